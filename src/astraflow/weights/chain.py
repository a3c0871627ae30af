"""Deltas one behind the other: which ones a sender keeps, the chain that leads from a base to a version, and its patching on arrival.

A chain travels as one transfer, the payloads of its deltas one behind the other. Versions are named together with their digests, so a
chain never leads over a version of the same number with other words (a rollback). No delta leads to a periodic full version, so no
chain crosses one: whoever was away over it pulls in full.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import xxhash

from astraflow.protocol.errors import DigestMismatch
from astraflow.protocol.weights import DeltaLink
from astraflow.weights.delta import Delta, Reading, Segment, reading
from astraflow.weights.layout import Layout

Name = tuple[int, str]
"""(version, digest)."""
Reader = Callable[[int, memoryview], None]
Writer = Callable[[int, memoryview, bool], None]


@dataclass(frozen=True)
class Chain:
    """Deltas of which each starts where the one before it ends; at least one."""

    deltas: tuple[Delta, ...]

    @cached_property
    def size_bytes(self) -> int:
        return sum(len(d.payload) for d in self.deltas)

    @property
    def changed(self) -> int:
        """Words that are changed, counted once per delta."""
        return sum(d.changed for d in self.deltas)

    @property
    def codecs(self) -> set[str]:
        """Names of the codecs that a receiver must have."""
        return {d.codec for d in self.deltas}

    @property
    def base(self) -> Name:
        return self.deltas[0].base_version, self.deltas[0].base_digest

    def links(self) -> list[DeltaLink]:
        """As a ticket names them."""
        return [
            DeltaLink(
                base_version=d.base_version,
                base_digest=d.base_digest,
                version=d.version,
                digest=d.digest,
                size_bytes=len(d.payload),
                changed_elements=d.changed,
            )
            for d in self.deltas
        ]

    def pieces(self, offset: int, size: int) -> Iterator[memoryview]:
        """The bytes [offset, offset + size) of the transfer, without copying: one view per payload that they touch."""
        start = 0
        for d in self.deltas:
            low, high = max(offset - start, 0), min(offset + size - start, len(d.payload))
            if low < high:
                yield memoryview(d.payload)[low:high]
            start += len(d.payload)

    def chunk_hashes(self, chunk_bytes: int) -> list[int]:
        """xxh3-64 of every chunk of the transfer."""
        found = []
        for offset in range(0, self.size_bytes, chunk_bytes):
            running = xxhash.xxh3_64()
            for piece in self.pieces(offset, chunk_bytes):
                running.update(piece)
            found.append(running.intdigest())
        return found


class Shelf:
    """The newest deltas, bounded in number, and in bytes by less than a full transfer has: so every chain of them is smaller."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: list[Delta] = []

    def add(self, made: Delta) -> None:
        """Keep a delta; the oldest ones go when there are too many (the newest one always stays)."""
        self._kept.append(made)
        while len(self._kept) > 1 and (len(self._kept) > self._most or self.size_bytes >= self._most_bytes):
            del self._kept[0]

    @property
    def size_bytes(self) -> int:
        return sum(len(d.payload) for d in self._kept)

    def pairs(self) -> list[tuple[int, int]]:
        """(base version, version) of what is kept."""
        return [(d.base_version, d.version) for d in self._kept]

    def chain(self, base: Name, target: Name) -> Chain | None:
        """The shortest chain from exactly this base to exactly this version; of two equally long ones that with the newest deltas."""
        ways: list[tuple[Delta, ...]] = [()]
        seen = {target}
        while ways:
            longer: list[tuple[Delta, ...]] = []
            for way in ways:
                start = (way[0].base_version, way[0].base_digest) if way else target
                for d in reversed(self._kept):
                    if (d.version, d.digest) != start:
                        continue
                    name = (d.base_version, d.base_digest)
                    if name == base:
                        return Chain((d, *way))
                    if name not in seen:
                        seen.add(name)
                        longer.append((d, *way))
            ways = longer
        return None


def check(links: Sequence[DeltaLink], base: Name, target: Name, size_bytes: int, changed: int, most: int) -> str:
    """What is wrong with the links of a ticket; empty when they lead from `base` to `target` and fill the transfer exactly."""
    if not 0 < len(links) <= most:
        return f"{len(links)} deltas (accepted: 1…{most})"
    at = base
    for link in links:
        if (link.base_version, link.base_digest) != at:
            return f"a delta from version {link.base_version} follows version {at[0]} (or its digest is another one)"
        if link.size_bytes <= 0 or link.changed_elements < 0:
            return f"a delta of {link.size_bytes} bytes with {link.changed_elements} changes"
        at = (link.version, link.digest)
    if at != target:
        return f"the deltas end at version {at[0]}, not at {target[0]}"
    if sum(link.size_bytes for link in links) != size_bytes or sum(link.changed_elements for link in links) != changed:
        return f"the deltas do not add up to {size_bytes} bytes and {changed} changes"
    return ""


class Patcher:
    """Applies a chain block by block as the bytes of its transfer come in, several blocks at a time.

    `payload` is the whole transfer; only its verified beginning is looked at. `read_base` and `read` fill a buffer with the words at an
    offset, of the base and of what was written already (from any thread); `write(offset, words, final)` takes a patched block, `final`
    when it is the last delta's. Blocks are written in the order of the layout, every delta over all of them.
    """

    def __init__(
        self,
        layout: Layout,
        links: Sequence[DeltaLink],
        payload: memoryview,
        read_base: Reader,
        read: Reader,
        write: Writer,
        threads: int = 1,
    ) -> None:
        self._layout, self._links, self._payload, self._threads = layout, links, payload, threads
        self._read_base, self._read, self._write = read_base, read, write
        self._link = 0
        self._start = self._cursor = self._block = self._changed = 0
        """Where the present link begins, the next byte of it, its next block, and the words that it has changed."""
        self._reading: Reading | None = None
        self._buffers: list[memoryview] = []
        """One per thread, for as many words as the largest block has."""

    @property
    def done(self) -> bool:
        """Every block of every link was applied."""
        return self._link == len(self._links)

    def advance(self, ready: int) -> None:
        """Apply every block that is complete within the first `ready` bytes. Raises DigestMismatch for what is no delta."""
        with ThreadPoolExecutor(self._threads, thread_name_prefix="patch") as pool:
            while not self.done:
                if self._reading is None and not self._open(ready):
                    return
                assert self._reading is not None
                batch = self._complete(self._reading, ready)
                each = pool.map(self._patched, batch) if len(batch) > 1 else map(self._patched, batch)
                for offset, data, changed in each:
                    self._changed += changed
                    self._write(offset, data, self._link == len(self._links) - 1)
                if self._block == len(self._reading.segments):
                    self._close()
                elif not batch:
                    return

    @property
    def _end(self) -> int:
        return self._start + self._links[self._link].size_bytes

    def _open(self, ready: int) -> bool:
        """Read the head of a link; False when it is not there yet."""
        size = self._links[self._link].size_bytes
        found = reading(self._layout, self._payload[self._start : min(ready, self._end)], size)
        if isinstance(found, int):
            self._within(self._start + found)
            return False
        self._reading, self._cursor = found, self._start + found.head_bytes
        largest = max((s.words * s.word_bytes for s in found.segments), default=0)
        if not self._buffers or len(self._buffers[0]) < largest:
            self._buffers = [memoryview(bytearray(largest)) for _ in range(min(self._threads, len(found.segments)))]
        return True

    def _complete(self, reading: Reading, ready: int) -> list[_Block]:
        """The next blocks whose bytes are all there, at most one per thread."""
        batch: list[_Block] = []
        while len(batch) < self._threads and self._block < len(reading.segments):
            self._within(self._cursor + 4)
            if self._cursor + 4 > ready:
                break
            (length,) = struct.unpack_from("<I", self._payload, self._cursor)
            after = self._cursor + 4 + length
            self._within(after)
            if after > ready:
                break
            batch.append((len(batch), reading.segments[self._block], self._payload[self._cursor + 4 : after]))
            self._cursor = after
            self._block += 1
        return batch

    def _within(self, wanted: int) -> None:
        if wanted > self._end:
            raise DigestMismatch(f"delta: cut off at byte {self._end}")

    def _patched(self, block: _Block) -> tuple[int, memoryview, int]:
        """(offset, new words, how many of them changed)."""
        assert self._reading is not None
        thread, segment, data = block
        words = self._buffers[thread][: segment.words * segment.word_bytes]
        (self._read if self._link else self._read_base)(segment.offset, words)
        return segment.offset, words, self._reading.patch(np.frombuffer(words, f"<u{segment.word_bytes}"), data, thread)

    def _close(self) -> None:
        """A link was applied: on to the next."""
        link = self._links[self._link]
        if self._cursor != self._end:
            raise DigestMismatch(f"delta to version {link.version}: {self._end - self._cursor} bytes too many")
        if self._changed != link.changed_elements:
            raise DigestMismatch(f"delta to version {link.version}: {self._changed} words changed, {link.changed_elements} announced")
        self._start, self._link = self._end, self._link + 1
        self._block = self._changed = 0
        self._reading = None


_Block = tuple[int, Segment, memoryview]
"""(thread, place, encoded)."""
