"""Delta codec for 16-bit words: places as gaps in ranks within classes of the old magnitude, values as steps given the old magnitude.

Pure: arrays in, bytes out, and back; one *segment* of consecutive words at a time, after a *plan* for the whole payload was made.
Both sides hold the old words, so everything that depends on them costs nothing.

    plan     classes by exponent, contexts by bin (`scan.BINS`), one table of step tokens per context: one `Head`
    segment  nothing when no word changed, else: varint changes per class; per class with changes <H parameter, <B largest gap token;
             rANS words <I: the runs of gaps by class, then the runs of steps by context
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import zstandard

from astraflow.protocol.errors import DigestMismatch
from astraflow.weights import classes, entropy, scan

Words = np.ndarray[Any, np.dtype[Any]]
Setting = Literal["fast", "dense"]

SEGMENT_WORDS = 1 << 22
MAX_SEGMENT_WORDS = 1 << 23
"""Largest gap: a token of it has at most `entropy.MAX_EXTRA` extra bits."""
MAX_CLASSES, MAX_CONTEXTS = 32, 96
STEP_TOKENS = 120
ARENA = 1 << 20
"""Changes for which a thread reserves memory at a time (11 MB, touched only as it is used)."""
SAMPLE_WORDS = 1 << 19
STRETCH = 1024
WORTH_CLASSES_BITS, WORTH_CONTEXTS_BITS = 4.0, 1.5
"""Bits per change that classes of places, and then contexts of steps, must save in the fast setting: without either, nothing but the
changed words is looked at."""
_LEVEL = np.zeros(entropy.SCALE + 1, np.uint8)
_LEVEL[1:] = 1 + np.rint(4 * np.log2(np.arange(1, entropy.SCALE + 1))).astype(np.uint8)


class Head(msgspec.Struct, array_like=True):
    """What a receiver needs to know before the first segment."""

    segment_words: int
    small: int
    """Words of smaller magnitude are looked at one by one."""
    singles: list[int]
    """First exponent of each class among them."""
    cuts: list[int]
    """Magnitudes that separate the wide classes."""
    contexts: list[int]
    """First bin of each context; the first is 0."""
    levels: bytes
    """zstd of one row of `STEP_TOKENS` levels (entropy.from_levels) per context."""


@dataclass(frozen=True)
class Places:
    """The classes."""

    small: np.uint16
    class_of: Words
    """By exponent, for words below `small`."""
    cuts: Words
    wide: int
    """Number of the first wide class."""

    @property
    def total(self) -> int:
        return self.wide + self.cuts.size + 1


@dataclass(frozen=True)
class Found:
    """The changes of one segment, in the order of `scan`."""

    gaps: Words
    classes: Words
    bins: Words
    steps: Words

    @property
    def count(self) -> int:
        return self.gaps.size


class Scratch:
    """Arrays of one thread that are used again for every segment: fresh memory costs page faults, and threads take those in turn."""

    def __init__(self) -> None:
        self._kept: dict[str, Words] = {}

    def take(self, name: str, size: int, kind: type[np.generic]) -> Words:
        """`size` elements with anything in them, until the next `take` of this name."""
        kept = self._kept.get(name)
        if kept is None or kept.size < size:
            kept = self._kept[name] = np.empty(size + size // 4, kind)
        return kept[:size]

    def rest(self, name: str, size: int, kind: type[np.generic]) -> Words:
        """As `take`, out of memory in which `keep` reserves what was used."""
        kept = self._kept.get(name)
        if kept is None or kept.size < size:
            kept = self._kept[name] = np.empty(max(size, ARENA), kind)
        return kept

    def keep(self, name: str, size: int) -> Words:
        """The first `size` elements of what `rest` gave: nobody gets them again."""
        kept = self._kept[name]
        self._kept[name] = kept[size:]
        return kept[:size]


@dataclass(frozen=True)
class Plan:
    """Everything that is decided once per payload."""

    places: Places
    context_of: Words
    """By bin."""
    frequencies: Words
    """(contexts, entropy.TOKENS)"""
    lookups: Words
    """(contexts, entropy.SCALE); empty on the encoding side"""

    @property
    def contexts(self) -> int:
        return int(self.frequencies.shape[0])


def places(small: int, singles: list[int], cuts: list[int]) -> Places:
    """Raises ValueError when they are not classes."""
    if (
        not 0 <= small <= 0x8000
        or len(singles) + len(cuts) + 1 > MAX_CLASSES
        or singles != sorted(set(singles))
        or cuts != sorted(set(cuts))
    ):
        raise ValueError("classes are not in order")
    if any(not 0 <= e < 256 for e in singles) or any(not small < c <= 0x8000 for c in cuts) or bool(small) != bool(singles):
        raise ValueError("a class is out of range")
    class_of = np.zeros(256, np.uint8)
    for k, first in enumerate(singles):
        class_of[first:] = k
    return Places(np.uint16(small), class_of, np.array(cuts, np.uint16), len(singles))


def choose_places(pairs: list[tuple[Words, Words]], setting: Setting) -> tuple[Places, Head, float]:
    """Classes for these (old, new) arrays by a sample of them, the head so far, and the share of words that changed."""
    total = sum(old.size for old, _ in pairs)
    every, changed = np.zeros(256, np.int64), np.zeros(256, np.int64)
    stride = max(STRETCH, total * STRETCH // SAMPLE_WORDS)
    for old, new in pairs:
        scan.sample(old, new, STRETCH, stride, every, changed)
    out = np.zeros(64, np.int64)
    hits = max(int(changed.sum()), 1)
    small, singles = 0, list[int]()
    if setting == "dense":
        small = int(classes.first_wide(every, changed, 0.05, 0.04))
        # What a class costs in every segment, seen from the sample.
        segment_bits = 40.0 * every.sum() / SEGMENT_WORDS
        count = classes.partition(every, changed, 0, small, 12, segment_bits, out) if small else 0
        singles = [0, *map(int, out[1:count])] if small else []
        count = classes.partition(every, changed, small, 256, 6, segment_bits + 0.01 * hits, out)
    else:
        count = classes.partition(every, changed, 0, 256, 2, WORTH_CLASSES_BITS * hits, out)
    cuts = [int(first) << 7 for first in out[1:count]]
    head = Head(SEGMENT_WORDS, small << 7, singles, cuts, [0], b"")
    return places(head.small, singles, cuts), head, hits / max(int(every.sum()), 1)


def new_tally(setting: Setting) -> Words:
    """Counts of step tokens by bin (dense) or by exponent (fast), all zero."""
    return np.zeros((scan.BINS if setting == "dense" else 256, classes.TALLY_TOKENS), np.int64)


def extract(old: Words, new: Words, where: Places, expected: float, tally: Words, scratch: Scratch) -> Found:
    """The changes of a segment; counts their step tokens in `tally`. expected: share of words that change."""
    room = min(old.size, int(old.size * expected * 2) + 4096) + 64
    kinds = (("gaps", np.uint32), ("classes", np.uint8), ("bins", np.uint16), ("steps", np.uint32))
    while True:
        gaps, cls, bins, steps = (scratch.rest(name, room, kind) for name, kind in kinds)
        count = scan.extract(old, new, where.small, where.class_of, where.cuts, where.wide, gaps, cls, bins, steps)
        if count >= 0:
            break
        room = min(4 * room, old.size) + 64
    entropy.count_steps(bins, steps, count, 0 if len(tally) == scan.BINS else 3, tally)
    return Found(*(scratch.keep(name, count) for name, _ in kinds))


def choose_contexts(where: Places, head: Head, tally: Words, setting: Setting, complete: bool) -> Plan:
    """Fill the head. complete: the tally has every token that will come; otherwise room is left for all."""
    out = np.zeros(scan.BINS, np.int64)
    grain = scan.BINS // len(tally)
    most = 64 if setting == "dense" else 16
    # Changes of one class keep their order, those of different classes do not: a context lies within one class.
    bounds = [e << 3 for e in head.singles[1:]] + [head.small >> 4] + [cut >> 4 for cut in head.cuts]
    parts = np.searchsorted(np.sort(bounds), np.arange(0, scan.BINS, grain), side="right")
    count = classes.merge(tally.copy(), parts, most, 5.0, out)
    # A bin between two contexts must not be on the wrong side of a bound either (a later round may use it).
    firsts = {int(first) * grain for first in out[:count]} | {bound for bound in bounds if 0 < bound < scan.BINS}
    head.contexts = sorted(firsts)
    rows = np.add.reduceat(tally, np.array(head.contexts) // grain, axis=0)
    if setting == "fast" and where.total == 1:
        one = rows.sum(axis=0, keepdims=True)
        if classes.bits(one) - classes.bits(rows) < WORTH_CONTEXTS_BITS * one.sum():
            head.contexts, rows = [0], one
    rows = rows[:, :STEP_TOKENS]
    scaled = rows * entropy.SCALE / np.maximum(rows.sum(axis=1, keepdims=True), 1)
    levels = np.where(rows > 0, _LEVEL[np.maximum(np.rint(scaled).astype(np.int64), 1)], 0 if complete else 1).astype(np.uint8)
    head.levels = zstandard.ZstdCompressor(level=3).compress(levels.tobytes())
    return _plan(where, head, levels, lookups=False)


def _plan(where: Places, head: Head, levels: Words, lookups: bool) -> Plan:
    count = len(head.contexts)
    context_of = np.zeros(scan.BINS, np.uint8)
    for k, first in enumerate(head.contexts):
        context_of[first:] = k
    frequencies = np.zeros((count, entropy.TOKENS), np.uint16)
    tables = np.zeros((count if lookups else 0, entropy.SCALE), np.uint32)
    for k in range(count):
        if levels[k].any():
            entropy.from_levels(levels[k], frequencies[k])
            if lookups:
                entropy.lookup(frequencies[k], tables[k])
    return Plan(where, context_of, frequencies, tables)


def pack_head(head: Head) -> bytes:
    """As it travels."""
    return msgspec.msgpack.encode(head)


def read_head(data: bytes | memoryview) -> tuple[Head, Plan]:
    """Raises DigestMismatch for a head that cannot be one."""
    try:
        head = msgspec.msgpack.decode(data, type=Head)
        where = places(head.small, head.singles, head.cuts)
        count, size = len(head.contexts), len(head.contexts) * STEP_TOKENS
        if not 0 < count <= MAX_CONTEXTS or head.contexts[0] != 0 or head.contexts != sorted(set(head.contexts)):
            raise ValueError("contexts are not in order")
        if head.contexts[-1] >= scan.BINS or not 64 <= head.segment_words <= MAX_SEGMENT_WORDS:
            raise ValueError("a number is out of range")
        if zstandard.frame_content_size(head.levels) != size:
            raise ValueError("tables of another size")
        levels = np.frombuffer(zstandard.ZstdDecompressor().decompress(head.levels, max_output_size=size), np.uint8).reshape(count, -1)
    except (ValueError, msgspec.MsgspecError, zstandard.ZstdError) as error:
        raise DigestMismatch(f"delta head: {error}") from None
    return head, _plan(where, head, levels, lookups=True)


def encode_segment(found: Found, plan: Plan, scratch: Scratch) -> bytes:
    """Bytes of one segment."""
    if not found.count:
        return b""
    total, count = plan.places.total, found.count
    ends, sums, most = np.empty(total + plan.contexts, np.int64), np.empty(total, np.int64), np.empty(total, np.int64)
    tokens, extras = scratch.take("tokens", 2 * count, np.uint8), scratch.take("extras", 2 * count, np.uint32)
    arranged = entropy.arrange(found.gaps, found.classes, found.bins, found.steps, plan.context_of, ends, sums, most, tokens, extras)
    assert arranged
    by_class = np.diff(ends[:total], prepend=0).tolist()
    frequencies = np.zeros((total + plan.contexts, entropy.TOKENS), np.uint16)
    frequencies[total:] = plan.frequencies
    header = [_varint(n) for n in by_class]
    for c, n in enumerate(by_class):
        if n:
            parameter = entropy.parameter_of(n, int(sums[c]))
            known = entropy.geometric(parameter, int(most[c]), frequencies[c])
            assert known
            header.append(struct.pack("<HB", parameter, int(most[c])))
    out = scratch.take("out", 2 * count + 32, np.uint32)
    first = entropy.encode_runs(tokens, extras, ends, total, frequencies, out)
    assert first >= 0
    return b"".join([*header, out[first:].astype("<u4", copy=False).tobytes()])


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(0x80 | (value & 0x7F))
        value >>= 7
    out.append(value)
    return bytes(out)


@dataclass
class _Reader:
    """Cursor over the header of a segment. Raises DigestMismatch at its end."""

    data: memoryview
    at: int = 0

    def byte(self) -> int:
        if self.at >= len(self.data):
            raise DigestMismatch(f"delta segment: cut off after {self.at} bytes")
        self.at += 1
        return self.data[self.at - 1]

    def varint(self) -> int:
        value = 0
        for shift in range(0, 28, 7):
            got = self.byte()
            value |= (got & 0x7F) << shift
            if got < 0x80:
                return value
        raise DigestMismatch("delta segment: a number has too many bytes")


def apply_segment(words: Words, data: memoryview, plan: Plan, scratch: Scratch) -> int:
    """Turn the old words into the new ones, in place; the number of changes.

    Raises DigestMismatch for a segment that cannot be one (the words may be half patched then: discard them).
    """
    if not len(data):
        return 0
    where, reader = plan.places, _Reader(data)
    counts = [reader.varint() for _ in range(where.total)]
    count = sum(counts)
    if not 0 < count <= words.size:
        raise DigestMismatch(f"delta segment: {count} changes of {words.size} words")
    specs = [(reader.byte() | reader.byte() << 8, reader.byte()) if n else (0, 0) for n in counts]
    if (len(data) - reader.at) % 4:
        raise DigestMismatch("delta segment: not whole words")
    source = scratch.take("source", (len(data) - reader.at) // 4 + 1, np.uint32)
    source[:-1] = np.frombuffer(bytes(data[reader.at :]), "<u4")
    source[-1] = 0  # the decoder may look at one word beyond the end
    state, numbers = np.zeros(entropy.STATES + 1, np.uint64), scratch.take("numbers", count + 1, np.uint32)
    numbers[-1] = 0
    starts = np.cumsum([0, *counts])
    parameters, most = np.array(specs, np.int64).T.copy()
    fine = entropy.open_states(source, state) and entropy.decode_gaps(source, state, starts, parameters, most, numbers)
    if fine and where.total == plan.contexts == 1:
        steps = scratch.take("steps", count, np.uint32)
        fine = entropy.decode_steps(source, state, np.array([0, count]), plan.lookups, steps) and entropy.closed(source, state)
        fine = fine and scan.patch_plain(words, numbers, count, steps)
    elif fine:
        fine = _locate_and_patch(words, source, state, starts, numbers, plan, scratch)
    if not fine:
        raise DigestMismatch("delta segment: damaged")
    return count


def _locate_and_patch(
    words: Words, source: Words, state: Words, starts: Words, numbers: Words, plan: Plan, scratch: Scratch
) -> bool:
    """The rest of `apply_segment`, where steps depend on the old words. numbers: the gaps; overwritten by the steps."""
    where, count = plan.places, int(starts[-1])
    spots, held = scratch.take("spots", count + 1, np.uint32), scratch.take("held", count + 1, np.uint16)
    contexts = scratch.take("contexts", count, np.uint8)
    if where.total == 1:
        fine = scan.locate_plain(words, numbers, count, spots, held)
    else:
        fine = scan.locate(words, where.small, where.class_of, where.cuts, where.wide, numbers, starts, spots, held)
    at = np.zeros(257, np.int64)
    fine = fine and scan.assign(held, count, plan.context_of, contexts, at)
    at = np.cumsum(at)
    fine = fine and entropy.decode_steps(source, state, at[: plan.contexts + 1], plan.lookups, numbers)
    return bool(fine and entropy.closed(source, state) and scan.patch(words, spots, held, contexts, count, numbers, at))
