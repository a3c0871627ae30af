"""Two policies: one writes a program, the other writes tests for it; a program that fails them is written again.

The program is credited for the task's hidden tests. The tester, by `tester_credit`:

    outcome     half for tests that a reference solution passes, half for a final program that is right
    diagnosis   half for such tests, half when, besides, their verdict on the first program agrees with the hidden tests: what the
                tester can bring about itself, whatever the programmer's skill

Without a reference `solution` in the task the first half falls away, and the second one counts whole.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from astraflow.workflows.api import EngineGroup, Episode, EpisodeError, InferenceEngine, Options, RolloutWorkflow, Score, WorkflowContext
from astraflow.workflows.code_tests import RewardTests, RunTests, Test, read_tests, told
from astraflow.workflows.conversation import Conversation
from astraflow.workflows.roles import RULES, Role, Team, check_policies, fields_of

WRITE_TESTS = (
    "Problem:\n{problem}\n\nA program for it:\n{code}\n\nWrite {cases} tests that show whether it is right: valid inputs and the outputs "
    "that the problem demands, hard cases first. Think, then end with a JSON list in a ```json block: "
    '[{{"input": "...", "output": "..."}}]'
)
REPAIR = (
    "{problem}\n\nAn earlier program:\n{code}\n\nIt was run on tests that may themselves be wrong:\n{feedback}\n\n"
    "Find what is wrong and write the whole program again in one ```python block."
)
EXAMPLES = re.compile(
    r"(?ims)^\s*(?:examples?|sample (?:input|output|tests?)|sample)\s*\d*\s*[:.]?\s*$.*?(?=^\s*(?:constraints?|notes?)\s*[:.]?\s*$|\Z)"
)
"""A heading of the problem's own examples and what follows, up to the next heading."""


class CodeActorAndVerify(RolloutWorkflow):
    """`policies: [coder, tester]`.

    Options: `credit`; `attempts` (programs in all); `cases` (tests per verdict); `retry`: `useful` (the program failed readable
    tests and is not known to be right) or `rejected` (anything but a clean pass, unreadable tests too); `tester_credit`;
    `strip_examples` (the tester does not see the problem's own examples); roles `coder` (fields of the task), `tester` (those,
    `problem`, `code`, `cases`); `repair_template` (those, `feedback`): the next attempt, in a context of its own.
    """

    def __init__(self, context: WorkflowContext, run_tests: RunTests | None = None) -> None:
        """`run_tests`: instead of the reward, for tests of generated cases."""
        super().__init__(context)
        check_policies(context, "code_actor_and_verify", "coder", "tester")
        options = Options("code_actor_and_verify", context.options)
        self._credit = options.take("credit", "own", RULES)
        self._attempts, self._cases = options.take("attempts", 2, least=1), options.take("cases", 2, least=1)
        self._retry = options.take("retry", "useful", ("useful", "rejected"))
        self._tester_credit = options.take("tester_credit", "diagnosis", ("diagnosis", "outcome"))
        self._strip = options.take("strip_examples", True)
        self._coder = Role.take(context, options, 0, "coder", adds=())
        self._tester = Role.take(context, options, 1, "tester", WRITE_TESTS, adds=("problem", "code", "cases"))
        again = options.template("repair_template", REPAIR, context.fields_with("problem", "code", "feedback"))
        self._again = replace(self._coder, template=again)
        options.done()
        self._run_tests = run_tests or RewardTests(context)

    async def arun_episode(self, engine: InferenceEngine | EngineGroup, data: dict[str, Any]) -> Episode:
        if "tests" not in data:
            raise EpisodeError("prompt", "no_tests", f"a task needs `tests`; it has {', '.join(sorted(data))}")
        fields = fields_of(data)
        attempts = [self._coder.open(data)]
        scores: list[Score] = []
        tested: list[tuple[Conversation, float | None, bool]] = []
        while True:
            speak = self._coder.go_on if scores else self._coder.answer
            fields["code"] = await speak(engine, attempts[-1])
            if fields["code"] is None:
                break  # no room for another attempt: the last one counts
            scores.append(await attempts[-1].score(data))
            right = scores[-1].reward is not None and scores[-1].reward >= 1
            if scores[-1].reward is None or len(attempts) == self._attempts:
                break
            talk, tests, verdicts = await self._test(engine, fields)
            clean = tests is not None and all(verdicts)
            tested.append((talk, await self._valid(tests, data), clean is right))
            useful = tests is not None and not right
            if clean or (self._retry == "useful" and not useful):
                break
            fields["feedback"] = told(tests, verdicts) if tests is not None else "(the tests could not be read)"
            attempts.append(self._again.ask(fields))
        return self._episode(attempts, scores, tested)

    async def _test(
        self, engine: InferenceEngine | EngineGroup, fields: dict[str, Any]
    ) -> tuple[Conversation, list[Test] | None, list[bool | None]]:
        """The tester's turn: its tests, None when unreadable, and what the program did on them."""
        problem = EXAMPLES.sub("", fields["problem"]) if self._strip else fields["problem"]
        talk = self._tester.ask({**fields, "problem": problem, "cases": self._cases})
        tests = read_tests(await self._tester.answer(engine, talk), self._cases, fields.get("function", ""))
        return talk, tests, [] if tests is None else await self._run_tests(fields["code"], tests, fields)

    async def _valid(self, tests: list[Test] | None, data: dict[str, Any]) -> float | None:
        """Whether the reference passes the tests; None = there is no reference, or it could not be run."""
        if tests is None:
            return 0.0
        if not data.get("solution"):
            return None
        verdicts = await self._run_tests(f"```python\n{data['solution']}\n```", tests, data)
        return None if None in verdicts else float(all(verdicts))

    def _episode(self, attempts: list[Conversation], scores: list[Score], tested: list[tuple[Conversation, float | None, bool]]) -> Episode:
        team = Team(self._credit)
        before: float | None = 0.0
        for talk, score in zip(attempts, scores, strict=False):
            team.add(talk, score.reward, without=before)
            before = score.reward
        final = float(scores[-1].reward is not None and scores[-1].reward >= 1)
        for (talk, valid, agrees), score in zip(tested, scores, strict=False):
            second = final if self._tester_credit == "outcome" else float(agrees and valid != 0.0)
            team.add(talk, second if valid is None else 0.5 * (valid + second), without=score.reward)
        return team.episode(scores[-1], attempts=float(len(scores)), tests_valid=_share([valid for _, valid, _ in tested]))


def _share(values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0
