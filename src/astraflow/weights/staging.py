"""Staged weights: one safetensors file per version in memory (tmpfs), written beside the held one and moved into place by a rename.

A file that was moved into place is never written again: engines map it.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import re
import secrets
import shutil
from pathlib import Path

import xxhash

from astraflow.protocol.errors import WeightError
from astraflow.weights import layout
from astraflow.weights.layout import Layout
from astraflow.weights.memory import require_room

log = logging.getLogger(__name__)

FILE = "model.safetensors"


class Draft:
    """A staged file being written. `data` is its half (header and tied copies excluded)."""

    def __init__(self, directory: Path, shape: Layout, export_tied: bool):
        self.path = directory / FILE
        self.layout, self._export_tied = shape, export_tied
        self._header_bytes = len(layout.file_header(shape, 0, "", export_tied))
        rows = layout.exported(shape, export_tied)
        self.size_bytes = self._header_bytes + (rows[-1][2] + rows[-1][1].size_bytes if rows else 0)
        self._map: mmap.mmap | None = None

    def create(self, base: Path | None) -> None:
        """A new file; with a copy of `base` (same layout) for a delta. Raises WeightError when it does not fit."""
        self.path.parent.mkdir(parents=True)
        require_room(self.size_bytes, f"staging in {self.path.parent.parent}", self.path.parent)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if base is not None:
                _copy(base, fd, self.size_bytes)
            elif hasattr(os, "posix_fallocate"):
                # Reserve now: a page that cannot be had later would be a SIGBUS.
                os.posix_fallocate(fd, 0, self.size_bytes)
            else:
                os.ftruncate(fd, self.size_bytes)
            self._map = mmap.mmap(fd, self.size_bytes)
        except OSError as error:
            raise WeightError(f"staging {self.size_bytes} bytes in {self.path.parent.parent}: {error.strerror or error}") from None
        finally:
            os.close(fd)

    @property
    def data(self) -> memoryview:
        """The bytes of the half, writable."""
        assert self._map is not None
        return memoryview(self._map)[self._header_bytes : self._header_bytes + self.layout.size_bytes]

    def finish(self, version: int, digest: str) -> None:
        """Write header and tied copies."""
        assert self._map is not None
        self._map[: self._header_bytes] = layout.file_header(self.layout, version, digest, self._export_tied)
        with memoryview(self._map)[self._header_bytes :] as body:
            for _, t, offset in layout.exported(self.layout, self._export_tied)[len(self.layout.tensors) :]:
                body[offset : offset + t.size_bytes] = body[t.offset : t.offset + t.size_bytes]

    def close(self) -> None:
        """Give the mapping up (views that are still held keep it alive until they go)."""
        if self._map is not None:
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None


class Staging:
    """The staged files of one model in one instance. Nothing of an earlier process is ever used."""

    def __init__(self, root: Path, model_id: str):
        plain = re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", model_id)
        # Never a name like "..", and never the same name for two models.
        self.directory = root / (model_id if plain else f"model-{xxhash.xxh3_64_hexdigest(model_id.encode())}")
        if self.directory.exists():
            shutil.rmtree(self.directory)
        self.directory.mkdir(parents=True)

    def clean(self, keep: set[Path]) -> None:
        """Remove every staged file but these (engines that still map a removed one keep its bytes)."""
        wanted = {path.parent for path in keep}
        for entry in self.directory.iterdir():
            if entry not in wanted:
                shutil.rmtree(entry)

    def draft(self, shape: Layout, export_tied: bool) -> Draft:
        """A place for a new file."""
        return Draft(self.directory / f".draft-{secrets.token_hex(8)}", shape, export_tied)

    def place(self, draft: Draft, version: int, digest: str) -> Path:
        """Move a finished draft to `v<version>-<digest8>/model.safetensors`."""
        draft.close()
        target = self.directory / f"v{version}-{digest[:8]}"
        target.mkdir(exist_ok=True)
        os.replace(draft.path, target / FILE)
        draft.path.parent.rmdir()
        return target / FILE

    def discard(self, draft: Draft) -> None:
        """A failed draft leaves nothing behind."""
        draft.close()
        shutil.rmtree(draft.path.parent, ignore_errors=True)

    def close(self) -> None:
        """Remove everything, and the parent directory when nothing else is in it."""
        shutil.rmtree(self.directory, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.directory.parent.rmdir()


def _copy(source: Path, fd: int, size_bytes: int) -> None:
    with open(source, "rb") as file:
        if os.fstat(file.fileno()).st_size != size_bytes:
            raise OSError(f"{source} does not have {size_bytes} bytes")
        done = 0
        while done < size_bytes:
            sent = os.sendfile(fd, file.fileno(), done, size_bytes - done)
            if sent == 0:
                raise OSError(f"{source} ended after {done} bytes")
            done += sent
