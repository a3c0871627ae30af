from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from astraflow.protocol.errors import UserError
from astraflow.rewards.text import exact_match
from astraflow.workflows.api import EpisodeError
from astraflow.workflows.spawn import Spawn

TASK = {"prompt": "s21", "answer": "12"}


def spawn(*tasks: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'spawn', 'arguments': {'tasks': list(tasks)}})}</tool_call>"


async def reward(*args, **data):
    return exact_match(*args, **data)


def play(context: Any, script: Any, *answers: Any, **options: Any) -> tuple[Any, Any]:
    engine = script(*answers)
    given = context(reward, **{"system": "", "sub_template": "{task}", **options})
    given.context_length = 0
    return asyncio.run(Spawn(given).arun_episode(engine, TASK)), engine


def prompts(engine: Any) -> list[str]:
    """The last user's turn of every call."""
    texts = [engine.tokenizer.decode(request.input_ids, skip_special=False) for request in engine.requests]
    return [text.removesuffix(">").rpartition(">")[2] for text in texts]


def test_an_answer_without_a_call_is_the_end(context, script):
    episode, engine = play(context, script, "12")
    assert (episode.trajectory.reward, len(engine.requests), episode.metrics["rollout/sub_agents"]) == (1.0, 1, 0)


def test_sub_agents_answer_in_the_order_of_their_tasks_and_carry_their_parent(context, script):
    episode, engine = play(context, script, spawn("left", "right"), "1", "2", "12")
    assert prompts(engine)[1:] == ["left", "right", "Part 1: 1\nPart 2: 2"]
    assert [segment.parent for segment in episode.trajectory.segments] == [None, 0, 0]
    assert episode.trajectory.reward == 1.0


def test_breadth_and_budget_bound_the_tree_before_it_grows(context, script):
    _, engine = play(context, script, spawn("a", "b", "c"), "1", "2", "12", breadth=2)
    assert prompts(engine)[-1] == "Part 1: 1\nPart 2: 2\n(1 more parts were not started: too many)"
    _, engine = play(context, script, spawn("a", "b", "c"), "1", "12", breadth=3, budget=1)
    assert len(engine.requests) == 3


def test_depth_says_who_may_spawn_and_a_share_of_the_budget_goes_down_with_it(context, script):
    answers = [spawn("a", "b"), spawn("c", "d"), spawn("e"), "1", "2", "3", "4", "12"]
    episode, engine = play(context, script, *answers, depth=2, breadth=2, budget=4)
    assert [segment.parent for segment in episode.trajectory.segments] == [None, 0, 0, 1, 2]
    assert episode.metrics["rollout/sub_agents"] == 4, "2 + one of each share: a's second task found the budget used up"
    episode, engine = play(context, script, spawn("a"), spawn("b"), "12", depth=1)
    assert len(engine.requests) == 3, "what a sub-agent writes at the last depth is its answer"
    _, engine = play(context, script, spawn("a"), "1", spawn("b"), "12", rounds=1)
    assert len(engine.requests) == 3
    episode, engine = play(context, script, spawn("a"), "1", spawn("b"), "2", "12", rounds=2, budget=4, breadth=1)
    assert (len(engine.requests), episode.trajectory.reward) == (5, 1.0)


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ("<tool_call>{</tool_call>", "Error: a call is a JSON object"),
        ('<tool_call>{"name": "spwan", "arguments": {"tasks": ["a"]}}</tool_call>', "did you mean 'spawn'?"),
        ('<tool_call>{"name": "spawn", "arguments": {"task": "a"}}</tool_call>', "Error: spawn: "),
        ('<tool_call>{"name": "spawn", "arguments": {"tasks": "a"}}</tool_call>', "Error: spawn: `tasks` must be a list of texts"),
        ('<tool_call>{"name": "spawn", "arguments": {"tasks": ["a"]}}', "not closed"),
    ],
)
def test_a_call_that_cannot_be_run_is_answered_and_the_episode_goes_on(context, script, call, answer):
    episode, engine = play(context, script, call, "12")
    assert answer in engine.tokenizer.decode(engine.requests[1].input_ids)
    assert episode.trajectory.reward == 1.0


def test_a_sub_agent_without_room_is_an_answer_and_an_engine_s_failure_is_not(context, script):
    episode, engine = play(context, script, spawn("a", "b"), EpisodeError("prompt", "overlong"), "2", "12")
    assert prompts(engine)[-1] == "Part 1: Error: this part is too long\nPart 2: 2"
    assert len(episode.trajectory.segments) == 2
    with pytest.raises(EpisodeError, match="gone"):
        play(context, script, spawn("a", "b"), EpisodeError("engine", "crash", "gone"), "2", "12")
    episode, _ = play(context, script, spawn("a"), "1", EpisodeError("prompt", "overlong"))
    assert episode.trajectory.reward == 0.0, "no room to go on: what the main agent said counts"


def test_options_that_make_no_sense_are_refused(context):
    for wrong in ({"depth": -1}, {"breadth": 0}, {"tool_format": "qwen99"}):
        with pytest.raises(UserError):
            Spawn(context(reward, **wrong))
