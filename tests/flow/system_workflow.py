"""A workflow that gives nothing, loaded by runs of tests/flow as a plug-in."""

from __future__ import annotations

from typing import Any

from astraflow.workflows.api import EngineGroup, InferenceEngine, RolloutWorkflow, register_workflow


@register_workflow("gives_nothing")
class GivesNothing(RolloutWorkflow):
    """Returns None for every prompt (case G24 b)."""

    async def arun_episode(self, engine: InferenceEngine | EngineGroup, data: dict[str, Any]) -> None:
        return None
