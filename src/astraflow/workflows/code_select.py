"""Two policies: one writes two programs for the same problem, the other selects the better one."""

from __future__ import annotations

import re
from typing import Any

from astraflow.workflows.api import EngineGroup, Episode, InferenceEngine, Options, RolloutWorkflow, Score, WorkflowContext
from astraflow.workflows.conversation import Conversation
from astraflow.workflows.roles import RULES, Role, Team, check_policies, fields_of, together

SELECT = (
    "Problem:\n{problem}\n\nProgram A:\n{code_a}\n\nProgram B:\n{code_b}\n\nWhich one is right? If both or neither seem so, take the one "
    "that you trust more. Think, then end with <final>A</final> or <final>B</final>."
)
CHOICE = r"<\s*final\s*>\s*([AB])\s*<\s*/\s*final\s*>"
NEUTRAL = 0.5
"""Credit of a choice between two programs of the same worth."""


class CodeSolveAndSelect(RolloutWorkflow):
    """`policies: [coder, selector]`; the trajectory's reward is that of the selected program (A when the choice cannot be read).

    Each program is credited for itself; the selector with 1 for the better one of two unequal programs, 0.5 between equal ones, 0 for the
    worse one and for what cannot be read.
    Options: `credit`; `choice` (regular expression; its first group in the last match is the choice, A or B); roles `coder` (fields of the
    task), `selector` (those, `problem`, `code_a`, `code_b`).
    """

    def __init__(self, context: WorkflowContext) -> None:
        super().__init__(context)
        check_policies(context, "code_solve_and_select", "coder", "selector")
        options = Options("code_solve_and_select", context.options)
        self._credit = options.take("credit", "own", RULES)
        self._choice = options.pattern("choice", CHOICE, re.IGNORECASE, group=True)
        self._coder = Role.take(context, options, 0, "coder", adds=())
        self._selector = Role.take(context, options, 1, "selector", SELECT, adds=("problem", "code_a", "code_b"))
        options.done()

    async def arun_episode(self, engine: InferenceEngine | EngineGroup, data: dict[str, Any]) -> Episode:
        fields = fields_of(data)
        (a, code_a, score_a), (b, code_b, score_b) = await together(self._write(engine, data), self._write(engine, data))
        talk = self._selector.ask({**fields, "code_a": code_a, "code_b": code_b})
        picked = self._picked(await self._selector.answer(engine, talk))
        chosen, other = (score_b, score_a) if picked == "B" else (score_a, score_b)
        team = Team(self._credit)
        team.add(a, score_a.reward, without=score_b.reward)
        team.add(b, score_b.reward, without=score_a.reward)
        team.add(talk, _worth(picked, chosen.reward, other.reward), without=score_a.reward)
        return team.episode(chosen, unreadable=float(picked is None))

    def _picked(self, text: str) -> str | None:
        """A or B, None when there is no match or its group says something else."""
        found = [(match[1] or "").upper() for match in self._choice.finditer(text)]
        return found[-1] if found and found[-1] in ("A", "B") else None

    async def _write(self, engine: InferenceEngine | EngineGroup, data: dict[str, Any]) -> tuple[Conversation, str, Score]:
        talk = self._coder.open(data)
        code = await self._coder.answer(engine, talk)
        return talk, code, await talk.score(data)


def _worth(picked: str | None, chosen: float | None, other: float | None) -> float | None:
    if chosen is None or other is None:
        return None
    if picked is None:
        return 0.0
    return NEUTRAL if chosen == other else float(chosen > other)
