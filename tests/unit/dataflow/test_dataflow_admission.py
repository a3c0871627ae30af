from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.dataflow.admission import check_group, examine, make_share, statistics
from astraflow.dataflow.policies.admit import FilterZeroAdvantage, KeepAll, RewardBand
from astraflow.dataflow.policies.shape import Overlong, Unshaped
from astraflow.protocol import codec
from astraflow.protocol.errors import BadMessage
from astraflow.protocol.rollout import Group, Segment, Trajectory

_spec = importlib.util.spec_from_file_location("dataflow_groups", Path(__file__).with_name("groups.py"))
assert _spec is not None
assert _spec.loader is not None
made: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(made)


def test_equal_rewards_have_no_variance_and_the_filter_drops_them(case: Callable[[str], dict[str, Any]]) -> None:
    groups = case("G08")["input"]["groups"]
    for name, rewards in groups.items():
        share = make_share(made.rewarded([float(np.float32(r)) for r in rewards]), "m", [Unshaped()])
        assert share.stats is not None
        equal = name in "abcd"
        assert share.stats.all_equal == equal
        assert (share.stats.std == 0.0) == equal
        assert math.isfinite(share.stats.mean)
        assert FilterZeroAdvantage().reject("m", share.stats) == ("zero_variance" if equal else "")
        assert KeepAll().reject("m", share.stats) == ""
        largest = max(abs(r - share.stats.mean) for r in share.stats.values.values()) / (share.stats.std + 1e-4)
        assert largest < (1e-3 if equal else 2.65)


def test_two_data_sets_with_the_same_row_number_stay_two_groups(case: Callable[[str], dict[str, Any]]) -> None:
    rows = case("G10")["input"]["rollouts"]
    shares = []
    for dataset in ("A", "B"):
        rewards = [row["reward"] for row in rows if row["dataset"] == dataset]
        shares.append(make_share(made.rewarded(rewards, task_id=f"{dataset}:0"), "m", []))
    expected = case("G10")["expected"]["values"]
    assert len({share.stats.task_id for share in shares if share.stats}) == expected["num_groups"]
    assert sum(share.stats.all_equal for share in shares if share.stats) == expected["zero_variance_groups"]
    assert [share.stats.mean for share in shares if share.stats] == [1.0, 0.0]


def test_unscored_and_failed_members_are_outside_statistics_and_counted() -> None:
    members = [
        made.trajectory(0, 1.0),
        made.trajectory(1, None),
        made.trajectory(2, None, error="timeout"),
        made.trajectory(3, 0.0),
        Trajectory(index=4, finish="rejected"),
        Trajectory(index=5, reward=1.0),
    ]
    share = make_share(made.group(members), "m", [])
    assert share.lost == {1: "unscored", 2: "error:reward.timeout", 4: "rejected", 5: "no_tokens"}
    assert share.stats is not None
    assert share.stats.values == {0: 1.0, 3: 0.0}
    assert share.stats.std == pytest.approx(np.std([1.0, 0.0], ddof=1))


def test_a_group_without_a_scored_member_has_no_statistics() -> None:
    share = make_share(made.rewarded([None, None]), "m", [])
    assert share.stats is None
    assert set(share.lost.values()) == {"unscored"}


def test_a_trajectorys_value_is_the_mean_of_its_segments_credits_per_policy() -> None:
    parts = [
        made.segment([0], credit={"m": 1.0}),
        made.segment([1], credit={"m": 0.0}),
        made.segment([2], credit={"m": None}),
        made.segment([3], policy="other"),
    ]
    two = made.group([Trajectory(index=0, segments=parts, reward=0.25), made.trajectory(1, 0.25, [5])])
    share = make_share(two, "m", [])
    assert share.stats is not None
    assert share.stats.values == {0: 0.5, 1: 0.25}
    assert (share.stats.min_version, share.stats.max_version) == (0, 5), "versions of scored segments only"
    other = make_share(two, "other", [])
    assert other.stats is not None
    assert other.stats.values == {0: 0.25}
    assert other.lost == {1: "no_tokens"}


def test_a_shared_sequence_counts_each_policys_own_tokens() -> None:
    shared = Segment(
        policies=["m", "other"],
        policy_of_token=codec.column([0, 0, 1, 1], "uint8"),
        input_ids=codec.column([1, 2, 3, 4], "int32"),
        loss_mask=codec.column([0, 1, 0, 1], "uint8"),
        logprobs=codec.column(np.zeros(4, dtype=np.float32), "float32"),
        versions=codec.column([-1, 7, -1, 2], "int32"),
    )
    group = made.group([Trajectory(index=0, segments=[shared], reward=1.0)])
    mine, theirs = make_share(group, "m", []).stats, make_share(group, "other", []).stats
    assert mine is not None
    assert theirs is not None
    assert (mine.min_version, theirs.min_version) == (7, 2)
    assert (mine.loss_tokens, theirs.loss_tokens) == (1, 1)


def test_the_overlong_penalty_falls_on_every_trajectory_by_its_length() -> None:
    penalty = Overlong(max_len=10, tail=4, factor=2.0)
    assert [penalty.bonus(n, "stop") for n in (5, 6, 8, 10, 20)] == [0.0, 0.0, -1.0, -2.0, -2.0]
    share = make_share(made.group([made.trajectory(0, 1.0, [0] * 8), made.trajectory(1, 1.0, [0] * 2)]), "m", [penalty])
    assert share.stats is not None
    assert share.stats.values == {0: 1.0, 1: 1.0}
    assert share.stats.shaped == {0: 0.0, 1: 1.0}
    assert not share.stats.all_equal, "statistics run over shaped values"


def test_the_reward_band_keeps_means_inside() -> None:
    band = RewardBand(0.2, 0.8)
    for rewards, reason in (([0.0, 0.0], "reward_band"), ([0.0, 1.0], ""), ([1.0, 1.0], "reward_band")):
        stats = make_share(made.rewarded(rewards), "m", []).stats
        assert stats is not None
        assert band.reject("m", stats) == reason


@given(st.lists(st.integers(-1000, 1000).map(lambda n: n / 10), min_size=2, max_size=12))
def test_advantages_of_scored_members_sum_to_zero(rewards: list[float]) -> None:
    mean, std, equal = statistics(rewards)
    assert abs(sum(r - mean for r in rewards)) < 1e-9 * max(1.0, max(map(abs, rewards))) * len(rewards)
    assert equal == (std == 0.0)
    if not equal:
        assert std == pytest.approx(np.std(np.asarray(rewards), ddof=1))
    assert statistics(list(reversed(rewards)))[2] == equal


def _broken(change: Callable[[Group], None]) -> bytes:
    group = made.rewarded([1.0, 0.0])
    change(group)
    return codec.encode(group)


def _set(path: str, value: Any) -> Callable[[Group], None]:
    def change(group: Group) -> None:
        target: Any = group
        *parents, last = path.split(".")
        for name in parents:
            target = target[int(name)] if name.isdigit() else target[name] if isinstance(target, dict) else getattr(target, name)
        setattr(target, last, value)

    return change


@pytest.mark.parametrize(
    ("path", "value", "names"),
    [
        ("lease_id", "other", "lease 'other'"),
        ("attempt", 2, "attempt 2"),
        ("trajectories.1.index", 5, "trajectory indices"),
        ("trajectories.0.reward", float("nan"), r"trajectories\[0\].reward"),
        ("trajectories.0.segments.0.logprobs", codec.column([0.0] * 3, "float32"), r"segments\[0\].logprobs"),
        ("trajectories.0.segments.0.logprobs", codec.column([float("inf")] * 4, "float32"), "not finite"),
        ("trajectories.0.segments.0.loss_mask", codec.column([1] * 4, "int32"), "expected uint8"),
        ("trajectories.0.segments.0.loss_mask", codec.column([0, 0, 1, 2], "uint8"), "2, expected 0 or 1"),
        ("trajectories.0.segments.0.policy_of_token", codec.column([0, 0, 0, 1], "uint8"), "1 on a sampled token"),
        ("trajectories.0.segments.0.versions", codec.column([-1, -1, -1, 0], "int32"), "on a sampled token"),
        ("trajectories.0.segments.0.parent", 0, "earlier segment"),
        ("trajectories.0.segments.0.policies", ["m", "n"], "without policy_of_token"),
        ("trajectories.0.segments.0.credit", {"m": float("nan")}, "credit.m"),
        ("versions.m.min", 3, "but the tokens say"),
    ],
)
def test_a_malformed_group_dies_at_the_door_with_the_fields_path(path: str, value: Any, names: str) -> None:
    with pytest.raises(BadMessage, match=names):
        check_group(_broken(_set(path, value)), "g", 1, 2)


def test_a_policy_outside_the_workflow_is_refused() -> None:
    data = codec.encode(made.rewarded([1.0, 0.0]))
    assert examine(data, "g", 1, 2, ["m"], []).tokens == 4
    with pytest.raises(BadMessage, match="not in this workflow"):
        examine(data, "g", 1, 2, ["x"], [])
    with pytest.raises(BadMessage):
        examine(b"\x81garbage", "g", 1, 2, ["m"], [])
