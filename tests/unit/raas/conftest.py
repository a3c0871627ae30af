"""An executor with the scripted engine, in the test's own loop: everything of a rollout service but its sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from astraflow.lib.aio import Tasks
from astraflow.lib.metrics import Counter
from astraflow.lib.tokenizer import Tokenizer
from astraflow.protocol.codec import decode
from astraflow.protocol.rollout import Group, Lease, Pull, RegisterWorkflow, WorkflowSpec
from astraflow.raas.config import EngineConfig, GenerationConfig, RewardsConfig
from astraflow.raas.engines.base import EngineSetup
from astraflow.raas.engines.scripted import ScriptedEngine
from astraflow.raas.executor import Executor
from astraflow.raas.gateway.door import Door
from astraflow.raas.models import ServedModel
from astraflow.raas.outbox import Outbox
from astraflow.raas.programs import Programs
from astraflow.raas.records import Records
from astraflow.raas.slots import SlotBook
from astraflow.workflows.config import AgentConfig

CHARS = Path(__file__).parents[2] / "data" / "chars-model"


def scripted_engine(context: int = 256, **options: Any) -> ScriptedEngine:
    """An engine on the character tokenizer that serves version 0 from the start, unless told otherwise."""
    tokenizer = Tokenizer.load(CHARS)
    setup = EngineSetup(
        model_id="default",
        model_dir=CHARS,
        tokenizer=tokenizer,
        eos_ids=list(tokenizer.eos_ids),
        context_length=context,
        max_slots=64,
        config=EngineConfig(kind="scripted", options={"initial": True, **options}),
        dtype="float32",
        staged=lambda: None,
        on_death=lambda reason: None,
        log_path=Path("/dev/null"),
    )
    return ScriptedEngine(setup)


@dataclass
class Rig:
    executor: Executor
    programs: Programs
    engine: ScriptedEngine
    tasks: Tasks
    door: Door
    urls: list[str]
    """Where the door is reached; a test that serves it puts the address here."""
    failures: list[str] = field(default_factory=list)

    def lease(self, lease_id: str = "l1", workflow: str = "w", n: int = 1, **fields: Any) -> Lease:
        data = fields.pop("data", {"prompt": "2 + 3 =", "answer": "5"})
        return Lease(lease_id=lease_id, task_id="t", workflow_id=workflow, n_samples=n, data=data, **fields)

    def register(self, workflow_id: str = "w", workflow: str = "rlvr", **fields: Any) -> None:
        self.programs.register(RegisterWorkflow(workflow_id=workflow_id, spec=WorkflowSpec(workflow=workflow, **fields)))

    async def groups(self, count: int = 1, lane: str = "", deadline_s: float = 60.0) -> list[Group]:
        """The next groups, acknowledged."""
        out: list[Group] = []
        ack: list[str] = []
        async with asyncio.timeout(deadline_s):
            while len(out) < count:
                deliveries, _ = await self.executor.pull(Pull(ack=ack, wait_s=5.0, lane=lane), lane)
                ack = [d.delivery_id for d in deliveries]
                out += [decode(bytes(d.group), Group) for d in deliveries]
        await self.executor.pull(Pull(ack=ack, max_items=0), lane)
        return out


@pytest.fixture
def scripted() -> Callable[..., ScriptedEngine]:
    """Call inside a running loop: `scripted(token_s=0.01)`."""
    return scripted_engine


@pytest.fixture
def rig(tmp_path: Path) -> Callable[..., Rig]:
    """Call inside a running loop: `rig(context=32, slots=8, token_s=0.01)`."""

    def make(
        *,
        context: int = 256,
        slots: int = 16,
        outbox: int = 64,
        retries: int = 2,
        grace_s: float = 0.2,
        plugins: list[str] | None = None,
        agents: dict[str, AgentConfig] | None = None,
        **options: Any,
    ) -> Rig:
        engine = scripted_engine(context, **options)
        models = {"default": ServedModel("default", engine, engine._setup.tokenizer, context)}
        failures: list[str] = []
        tasks = Tasks(lambda name, error: failures.append(f"{name}: {error!r}"))
        generation = GenerationConfig(max_new_tokens=max(16, context // 16))
        urls: list[str] = []
        door = Door(lambda: urls[-1], Counter())
        programs = Programs(models, generation, RewardsConfig(workers=1, deadline_s=60.0), plugins=plugins, agents=agents, door=door)
        executor = Executor(
            "raas0",
            models=models,
            programs=programs,
            slots=SlotBook(slots, outbox),
            outbox=Outbox("x"),
            records=Records(tmp_path / "records", 100),
            tasks=tasks,
            engine_retries=retries,
            cancel_grace_s=grace_s,
        )
        return Rig(executor, programs, engine, tasks, door, urls, failures)

    return make
