"""What a seed stands for: sizes, settings, and the faults of one schedule."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from astraflow.dataflow.config import (
    BufferConfig,
    DataflowConfig,
    DataflowProcess,
    EvalConfig,
    LedgerConfig,
    PoliciesConfig,
    PoolConfig,
    ReplayConfig,
    WorkflowConfig,
)
from astraflow.datasets.api import Task
from astraflow.datasets.config import DatasetConfig, ValidDatasetConfig

RUN_ID = "chaos"
N_SAMPLES = 2
BATCH_GROUPS = 2
WEIGHTS = {
    "raas_crash": 5,
    "raas_hang": 3,
    "raas_cut": 3,
    "raas_drain": 2,
    "raas_join": 2,
    "trainer_crash": 12,
    "trainer_hang": 1,
    "trainer_zombie": 2,
    "dataflow_kill": 4,
    "dataflow_kill_in_write": 4,
    "dataflow_hang": 1,
    "dataflow_stop": 2,
}
"""How often each kind is chosen."""
LAST_EVENT = 140
"""A schedule without faults has about as many events; what is planned later than its end does not happen."""
MESSAGE_FAULTS = ("request_lost", "reply_lost", "late", "twice")


@dataclass(frozen=True)
class Blow:
    """One fault of a process, at a moment counted in events (messages handled, ledger calls)."""

    at_event: int
    kind: str
    """A key of WEIGHTS. `hang` = stopped like by SIGSTOP, `cut` = nothing passes, `zombie` = stopped, replaced, and back again."""
    target: int
    """Which instance or trainer, modulo how many there are."""
    pause_s: float
    """Until it comes back or goes on."""


@dataclass(frozen=True)
class Schedule:
    """Everything that a run is, but the interleaving, which follows from `seed` too."""

    seed: int
    policies: tuple[str, ...]
    steps: int
    slots: tuple[int, ...]
    """Of the instances that are there from the start."""
    checkpoint_every: int
    eval_every: int
    """0 = no evaluation."""
    message_rate: float
    message_faults: int
    """At most so many, then the network is healed."""
    rollout_rate: float
    """Share of rollouts and loads that go wrong by themselves."""
    blows: tuple[Blow, ...]
    dataflow: DataflowConfig = field(default_factory=DataflowConfig)
    tasks: int = 40
    epochs: int | None = None

    def process(self, run_dir: Path) -> DataflowProcess:
        """The configuration of its Dataflow."""
        valid = {"valid": ValidDatasetConfig(name="sim", n_samples=N_SAMPLES)} if self.eval_every else {}
        return DataflowProcess(
            run_id=RUN_ID, run_dir=str(run_dir), seed=self.seed, models=list(self.policies),
            workflow=WorkflowConfig(workflow="sim", n_samples=N_SAMPLES),
            train_dataset=DatasetConfig(name="sim", repeat=self.epochs), valid_datasets=valid, dataflow=self.dataflow,
        )  # fmt: skip

    def train_tasks(self) -> list[Task]:
        return [Task(f"sim:{number:04d}", {"prompt": str(number)}) for number in range(self.tasks)]

    def valid_tasks(self) -> dict[str, list[Task]]:
        return {"valid": [Task(f"valid:{number:04d}", {"prompt": str(number)}) for number in range(2)]} if self.eval_every else {}

    def words(self) -> str:
        """One line."""
        plan = ", ".join(f"{blow.kind} at {blow.at_event}" for blow in self.blows) or "no process fails"
        buffer = self.dataflow.buffer
        return (
            f"{len(self.policies)} policies, {len(self.slots)} instances, {self.steps} steps, staleness {buffer.max_staleness},"
            f" lead {buffer.max_policy_lead}, {self.message_faults} message faults; {plan}"
        )


def schedule(seed: int) -> Schedule:
    """The schedule of a seed."""
    rng = random.Random(f"schedule {seed}")
    policies = ("a",) if rng.random() < 0.7 else ("a", "b")
    blows = sorted((_blow(rng) for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4)))), key=lambda blow: blow.at_event)
    return Schedule(
        seed=seed,
        policies=policies,
        steps=rng.choice((2, 2, 3, 3, 4)),
        slots=tuple(rng.choice((2, 4, 4, 6)) for _ in range(rng.choice((1, 1, 1, 2, 2, 3)))),
        checkpoint_every=rng.randint(1, 3),
        eval_every=rng.choice((0, 0, 0, 2)),
        message_rate=rng.choice((0.0, 0.03, 0.08, 0.15)),
        message_faults=rng.randint(1, 14),
        rollout_rate=rng.choice((0.0, 0.05, 0.15)),
        blows=tuple(blows),
        dataflow=_dataflow(rng),
        tasks=rng.choice((7, 40)),
        epochs=rng.choice((None, None, None, 2)),
    )


def _blow(rng: random.Random) -> Blow:
    kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    pause = rng.choice((0.1, 0.5, 2.0, 6.0))
    return Blow(rng.randrange(LAST_EVENT), kind, rng.randrange(6), pause)


def _dataflow(rng: random.Random) -> DataflowConfig:
    staleness: int | None = rng.choice((0, 1, 1, 2, 2, None))
    drop = rng.random() < 0.15
    options: dict[str, Any] = {"max_groups": 12} if drop or staleness is None else {}
    return DataflowConfig(
        buffer=BufferConfig(
            max_staleness=staleness,
            order=rng.choice(("edf", "fifo")),
            unit=rng.choice(("groups", "groups", "groups", "sequences")),
            treatment="drop" if drop else "pace",
            max_policy_lead=rng.choice((0, 0, 1)),
            hold_s=4.0,
            replay=ReplayConfig(ratio=rng.choice((0.0, 0.0, 0.0, 0.5)), size=4, max_staleness=3),
            **options,
        ),
        pool=PoolConfig(
            heartbeat_s=3.0,
            status_timeout_s=1.0,
            call_timeout_s=2.0,
            pull_wait_s=rng.choice((1.0, 5.0)),
            load_timeout_s=20.0,
            lease_deadline_s=5.0,
            trainer_deadline_s=rng.choice((6.0, 900.0)),
        ),
        policies=PoliciesConfig(
            filter=rng.choice(("keep_all", "keep_all", "filter_zero_adv", "complete_only")),
            curator=rng.choice(("accept_all", "accept_all", "filter_solved", "greso")),
        ),
        eval=EvalConfig(at_start=rng.random() < 0.3, mode=rng.choice(("pinned", "pinned", "synchronous")), deadline_s=12.0),
        ledger=LedgerConfig(segment_bytes=rng.choice((1 << 20, 2000))),
        metrics_s=1000.0,
    )
