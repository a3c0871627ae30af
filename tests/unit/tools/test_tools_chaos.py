"""Thousands of fault schedules in simulated time; what they find is replayed with `astraflow chaos --seed N --trace`."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest

from astraflow.dataflow.acquisition import DataAcquisition
from astraflow.dataflow.barrier import VersionBarrier
from astraflow.dataflow.buffer import RolloutBuffer
from astraflow.dataflow.intake import Intake
from astraflow.dataflow.ledger import Ledger
from astraflow.dataflow.pool import Held
from astraflow.tools import chaos
from astraflow.tools.chaos_schedule import Blow, schedule

SCHEDULES = 2000
CHUNK = 100
WORKERS = 2
SEEDS_PER_MUTANT = 300
YARDSTICK = 500_000
YARDSTICK_S = 0.02
"""What the loop takes on the machine whose minute is meant: a core of a recent server."""
KINDS = {
    "request_lost", "reply_lost", "late", "twice", "raas_crash", "raas_hang", "raas_cut", "raas_drain", "raas_join", "trainer_crash",
    "trainer_hang", "trainer_zombie", "replaced", "dataflow_kill", "dataflow_kill_in_write", "dataflow_hang", "dataflow_stop", "rollback",
    "episode_fails", "reward_fails", "group_fails", "load_fails", "end_of_data",
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """What a worker process found."""

    schedules: int
    events: int
    with_fault: Counter[str]
    broken: list[str]
    cpu_s: float
    yardstick_s: float
    """CPU time of a fixed loop in the same process, so that a slow or loaded machine is measured by its own speed."""


def run_chunk(first: int) -> Part:
    begin = time.process_time()
    tally = chaos.replay_many(range(first, first + CHUNK))
    cpu_s = time.process_time() - begin
    sum(number * number for number in range(YARDSTICK))
    broken = [f"seed {outcome.seed}: {outcome.violation}" for outcome in tally.broken]
    return Part(tally.schedules, tally.events, tally.with_fault, broken, cpu_s, time.process_time() - begin - cpu_s)


@pytest.mark.timeout(900)
def test_every_invariant_holds_in_two_thousand_schedules_of_faults_within_a_minute() -> None:
    begin = time.monotonic()
    with ProcessPoolExecutor(WORKERS, mp_context=multiprocessing.get_context("spawn")) as workers:
        parts = list(workers.map(run_chunk, range(0, SCHEDULES, CHUNK)))
    wall_s, cpu_s = time.monotonic() - begin, sum(part.cpu_s for part in parts)
    broken = [line for part in parts for line in part.broken]
    assert not broken, "\n".join(broken[:5])
    assert sum(part.schedules for part in parts) == SCHEDULES
    assert sum(part.events for part in parts) >= 100 * SCHEDULES, "each event is followed by a look at the invariants"
    with_fault: Counter[str] = sum((part.with_fault for part in parts), Counter())
    assert with_fault.keys() >= KINDS, f"never came: {KINDS - with_fault.keys()}"
    assert all(with_fault[kind] >= SCHEDULES // 100 for kind in KINDS), with_fault
    slower = max(1.0, statistics.median(part.yardstick_s for part in parts) / YARDSTICK_S)
    assert min(wall_s, cpu_s / WORKERS) < 60.0 * slower, f"{wall_s:.0f} s, {cpu_s:.0f} CPU-seconds, machine {slower:.1f} times slower"


def test_a_seed_is_the_same_run_step_by_step_in_any_process() -> None:
    code = "from astraflow.tools import chaos; print(*(chaos.replay(seed).digest for seed in range(3000, 3008)))"
    digests = [
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True)
        for seed in ("1", "2")
    ]
    assert digests[0].stdout == digests[1].stdout
    assert len(set(digests[0].stdout.split())) == 8


def test_the_command_replays_one_schedule_and_ends_1_with_the_broken_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from astraflow.cli import app

    told = CliRunner().invoke(app, ["chaos", "--seed", "3", "--trace"])
    assert told.exit_code == 0, told.output
    assert "dataflow → r0 submit" in told.output
    assert "1 schedule, 0 broken" in told.output
    acknowledged_before_it_is_durable(monkeypatch.setattr)
    told = CliRunner().invoke(app, ["chaos", "--seed", "0", "--count", "10"])
    assert told.exit_code == 1
    assert "astraflow chaos --seed" in told.output


@pytest.mark.parametrize("kind", ["raas_crash", "raas_hang", "raas_cut", "trainer_crash", "trainer_zombie", "dataflow_kill"])
def test_a_lone_process_that_fails_early_or_late_comes_back_and_the_run_ends(kind: str) -> None:
    calm = replace(schedule(0), policies=("a",), slots=(4,), steps=3, message_rate=0.0, rollout_rate=0.0, eval_every=0, epochs=None)
    for at_event in (15, 45, 75):
        outcome = chaos.play(replace(calm, blows=(Blow(at_event, kind, 0, 0.5),)))
        assert not outcome.violation
        assert outcome.happened[kind] == 1


# --- mutants: each is a mistake that somebody could make, and each is found --------------------------------------------------


def acknowledged_before_it_is_durable(patch: Callable[..., None]) -> str:
    async def take(self: Any, instance_id: str, deliveries: Any) -> list[str]:
        self._shelf.tasks.spawn("record later", original(self, instance_id, deliveries))
        return [delivery.delivery_id for delivery in deliveries]

    original = Intake.take
    patch(Intake, "take", take)
    return "acknowledged"


def leases_of_a_dead_instance_forgotten(patch: Callable[..., None]) -> str:
    async def lost(self: Any, held: Iterable[Held], why: str) -> None:
        return None

    patch(DataAcquisition, "lost", lost)
    return "is on no instance"


def stale_groups_served(patch: Callable[..., None]) -> str:
    original = Intake.unservable

    def unservable(self: Any, model_id: str, group: Any) -> str:
        reason = original(self, model_id, group)
        return "" if reason == "stale" else reason

    patch(Intake, "unservable", unservable)
    return "versions old"


def timelines_not_compared(patch: Callable[..., None]) -> str:
    patch(VersionBarrier, "on_live_timeline", lambda self, model_id, timeline, max_version: True)
    return "dead timeline"


def rows_trained_after_the_checkpoint_not_opened_again(patch: Callable[..., None]) -> str:
    patch(Ledger, "rollback", lambda self, policy, version, meta: [])
    return "the trainer"


def as_much_generated_as_fits(patch: Callable[..., None]) -> str:
    patch(RolloutBuffer, "room", lambda self, *numbers: 64)
    return "pace"


@pytest.mark.parametrize(
    "mutant",
    [
        acknowledged_before_it_is_durable,
        leases_of_a_dead_instance_forgotten,
        stale_groups_served,
        timelines_not_compared,
        rows_trained_after_the_checkpoint_not_opened_again,
        as_much_generated_as_fits,
    ],
)
def test_a_mistake_is_found_within_a_few_hundred_seeds(
    mutant: Callable[[Callable[..., None]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = mutant(monkeypatch.setattr)
    for seed in range(SEEDS_PER_MUTANT):
        found = chaos.replay(seed).violation
        if found:
            assert expected in found, f"seed {seed} found something else: {found}"
            return
    pytest.fail(f"{SEEDS_PER_MUTANT} schedules did not find it")
