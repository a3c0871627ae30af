from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from astraflow.lib.jsonl import read_jsonl
from astraflow.protocol.errors import UserError
from astraflow.rewards.api import RewardError
from astraflow.workflows.api import EngineGroup, Episode, EpisodeError
from astraflow.workflows.code_select import CodeSolveAndSelect
from astraflow.workflows.code_tests import RewardTests, read_tests, told
from astraflow.workflows.code_verify import CodeActorAndVerify

OWN = Path(__file__).parents[3] / "assets" / "code" / "own.jsonl"
TASK = {
    "prompt": "print twice the number",
    "tests": [{"input": "2", "output": "4"}, {"input": "5", "output": "10"}],
    "solution": "print(2 * int(input()))",
}
RIGHT, SQUARE = "```python\nprint(2 * int(input()))\n```", "```python\nprint(int(input()) ** 2)\n```"
THREE, TWO, WRONG = ('[{"input": "3", "output": "6"}]', '[{"input": "2", "output": "4"}]', '[{"input": "3", "output": "7"}]')
SHORT = {"cases": 1, "tester_template": "?", "repair_template": "{feedback}"}


async def run_code(prompt: str, completions: str, *ids: Any, tests: list[dict[str, str]], **data: Any) -> float:
    """All tests passed by a program of this file: the code is known, so a plain process will do."""
    for test in tests:
        argv = [sys.executable, "-S", "-c", completions.strip("`").removeprefix("python")]
        done = await asyncio.to_thread(subprocess.run, argv, input=test["input"], capture_output=True, text=True, check=False)
        if done.stdout.strip() != test["output"]:
            return 0.0
    return 1.0


def play(context: Any, script: Any, kind: type, answers: dict[str, list[str]], given: Any = run_code, **options: Any) -> Episode:
    made = context(given, tuple(answers), **options)
    made.context_length = 0
    engines = EngineGroup({policy: script(*texts) for policy, texts in answers.items()})
    episode: Episode = asyncio.run(kind(made).arun_episode(engines, dict(TASK)))
    assert [len(engines[p].requests) for p in answers] == [len(texts) for texts in answers.values()]
    return episode


def credits(episode: Episode, policy: str) -> list[float | None]:
    return [s.credit[policy] for s in episode.trajectory.segments if policy in s.credit]


@pytest.mark.parametrize(
    ("coder", "tester", "options", "programs", "verdicts"),
    [
        ([SQUARE, RIGHT], [THREE], {}, [0.0, 1.0], [1.0]),
        ([SQUARE], [TWO], {}, [0.0], [0.5]),
        ([SQUARE, RIGHT], [WRONG], {}, [0.0, 1.0], [0.0]),
        ([RIGHT], [THREE], {}, [1.0], [1.0]),
        ([RIGHT], [WRONG], {}, [1.0], [0.0]),
        ([RIGHT, RIGHT], [WRONG], {"retry": "rejected"}, [1.0, 1.0], [0.0]),
        ([SQUARE], ["none"], {}, [0.0], [0.0]),
        ([SQUARE, RIGHT], ["none"], {"retry": "rejected"}, [0.0, 1.0], [0.0]),
        ([SQUARE, RIGHT], [THREE], {"tester_credit": "outcome"}, [0.0, 1.0], [1.0]),
        ([SQUARE], [TWO], {"tester_credit": "outcome"}, [0.0], [0.5]),
        ([SQUARE, SQUARE, RIGHT], [THREE, THREE], {"attempts": 3}, [0.0, 0.0, 1.0], [1.0, 1.0]),
        ([SQUARE], [], {"attempts": 1}, [0.0], []),
    ],
)
def test_programs_are_credited_by_the_hidden_tests_and_testers_for_tests_that_tell(
    context, script, coder, tester, options, programs, verdicts
):
    episode = play(context, script, CodeActorAndVerify, {"coder": coder, "tester": tester}, **SHORT, **options)
    assert (credits(episode, "coder"), credits(episode, "tester")) == (programs, verdicts)
    assert episode.trajectory.reward == programs[-1]


def test_the_next_attempt_is_told_what_each_test_said(context, script):
    cases = '[{"input": "2", "output": "4"}, {"input": "3", "output": "6"}]'
    episode = play(context, script, CodeActorAndVerify, {"coder": [SQUARE, RIGHT], "tester": [cases]}, **{**SHORT, "cases": 2})
    asked = [turn["content"] for turn in episode.record if turn["policy"] == "coder" and turn["role"] == "user"]
    assert asked[1] == "passed: input '2', expected '4'\nFAILED: input '3', expected '6'"


def test_a_program_that_cannot_be_scored_ends_the_episode_unscored(context, script):
    async def broken(*args: Any, **data: Any) -> float:
        raise RewardError("timeout")

    episode = play(context, script, CodeActorAndVerify, {"coder": [RIGHT], "tester": []}, broken, **SHORT)
    assert (credits(episode, "coder"), episode.trajectory.reward) == ([None], None)
    assert episode.trajectory.error.kind == "timeout"


@pytest.mark.parametrize(
    ("a", "b", "choice", "credit", "reward"),
    [
        (RIGHT, SQUARE, "A", 1.0, 1.0),
        (RIGHT, SQUARE, "B", 0.0, 0.0),
        (SQUARE, RIGHT, "B", 1.0, 1.0),
        (RIGHT, RIGHT, "B", 0.5, 1.0),
        (SQUARE, SQUARE, "A", 0.5, 0.0),
        (RIGHT, SQUARE, "C", 0.0, 1.0),
    ],
)
def test_a_selector_is_credited_where_its_choice_matters(context, script, a, b, choice, credit, reward):
    answers = {"coder": [a, b], "selector": [f"<final>B</final>, no: <final>{choice}</final>" if choice != "C" else "C"]}
    episode = play(context, script, CodeSolveAndSelect, answers, selector_template="{code_a}{code_b}")
    assert credits(episode, "coder") == [float(a == RIGHT), float(b == RIGHT)]
    assert (credits(episode, "selector"), episode.trajectory.reward) == ([credit], reward)


def test_the_problem_s_own_examples_are_hidden_from_the_tester(context, script):
    problem = "Double it.\n\nExample 1:\nInput: 2\nOutput: 4\n\nConstraints:\nsmall"
    made = context(run_code, ("coder", "tester"), **{**SHORT, "tester_template": "{problem}"})
    made.context_length = 0
    coder, tester = script(RIGHT), script(THREE)
    asyncio.run(CodeActorAndVerify(made).arun_episode(EngineGroup({"coder": coder, "tester": tester}), {**TASK, "prompt": problem}))
    told = tester.tokenizer.decode(tester.requests[0].input_ids)
    assert "Example" not in told
    assert "Output" not in told
    assert ("Double it." in told, "Constraints:" in told) == (True, True)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('think\n```json\n[{"input": "1", "output": "2", "why": "x"}]\n```', [{"input": "1", "output": "2"}]),
        ('{"tests": [{"input": "1", "output": "2"}, {"input": "3", "output": "4"}]}', [{"input": "1", "output": "2"}]),
        ('[{"input": [1], "output": 2}]', None),
        ('[{"input": "1", "output": 2}]', None),
        ('[{"input": "1"}]', None),
        ("[]", None),
        ("3", None),
        ("[", None),
        ("[3]", None),
    ],
)
def test_tests_are_read_from_an_answer_or_there_are_none(text, found):
    assert read_tests(text, 1) == found


def test_functions_are_called_with_a_list_of_arguments():
    tests = read_tests(json.dumps([{"input": [1, 2], "output": 3}]), 1, "add")
    assert tests == [{"args": [1, 2], "accepted": [3]}]
    assert told(tests, [False]) == "FAILED: input [1, 2], expected 3"
    assert read_tests('[{"input": "1", "output": "3"}]', 1, "add") is None


def test_a_task_without_tests_is_refused_and_nothing_is_asked(context, script):
    made = context(run_code, ("coder", "tester"))
    with pytest.raises(EpisodeError, match="needs `tests`") as caught:
        asyncio.run(CodeActorAndVerify(made).arun_episode(EngineGroup({"coder": script(), "tester": script()}), {"prompt": "x"}))
    assert (caught.value.boundary, caught.value.kind) == ("prompt", "no_tests")


def test_a_test_that_could_not_be_run_has_no_verdict(context):
    async def sometimes(prompt: str, completions: str, *ids: Any, tests: list[Any], **data: Any) -> float | None:
        if tests[0]["input"] == "1":
            raise RewardError("crash")
        return float(tests[0]["input"] == "2")

    run = RewardTests(context(sometimes))
    assert asyncio.run(run("x", [{"input": str(i), "output": ""} for i in (1, 2, 3)], {})) == [None, True, False]


def test_the_reference_programs_of_the_checkout_pass_their_own_tests():
    rows = read_jsonl(OWN)
    for row in rows:
        assert asyncio.run(run_code("", row["solution"], tests=row["tests"])) == 1.0, row["prompt"]
        assert asyncio.run(run_code("", "print(input())", tests=row["tests"])) == 0.0, row["prompt"]


@pytest.mark.parametrize(("choice", "picked"), [("(A)(B)?", "A"), ("(B)|(A)", "B"), ("pick (.)", None), ("final(A)?", None)])
def test_the_first_group_of_the_last_match_is_the_choice(context, choice, picked):
    flow = CodeSolveAndSelect(context(run_code, ("coder", "selector"), choice=choice))
    assert flow._picked({"(A)(B)?": "A AB", "(B)|(A)": "A B"}.get(choice, "pick C final")) == picked


@pytest.mark.parametrize(
    ("kind", "option", "says"),
    [
        (CodeSolveAndSelect, {"choice": "A"}, r"options\.choice: 'A' has no group"),
        (CodeActorAndVerify, {"attempts": 0}, r"options\.attempts: 0, expected at least 1"),
        (CodeActorAndVerify, {"attempts": -1}, r"options\.attempts: -1, expected at least 1"),
        (CodeActorAndVerify, {"cases": 0}, r"options\.cases: 0, expected at least 1"),
    ],
)
def test_options_that_cannot_be_used_are_refused_by_name(context, kind, option, says):
    with pytest.raises(UserError, match=says):
        kind(context(run_code, ("a", "b"), **option))
