"""Append-only payload files of the ledger: `segment-000001.bin`, …; the ledger's SQLite file says what lies where.

Bytes are written before the transaction that names them, so a torn tail after a kill is never referenced.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec
import xxhash

from astraflow.protocol.errors import AstraFlowError


class PayloadDamaged(AstraFlowError):
    """A payload on disk is not what was written."""

    lease_id = ""
    """Whose payload it is."""


class DiskRefused(AstraFlowError):
    """The disk takes no more bytes: the process ends, and a restart finds everything that was acknowledged."""


class Location(msgspec.Struct, frozen=True):
    """Where a payload lies."""

    segment: int
    offset: int
    length: int
    checksum: int
    """xxh3-64 of the payload."""


class SegmentFiles:
    """Writes in the ledger's thread; `read` may be called from any."""

    def __init__(self, directory: Path, segment_bytes: int) -> None:
        self._directory, self._limit = directory, segment_bytes
        directory.mkdir(parents=True, exist_ok=True)
        self._refs: Counter[int] = Counter()
        self._current = max((int(path.stem.split("-")[1]) for path in directory.glob("segment-*.bin")), default=0) + 1
        self._fd = -1
        self._size = 0

    def append(self, payload: bytes) -> Location:
        """Write one payload and hold its segment once; it is kept until every hold was released."""
        try:
            if self._fd < 0 or self._size >= self._limit:
                self._roll()
            start, view = self._size, memoryview(payload)
            while view:
                written = os.write(self._fd, view)
                self._size += written
                view = view[written:]
        except OSError as error:
            raise DiskRefused(f"ledger: cannot write {self._path(self._current)}: {error.strerror}") from error
        self.hold(self._current)
        return Location(self._current, start, len(payload), xxhash.xxh3_64_intdigest(payload))

    def read(self, place: Location) -> bytes:
        """One payload, verified. Raises PayloadDamaged when the file does not hold what was written, or is gone."""
        try:
            with self._path(place.segment).open("rb") as file:
                data = os.pread(file.fileno(), place.length, place.offset)
        except FileNotFoundError:
            data = b""
        if len(data) != place.length or xxhash.xxh3_64_intdigest(data) != place.checksum:
            raise PayloadDamaged(f"ledger: {self._path(place.segment)} at byte {place.offset}: payload damaged")
        return data

    def hold(self, segment: int, count: int = 1) -> None:
        """`count` more rows need this segment."""
        self._refs[segment] += count

    def release(self, segment: int, count: int = 1) -> None:
        """`count` rows no longer need it; a closed segment that nobody needs is deleted."""
        self._refs[segment] -= count
        assert self._refs[segment] >= 0, f"segment {segment} released too often"
        self._collect([segment])

    def tidy(self) -> None:
        """After a restart: delete closed segments that nobody holds."""
        self._collect([int(path.stem.split("-")[1]) for path in self._directory.glob("segment-*.bin")])

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _roll(self) -> None:
        if self._fd >= 0:
            self.close()
            closed, self._current = self._current, self._current + 1
            self._collect([closed])
        self._fd = os.open(self._path(self._current), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._size = os.fstat(self._fd).st_size

    def _collect(self, segments: Iterable[int]) -> None:
        for segment in segments:
            if self._refs[segment] == 0 and segment != self._current:
                self._path(segment).unlink(missing_ok=True)
                del self._refs[segment]

    def _path(self, segment: int) -> Path:
        return self._directory / f"segment-{segment:06d}.bin"
