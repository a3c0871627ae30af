"""Kept deltas, the chains that they make, and their patching while bytes arrive."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.protocol.errors import DigestMismatch
from astraflow.weights import chain, codec, codec_gaps, codec_ranks, delta, layout
from astraflow.weights.chain import Chain, Patcher, Shelf
from astraflow.weights.delta import Coding, Delta

SHAPE = layout.build([("a", (3000,), "BF16"), ("b", (5, 7), "F32"), ("empty", (0,), "BF16")])


def link(base: int, version: int, size: int = 30, base_digest: str = "", digest: str = "") -> Delta:
    return Delta(base, base_digest or f"d{base}", version, digest or f"d{version}", b"x" * size, 1)


def test_the_shelf_is_bounded_in_number_and_by_the_bytes_of_a_full_transfer() -> None:
    shelf = Shelf(3, 100)
    for version in range(1, 6):
        shelf.add(link(version - 1, version))
    assert shelf.pairs() == [(2, 3), (3, 4), (4, 5)]
    assert shelf.size_bytes == 90
    shelf.add(link(5, 6, size=10))
    assert shelf.pairs() == [(3, 4), (4, 5), (5, 6)]
    shelf.add(link(6, 7, size=60))
    assert shelf.pairs() == [(5, 6), (6, 7)], "all together would be as large as the half"
    shelf.add(link(5, 6, size=99))
    assert shelf.pairs() == [(5, 6)], "the newest one always stays"


def test_a_chain_leads_from_exactly_the_base_to_exactly_the_version() -> None:
    shelf = Shelf(8, 10_000)
    for version in range(1, 6):
        shelf.add(link(version - 1, version, size=version))
    found = shelf.chain((2, "d2"), (5, "d5"))
    assert found is not None
    assert [(d.base_version, d.version) for d in found.deltas] == [(2, 3), (3, 4), (4, 5)]
    assert (found.base, found.size_bytes, found.changed) == ((2, "d2"), 12, 3)
    for base, target in (((2, "other"), (5, "d5")), ((2, "d2"), (5, "other")), ((5, "d5"), (5, "d5")), ((6, "d6"), (5, "d5"))):
        assert shelf.chain(base, target) is None


def test_a_chain_never_leads_over_a_version_whose_words_were_rolled_back() -> None:
    shelf = Shelf(8, 10_000)
    shelf.add(link(1, 2))
    shelf.add(link(2, 3))
    shelf.add(link(3, 2, digest="again"))
    shelf.add(link(2, 3, base_digest="again", digest="again"))
    found = shelf.chain((1, "d1"), (3, "again"))
    assert found is not None
    assert [d.digest for d in found.deltas] == ["d2", "d3", "again", "again"], "the way that the words went"
    assert shelf.chain((2, "d2"), (3, "d3")) == Chain((link(2, 3),))
    direct = shelf.chain((2, "again"), (3, "again"))
    assert direct is not None
    assert len(direct.deltas) == 1


def test_deltas_that_go_in_circles_end_the_search() -> None:
    shelf = Shelf(8, 10_000)
    shelf.add(link(1, 2))
    shelf.add(link(2, 1))
    assert shelf.chain((7, "d7"), (1, "d1")) is None


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=5), st.integers(1, 50), st.integers(0, 200), st.integers(0, 200))
def test_a_chain_is_read_and_hashed_as_if_its_payloads_were_one(payloads: list[bytes], chunk: int, offset: int, size: int) -> None:
    made = Chain(tuple(Delta(k, "", k + 1, "", payload, 0) for k, payload in enumerate(payloads)))
    whole = b"".join(payloads)
    assert b"".join(made.pieces(offset, size)) == whole[offset : offset + size]
    assert made.chunk_hashes(chunk) == [xxhash.xxh3_64_intdigest(whole[at : at + chunk]) for at in range(0, len(whole), chunk)]
    assert sum(each.size_bytes for each in made.links()) == made.size_bytes == len(whole)


GOOD = Chain((link(1, 2), link(2, 3)))


@pytest.mark.parametrize(
    ("base", "target", "size", "changed", "wrong"),
    [
        ((1, "d1"), (3, "d3"), 60, 2, ""),
        ((1, "else"), (3, "d3"), 60, 2, "follows version 1"),
        ((1, "d1"), (3, "else"), 60, 2, "end at version 3"),
        ((1, "d1"), (4, "d4"), 60, 2, "end at version 3, not at 4"),
        ((1, "d1"), (3, "d3"), 61, 2, "do not add up"),
        ((1, "d1"), (3, "d3"), 60, 3, "do not add up"),
    ],
)
def test_fault_5_links_of_a_ticket_lead_from_the_base_that_is_held_to_the_version_that_was_asked_for(
    base: chain.Name, target: chain.Name, size: int, changed: int, wrong: str
) -> None:
    found = chain.check(GOOD.links(), base, target, size, changed, 10)
    assert (wrong in found) if wrong else not found
    assert "accepted: 1…1" in chain.check(GOOD.links(), base, target, size, changed, 1)
    assert chain.check([], base, target, size, changed, 10)


class Store:
    """A base and a draft in memory."""

    def __init__(self, base: bytes) -> None:
        self.base, self.draft = base, bytearray(len(base))
        self.final: list[int] = []

    def read_base(self, offset: int, room: memoryview) -> None:
        room[:] = self.base[offset : offset + len(room)]

    def read(self, offset: int, room: memoryview) -> None:
        room[:] = self.draft[offset : offset + len(room)]

    def write(self, offset: int, data: memoryview, final: bool) -> None:
        self.draft[offset : offset + len(data)] = data
        if final:
            self.final.append(offset)


def history(seed: int, versions: int, density: float) -> list[bytes]:
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 256, SHAPE.size_bytes, dtype=np.uint8)
    made = [words.tobytes()]
    for _ in range(versions):
        hit = rng.random(words.size) < density
        words = np.where(hit, rng.integers(0, 256, words.size, dtype=np.uint8), words)
        made.append(words.tobytes())
    return made


CODINGS = [Coding(codec.GAPS), Coding(codec.RANKS, "fast"), Coding(codec.RANKS, "dense")]


def chained(halves: list[bytes], coding: Coding = CODINGS[0]) -> Chain:
    made = []
    for k, (old, new) in enumerate(itertools.pairwise(halves)):
        encoded = delta.encode(SHAPE, memoryview(old), memoryview(new), coding, lambda: False)
        assert encoded is not None
        made.append(Delta(k, f"d{k}", k + 1, f"d{k + 1}", *encoded, coding.codec))
    return Chain(tuple(made))


def patcher(store: Store, made: Chain, payload: bytes, threads: int = 1) -> Patcher:
    return Patcher(SHAPE, made.links(), memoryview(payload), store.read_base, store.read, store.write, threads)


@given(
    st.integers(0, 1000),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.001, 0.05]),
    st.lists(st.integers(0, 20_000), max_size=8),
    st.sampled_from(CODINGS),
)
@settings(max_examples=60, deadline=None)
def test_any_arrival_of_a_chains_bytes_gives_the_last_version(
    seed: int, versions: int, density: float, steps: list[int], coding: Coding
) -> None:
    halves = history(seed, versions, density)
    made, store = chained(halves, coding), Store(halves[0])
    whole = b"".join(bytes(d.payload) for d in made.deltas)
    arriving = bytearray(len(whole))
    at = patcher(store, made, arriving, threads=1 + seed % 2)  # type: ignore[arg-type]
    for ready in [*sorted(min(step, len(whole)) for step in steps), len(whole)]:
        arriving[:ready] = whole[:ready]
        at.advance(ready)
    assert at.done
    assert bytes(store.draft) == halves[-1]
    assert store.base == halves[0], "what is held is only read"
    words = codec_gaps.BLOCK_WORDS if coding.codec == codec.GAPS else codec_ranks.SEGMENT_WORDS
    assert store.final == [s.offset for s in delta.segments(SHAPE, words)], "each block is final once, in order"


def test_blocks_are_applied_before_the_last_byte_has_come() -> None:
    halves = history(3, 2, 0.01)
    made, store = chained(halves), Store(halves[0])
    whole = b"".join(bytes(d.payload) for d in made.deltas)
    at = patcher(store, made, whole)
    at.advance(len(made.deltas[0].payload))
    assert bytes(store.draft) == halves[1]
    assert not at.done
    assert store.final == []


@given(st.integers(0, 100), st.data())
@settings(max_examples=60)
def test_a_cut_or_longer_chain_is_noticed(seed: int, data: st.DataObject) -> None:
    halves = history(seed, 2, 0.01)
    made = chained(halves)
    victim = data.draw(st.integers(0, 1))
    size = len(made.deltas[victim].payload)
    cut = data.draw(st.integers(0, size + 3).filter(lambda value: value != size))
    payload = (bytes(made.deltas[victim].payload) + b"\0\0\0")[:cut]
    broken = list(made.deltas)
    broken[victim] = dataclasses.replace(broken[victim], payload=payload)
    bad = Chain(tuple(broken))
    with pytest.raises(DigestMismatch):
        patcher(Store(halves[0]), bad, b"".join(bytes(d.payload) for d in broken)).advance(bad.size_bytes)
