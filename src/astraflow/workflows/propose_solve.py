"""Two policies: one sets problems, the other solves them."""

from __future__ import annotations

import re
from typing import Any

from astraflow.protocol.errors import UserError
from astraflow.workflows.api import EngineGroup, Episode, InferenceEngine, Options, RolloutWorkflow, Score, WorkflowContext
from astraflow.workflows.conversation import Conversation
from astraflow.workflows.roles import Role, Team, check_policies, fields_of, together

PROPOSE = (
    "Here is a problem:\n{problem}\n\nSet a new one of the same kind, neither trivial nor hopeless, with its answer:\n"
    "<problem>the problem</problem><answer>its final answer</answer>"
)
FOUND = r"<problem>(?P<problem>.+?)</problem>\s*<answer>(?P<answer>.+?)</answer>"


class ProposeAndSolve(RolloutWorkflow):
    """`policies: [proposer, solver]`; the trajectory's reward is the share of attempts that were right.

    The solver is credited, per attempt, by the reward with the proposed problem and answer in the place of the task's; the proposer
    with 1 when the share of right attempts lies inside the band, else 0. A proposal that cannot be read counts 0 and is not solved.
    Options: `attempts`; `low`, `high` (the band, both ends included); `correct`; `proposal` (regular expression with the groups
    `problem` and, unless the reward needs none, `answer`; the last match counts); roles `proposer` (fields of the task, `problem`),
    `solver` (`prompt` is the proposed problem).
    """

    def __init__(self, context: WorkflowContext) -> None:
        super().__init__(context)
        check_policies(context, "propose_and_solve", "proposer", "solver")
        options = Options("propose_and_solve", context.options)
        self._attempts = options.take("attempts", 4, least=1)
        self._low = options.take("low", 0.25, least=0, most=1)
        self._high = options.take("high", 0.75, least=self._low, most=1)
        self._correct = options.take("correct", 1.0)
        self._proposal = options.pattern("proposal", FOUND, re.DOTALL)
        self._proposer = Role.take(context, options, 0, "proposer", PROPOSE, adds=("problem",))
        self._solver = Role.take(context, options, 1, "solver", adds=self._proposal.groupindex)
        options.done()
        if "problem" not in self._proposal.groupindex:
            raise UserError("workflow 'propose_and_solve' options.proposal: expected a group (?P<problem>…)")

    async def arun_episode(self, engine: InferenceEngine | EngineGroup, data: dict[str, Any]) -> Episode:
        talk = self._proposer.ask(fields_of(data))
        text = await self._proposer.answer(engine, talk)
        team = Team()
        found = [match for match in self._proposal.finditer(text) if match["problem"] is not None]
        if not found:
            team.add(talk, 0.0)
            return team.episode(Score(0.0), proposed=0.0)
        parts = {name: value.strip() for name, value in found[-1].groupdict().items() if value is not None}
        task = {**data, **parts, "prompt": parts["problem"]}
        task.pop("messages", None)
        solved = await together(*(self._solve(engine, task) for _ in range(self._attempts)))
        rewards = [score.reward for _, score in solved if score.reward is not None]
        share = sum(reward >= self._correct for reward in rewards) / len(rewards) if rewards else None
        team.add(talk, None if share is None else float(self._low <= share <= self._high))
        for attempt, score in solved:
            team.add(attempt, score.reward, parent=talk)
        error = next((score.error for _, score in solved if score.error), None) if share is None else None
        return team.episode(Score(share, error), proposed=1.0)

    async def _solve(self, engine: InferenceEngine | EngineGroup, task: dict[str, Any]) -> tuple[Conversation, Score]:
        talk = self._solver.open(task)
        await self._solver.answer(engine, talk)
        return talk, await talk.score(task)
