from __future__ import annotations

import asyncio

import pytest

from astraflow.protocol.codec import array
from astraflow.protocol.errors import UserError
from astraflow.rewards.api import RewardError
from astraflow.rewards.text import exact_match
from astraflow.workflows.api import EpisodeError
from astraflow.workflows.multi_turn import MultiTurn

TASK = {"prompt": "s21", "answer": "12"}


async def reward(*args, **data):
    return exact_match(*args, **data)


@pytest.mark.parametrize(
    ("answers", "expected", "turns"),
    [(["12"], 1.0, 1), (["9", "12"], 0.5, 2), (["9", "8", "12"], 0.25, 3), (["9", "8", "7", "12"], 0.0, 3)],
)
def test_every_retry_halves_the_reward_until_the_turns_are_used_up(context, script, answers, expected, turns):
    engine = script(*answers)
    workflow = MultiTurn(context(reward, max_turns=3, discount=0.5, feedback="no"))
    episode = asyncio.run(workflow.arun_episode(engine, TASK))
    assert episode.trajectory.reward == expected
    assert len(engine.requests) == turns
    assert episode.metrics["rollout/turns"] == turns
    (segment,) = episode.trajectory.segments
    assert int(array(segment.loss_mask).sum()) == sum(len(a) + 1 for a in answers[:turns])


def test_the_feedback_is_in_the_context_and_not_trained_on(context, script):
    engine = script("9", "12")
    episode = asyncio.run(MultiTurn(context(reward, feedback="no")).arun_episode(engine, TASK))
    ids = array(episode.trajectory.segments[0].input_ids).tolist()
    assert engine.tokenizer.decode(ids, skip_special=False) == "s21>9<eos>no>12<eos>"
    mask = array(episode.trajectory.segments[0].loss_mask).tolist()
    assert mask == [0] * 4 + [1] * 2 + [0] * 3 + [1] * 3


def test_an_unscored_answer_ends_the_episode_unscored(context, script):
    async def fails_later(prompt, completions, *args, **data):
        if completions == "8":
            raise RewardError("crash")
        return 0.0

    engine = script("9", "8", "7")
    trajectory = asyncio.run(MultiTurn(context(fails_later)).arun_episode(engine, TASK)).trajectory
    assert trajectory.reward is None
    assert trajectory.error.kind == "crash"
    assert len(engine.requests) == 2


def test_no_room_for_a_retry_keeps_the_answer_there_is(context, script):
    engine = script("9", EpisodeError("prompt", "overlong"))
    trajectory = asyncio.run(MultiTurn(context(reward)).arun_episode(engine, TASK)).trajectory
    assert trajectory.reward == 0.0
    assert trajectory.error is None
    with pytest.raises(EpisodeError):
        asyncio.run(MultiTurn(context(reward)).arun_episode(script(EpisodeError("prompt", "overlong")), TASK))
    with pytest.raises(EpisodeError, match="gone"):
        asyncio.run(MultiTurn(context(reward)).arun_episode(script("9", EpisodeError("engine", "crash", "gone")), TASK))


def test_partial_credit_below_the_bar_is_a_wrong_answer(context, script):
    async def partial(prompt, completions, *args, **data):
        return {"9": 0.2, "12": 0.8}[completions]

    workflow = MultiTurn(context(partial, correct=0.8, discount=0.5))
    assert asyncio.run(workflow.arun_episode(script("9", "12"), TASK)).trajectory.reward == 0.4


def test_options_that_make_no_sense_are_refused(context):
    with pytest.raises(UserError, match="max_turns"):
        MultiTurn(context(reward, max_turns=0))
