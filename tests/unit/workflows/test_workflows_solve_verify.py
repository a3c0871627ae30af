from __future__ import annotations

import asyncio

import pytest

from astraflow.protocol.codec import array
from astraflow.protocol.errors import UserError
from astraflow.rewards.api import RewardError
from astraflow.rewards.text import exact_match
from astraflow.workflows.api import EngineGroup, EpisodeError
from astraflow.workflows.solve_verify import SolveAndVerify

TASK = {"prompt": "s21", "answer": "12"}
OPTIONS = {"yes": "y$", "no": "n$", "verifier_template": "{problem}={answer}", "feedback_template": "?{verdict}"}


async def reward(*args, **data):
    return exact_match(*args, **data)


def play(context, script, solver, verifier, given=reward, **options):
    engines = {"solver": script(*solver), "verifier": script(*verifier)}
    workflow = SolveAndVerify(context(given, ("solver", "verifier"), **OPTIONS, **options))
    return asyncio.run(workflow.arun_episode(EngineGroup(engines), TASK)), engines


def credits(episode, policy):
    return [s.credit[policy] for s in episode.trajectory.segments if s.policies == [policy]]


@pytest.mark.parametrize(
    ("solver", "verifier", "solved", "verdicts"),
    [
        (["12"], ["y"], 1.0, [1.0]),
        (["21"], ["y"], 0.0, [0.0]),
        (["21", "12"], ["n", "y"], 1.0, [1.0, 1.0]),
        (["12", "21", "21"], ["n", "n", "n"], 0.0, [0.0, 1.0, 1.0]),
        (["21", "21", "12"], ["n", "n", "n"], 1.0, [1.0, 1.0, 0.0]),
        (["21", "12"], ["yn", "y"], 1.0, [0.0, 1.0]),
    ],
)
def test_the_solver_is_credited_for_being_right_and_the_verifier_for_knowing(context, script, solver, verifier, solved, verdicts):
    episode, engines = play(context, script, solver, verifier, max_rounds=3)
    assert episode.trajectory.reward == solved
    assert credits(episode, "solver") == [solved]
    assert credits(episode, "verifier") == verdicts
    assert [len(engines[name].requests) for name in engines] == [len(solver), len(verifier)]
    assert episode.metrics["rollout/rounds"] == len(verdicts)


def test_attempts_share_a_segment_and_each_verdict_has_its_own_context(context, script):
    episode, engines = play(context, script, ["21", "12"], ["n", "y"])
    decode = engines["solver"].tokenizer.decode
    texts = [(s.policies[0], decode(array(s.input_ids).tolist(), skip_special=False)) for s in episode.trajectory.segments]
    assert texts == [("solver", "s21>21<eos>?n>12<eos>"), ("verifier", "s21=21>n<eos>"), ("verifier", "s21=12>y<eos>")]
    for segment in episode.trajectory.segments:
        sampled = array(segment.versions)[array(segment.loss_mask) == 1]
        assert (sampled >= 1).all()
    assert {turn["policy"] for turn in episode.record} == {"solver", "verifier"}


def test_a_solver_without_a_score_credits_nobody_and_asks_no_verifier(context, script):
    async def broken(*args, **data):
        raise RewardError("timeout")

    episode, engines = play(context, script, ["12"], ["y"], given=broken)
    assert episode.trajectory.reward is None
    assert episode.trajectory.error.kind == "timeout"
    assert credits(episode, "solver") == [None]
    assert engines["verifier"].requests == []


def test_roles_have_their_own_generation_settings(context, script):
    _, engines = play(context, script, ["12"], ["y"], verifier_generation={"max_new_tokens": 2})
    assert engines["solver"].requests[0].max_new_tokens == 8
    assert engines["verifier"].requests[0].max_new_tokens == 2


def test_no_room_for_another_attempt_keeps_the_last_one(context, script):
    episode, _ = play(context, script, ["21", EpisodeError("prompt", "overlong")], ["n"])
    assert episode.trajectory.reward == 0.0
    assert credits(episode, "verifier") == [1.0]


def test_words_are_verdicts_by_default(context, script):
    workflow = SolveAndVerify(context(reward, ("solver", "verifier"), max_rounds=1))
    for text, credit in (("Yes, it is.", 1.0), ("**no**", 0.0), ("Incorrect", 0.0), ("Noted", 0.0)):
        engines = EngineGroup({"solver": script("12"), "verifier": script(text)})
        assert credits(asyncio.run(workflow.arun_episode(engines, TASK)), "verifier") == [credit]


def test_two_policies_are_needed(context):
    with pytest.raises(UserError, match="policies"):
        SolveAndVerify(context(reward, ("solver",)))
    with pytest.raises(UserError, match="max_rounds"):
        SolveAndVerify(context(reward, ("solver", "verifier"), max_rounds=0))
