"""Programs and their tests, as the code workflows see them: run through the workflow's reward, which owns the sandbox.

A test is `{"input": …, "output": …}` for programs that read stdin, `{"args": […], "accepted": […]}` where the task names a `function`.
The reward (`livecodebench`) grades a completion by the task's `tests`, so one call with other tests in their place is one verdict.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from astraflow.workflows.api import Score, WorkflowContext
from astraflow.workflows.conversation import read_json
from astraflow.workflows.roles import together

Test = dict[str, Any]
BLOCK = re.compile(r"```(?:json)?\s*(.*?)```", re.DOTALL | re.IGNORECASE)


class RunTests(Protocol):
    """Whatever runs the program of an answer against tests."""

    async def __call__(self, answer: str, tests: Sequence[Test], data: Mapping[str, Any]) -> list[bool | None]:
        """One verdict per test; None = it could not be run (the sandbox failed, not the program)."""
        ...


@dataclass(frozen=True)
class RewardTests:
    """`RunTests` by the workflow's reward: a test passed when the reward for that test alone is 1."""

    context: WorkflowContext

    async def __call__(self, answer: str, tests: Sequence[Test], data: Mapping[str, Any]) -> list[bool | None]:
        verdicts = await together(*(self._one(answer, test, data) for test in tests))
        return [None if score.reward is None else score.reward >= 1 for score in verdicts]

    async def _one(self, answer: str, test: Test, data: Mapping[str, Any]) -> Score:
        return await self.context.score("", answer, [], [], {**data, "tests": [test]})


def read_tests(text: str, count: int, function: str = "") -> list[Test] | None:
    """The first `count` tests that an answer writes down as JSON (its last fenced block, else all of it); None = there are none.

    A list of `{"input", "output"}`: texts for programs that read stdin, the list of arguments and the value for a function.
    """
    blocks = BLOCK.findall(text)
    try:
        found = read_json(blocks[-1] if blocks else text)
    except ValueError:
        return None
    if isinstance(found, dict):
        found = found.get("tests")
    if not isinstance(found, list) or len(found) < count or count < 1:
        return None
    whole = [one for one in found[:count] if isinstance(one, dict) and {"input", "output"} <= set(one)]
    if len(whole) < count or not all(isinstance(one["input"], list if function else str) for one in whole):
        return None
    if function:
        return [{"args": one["input"], "accepted": [one["output"]]} for one in whole]
    return [{"input": one["input"], "output": one["output"]} for one in whole] if all(isinstance(o["output"], str) for o in whole) else None


def told(tests: Sequence[Test], verdicts: Sequence[bool | None]) -> str:
    """Verdicts as text for the next turn."""
    said = [(t.get("args", t.get("input")), t.get("accepted", [t.get("output")])[0]) for t in tests]
    rows = zip(said, verdicts, strict=True)
    return "\n".join(f"{'passed' if passed else 'FAILED'}: input {given!r}, expected {wanted!r}" for (given, wanted), passed in rows)
