"""Two policies one after the other; the second one's answer counts, for both.

    plan_and_solve        a planner writes a plan, a solver carries it out, in one context whose tokens belong to either
    solve_and_check       a solver solves, a checker goes over it and gives the final answer, in one context
    sep_solve_and_check   the same in two contexts
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from astraflow.workflows.api import EngineGroup, Episode, InferenceEngine, Options, RolloutWorkflow, Score, WorkflowContext
from astraflow.workflows.conversation import Conversation
from astraflow.workflows.roles import RULES, Role, Team, check_policies, fields_of, same_tokenizer

PLAN = "{problem}\n\nWrite a short plan, step by step, that solves this. Do not carry it out and give no final answer."
CARRY_OUT = "Now carry out the plan and give the final answer in the form that the problem asks for."
CHECK = "Check this solution step by step, correct what is wrong, and give the final answer in the form that the problem asks for."
APART = "Problem:\n{problem}\n\n{answer}\n\n"


class PlanAndSolve(RolloutWorkflow):
    """`policies: [planner, solver]`.

    Options: `credit` (shared, or difference: a plan is worth what the solver gains over solving without it, which costs one more
    answer that is not trained on); `separate` (the second role has a context of its own); roles `planner` (fields of the task,
    `problem`), `solver` (those, `answer`: what the first role wrote).
    """

    name, roles, separate = "plan_and_solve", ("planner", "solver"), False
    first, second = PLAN, CARRY_OUT
    rules: tuple[str, ...] = ("shared", "difference")

    def __init__(self, context: WorkflowContext) -> None:
        super().__init__(context)
        check_policies(context, self.name, *self.roles)
        options = Options(self.name, context.options)
        self._credit = options.take("credit", "shared", self.rules)
        self._separate = options.take("separate", self.separate)
        self._first = Role.take(context, options, 0, self.roles[0], self.first, adds=("problem",))
        second = APART + self.second if self._separate else self.second
        self._second = Role.take(context, options, 1, self.roles[1], second, adds=("problem", "answer"))
        options.done()
        if not self._separate:
            same_tokenizer(context, self.name)

    async def arun_episode(self, engine: InferenceEngine | EngineGroup, data: dict[str, Any]) -> Episode:
        fields = fields_of(data)
        draft = self._first.ask(fields)
        fields["answer"] = await self._first.answer(engine, draft)
        before = await self._before(engine, data, draft)
        last = draft
        if self._separate:
            last = self._second.ask(fields)
        else:
            self._second.say(draft, fields)
        await self._second.answer(engine, last)
        score = await last.score(data)
        one, two = self._first.policy, self._second.policy
        own, without = {one: before.reward, two: score.reward}, self._without(one, two, before.reward)
        team = Team(self._credit)
        team.add(draft, own, without=without)
        if self._separate:
            team.add(last, own, without=without)
        return team.episode(score)

    async def _before(self, engine: InferenceEngine | EngineGroup, data: dict[str, Any], draft: Conversation) -> Score:
        """What there would be without the first role, as far as the credit rule asks: the second one alone."""
        if self._credit != "difference":
            return Score(None)
        alone = replace(self._second, template="{problem}")
        talk = alone.ask(fields_of(data))
        await alone.answer(engine, talk)
        return await talk.score(data)

    def _without(self, one: str, two: str, before: float | None) -> dict[str, float | None]:
        return {one: before, two: 0.0}


class SolveAndCheck(PlanAndSolve):
    """`policies: [solver, checker]`; all credit rules: own scores the first answer for the solver, the last one for the checker."""

    name, roles = "solve_and_check", ("solver", "checker")
    first, second = "{problem}", CHECK
    rules = RULES

    async def _before(self, engine: InferenceEngine | EngineGroup, data: dict[str, Any], draft: Conversation) -> Score:
        return Score(None) if self._credit == "shared" else await draft.score(data)

    def _without(self, one: str, two: str, before: float | None) -> dict[str, float | None]:
        return {two: before, one: 0.0}


class SepSolveAndCheck(SolveAndCheck):
    """The same with the checker in a context of its own."""

    name, separate = "sep_solve_and_check", True
