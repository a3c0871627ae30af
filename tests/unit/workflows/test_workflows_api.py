from __future__ import annotations

import asyncio

import pytest

from astraflow.protocol.codec import array
from astraflow.protocol.errors import AstraFlowError, UserError
from astraflow.protocol.rollout import RolloutError, Trajectory
from astraflow.rewards.api import RewardError
from astraflow.workflows.api import WORKFLOWS, EngineGroup, Episode, EpisodeError, Options, as_episode, engine_of, rollout_error


def test_every_listed_workflow_loads():
    for name in WORKFLOWS.names():
        assert callable(WORKFLOWS.get(name))


def test_an_engine_group_gives_engines_by_name_and_one_engine_stands_for_itself(script):
    one, two = script("1"), script("2")
    pair = EngineGroup({"a": one, "b": two})
    assert pair["b"] is two
    assert list(pair) == ["a", "b"]
    assert engine_of(pair, "a") is one
    assert engine_of(one, "whatever") is one
    with pytest.raises(UserError, match=r"'c'.*a, b"):
        pair["c"]


def test_a_group_of_one_generates_and_a_larger_one_asks_for_the_name(script, context):
    request = context().request([5])
    assert asyncio.run(EngineGroup({"a": script("1")}).agenerate(request)).finish == "stop"
    with pytest.raises(UserError, match="name the policy"):
        asyncio.run(EngineGroup({"a": script("1"), "b": script("1")}).agenerate(request))


def test_a_request_takes_the_generation_settings_and_refuses_unknown_ones(context):
    request = context().request([1, 2], max_new_tokens=3)
    assert (request.input_ids, request.max_new_tokens, request.temperature) == ([1, 2], 3, 0.7)
    with pytest.raises(UserError, match=r"generation\.tempreature"):
        context().request([1], tempreature=1.0)
    with pytest.raises(UserError, match="generation"):
        context().request([1], max_new_tokens="many")


@pytest.mark.parametrize(
    ("error", "boundary", "kind"),
    [
        (EpisodeError("engine", "timeout", "no tokens"), "engine", "timeout"),
        (RewardError("crash"), "reward", "crash"),
        (ValueError("a\nb"), "workflow", "exception"),
        (TimeoutError(), "workflow", "timeout"),
        (asyncio.CancelledError(), "cancelled", "cancelled"),
    ],
)
def test_an_exception_becomes_data_under_the_boundary_it_crossed(error, boundary, kind):
    data = rollout_error(error)
    assert (data.boundary, data.kind) == (boundary, kind)
    assert "\n" not in data.message
    assert len(rollout_error(ValueError("x" * 10_000)).message) == 500


def test_a_reward_s_error_is_part_of_the_verdict_and_any_other_passes_through(context):
    async def broken(*args: object, **data: object) -> float:
        raise RewardError("timeout", "too slow")

    async def ours(*args: object, **data: object) -> float:
        raise AstraFlowError("a bug")

    score = asyncio.run(context(broken).score("p", "c", [1], [2], {}))
    assert score.reward is None
    assert score.error == RolloutError(boundary="reward", kind="timeout", message="too slow")
    with pytest.raises(AstraFlowError, match="a bug"):
        asyncio.run(context(ours).score("p", "c", [1], [2], {}))
    with pytest.raises(UserError, match=r"workflow\.reward"):
        asyncio.run(context().score("p", "c", [1], [2], {}))


def test_a_reward_gets_the_task_s_fields_and_its_own_arguments_win(context):
    seen = {}

    async def spy(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: object) -> float:
        seen.update(data, prompt=prompt)
        return 1

    score = asyncio.run(context(spy).score("rendered", "c", [1], [2], {"prompt": "raw", "answer": "4"}))
    assert score.reward == 1.0
    assert seen == {"prompt": "rendered", "answer": "4"}


def test_results_of_every_shape_become_an_episode():
    columns = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "logprobs": [0.0, -0.5, -1.0], "versions": [-1, 3, 4]}
    from_dict = as_episode({**columns, "reward": 1, "finish": "length"}, ["p"])
    (segment,) = from_dict.trajectory.segments
    assert from_dict.trajectory.reward == 1.0
    assert from_dict.trajectory.finish == "length"
    assert segment.policies == ["p"]
    assert array(segment.versions).tolist() == [-1, 3, 4]
    both = as_episode({"segments": [columns, {**columns, "policy": "q"}], "reward": None}, ["p", "q"])
    assert [s.policies for s in both.trajectory.segments] == [["p"], ["q"]]
    assert as_episode(None, ["p"]).trajectory.finish == "rejected"
    bare = Trajectory(index=0)
    assert as_episode(bare, ["p"]).trajectory is bare
    episode = Episode(bare)
    assert as_episode(episode, ["p"]) is episode


@pytest.mark.parametrize(
    "result",
    [
        {"input_ids": [1, 2], "loss_mask": [1], "logprobs": [0.0, 0.0], "versions": [0, 0], "reward": 1.0},
        {"input_ids": [1, 2], "reward": 1.0},
        {"input_ids": [1], "loss_mask": [1], "logprobs": [0.0], "versions": [0.5], "reward": 1.0},
        {"input_ids": [1], "loss_mask": [1], "logprobs": [0.0], "versions": [0], "reward": "good"},
        {"input_ids": [1], "loss_mask": [1], "logprobs": [0.0], "versions": [0], "reward": 1.0, "finish": "done"},
        17,
    ],
)
def test_a_result_that_does_not_fit_is_the_workflow_s_error(result):
    with pytest.raises(EpisodeError) as caught:
        as_episode(result, ["p"])
    assert (caught.value.boundary, caught.value.kind) == ("workflow", "bad_result")


def test_options_are_read_with_a_type_and_leftovers_refused():
    options = Options("w", {"turns": 3, "typo": 1})
    assert options.take("turns", 1) == 3
    assert options.take("discount", 0.9) == 0.9
    with pytest.raises(UserError, match=r"options\.typo.*turns, discount"):
        options.done()
    with pytest.raises(UserError, match=r"options\.turns"):
        Options("w", {"turns": "three"}).take("turns", 1)
