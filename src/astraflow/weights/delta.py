"""A delta between two halves: segments of the codec in layout order, coded by several threads (`chain.py` keeps deltas and chains them).

    payload of ranks-rans = "AFD2", <I length of the head, head (`codec_ranks.Head`), then per segment: <I its length, its bytes
    payload of gaps-zstd  = "AFD1", then per segment: <I its length, its bytes
Segments never cross a change of word size, so both sides cut the same ones from the layout alone. Words of 32 bits are always coded
as gaps-zstd blocks.
"""

from __future__ import annotations

import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import zstandard

from astraflow.protocol.errors import DigestMismatch
from astraflow.weights import codec, codec_gaps
from astraflow.weights.layout import Layout

if TYPE_CHECKING:
    from astraflow.weights import codec_ranks

MAGICS = {codec.GAPS: b"AFD1", codec.RANKS: b"AFD2"}
KEPT_SHARE = 16
"""Changes that are held in memory while tables are made: at most one word in so many (11 bytes each)."""
MAX_HEAD_BYTES = 1 << 16
Words = codec_gaps.Words
T = TypeVar("T")


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
    codec: str = codec.GAPS


@dataclass(frozen=True)
class Segment:
    """Consecutive words of one size."""

    offset: int
    words: int
    word_bytes: int

    def view(self, half: memoryview) -> Words:
        return np.frombuffer(half, f"<u{self.word_bytes}", self.words, self.offset)


def segments(layout: Layout, narrow_words: int) -> Iterator[Segment]:
    """The half in pieces; `narrow_words`: 16-bit words per piece."""
    for run in layout.runs:
        step = (narrow_words if run.word_bytes == 2 else codec_gaps.BLOCK_WORDS) * run.word_bytes
        for start in range(run.offset, run.offset + run.size_bytes, step):
            yield Segment(start, min(step, run.offset + run.size_bytes - start) // run.word_bytes, run.word_bytes)


@dataclass(frozen=True)
class Coding:
    """How to encode."""

    codec: str = codec.GAPS
    setting: codec_ranks.Setting = "fast"
    zstd_level: int = 1
    threads: int = 1


def encode(layout: Layout, old: memoryview, new: memoryview, coding: Coding, stop: Callable[[], bool]) -> tuple[bytes, int] | None:
    """(payload, changed words), or None when it would be no smaller than the half itself. Raises Cancelled once `stop()`."""
    if coding.codec == codec.RANKS:
        return _Ranks(layout, old, new, coding, stop).run()
    compressor = zstandard.ZstdCompressor(level=coding.zstd_level, write_content_size=True)
    parts: list[bytes] = [MAGICS[codec.GAPS]]
    size, changed = len(parts[0]), 0
    for each in segments(layout, codec_gaps.BLOCK_WORDS):
        if stop():
            raise Cancelled
        block, hits = codec_gaps.encode_block(each.view(old), each.view(new), compressor)
        parts += [struct.pack("<I", len(block)), block]
        size += 4 + len(block)
        changed += hits
        if size >= layout.size_bytes:
            return None
    return b"".join(parts), changed


class _Ranks:
    """One encoding by ranks-rans. What changed is found first, for as much as may be kept; its statistics make the tables; then it is
    coded. What does not fit is found and coded with the same tables in further rounds."""

    def __init__(self, layout: Layout, old: memoryview, new: memoryview, coding: Coding, stop: Callable[[], bool]):
        from astraflow.weights import codec_ranks

        self._codec = codec_ranks
        self._layout, self._old, self._new, self._coding, self._stop = layout, old, new, coding, stop
        self._segments = list(segments(layout, codec_ranks.SEGMENT_WORDS))
        self._coded: list[bytes] = [b""] * len(self._segments)
        self._found: dict[int, codec_ranks.Found] = {}
        self._lock = threading.Lock()
        self._next = self._kept = self._changed = 0
        self._most = max(layout.words // KEPT_SHARE, 1 << 16)

    def run(self) -> tuple[bytes, int] | None:
        """As `encode`."""
        pairs = [(s.view(self._old), s.view(self._new)) for s in self._segments if s.word_bytes == 2]
        self._places, head, self._share = self._codec.choose_places(pairs, self._coding.setting)
        plan: codec_ranks.Plan | None = None
        with ThreadPoolExecutor(self._coding.threads, thread_name_prefix="delta") as pool:
            while plan is None or self._next < len(self._segments):
                tallies = _each(pool, self._coding.threads, self._find)
                if plan is None:
                    complete = self._next == len(self._segments)
                    plan = self._codec.choose_contexts(self._places, head, np.sum(tallies, axis=0), self._coding.setting, complete)
                self._code(pool, plan)
                if sum(map(len, self._coded)) >= self._layout.size_bytes:
                    return None
        top = self._codec.pack_head(head)
        parts = [MAGICS[codec.RANKS], struct.pack("<I", len(top)), top]
        for coded in self._coded:
            parts += [struct.pack("<I", len(coded)), coded]
        payload = b"".join(parts)
        return (payload, self._changed) if len(payload) < self._layout.size_bytes else None

    def _find(self) -> Words:
        """Body of a thread: segment by segment until as many changes are kept as may be; the tally of their steps."""
        tally = self._codec.new_tally(self._coding.setting)
        compressor = zstandard.ZstdCompressor(level=self._coding.zstd_level, write_content_size=True)
        scratch = self._codec.Scratch()
        while True:
            with self._lock:
                number = self._next
                if number == len(self._segments) or self._kept >= self._most:
                    return tally
                self._next += 1
            if self._stop():
                raise Cancelled
            segment = self._segments[number]
            old, new = segment.view(self._old), segment.view(self._new)
            if segment.word_bytes == 2:
                found = self._codec.extract(old, new, self._places, self._share, tally, scratch)
                self._found[number] = found
                count, kept = found.count, found.count
            else:
                self._coded[number], count = codec_gaps.encode_block(old, new, compressor)
                kept = len(self._coded[number]) // 8
            with self._lock:
                self._kept += kept
                self._changed += count

    def _code(self, pool: ThreadPoolExecutor, plan: codec_ranks.Plan) -> None:
        numbers = iter(self._found)

        def work() -> None:
            scratch = self._codec.Scratch()
            for number in numbers:
                self._coded[number] = self._codec.encode_segment(self._found[number], plan, scratch)

        _each(pool, self._coding.threads, work)
        self._found.clear()
        self._kept = 0
        if self._stop():
            raise Cancelled


def _each(pool: ThreadPoolExecutor, threads: int, call: Callable[[], T]) -> list[T]:
    """The results of `threads` calls at the same time; they share an iterator to divide the work. Raises the first one's error."""
    jobs = [pool.submit(call) for _ in range(threads)]
    return [job.result() for job in jobs]


@dataclass(frozen=True)
class Reading:
    """How a payload is read, once its head is there."""

    head_bytes: int
    """What stands before the first segment."""
    segments: list[Segment]
    """In the payload's order."""
    patch: Callable[[Words, memoryview, int], int]
    """(words, their segment's bytes, number of the thread) → changed words; in place. Raises DigestMismatch for a segment that cannot be
    one (the words may be half patched then: discard them)."""


def reading(layout: Layout, payload: memoryview, size_bytes: int) -> Reading | int:
    """`payload`: the beginning of one of `size_bytes`. A number = that many bytes must be there to tell. Raises DigestMismatch."""
    if len(payload) < 4:
        return 4
    magic = bytes(payload[:4])
    if magic == MAGICS[codec.GAPS]:
        return Reading(4, list(segments(layout, codec_gaps.BLOCK_WORDS)), lambda words, data, _: codec_gaps.apply_block(words, data))
    if magic != MAGICS[codec.RANKS] or codec.RANKS not in codec.available():
        raise DigestMismatch("delta: not a payload of a codec that is known here")
    if len(payload) < 8:
        return 8
    size = int.from_bytes(payload[4:8], "little")
    if not 0 < size <= min(MAX_HEAD_BYTES, size_bytes - 8):
        raise DigestMismatch(f"delta: a head of {size} bytes")
    if len(payload) < 8 + size:
        return 8 + size
    from astraflow.weights import codec_ranks

    head, plan = codec_ranks.read_head(payload[8 : 8 + size])
    if 4 * (layout.words // head.segment_words) > size_bytes:
        raise DigestMismatch(f"delta: segments of {head.segment_words} words do not fit into {size_bytes} bytes")
    scratches: defaultdict[int, codec_ranks.Scratch] = defaultdict(codec_ranks.Scratch)

    def patch(words: Words, data: memoryview, thread: int) -> int:
        if words.itemsize != 2:
            return codec_gaps.apply_block(words, data)
        return codec_ranks.apply_segment(words, data, plan, scratches[thread])

    return Reading(8 + size, list(segments(layout, head.segment_words)), patch)


def apply(layout: Layout, half: memoryview, payload: memoryview, threads: int = 1) -> int:
    """Patch a writable copy of the base in place, as `chain.Patcher` does while a payload comes in; the number of changed words.

    Raises DigestMismatch for a damaged payload."""
    found = reading(layout, payload, len(payload))
    if isinstance(found, int):
        raise DigestMismatch(f"delta: cut off, {found} bytes are wanted")
    jobs = iter(list(zip(found.segments, _split(payload, found.head_bytes, len(found.segments)), strict=True)))

    def work(thread: int) -> int:
        return sum(found.patch(segment.view(half), data, thread) for segment, data in jobs)

    if threads == 1 or len(found.segments) == 1:
        return work(0)
    with ThreadPoolExecutor(threads, thread_name_prefix="delta") as pool:
        return sum(pool.map(work, range(threads)))


def _split(payload: memoryview, cursor: int, count: int) -> Sequence[memoryview]:
    """The bytes of every segment."""
    found = []
    for _ in range(count):
        if cursor + 4 > len(payload):
            raise DigestMismatch(f"delta: cut off at byte {cursor}")
        (length,) = struct.unpack_from("<I", payload, cursor)
        cursor += 4
        if cursor + length > len(payload):
            raise DigestMismatch(f"delta: segment of {length} bytes at {cursor} of {len(payload)}")
        found.append(payload[cursor : cursor + length])
        cursor += length
    if cursor != len(payload):
        raise DigestMismatch(f"delta: {len(payload) - cursor} bytes too many")
    return found
