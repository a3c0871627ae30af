"""A delta between two halves: blocks of the codec in layout order, and the few deltas that a sender keeps.

    payload = magic "AFD1", then per block: <I its length, then its bytes
Blocks never cross a change of word size, so both sides cut the same ones from the layout alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import zstandard

from astraflow.protocol.errors import DigestMismatch
from astraflow.weights import codec
from astraflow.weights.layout import Layout

MAGIC = b"AFD1"


class Cancelled(Exception):
    """The half is needed for writing; the delta is given up."""


@dataclass(frozen=True)
class Delta:
    """An encoded delta; versions are named together with their digests, because numbers come back after a rollback."""

    base_version: int
    base_digest: str
    version: int
    digest: str
    payload: bytes
    changed: int
    chunk_bytes: int = 0
    chunk_hashes: tuple[int, ...] = ()
    """Checksums of the payload's chunks, for tickets."""


def blocks(layout: Layout) -> Iterator[tuple[int, int, int]]:
    """(offset, words, bytes per word) of every block."""
    for run in layout.runs:
        step = codec.BLOCK_WORDS * run.word_bytes
        for start in range(run.offset, run.offset + run.size_bytes, step):
            size = min(step, run.offset + run.size_bytes - start)
            yield start, size // run.word_bytes, run.word_bytes


def _words(data: memoryview, offset: int, count: int, word_bytes: int) -> codec.Words:
    return np.frombuffer(data, f"<u{word_bytes}", count, offset)


def encode(layout: Layout, old: memoryview, new: memoryview, level: int, stop: Callable[[], bool]) -> tuple[bytes, int] | None:
    """(payload, changed words), or None when it would be no smaller than the half itself. Raises Cancelled once `stop()`."""
    compressor = zstandard.ZstdCompressor(level=level, write_content_size=True)
    parts: list[bytes] = [MAGIC]
    size, changed = len(MAGIC), 0
    for offset, count, word_bytes in blocks(layout):
        if stop():
            raise Cancelled
        block, hits = codec.encode_block(_words(old, offset, count, word_bytes), _words(new, offset, count, word_bytes), compressor)
        parts += [struct.pack("<I", len(block)), block]
        size += 4 + len(block)
        changed += hits
        if size >= layout.size_bytes:
            return None
    return b"".join(parts), changed


def apply(layout: Layout, half: memoryview, payload: memoryview) -> int:
    """Patch a writable copy of the base in place; the number of changed words. Raises DigestMismatch for a damaged payload."""
    if bytes(payload[: len(MAGIC)]) != MAGIC:
        raise DigestMismatch("delta: not a delta payload")
    cursor, changed = len(MAGIC), 0
    for offset, count, word_bytes in blocks(layout):
        if cursor + 4 > len(payload):
            raise DigestMismatch(f"delta: cut off at byte {cursor}")
        (length,) = struct.unpack_from("<I", payload, cursor)
        cursor += 4
        if cursor + length > len(payload):
            raise DigestMismatch(f"delta: block of {length} bytes at {cursor} of {len(payload)}")
        changed += codec.apply_block(_words(half, offset, count, word_bytes), payload[cursor : cursor + length])
        cursor += length
    if cursor != len(payload):
        raise DigestMismatch(f"delta: {len(payload) - cursor} bytes too many")
    return changed


class Shelf:
    """The newest deltas, bounded in number and bytes."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._kept: list[Delta] = []

    def add(self, delta: Delta) -> None:
        """Keep a delta; the oldest ones go when there are too many (the newest one always stays)."""
        self._kept.append(delta)
        while len(self._kept) > 1 and (len(self._kept) > self._most or self.size_bytes > self._most_bytes):
            del self._kept[0]

    @property
    def size_bytes(self) -> int:
        return sum(len(d.payload) for d in self._kept)

    def find(self, base_version: int, base_digest: str, version: int, digest: str) -> Delta | None:
        """The delta from exactly this base to exactly this version."""
        wanted = (base_version, base_digest, version, digest)
        return next((d for d in reversed(self._kept) if (d.base_version, d.base_digest, d.version, d.digest) == wanted), None)

    def pairs(self) -> list[tuple[int, int]]:
        """(base version, version) of what is kept."""
        return [(d.base_version, d.version) for d in self._kept]
