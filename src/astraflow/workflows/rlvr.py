"""One question, one answer, one verifiable reward."""

from __future__ import annotations

from typing import Any

from astraflow.workflows.api import EngineGroup, Episode, InferenceEngine, Options, RolloutWorkflow, WorkflowContext
from astraflow.workflows.roles import Role, alone


class Rlvr(RolloutWorkflow):
    """Options: those of its one `Role`: `template` (how a task's `prompt` becomes the user's turn), `system`, `generation`, `chat`."""

    def __init__(self, context: WorkflowContext) -> None:
        super().__init__(context)
        options = Options("rlvr", context.options)
        self._solver = Role.take(context, options, adds=())
        options.done()

    async def arun_episode(self, engine: InferenceEngine | EngineGroup, data: dict[str, Any]) -> Episode:
        talk = self._solver.open(data)
        await self._solver.answer(engine, talk)
        return alone(talk, await talk.score(data))
