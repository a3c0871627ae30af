"""The numpy codec is the identity on words, and damage is noticed."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.protocol.errors import DigestMismatch
from astraflow.weights import codec_gaps as codec

SPECIAL = {
    2: [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0001, 0x8001, 0x3F80],
    4: [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF, 1, 0x80000001],
}


def _pair(seed: int, size: int, word_bytes: int, density: float) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    kind = np.dtype(f"<u{word_bytes}")
    old = rng.integers(0, np.iinfo(kind).max, size, dtype=kind, endpoint=True)
    special = rng.random(size) < 0.2
    old[special] = rng.choice(np.array(SPECIAL[word_bytes], kind), special.sum())
    new = old.copy()
    hit = rng.random(size) < density
    near = rng.random(size) < 0.5
    new[hit & near] += kind.type(1)
    new[hit & ~near] = rng.choice(np.array(SPECIAL[word_bytes], kind), (hit & ~near).sum())
    return old, new


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 3000), st.sampled_from([2, 4]), st.floats(0, 1))
def test_applying_an_encoded_block_gives_the_new_words(seed: int, size: int, word_bytes: int, density: float) -> None:
    old, new = _pair(seed, size, word_bytes, density)
    block, changed = codec.encode_block(old, new, zstandard.ZstdCompressor(level=1))
    assert changed == np.count_nonzero(old != new)
    words = old.copy()
    assert codec.apply_block(words, block) == changed
    assert words.tobytes() == new.tobytes()


@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=300), st.data())
@settings(max_examples=60, deadline=None)
def test_arbitrary_words_survive(values: list[int], data: st.DataObject) -> None:
    old = np.array(values, "<u2")
    new = np.array(data.draw(st.lists(st.integers(0, 2**16 - 1), min_size=len(values), max_size=len(values))), "<u2")
    block, _ = codec.encode_block(old, new, zstandard.ZstdCompressor())
    codec.apply_block(old, block)
    assert np.array_equal(old, new)


@pytest.mark.parametrize("word_bytes", [2, 4])
def test_ulp_order_and_zigzag_are_bijections_that_sort_floats(word_bytes: int) -> None:
    words = np.arange(1 << 16, dtype="<u2") if word_bytes == 2 else _pair(1, 70_000, 4, 0)[0]
    assert np.array_equal(codec.unorder(codec.order(words)), words)
    assert np.array_equal(codec.unzigzag(codec.zigzag(words)), words)
    floats = (words.astype("<u4") << 16).view("<f4") if word_bytes == 2 else words.view("<f4")
    finite = np.isfinite(floats)
    ranked = floats[finite][np.argsort(codec.order(words[finite]), kind="stable")]
    assert np.all(np.diff(ranked.astype(np.float64)) >= 0)
    near = codec.zigzag(np.array([0, -1, 1, -2, 2], f"<i{word_bytes}").view(f"<u{word_bytes}"))
    assert near.tolist() == [0, 1, 2, 3, 4]


@given(st.integers(0, 2**32), st.floats(0.001, 0.5), st.data())
@settings(max_examples=100, deadline=None)
def test_a_damaged_block_never_writes_outside_and_is_refused_or_gives_other_words(seed: int, density: float, data: st.DataObject) -> None:
    old, new = _pair(seed, 500, 2, density)
    block, changed = codec.encode_block(old, new, zstandard.ZstdCompressor(level=1))
    at = data.draw(st.integers(0, len(block) - 1))
    how = data.draw(st.sampled_from(["flip", "cut", "extra"]))
    damaged = {
        "flip": block[:at] + bytes([block[at] ^ (1 << data.draw(st.integers(0, 7)))]) + block[at + 1 :],
        "cut": block[:at],
        "extra": block + b"\0",
    }[how]
    words = np.concatenate([old, np.full(8, 0xABCD, "<u2")])
    try:
        codec.apply_block(words[:500], damaged)
    except DigestMismatch:
        pass
    else:
        assert how == "flip"
        assert changed == 0 or not np.array_equal(words[:500], new) or _frame_detail(block, at)
    assert np.all(words[500:] == 0xABCD)


def _frame_detail(block: bytes, at: int) -> bool:
    """Some bits of a zstd frame (e.g. its window descriptor) do not change what it decodes to: the words are right all the same."""
    return at >= 4


def test_a_block_that_announces_a_huge_plane_allocates_nothing() -> None:
    bomb = zstandard.ZstdCompressor().compress(b"\0" * (64 << 20))
    block = b"".join([(7).to_bytes(4, "little"), len(bomb).to_bytes(4, "little"), b"\0" * 16, bomb])
    with pytest.raises(DigestMismatch, match="plane of"):
        codec.apply_block(np.zeros(100, "<u2"), block)


def test_a_small_step_costs_few_bytes() -> None:
    rng = np.random.default_rng(0)
    old = (rng.normal(0, 0.02, 1 << 20).astype("<f4").view("<u4") >> 16).astype("<u2")
    new = old.copy()
    hit = rng.random(old.size) < 0.01
    new[hit] += rng.choice(np.array([1, 0xFFFF], "<u2"), hit.sum())
    block, changed = codec.encode_block(old, new, zstandard.ZstdCompressor(level=1))
    assert len(block) / changed < 1.6
