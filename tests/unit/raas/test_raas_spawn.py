"""Fault 20: recursive agents on an instance with one slot and an engine with one place."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from astraflow.raas.engines.scripted import ScriptedEngine
from astraflow.workflows.api import ModelRequest, ModelResponse

TREE = {"depth": 2, "breadth": 3, "budget": 12, "sub_template": "{task}"}
AGENTS, SPAWNERS = 1 + 3 + 9, 1 + 3


def spawn(*tasks: str) -> dict[str, str]:
    return {"text": f"<tool_call>{json.dumps({'name': 'spawn', 'arguments': {'tasks': list(tasks)}})}</tool_call>"}


class OnePlace:
    """An engine that takes one request at a time and lets the others wait."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine, self._place = engine, asyncio.Semaphore(1)

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        async with self._place:
            return await self._engine.agenerate(request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def test_fault_20_any_tree_of_agents_ends_with_one_slot_and_one_place_in_the_engine(rig):
    async def go() -> None:
        made = rig(context=4096, slots=1, script=[spawn("a", "b", "c")] * SPAWNERS)
        model = made.programs._models["default"]
        model.engine = OnePlace(model.engine)
        made.register(workflow="spawn", reward="last_number", options=TREE, generation={"max_new_tokens": 200})
        leases = [made.lease(f"l{place}", deadline_s=60.0) for place in range(3)]
        for lease in leases:  # one after the other: there is one slot
            (verdict,) = made.executor.submit([lease])
            assert verdict.verdict == "accepted"
            assert made.executor.submit([made.lease("more")])[0].verdict == "over_capacity"
            (group,) = await made.groups()
            (trajectory,) = group.trajectories
            assert trajectory.error is None
            if lease is leases[0]:
                assert len(trajectory.segments) == AGENTS
                assert len(made.engine.seen) == AGENTS + SPAWNERS
        assert made.executor.idle
        assert made.failures == []

    asyncio.run(go())
