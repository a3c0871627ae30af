from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.dataflow.scores import eval_metrics, pass_at_k


def test_pass_at_k_is_unbiased_and_null_when_n_is_below_k(case: Any) -> None:
    given_, expected = case("G39")["input"], case("G39")["expected"]["values"]
    rewards: list[list[float | None]] = [[1.0] * p["c"] + [0.0] * (p["n"] - p["c"]) for p in given_["problems"]]
    metrics = eval_metrics(rewards, 4, 0.5, given_["k"])
    for k in given_["k"]:
        assert metrics[f"pass@{k}"] == (None if expected[f"pass@{k}"] is None else pytest.approx(expected[f"pass@{k}"], abs=1e-6))
    for one, value in zip(given_["single"], expected["single"], strict=True):
        assert pass_at_k(**one) == (None if value is None else pytest.approx(value, abs=1e-6))


def test_a_missing_sample_counts_as_wrong_and_keeps_n() -> None:
    metrics = eval_metrics([[1.0, None, 0.0, 0.0], [None] * 4], 4, 0.5, [4])
    assert metrics == {"avg@4": 1 / 8, "pass@4": 0.5, "reward/mean": pytest.approx(1 / 3)}
    assert eval_metrics([[None]], 1, 0.5, [1])["reward/mean"] is None


def test_a_partial_reward_below_the_threshold_is_not_right() -> None:
    assert eval_metrics([[0.2], [1.0]], 1, 0.5, [1])["avg@1"] == 0.5


@given(st.integers(1, 7), st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n: int, k: int, data: st.DataObject) -> None:
    c = data.draw(st.integers(0, n))
    value = pass_at_k(n, c, k)
    if k > n:
        assert value is None
    else:
        subsets = list(combinations(range(n), k))
        assert value == pytest.approx(sum(any(i < c for i in s) for s in subsets) / len(subsets))
