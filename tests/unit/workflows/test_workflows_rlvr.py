from __future__ import annotations

import asyncio

import pytest

from astraflow.protocol.errors import UserError
from astraflow.rewards.api import RewardError
from astraflow.rewards.text import exact_match
from astraflow.workflows.rlvr import Rlvr

TASK = {"prompt": "s21", "answer": "12"}


async def reward(*args, **data):
    return exact_match(*args, **data)


def test_an_answer_is_scored_and_recorded(context, script):
    episode = asyncio.run(Rlvr(context(reward)).arun_episode(script("12"), TASK))
    assert episode.trajectory.reward == 1.0
    assert episode.trajectory.finish == "stop"
    assert episode.trajectory.segments[0].credit == {}
    assert [(turn["role"], turn["content"]) for turn in episode.record] == [("user", "s21"), ("assistant", "12")]
    assert asyncio.run(Rlvr(context(reward)).arun_episode(script("21"), TASK)).trajectory.reward == 0.0


def test_a_cut_off_answer_keeps_the_engine_s_finish_reason(context, script):
    assert asyncio.run(Rlvr(context(reward)).arun_episode(script("12…"), TASK)).trajectory.finish == "length"


def test_a_failing_reward_leaves_the_sample_unscored_with_its_tokens(context, script):
    async def broken(*args, **data):
        raise RewardError("timeout", "slow")

    trajectory = asyncio.run(Rlvr(context(broken)).arun_episode(script("12"), TASK)).trajectory
    assert trajectory.reward is None
    assert (trajectory.error.boundary, trajectory.error.kind) == ("reward", "timeout")
    assert trajectory.finish == "error"
    assert len(trajectory.segments) == 1


def test_an_unscored_sample_is_no_error(context, script):
    async def unscored(*args, **data):
        return None

    trajectory = asyncio.run(Rlvr(context(unscored)).arun_episode(script("12"), TASK)).trajectory
    assert (trajectory.reward, trajectory.error) == (None, None)


def test_template_and_system_shape_the_prompt_and_typos_are_refused(context, script):
    engine = script("12")
    workflow = Rlvr(context(reward, template="<{prompt}>", system="Sort."))
    asyncio.run(workflow.arun_episode(engine, TASK))
    assert engine.tokenizer.decode(engine.requests[0].input_ids) == "Sort.><s21>>"
    with pytest.raises(UserError, match="templte"):
        Rlvr(context(reward, templte="x"))
