"""Credit and control flow of the workflows of two and three policies, beyond the golden episodes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from astraflow.protocol.errors import UserError
from astraflow.rewards.api import RewardError
from astraflow.rewards.text import exact_match
from astraflow.workflows.api import EngineGroup, Episode
from astraflow.workflows.plan_solve import PlanAndSolve, SepSolveAndCheck, SolveAndCheck
from astraflow.workflows.propose_solve import ProposeAndSolve
from astraflow.workflows.router import SmLgRouter
from astraflow.workflows.solve_verify import ActorAndVerify, SolveAndVerify

TASK = {"prompt": "s21", "answer": "12"}
VERDICT = {"yes": "y$", "no": "n$", "verifier_template": "{problem}={answer}", "feedback_template": "?"}


async def reward(*args, **data):
    return exact_match(*args, **data)


def play(kind: type, context: Any, script: Any, answers: dict[str, list[Any]], given: Any = reward, **options: Any) -> Episode:
    engines = EngineGroup({policy: script(*texts) for policy, texts in answers.items()})
    made = context(given, tuple(answers), **options)
    made.context_length = 0
    return asyncio.run(kind(made).arun_episode(engines, dict(TASK)))


def credits(episode: Episode, policy: str) -> list[float | None]:
    return [s.credit[policy] for s in episode.trajectory.segments if policy in s.credit]


@pytest.mark.parametrize(
    ("route", "small", "large", "credit", "reward_of"),
    [
        ("small", "12", "12", 1.0, 1.0),
        ("large", "12", "12", 0.0, 1.0),
        ("large", "9", "12", 1.0, 1.0),
        ("small", "9", "12", 0.0, 0.0),
        ("small", "12", "9", 1.0, 1.0),
        ("large", "9", "9", 0.5, 0.0),
        ("either", "12", "9", 0.0, 0.0),
        ("SMALL? No: LARGE.", "9", "12", 1.0, 1.0),
    ],
)
def test_the_router_is_credited_for_the_cheapest_model_that_is_right(context, script, route, small, large, credit, reward_of):
    episode = play(SmLgRouter, context, script, {"router": [route], "small": [small], "large": [large]})
    assert credits(episode, "router") == [credit]
    assert credits(episode, "small") == [float(small == "12")]
    assert episode.trajectory.reward == reward_of


@pytest.mark.parametrize(("right", "credit"), [(0, 0.0), (1, 1.0), (2, 1.0), (3, 1.0), (4, 0.0)])
def test_the_proposer_is_credited_for_problems_inside_the_band(context, script, right, credit):
    proposal = "<problem>s31</problem> <answer>13</answer>"
    answers = ["13"] * right + ["31"] * (4 - right)
    episode = play(ProposeAndSolve, context, script, {"proposer": [proposal], "solver": answers})
    assert credits(episode, "proposer") == [credit]
    assert sorted(credits(episode, "solver")) == sorted([1.0] * right + [0.0] * (4 - right))
    assert episode.trajectory.reward == right / 4


def test_a_proposal_that_cannot_be_read_is_not_solved(context, script):
    episode = play(ProposeAndSolve, context, script, {"proposer": ["hm"], "solver": []})
    assert (credits(episode, "proposer"), episode.trajectory.reward) == ([0.0], 0.0)


def test_a_proposal_whose_attempts_cannot_be_scored_is_unscored(context, script):
    async def broken(*args: Any, **data: Any) -> float:
        raise RewardError("timeout")

    proposal = "<problem>s31</problem><answer>13</answer>"
    episode = play(ProposeAndSolve, context, script, {"proposer": [proposal], "solver": ["13"]}, broken, attempts=1)
    assert (credits(episode, "proposer"), episode.trajectory.reward) == ([None], None)
    assert episode.trajectory.error is not None


@pytest.mark.parametrize(
    ("draft", "final", "rule", "solver", "checker"),
    [
        ("21", "12", "own", 0.0, 1.0),
        ("12", "21", "own", 1.0, 0.0),
        ("12", "12", "difference", 1.0, 0.0),
        ("21", "12", "difference", 1.0, 1.0),
        ("12", "21", "difference", 0.0, -1.0),
        ("21", "12", "team", 0.5, 0.5),
    ],
)
@pytest.mark.parametrize("kind", [SolveAndCheck, SepSolveAndCheck])
def test_a_checker_is_credited_for_what_it_changes(context, script, kind, draft, final, rule, solver, checker):
    episode = play(kind, context, script, {"solver": [draft], "checker": [final]}, credit=rule)
    assert (credits(episode, "solver"), credits(episode, "checker")) == ([solver], [checker])
    assert episode.trajectory.reward == float(final == "12")


@pytest.mark.parametrize(
    ("alone", "planned", "planner", "solver"),
    [("21", "12", 1.0, 1.0), ("12", "12", 0.0, 1.0), ("12", "21", -1.0, 0.0), ("21", "21", 0.0, 0.0)],
)
@pytest.mark.parametrize("separate", [False, True])
def test_a_plan_is_worth_what_the_solver_gains_by_it(context, script, separate, alone, planned, planner, solver):
    answers = {"planner": ["up"], "solver": [alone, planned]}
    episode = play(PlanAndSolve, context, script, answers, credit="difference", separate=separate)
    assert (credits(episode, "planner"), credits(episode, "solver")) == ([planner], [solver])
    assert len(episode.trajectory.segments) == 1 + separate, "the solver's answer without a plan is not trained on"


def test_a_plan_knows_two_rules_and_says_so(context):
    with pytest.raises(UserError, match=r"options\.credit: 'own'.*shared, difference"):
        PlanAndSolve(context(reward, ("planner", "solver"), credit="own"))


@pytest.mark.parametrize(
    ("kind", "answers", "solver", "verifier"),
    [
        (SolveAndVerify, {"solver": ["21", "12"], "verifier": ["n", "y"]}, [1.0], [1.0, 0.0]),
        (SolveAndVerify, {"solver": ["12", "21"], "verifier": ["n", "y"]}, [0.0], [-1.0, 0.0]),
        (ActorAndVerify, {"solver": ["21", "12"], "verifier": ["n"]}, [1.0, 1.0], [1.0]),
        (ActorAndVerify, {"solver": ["12"], "verifier": ["y"]}, [1.0], [0.0]),
    ],
)
def test_by_difference_a_verdict_is_worth_what_became_better_by_it(context, script, kind, answers, solver, verifier):
    episode = play(kind, context, script, answers, credit="difference", **VERDICT)
    assert (credits(episode, "solver"), credits(episode, "verifier")) == (solver, verifier)


def test_an_actor_tries_once_more_in_a_context_of_its_own_and_nobody_judges_that(context, script):
    episode = play(ActorAndVerify, context, script, {"solver": ["21", "12"], "verifier": ["n"]}, **VERDICT)
    assert credits(episode, "solver") == [0.0, 1.0]
    assert episode.metrics["rollout/rounds"] == 1
    episode = play(ActorAndVerify, context, script, {"solver": ["12"], "verifier": ["y"]}, **VERDICT)
    assert (credits(episode, "solver"), credits(episode, "verifier")) == ([1.0], [1.0])
