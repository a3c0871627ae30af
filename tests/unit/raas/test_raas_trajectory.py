"""The workflow boundary: every promise of the protocol is checked, and a broken one is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.protocol.codec import array, column
from astraflow.protocol.rollout import RolloutError, Segment, Trajectory
from astraflow.raas.trajectory import to_episode, version_spans
from astraflow.workflows.api import EpisodeError

GOOD: dict[str, Any] = {
    "input_ids": [5, 6, 7, 2],
    "loss_mask": [0, 0, 1, 1],
    "logprobs": [0.0, 0.0, -0.5, -0.25],
    "versions": [-1, -1, 0, 3],
    "reward": 1.0,
}


def segment(**changes: Any) -> Segment:
    fields: dict[str, Any] = {
        "policies": ["p"],
        "input_ids": column([5, 7], "int32"),
        "loss_mask": column([0, 1], "uint8"),
        "logprobs": column([0.0, -0.5], "float32"),
        "versions": column([-1, 4], "int32"),
    }
    return Segment(**{**fields, **changes})


def test_a_flat_dict_is_one_segment() -> None:
    trajectory = to_episode(dict(GOOD), ["p"], temperature=0.7).trajectory
    assert trajectory.reward == 1.0
    assert trajectory.segments[0].policies == ["p"]
    assert trajectory.segments[0].temperature == 0.7
    assert array(trajectory.segments[0].versions).tolist() == [-1, -1, 0, 3]


def test_the_seeds_name_for_the_reward_is_understood() -> None:
    flat = {key: value for key, value in GOOD.items() if key != "reward"}
    assert to_episode({**flat, "rewards": 0.5}, ["p"]).trajectory.reward == 0.5


def test_a_dict_of_segments_keeps_their_policies() -> None:
    flat = {key: value for key, value in GOOD.items() if key != "reward"}
    trajectory = to_episode({"segments": [flat, {**flat, "policy": "q"}], "reward": None}, ["p", "q"]).trajectory
    assert [s.policies for s in trajectory.segments] == [["p"], ["q"]]
    assert trajectory.reward is None


def test_none_is_a_rejected_trajectory_and_an_error_needs_no_segments() -> None:
    assert to_episode(None, ["p"]).trajectory.finish == "rejected"
    error = RolloutError(boundary="tool", kind="timeout")
    assert to_episode(Trajectory(index=0, error=error), ["p"]).trajectory.error == error


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"loss_mask": [0, 0, 1]}, "loss_mask"),
        ({"loss_mask": [0, 0, 2, 1]}, "loss_mask"),
        ({"logprobs": [0.0, 0.0, float("nan"), -1.0]}, "logprobs"),
        ({"logprobs": [0.0, 0.0, float("-inf"), -1.0]}, "logprobs"),
        ({"logprobs": [-3.0, 0.0, -0.5, -1.0]}, "logprobs"),
        ({"versions": [-1, -1, -1, 3]}, "versions"),
        ({"versions": [-1, 0, 0, 3]}, "versions"),
        ({"reward": float("inf")}, "reward"),
        ({"reward": "high"}, "high"),
        ({"policy": "z"}, "policies"),
        ({"finish": "eos"}, "finish"),
        ({"input_ids": [5, -6, 7, 2]}, "input_ids"),
        ({"input_ids": [1.5, 6, 7, 2]}, "int32"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_a_bad_dict_is_an_error_of_the_workflow_that_names_the_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(EpisodeError, match=field) as caught:
        to_episode({**GOOD, **change}, ["p"])
    assert (caught.value.boundary, caught.value.kind) == ("workflow", "bad_result")


@pytest.mark.parametrize("name", ["input_ids", "loss_mask", "logprobs", "versions"])
def test_a_missing_column_is_named(name: str) -> None:
    with pytest.raises(EpisodeError, match=name):
        to_episode({key: value for key, value in GOOD.items() if key != name}, ["p"])


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"input_ids": column([5, 7], "int64")}, r"segments\[0\].input_ids"),
        ({"loss_mask": column([0], "uint8")}, r"segments\[0\].loss_mask"),
        ({"policies": []}, r"segments\[0\].policies"),
        ({"parent": 0}, r"segments\[0\].parent"),
        ({"policy_of_token": column([0, 1], "uint8")}, r"policy_of_token"),
        ({"credit": {"q": 1.0}}, r"credit"),
        ({"credit": {"p": float("nan")}}, r"credit.p"),
        ({"extra": {"teacher": column([0.0], "float32")}}, r"extra.teacher"),
        (
            {
                "input_ids": column([], "int32"),
                "loss_mask": column([], "uint8"),
                "logprobs": column([], "float32"),
                "versions": column([], "int32"),
            },
            "no tokens",
        ),
    ],
)
def test_a_bad_trajectory_names_the_segments_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(EpisodeError, match=field):
        to_episode(Trajectory(index=0, segments=[segment(**changes)], reward=0.0), ["p", "q"])


def test_a_trajectory_without_segments_must_say_why() -> None:
    with pytest.raises(EpisodeError, match="segments"):
        to_episode(Trajectory(index=0, reward=1.0), ["p"])
    with pytest.raises(EpisodeError, match="returned int"):
        to_episode(7, ["p"])


def test_version_spans_look_at_each_policys_own_tokens_and_count_version_zero() -> None:
    shared = segment(
        policies=["p", "q"],
        input_ids=column([1, 2, 3, 4], "int32"),
        loss_mask=column([0, 1, 1, 1], "uint8"),
        logprobs=column([0, -1, -1, -1], "float32"),
        versions=column([-1, 0, 7, 5], "int32"),
        policy_of_token=column([0, 0, 1, 1], "uint8"),
    )
    spans = version_spans([Trajectory(index=0, segments=[shared]), Trajectory(index=1, segments=[segment()])], {"p": 2, "q": 1})
    assert (spans["p"].min, spans["p"].max, spans["p"].timeline) == (0, 4, 2)
    assert (spans["q"].min, spans["q"].max, spans["q"].timeline) == (5, 7, 1)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 50)), min_size=1, max_size=30))
def test_version_spans_agree_with_a_loop_over_tokens(tokens: list[tuple[int, int, int]]) -> None:
    mask, owner, version = (np.array(values) for values in zip(*tokens, strict=True))
    row = segment(
        policies=["p", "q"],
        input_ids=column(np.zeros(len(tokens)), "int32"),
        loss_mask=column(mask, "uint8"),
        logprobs=column(np.zeros(len(tokens)), "float32"),
        versions=column(np.where(mask == 1, version, -1), "int32"),
        policy_of_token=column(owner, "uint8"),
    )
    spans = version_spans([Trajectory(index=0, segments=[row])], {})
    for index, policy in enumerate(["p", "q"]):
        mine = [v for m, o, v in tokens if m and o == index]
        assert (policy in spans) == bool(mine)
        if mine:
            assert (spans[policy].min, spans[policy].max) == (min(mine), max(mine))
