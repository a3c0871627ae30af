"""Advantages against a brute force over trajectories and tokens, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.trainer.algorithms import ADVANTAGES
from astraflow.trainer.algorithms.advantage import token_rewards
from astraflow.trainer.algorithms.base import AdvantageInput
from astraflow.trainer.config import PPOConfig

ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "reward")


def inputs_of(groups: list[list[float | None]], lengths: list[int] | None = None, **options: Any) -> AdvantageInput:
    """One row per member; statistics as Dataflow stamps them (numerics 7)."""
    kl = options.pop("kl", None)
    flat = [(g, r) for g, members in enumerate(groups) for r in members]
    lengths = lengths or [2] * len(flat)
    mean, std, size, equal = [], [], [], []
    for g, _ in flat:
        scored = np.array([r for r in groups[g] if r is not None], dtype=np.float64)
        same = bool(scored.size and np.allclose(scored, scored[0], rtol=1e-6, atol=0))
        mean.append(scored.mean() if scored.size else 0.0)
        std.append(0.0 if same or scored.size < 2 else scored.std(ddof=1))
        size.append(scored.size)
        equal.append(same)
    row = np.repeat(np.arange(len(flat)), lengths)
    return AdvantageInput(
        value=np.array([np.nan if r is None else r for _, r in flat], dtype=np.float64),
        group_mean=np.array(mean),
        group_std=np.array(std),
        group_size=np.array(size),
        all_equal=np.array(equal),
        row=row,
        mask=np.ones(len(row), dtype=bool),
        kl=kl,
        config=PPOConfig(**options),
    )


def brute(name: str, groups: list[list[float | None]], lengths: list[int]) -> list[float]:
    """Per token, in plain loops."""
    per_row: list[float | None] = []
    for members in groups:
        scored = [r for r in members if r is not None]
        n = len(scored)
        mu = sum(scored) / n if n else 0.0
        sigma = (sum((r - mu) ** 2 for r in scored) / (n - 1)) ** 0.5 if n > 1 else 0.0
        silent = n < 2 or all(abs(r - scored[0]) <= 1e-6 * abs(scored[0]) for r in scored)
        for r in members:
            if r is None:
                per_row.append(None)
            elif name in ("reinforce_pp", "reward"):
                per_row.append(r)
            elif name == "reinforce_pp_baseline":
                per_row.append(r - mu)
            elif silent:
                per_row.append(0.0)
            elif name == "grpo":
                per_row.append((r - mu) / (sigma + 1e-4))
            elif name == "dr_grpo":
                per_row.append(r - mu)
            else:
                others = (sum(scored) - r) / (n - 1)
                per_row.append(r - others)
    out = [value for value, length in zip(per_row, lengths, strict=True) for _ in range(length)]
    if name.startswith("reinforce_pp"):
        live = [x for x in out if x is not None]
        if live:
            mu = sum(live) / len(live)
            var = sum((x - mu) ** 2 for x in live) / len(live)
            out = [None if x is None else (x - mu) / max(var, 1e-8) ** 0.5 for x in out]
    return [0.0 if x is None else x for x in out]


reward = st.one_of(st.none(), st.sampled_from([0.0, 0.2, 1.0, -1.0, 0.35, 0.7]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(reward, min_size=1, max_size=5), min_size=1, max_size=4), st.integers(0, 1000))
def test_every_estimator_equals_the_brute_force(groups: list[list[float | None]], seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 5, sum(len(g) for g in groups)).tolist()
    for name in ESTIMATORS:
        found = ADVANTAGES.get(name)(inputs_of(groups, lengths))
        np.testing.assert_allclose(found, brute(name, groups, lengths), rtol=1e-9, atol=1e-9, err_msg=name)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(reward, min_size=2, max_size=6), min_size=1, max_size=4))
def test_group_relative_advantages_sum_to_zero_over_scored_members(groups: list[list[float | None]]) -> None:
    for name in ("grpo", "dr_grpo", "rloo"):
        found = ADVANTAGES.get(name)(inputs_of(groups, [1] * sum(len(g) for g in groups)))
        assert np.all(np.isfinite(found))
        start = 0
        for members in groups:
            assert abs(found[start : start + len(members)].sum()) < 1e-8, name
            start += len(members)


def test_degenerate_groups_carry_no_signal(case: Callable[[str], dict[str, Any]]) -> None:
    recorded = case("G08")
    for label, rewards in recorded["input"]["groups"].items():
        single = np.asarray(rewards, dtype=np.float32).astype(np.float64).tolist()
        for name in ("grpo", "dr_grpo", "rloo"):
            found = ADVANTAGES.get(name)(inputs_of([single], [1] * len(single)))
            assert np.all(np.isfinite(found))
            if label in "abc":
                np.testing.assert_array_equal(found, recorded["expected"]["values"][f"adv_{label}"])
            if label == "d":
                assert found.tolist() == [0.0]
            if label == "e":
                assert np.abs(found).max() <= 2.65
                assert name != "rloo" or found[-1] == pytest.approx(0.6, abs=1e-6)


def test_groups_of_different_data_sets_do_not_merge(case: Callable[[str], dict[str, Any]]) -> None:
    recorded = case("G10")
    groups: dict[str, list[float | None]] = {}
    for rollout in recorded["input"]["rollouts"]:
        groups.setdefault(f"{rollout['dataset']}:{rollout['id']}", []).append(rollout["reward"])
    found = ADVANTAGES.get("grpo")(inputs_of(list(groups.values()), [1] * 4))
    assert found.tolist() == recorded["expected"]["values"]["advantages"]


def test_kl_in_the_reward_falls_on_its_own_token_and_the_estimate_on_the_last(case: Callable[[str], dict[str, Any]]) -> None:
    recorded = case("G14")
    given_, expected = recorded["input"], recorded["expected"]["values"]
    kl = np.array(given_["logp"]) - np.array(given_["ref_logp"])
    row, coefficient = np.zeros(3, dtype=np.int64), given_["kl_coef"]
    for mask_name, wanted in (("mask_full", "token_rewards"), ("mask_gap", "token_rewards_mask_gap")):
        mask = np.array(given_[mask_name], dtype=bool)
        np.testing.assert_allclose(token_rewards(np.array([given_["reward"]]), kl, mask, row, coefficient), expected[wanted], atol=1e-6)
    np.testing.assert_allclose(kl, expected["k1"], atol=1e-6)
    assert kl.mean() == pytest.approx(expected["logged_kl_mean_k1"])


def test_with_kl_in_the_reward_an_advantage_is_the_reward_to_go_after_group_normalisation() -> None:
    kl = np.array([0.1, 0.2, 0.3, 0.4])
    found = ADVANTAGES.get("grpo")(inputs_of([[1.0, 0.0]], [2, 2], kl=kl, kl_reward=0.5))
    a = 0.5 / (np.sqrt(0.5) + 1e-4)
    np.testing.assert_allclose(found, [a - 0.15, a - 0.1, -a - 0.35, -a - 0.2], rtol=1e-12)


def test_a_name_that_nobody_registered_is_refused_with_the_closest() -> None:
    with pytest.raises(ValueError, match="grpo"):
        ADVANTAGES.get("grpoo")
