"""Staged weights: one safetensors file per version in memory (tmpfs), written beside the held one and moved into place by a rename.

A file that was moved into place is never written again: engines map it.
"""

from __future__ import annotations

import contextlib
import logging
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
PIECE = 4 << 20
"""Bytes of a tied tensor that are copied at a time."""


class Draft:
    """A staged file being written. Offsets are those of its half (header and tied copies excluded).

    It is written and read through the descriptor, never through a mapping: a new page that is written as a whole need not be zeroed
    and mapped first (1 GB over loopback: 0.55 s instead of 0.8 s), and memory that cannot be had is an error, not a SIGBUS.
    """

    def __init__(self, directory: Path, shape: Layout, export_tied: bool):
        self.path = directory / FILE
        self.layout, self._export_tied = shape, export_tied
        self._header_bytes = len(layout.file_header(shape, 0, "", export_tied))
        rows = layout.exported(shape, export_tied)
        self.size_bytes = self._header_bytes + (rows[-1][2] + rows[-1][1].size_bytes if rows else 0)
        self._fd = self._base_fd = -1

    def create(self, base: Path | None) -> None:
        """A new, empty file; with `base`, a staged file of the same layout to read from. Raises WeightError when it does not fit."""
        try:
            self.path.parent.mkdir(parents=True)
            require_room(self.size_bytes, f"staging in {self.path.parent.parent}", self.path.parent)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._fd, self.size_bytes)
            if base is not None:
                self._base_fd = os.open(base, os.O_RDONLY | os.O_CLOEXEC)
                if os.fstat(self._base_fd).st_size != self.size_bytes:
                    raise OSError(f"{base} does not have {self.size_bytes} bytes")
        except OSError as error:
            raise WeightError(f"staging {self.size_bytes} bytes in {self.path.parent.parent}: {error.strerror or error}") from None

    def write(self, offset: int, data: memoryview) -> None:
        """Put bytes at their place; from any thread. Raises OSError when there is no room for them."""
        _write(self._fd, self._header_bytes + offset, data)

    def read(self, offset: int, room: memoryview) -> None:
        """Fill `room` with what was written."""
        _read(self._fd, self._header_bytes + offset, room)

    def read_base(self, offset: int, room: memoryview) -> None:
        """Fill `room` from the base."""
        _read(self._base_fd, self._header_bytes + offset, room)

    def finish(self, version: int, digest: str) -> None:
        """Write header and tied copies."""
        _write(self._fd, 0, memoryview(layout.file_header(self.layout, version, digest, self._export_tied)))
        for _, t, offset in layout.exported(self.layout, self._export_tied)[len(self.layout.tensors) :]:
            for start in range(0, t.size_bytes, PIECE):
                part = memoryview(bytearray(min(PIECE, t.size_bytes - start)))
                self.read(t.offset + start, part)
                self.write(offset + start, part)

    def close(self) -> None:
        """Give the descriptors up."""
        for fd in (self._fd, self._base_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._base_fd = -1


def _write(fd: int, offset: int, data: memoryview) -> None:
    while data:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


def _read(fd: int, offset: int, room: memoryview) -> None:
    while room:
        got = os.preadv(fd, [room], offset)
        if got == 0:
            raise OSError(f"the staged file ended at byte {offset}")
        room, offset = room[got:], offset + got


class Staging:
    """The staged files of one model in one instance. Nothing of an earlier process is ever used."""

    def __init__(self, root: Path, model_id: str):
        plain = re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", model_id)
        # Never a name like "..", and never the same name for two models.
        self.directory = root / (model_id if plain else f"model-{xxhash.xxh3_64_hexdigest(model_id.encode())}")
        self.clean(set())

    def clean(self, keep: set[Path]) -> None:
        """Remove every staged file but these (engines that still map a removed one keep its bytes). The directory is made again where
        somebody removed it. Raises WeightError."""
        wanted = {path.parent for path in keep}
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for entry in self.directory.iterdir():
                if entry not in wanted:
                    shutil.rmtree(entry)
        except OSError as error:
            raise WeightError(f"staging in {self.directory}: {error.strerror or error}") from None

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
