"""The prefix cache against a dictionary of everything ever inserted. Payloads are numpy arrays that spell their tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.raas.engines.embedded_cache import PrefixCache

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def payload_of(tokens: list[int]):  # type: ignore[no-untyped-def]
    """[2, n, 1]: the payload of token i is its whole prefix as a number, so a wrong path is seen."""

    def read(start: int, end: int) -> np.ndarray[tuple[int, int, int], np.dtype[np.float64]]:
        prefixes = [float(int("1" + "".join(map(str, tokens[: i + 1])))) for i in range(start, end)]
        return np.array([prefixes, prefixes])[:, :, None]

    return read


def held(cache: PrefixCache, tokens: list[int]) -> int:
    """Length of the match, its payload checked."""
    length = 0
    for start, end, payload in cache.match(tokens, len(tokens)):
        assert start == length
        assert np.array_equal(payload, payload_of(tokens)(start, end))
        length = end
    return length


def fresh(max_tokens: int = 1000) -> PrefixCache:
    cache = PrefixCache(max_tokens, copy=np.copy)
    cache.flush(1)
    return cache


@given(st.lists(TOKENS, max_size=12), TOKENS)
@settings(max_examples=200, deadline=None)
def test_a_match_is_the_longest_prefix_ever_inserted(inserted: list[list[int]], asked: list[int]) -> None:
    cache = fresh()
    for tokens in inserted:
        cache.insert(tokens, 1, payload_of(tokens))
    common = [
        next((i for i, (a, b) in enumerate(zip(tokens, asked, strict=False)) if a != b), min(len(tokens), len(asked)))
        for tokens in inserted
    ]
    assert held(cache, asked) == max(common, default=0)
    distinct = {tuple(tokens[: i + 1]) for tokens in inserted for i in range(len(tokens))}
    assert cache.tokens == len(distinct), "every prefix is held exactly once"


@given(st.lists(TOKENS, max_size=30), st.integers(0, 25))
@settings(max_examples=100, deadline=None)
def test_the_bound_holds_and_what_remains_is_right(inserted: list[list[int]], bound: int) -> None:
    cache = fresh(bound)
    for tokens in inserted:
        cache.insert(tokens, 1, payload_of(tokens))
        assert cache.tokens <= bound
        assert held(cache, tokens) == len(tokens) or len(tokens) > bound
    for tokens in inserted:
        held(cache, tokens)


def test_the_least_recently_used_branch_goes_first_and_the_shared_part_stays() -> None:
    cache = fresh(30)
    template = [0] * 10
    first, second, third = ([*template, branch, *[branch] * 9] for branch in (1, 2, 3))
    cache.insert(first, 1, payload_of(first))
    cache.insert(second, 1, payload_of(second))
    assert held(cache, first) == 20, "a match counts as use"
    cache.insert(third, 1, payload_of(third))
    assert (held(cache, third), held(cache, second)) == (20, 10)


def test_a_limit_keeps_the_last_token_for_the_caller() -> None:
    cache = fresh()
    cache.insert([1, 2, 3], 1, payload_of([1, 2, 3]))
    assert [(start, end) for start, end, _ in cache.match([1, 2, 3], 2)] == [(0, 2)]


def test_a_flush_forgets_and_keys_of_another_load_do_not_enter() -> None:
    cache = fresh()
    cache.insert([1, 2, 3], 1, payload_of([1, 2, 3]))
    cache.flush(2)
    assert held(cache, [1, 2, 3]) == cache.tokens == 0
    assert cache.insert([1, 2, 3], 1, payload_of([1, 2, 3])) == 0
    assert cache.insert([1, 2, 3], -1, payload_of([1, 2, 3])) == 0
    assert held(cache, [1, 2, 3]) == 0
