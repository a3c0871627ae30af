"""One question, one answer, one verifiable reward."""

from __future__ import annotations

from typing import Any

from astraflow.workflows.api import EngineGroup, Episode, InferenceEngine, Options, RolloutWorkflow, WorkflowContext
from astraflow.workflows.conversation import Conversation, messages_of


class Rlvr(RolloutWorkflow):
    """Options: `template` (how a task's `prompt` becomes the user's turn), `system`."""

    def __init__(self, context: WorkflowContext) -> None:
        super().__init__(context)
        options = Options("rlvr", context.options)
        self._template = options.take("template", "{prompt}")
        self._system = options.take("system", "")
        options.done()

    async def arun_episode(self, engine: InferenceEngine | EngineGroup, data: dict[str, Any]) -> Episode:
        talk = Conversation(self.context, self.context.policies[0], messages_of(data, self._template, self._system))
        await talk.answer(engine)
        return talk.episode(await talk.score(data))
