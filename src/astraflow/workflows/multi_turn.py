"""Try again with feedback while the answer is wrong; every retry costs."""

from __future__ import annotations

from typing import Any

from astraflow.protocol.errors import AstraFlowError, UserError
from astraflow.workflows.api import EngineGroup, Episode, InferenceEngine, Options, RolloutWorkflow, Score, WorkflowContext, is_overlong
from astraflow.workflows.conversation import Conversation, messages_of

FEEDBACK = "Your answer is wrong or could not be read. Look at it again and give a new answer in the same form."


class MultiTurn(RolloutWorkflow):
    """The reward is that of the last answer, times discount^retries.

    Options: `max_turns` (answers in all), `discount`, `correct` (a reward of at least this ends the episode),
    `feedback` (the user's turn after a wrong answer), `template`, `system`.
    """

    def __init__(self, context: WorkflowContext) -> None:
        super().__init__(context)
        options = Options("multi_turn", context.options)
        self._max_turns = options.take("max_turns", 3)
        self._discount = options.take("discount", 0.9)
        self._correct = options.take("correct", 1.0)
        self._feedback = options.take("feedback", FEEDBACK)
        self._template = options.take("template", "{prompt}")
        self._system = options.take("system", "")
        options.done()
        if self._max_turns < 1:
            raise UserError(f"workflow 'multi_turn' options.max_turns: {self._max_turns}, expected at least 1")

    async def arun_episode(self, engine: InferenceEngine | EngineGroup, data: dict[str, Any]) -> Episode:
        talk = Conversation(self.context, self.context.policies[0], messages_of(data, self._template, self._system))
        await talk.answer(engine)
        score = await talk.score(data)
        while score.reward is not None and score.reward < self._correct and talk.turns < self._max_turns:
            talk.say({"role": "user", "content": self._feedback})
            try:
                await talk.answer(engine)
            except AstraFlowError as error:
                if not is_overlong(error):
                    raise
                break  # no room for a retry: the last answer counts
            score = await talk.score(data)
        if score.reward is None:
            return talk.episode(score)
        return talk.episode(Score(score.reward * self._discount ** (talk.turns - 1)))
