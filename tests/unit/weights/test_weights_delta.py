"""Deltas between two halves: identity for all words, densities, word sizes and codecs; damage is refused or gives another digest."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.protocol.errors import DigestMismatch
from astraflow.weights import codec, codec_gaps, codec_ranks, delta, layout
from astraflow.weights.delta import Coding

CODINGS = [Coding(codec.GAPS), Coding(codec.RANKS, "fast"), Coding(codec.RANKS, "dense"), Coding(codec.RANKS, "dense", threads=2)]
NEVER = lambda: False  # noqa: E731
SPECIAL = np.array([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0001, 0x8001, 0x3F80, 0xBF80, 0x7FFF, 0x0080], "<u2")


def narrow(words: int) -> layout.Layout:
    return layout.build([("w", (words,), "BF16")])


def weights(rng: np.random.Generator, size: int) -> np.ndarray:
    return ((rng.normal(0, 0.02, size).astype("<f4").view("<u4") + 0x8000) >> 16).astype("<u2")


def pair(seed: int, size: int, density: float, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Old and new words: like weights under small updates, arbitrary, or special ones."""
    rng = np.random.default_rng(seed)
    any_words = rng.integers(0, 1 << 16, size, dtype=np.uint16)
    old = weights(rng, size) if kind == "weights" else any_words if kind == "any" else rng.choice(SPECIAL, size)
    new = old.copy()
    hit = rng.random(size) < density
    fresh = {
        "weights": old + rng.choice(np.array([1, 0xFFFF, 3, 0xFFC0], "<u2"), size),
        "any": any_words[::-1],
        "special": rng.choice(SPECIAL, size),
    }
    new[hit] = fresh[kind][hit]
    return old.astype("<u2"), new.astype("<u2")


def there_and_back(shape: layout.Layout, old: np.ndarray, new: np.ndarray, coding: Coding) -> bytes | None:
    encoded = delta.encode(shape, memoryview(old).cast("B"), memoryview(new).cast("B"), coding, NEVER)
    if encoded is None:
        return None
    payload, changed = encoded
    words = old.copy()
    assert delta.apply(shape, memoryview(words).cast("B"), memoryview(payload), coding.threads) == changed
    assert changed == sum(
        np.count_nonzero(s.view(memoryview(old).cast("B")) != s.view(memoryview(new).cast("B"))) for s in delta.segments(shape, 1 << 20)
    )
    assert words.tobytes() == new.tobytes()
    return payload


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32), st.integers(1, 5000), st.floats(0, 1), st.sampled_from(["weights", "any", "special"]), st.sampled_from(CODINGS)
)
def test_applying_an_encoded_delta_gives_the_new_words(seed: int, size: int, density: float, kind: str, coding: Coding) -> None:
    old, new = pair(seed, size, density, kind)
    there_and_back(narrow(size), old, new, coding)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 0xFFFF), st.integers(0, 0xFFFF)), min_size=1, max_size=300), st.sampled_from(CODINGS))
def test_segments_of_arbitrary_words_survive_even_where_they_grow(words: list[tuple[int, int]], coding: Coding) -> None:
    old, new = (np.array(side, "<u2") for side in zip(*words, strict=True))
    if coding.codec == codec.GAPS:
        there_and_back(narrow(old.size), old, new, coding)
        return
    where, head, _ = codec_ranks.choose_places([(old, new)], coding.setting)
    one_segment(old, new, where, head, coding.setting)


def one_segment(old: np.ndarray, new: np.ndarray, where: codec_ranks.Places, head: codec_ranks.Head, setting: codec_ranks.Setting) -> None:
    tally = codec_ranks.new_tally("dense")
    found = codec_ranks.extract(old, new, where, np.count_nonzero(old != new) / old.size, tally, codec_ranks.Scratch())
    plan = codec_ranks.choose_contexts(where, head, tally, setting, complete=True)
    data = codec_ranks.encode_segment(found, plan, codec_ranks.Scratch())
    _, received = codec_ranks.read_head(codec_ranks.pack_head(head))
    copy = old.copy()
    assert codec_ranks.apply_segment(copy, memoryview(data), received, codec_ranks.Scratch()) == np.count_nonzero(old != new)
    assert np.array_equal(copy, new)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(300, 40_000), st.integers(1, 0x80), st.floats(0, 0.004))
def test_few_changes_in_two_wide_classes_are_found_again(seed: int, size: int, exponent: int, density: float) -> None:
    old, new = pair(seed, size, density, "any" if seed % 2 else "weights")
    where = codec_ranks.places(0, [], [exponent << 7])
    one_segment(old, new, where, codec_ranks.Head(codec_ranks.SEGMENT_WORDS, 0, [], [exponent << 7], [0], b""), "fast")


def test_every_pair_of_words_survives() -> None:
    """All old words, each with a few of all new ones, signs and infinities included."""
    old = np.repeat(np.arange(1 << 16, dtype="<u2"), 4)
    new = np.random.default_rng(0).permutation(old)
    where, head, _ = codec_ranks.choose_places([(old, new)], "dense")
    one_segment(old, new, where, head, "dense")


@pytest.mark.parametrize("coding", CODINGS)
def test_a_delta_over_mixed_word_sizes_is_the_identity(monkeypatch: pytest.MonkeyPatch, coding: Coding) -> None:
    monkeypatch.setattr(codec_gaps, "BLOCK_WORDS", 100)
    monkeypatch.setattr(codec_ranks, "SEGMENT_WORDS", 128)
    shape = layout.build([("a", (64, 50), "BF16"), ("b", (33,), "F32"), ("c", (7, 3), "BF16"), ("d", (640,), "F32"), ("e", (0,), "F32")])
    rng = np.random.default_rng(3)
    old = rng.integers(0, 256, shape.size_bytes, dtype=np.uint8)
    new = old.copy()
    new[rng.integers(0, new.size, 40)] ^= 0x81
    payload = there_and_back(shape, old, new, coding)
    assert payload is not None
    for damaged in (payload[:-1], payload + b"\0", b"XXXX" + payload[4:], payload[:5], b""):
        with pytest.raises(DigestMismatch):
            delta.apply(shape, memoryview(old.copy()), memoryview(damaged))


@pytest.mark.parametrize("coding", CODINGS)
def test_a_delta_that_is_no_smaller_than_the_half_is_given_up_and_a_stopped_one_too(coding: Coding) -> None:
    rng = np.random.default_rng(0)
    old, new = (rng.integers(0, 256, 8192, dtype=np.uint8) for _ in range(2))
    assert delta.encode(narrow(4096), memoryview(old), memoryview(new), coding, NEVER) is None
    with pytest.raises(delta.Cancelled):
        delta.encode(narrow(4096), memoryview(old), memoryview(new), coding, lambda: True)


@pytest.mark.parametrize("setting", ["fast", "dense"])
def test_changes_that_are_too_many_to_be_kept_are_coded_in_rounds(monkeypatch: pytest.MonkeyPatch, setting: codec_ranks.Setting) -> None:
    monkeypatch.setattr(codec_ranks, "SEGMENT_WORDS", 1 << 14)
    old, new = pair(1, 400_000, 0.4, "weights")
    payload = there_and_back(narrow(old.size), old, new, Coding(codec.RANKS, setting, threads=2))
    assert payload is not None
    assert len(payload) < 1.2 * np.count_nonzero(old != new)


def test_small_steps_cost_few_bytes_and_dense_ones_fewer() -> None:
    rng = np.random.default_rng(0)
    masters = rng.normal(0, 0.02, 1 << 20).astype("<f4")
    old, new = ((x.view("<u4") + 0x8000 >> 16).astype("<u2") for x in (masters, masters + rng.normal(0, 3e-7, 1 << 20).astype("<f4")))
    cost = {}
    for coding in CODINGS[:3]:
        payload = there_and_back(narrow(old.size), old, new, coding)
        assert payload is not None
        cost[coding.setting if coding.codec == codec.RANKS else "gaps"] = len(payload) / np.count_nonzero(old != new)
    assert cost["dense"] < 0.95
    assert cost["dense"] < cost["fast"] < 1.4
    assert cost["fast"] < cost["gaps"]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.001, 0.2), st.sampled_from(CODINGS), st.data())
def test_a_damaged_delta_writes_nothing_outside_and_is_refused_or_gives_other_words(
    seed: int, density: float, coding: Coding, data: st.DataObject
) -> None:
    size = 2500
    old, new = pair(seed, size, density, "weights")
    encoded = delta.encode(narrow(size), memoryview(old).cast("B"), memoryview(new).cast("B"), coding, NEVER)
    assert encoded is not None
    payload = encoded[0]
    at = data.draw(st.integers(0, len(payload) - 1))
    how = data.draw(st.sampled_from(["flip", "cut", "extra", "fill", "swap"]))
    other = data.draw(st.integers(0, len(payload) - 1))
    low, high = sorted((at, other))
    damaged = {
        "flip": payload[:at] + bytes([payload[at] ^ (1 << data.draw(st.integers(0, 7)))]) + payload[at + 1 :],
        "cut": payload[:at],
        "extra": payload[:at] + b"\0" + payload[at:],
        "fill": payload[:low] + bytes([data.draw(st.integers(0, 255))]) * (high - low) + payload[high:],
        "swap": payload[high:] + payload[:high],
    }[how]
    guard = np.full(64, 0xABCD, "<u2")
    words = np.concatenate([guard, old, guard])
    try:
        delta.apply(narrow(size), memoryview(words[64:-64]).cast("B"), memoryview(damaged))
    except DigestMismatch:
        pass
    else:
        # Some bits do not change what is decoded (of a zstd frame's header, a rounded frequency): then the words are right.
        right = layout.digest(narrow(size), memoryview(new).cast("B"))
        assert (
            damaged == payload
            or words[64:-64].tobytes() == new.tobytes()
            or layout.digest(narrow(size), memoryview(words[64:-64]).cast("B")) != right
        )
    assert np.all(words[:64] == 0xABCD)
    assert np.all(words[-64:] == 0xABCD)


@settings(max_examples=150, deadline=None)
@given(st.binary(min_size=0, max_size=400), st.integers(0, 3))
def test_arbitrary_bytes_as_a_segment_do_no_harm(data: bytes, seed: int) -> None:
    old, new = pair(seed, 3000, 0.05, "weights")
    where, head, share = codec_ranks.choose_places([(old, new)], "dense" if seed % 2 else "fast")
    tally = codec_ranks.new_tally("dense")
    codec_ranks.extract(old, new, where, share, tally, codec_ranks.Scratch())
    codec_ranks.choose_contexts(where, head, tally, "dense", complete=False)
    _, plan = codec_ranks.read_head(codec_ranks.pack_head(head))
    words = old.copy()
    with contextlib.suppress(DigestMismatch):
        codec_ranks.apply_segment(words, memoryview(data), plan, codec_ranks.Scratch())


def test_a_process_without_numba_or_without_a_writable_cache_still_has_a_codec(tmp_path: Path) -> None:
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text("raise ImportError('not here')")
    code = "import sys; sys.path.insert(0, sys.argv[1]); from astraflow.weights import codec; print(*codec.available())"
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.split() == [codec.GAPS]
    assert "numpy alone" in run.stderr


def test_kernels_work_where_no_cache_can_be_written() -> None:
    """Numba refuses `cache=True` outright when it finds no place for it."""
    code = """
import numba.core.caching as caching
caching.CacheImpl._locator_classes = []
from numba import types
from astraflow.weights import simd
made = simd.kernel(types.int64(types.int64))(lambda x: x + 1)
print(made(41))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env=os.environ)
    assert run.stdout.split() == ["42"]


@pytest.mark.parametrize(("cuts", "contexts"), [([], 1), ([], 2), ([0x3B00], 1), ([0x3A00, 0x3B80], 3)])
def test_a_segment_for_more_words_than_there_are_writes_nothing_behind_them(cuts: list[int], contexts: int) -> None:
    """The last change lies exactly one word behind the end."""
    size = 2000
    old, new = pair(5, size, 0.003, "weights")
    new[-1] = old[-1] ^ 1
    where = codec_ranks.places(0, [], cuts)
    tally = codec_ranks.new_tally("dense")
    found = codec_ranks.extract(old, new, where, 0.01, tally, codec_ranks.Scratch())
    head = codec_ranks.Head(codec_ranks.SEGMENT_WORDS, 0, [], cuts, [0], b"")
    plan = codec_ranks.choose_contexts(where, head, tally, "fast" if contexts == 1 else "dense", complete=True)
    data = memoryview(codec_ranks.encode_segment(found, plan, codec_ranks.Scratch()))
    plan = codec_ranks.read_head(codec_ranks.pack_head(head))[1]
    words = old.copy()
    with pytest.raises(DigestMismatch):
        codec_ranks.apply_segment(words[:-1], data, plan, codec_ranks.Scratch())
    assert words[-1] == old[-1]
    assert codec_ranks.apply_segment(old[:], data, plan, codec_ranks.Scratch()) == found.count


def test_a_head_that_promises_more_segments_than_the_payload_can_have_is_refused() -> None:
    head = codec_ranks.Head(64, 0, [], [], [0], zstandard.ZstdCompressor().compress(bytes(codec_ranks.STEP_TOKENS)))
    packed = codec_ranks.pack_head(head)
    payload = delta.MAGICS[codec.RANKS] + len(packed).to_bytes(4, "little") + packed + bytes(1000)
    with pytest.raises(DigestMismatch, match="segments of 64 words do not fit"):
        delta.reading(narrow(1 << 20), memoryview(payload), len(payload))
