"""Engines that abort: the budget, the stamps and the end (case G23)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.lib.aio import Backoff
from astraflow.raas.engines.base import EngineError, Piece, generate_through_aborts, stable_hash
from astraflow.workflows.api import ModelRequest, ModelResponse

QUICK = Backoff(0.0, 1.0, 0.0)


def piece(tokens: list[int], finish: Any = "abort", version: int = 0, timeline: int = 1) -> Piece:
    return Piece(output_ids=tokens, logprobs=[-1.0] * len(tokens), versions=[version] * len(tokens), finish=finish, timeline=timeline)


def ask(script: list[Piece], budget: int = 8, prompt: list[int] | None = None) -> tuple[ModelResponse, list[ModelRequest]]:
    seen: list[ModelRequest] = []
    left = iter(script)

    async def once(request: ModelRequest) -> Piece:
        seen.append(request)
        return next(left)

    request = ModelRequest(input_ids=prompt or [1, 2], max_new_tokens=budget, seed=5)
    return asyncio.run(generate_through_aborts(once, request, pauses=QUICK)), seen


def test_case_g23_the_rest_of_the_budget_is_asked_for_with_the_tokens_so_far(case: Callable[[str], dict[str, Any]]) -> None:
    given_case, expected = case("G23")["input"], case("G23")["expected"]["values"]
    script = [piece(row["tokens"], row["finish"], row["version"]) for row in given_case["engine_script"]]
    response, seen = ask(script, given_case["max_new_tokens"], given_case["prompt_ids"])
    assert [{"input_ids": r.input_ids, "max_new_tokens": r.max_new_tokens} for r in seen] == expected["requests"]
    assert response.output_ids == expected["output_ids"]
    assert response.versions == expected["versions"]
    assert len(response.logprobs) == expected["len_logprobs"]
    assert response.finish == expected["finish"]


def test_an_empty_abort_just_resumes() -> None:
    response, seen = ask([piece([]), piece([]), piece([3], "stop")])
    assert (response.output_ids, response.finish, len(seen)) == ([3], "stop", 3)


def test_an_abort_with_the_whole_budget_used_ends_as_length() -> None:
    response, seen = ask([piece([3, 4])], budget=2)
    assert (response.output_ids, response.finish, len(seen)) == ([3, 4], "length", 1)


def test_the_oldest_timeline_of_the_tokens_is_kept() -> None:
    response, _ = ask([piece([3], timeline=4), piece([], timeline=1), piece([4], "stop", timeline=5)])
    assert response.timeline == 4


def test_every_try_samples_with_its_own_seed() -> None:
    _, seen = ask([piece([3]), piece([4]), piece([5], "stop")])
    assert seen[0].seed == 5
    assert len({request.seed for request in seen}) == 3


def test_an_engine_that_only_aborts_is_given_up() -> None:
    with pytest.raises(EngineError) as caught:
        ask([piece([])] * 200)
    assert caught.value.retryable


def test_an_answer_over_the_budget_or_with_unequal_columns_is_refused() -> None:
    with pytest.raises(EngineError, match="2 were asked for"):
        ask([piece([1, 2, 3], "stop")], budget=2)
    broken = piece([1, 2], "stop")
    broken.versions = [0]
    with pytest.raises(EngineError, match="1 versions"):
        ask([broken])


@given(st.integers(1, 30), st.lists(st.integers(0, 4), max_size=12))
def test_any_interruption_pattern_gives_the_same_tokens_as_none(budget: int, cuts: list[int]) -> None:
    full = list(range(100, 100 + budget))
    position = 0
    script: list[Piece] = []
    for cut in cuts:
        taken = full[position : position + cut]
        script.append(piece(taken))
        position += len(taken)
    script.append(piece(full[position:], "stop"))
    response, seen = ask(script, budget)
    assert response.output_ids == full
    assert all(request.input_ids[2:] + [0] * request.max_new_tokens for request in seen)
    assert all(len(request.input_ids) - 2 + request.max_new_tokens == budget for request in seen)


def test_the_stable_hash_depends_on_every_part_and_on_nothing_else() -> None:
    assert stable_hash(1, "a") == stable_hash(1, "a") == 4574243854444617091
    assert len({stable_hash(1, "a"), stable_hash("1a"), stable_hash(1, "b"), stable_hash("a", 1)}) == 4
    assert 0 <= stable_hash(0) < 2**63


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.lists(st.integers(0, 4), max_size=6), st.sampled_from(["01", "222", "10"]))
def test_a_stop_text_that_spans_an_interruption_ends_the_generation(tokens: list[int], cuts: list[int], stop: str) -> None:
    """The engine looks at each try by itself, as servers do."""
    at = 0

    def holds(found: list[int]) -> bool:
        return stop in "".join(map(str, found))

    async def once(request: ModelRequest) -> Piece:
        nonlocal at
        size = cuts.pop() if cuts else len(tokens)
        part: list[int] = []
        while len(part) < size and at < len(tokens):
            part.append(tokens[at])
            at += 1
            if holds(part):
                return piece(part, "stop")
        return piece(part, "abort" if at < len(tokens) else "length")

    request = ModelRequest(input_ids=[9], max_new_tokens=len(tokens), stop=[stop])
    response = asyncio.run(generate_through_aborts(once, request, pauses=QUICK, stopped=holds))
    end = "".join(map(str, tokens)).find(stop)
    expected = tokens if end < 0 else tokens[: end + len(stop)]
    assert (response.output_ids, response.finish) == (expected, "length" if end < 0 else "stop")
    assert len(response.logprobs) == len(response.versions) == len(expected)
