"""Try again with feedback while the answer is wrong; every retry costs."""

from __future__ import annotations

from typing import Any

from astraflow.workflows.api import EngineGroup, Episode, InferenceEngine, Options, RolloutWorkflow, Score, WorkflowContext
from astraflow.workflows.conversation import fill
from astraflow.workflows.roles import Role, alone, fields_of, user

FEEDBACK = "Your answer is wrong or could not be read. Look at it again and give a new answer in the same form."


class MultiTurn(RolloutWorkflow):
    """The reward is that of the last answer, times discount^retries.

    Options: `max_turns` (answers in all), `discount`, `correct` (a reward of at least this ends the episode),
    `feedback` (the user's turn after a wrong answer; fields of the task and `problem`), and those of its one `Role`.
    """

    def __init__(self, context: WorkflowContext) -> None:
        super().__init__(context)
        options = Options("multi_turn", context.options)
        self._max_turns = options.take("max_turns", 3, least=1)
        self._discount = options.take("discount", 0.9, least=0, most=1)
        self._correct = options.take("correct", 1.0)
        self._feedback = options.template("feedback", FEEDBACK, context.fields_with("problem"))
        self._solver = Role.take(context, options, adds=())
        options.done()

    async def arun_episode(self, engine: InferenceEngine | EngineGroup, data: dict[str, Any]) -> Episode:
        talk = self._solver.open(data)
        await self._solver.answer(engine, talk)
        score = await talk.score(data)
        while score.reward is not None and score.reward < self._correct and talk.turns < self._max_turns:
            talk.say(user(fill(self._feedback, fields_of(data))))
            if await self._solver.go_on(engine, talk) is None:
                break  # no room for a retry: the last answer counts
            score = await talk.score(data)
        if score.reward is None:
            return alone(talk, score)
        return alone(talk, Score(score.reward * self._discount ** (talk.turns - 1)))
