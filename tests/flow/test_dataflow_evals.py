"""Synchronous evaluations of a real Dataflow process: what is evaluated, who is cancelled, and that training always goes on."""

from __future__ import annotations

import importlib.util
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from astraflow.datasets.config import ValidDatasetConfig
from astraflow.protocol import control
from astraflow.protocol.routes import DataflowAPI, RaaSAPI

_spec = importlib.util.spec_from_file_location("peers", Path(__file__).with_name("peers.py"))
assert _spec is not None
assert _spec.loader is not None
peers: Any = importlib.util.module_from_spec(_spec)
sys.modules["peers"] = peers
_spec.loader.exec_module(peers)

TASKS, N = 4, 2
"""Of the valid set (`peers._dataflow_main`)."""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Any]:
    with peers.staged(tmp_path) as made:
        made.process.dataflow.eval.mode = "synchronous"
        made.process.valid_datasets = {"heldout": ValidDatasetConfig(n_samples=N)}
        yield made


def results(trainer: Any) -> list[control.EvalResult]:
    reply = trainer.client.call(DataflowAPI.eval_results, control.EvalResultsRequest(wait_s=1.0), timeout_s=peers.WAIT_S)
    return [] if reply.running else reply.results


def in_flight(trainer: Any) -> int:
    return sum(instance.in_flight for instance in trainer.status().instances)


def quiet(trainer: Any) -> bool:
    """All that may be generated ahead is queued."""
    status = trainer.status()
    return status.started and status.metrics["buffer/room"] == 0 and status.metrics["buffer/in_flight_trajectories"] == 0


def adds_up(ledger: control.LedgerCounts) -> bool:
    return ledger.made == ledger.trained + sum(ledger.dropped.values()) + sum(ledger.in_flight.values())


def served(trainer: Any) -> dict[str, dict[str, int]]:
    """Version per policy of each instance in the pool."""
    return {i.instance_id: {m: s.version for m, s in i.serving.items()} for i in trainer.status().instances}


def waits(trainer: Any, who: str, waits_for: str) -> Any:
    """The edge, or None."""
    return next((edge for edge in trainer.status().waits if (edge.who, edge.waits_for) == (who, waits_for)), None)


def test_both_policies_on_both_instances_at_exactly_the_version_and_the_cancelled_leases_run_again(stage: Any) -> None:
    gate = stage.directory / "gate"
    gate.touch()
    stage.process.models = ["solver", "checker"]
    stage.dataflow()
    for name in ("r0", "r1"):
        stage.raas(name, "--policies", "solver,checker", "--gate", str(gate))
    solver, checker = trainers = [peers.Trainer(stage.url, model_id=name) for name in ("solver", "checker")]
    peers.until(lambda: set(served(solver)) == {"r0", "r1"}, 30, "both instances")
    for trainer in trainers:
        trainer.ready()
    solver.step()
    checker.step()
    peers.until(lambda: quiet(solver), 30, "everything that may be generated is queued")
    gate.unlink()
    solver.step()
    checker.step()
    peers.until(lambda: in_flight(solver) == 8, 30, "the two groups for which version 2 made room")
    asked = {solver.step(run_eval=True) and solver.version}
    barrier = peers.until(lambda: waits(solver, "dataflow:eval-0001", "trainer:checker"), 30, "the barrier")
    assert 0 < barrier.deadline_s <= 300.0
    peers.until(lambda: waits(solver, "dataflow:submit", "dataflow:eval-0001"), 30, "submission is held")
    assert in_flight(solver) == 8, "nothing new is submitted, nothing is cancelled before the barrier"
    checker.step(run_eval=True)  # its batch was queued: batches are served meanwhile
    (result,) = peers.until(lambda: results(solver), 30, "the evaluation")
    assert asked == {3}
    assert {m: (s.timeline, s.version, s.digest) for m, s in result.versions.items()} == {
        "solver": (0, 3, "solver-0-3"),
        "checker": (0, 3, "checker-0-3"),
    }
    assert (result.mode, result.missing, result.note, result.n_tasks) == ("synchronous", 0, "", TASKS)
    assert result.metrics["avg@2"] == 0.5
    status = solver.status()
    assert status.metrics["rollout/cancelled_leases"] == 2
    third = {"solver": 3, "checker": 3}
    peers.until(lambda: served(solver) == {"r0": third, "r1": third}, 30, "both serve what was evaluated")
    gate.touch()
    for _ in range(3):
        solver.step()
        checker.step()
    peers.until(lambda: quiet(solver), 30, "the cancelled leases ran again")
    status = solver.status()
    assert adds_up(status.ledger)
    assert status.ledger.trained == 2 * 8 * 6
    assert status.ledger.dropped == {}
    assert status.service_version == 6
    assert not any(name.startswith("eval") for trainer in trainers for name in trainer.seen)
    database = sqlite3.connect(f"file:{stage.process.run_dir}/ledger/ledger.sqlite?mode=ro", uri=True)
    assert database.execute("SELECT max(attempt) FROM leases").fetchone() == (1,), "a cancelled lease is no failed attempt"
    assert database.execute("SELECT count(*) FROM leases WHERE lease_id LIKE 'eval%'").fetchone() == (0,)
    database.close()


def test_an_instance_that_is_killed_gives_its_tasks_back_and_training_goes_on(stage: Any) -> None:
    lane_gate = stage.directory / "lane-gate"
    stage.process.dataflow.eval.at_start = True
    stage.dataflow()
    for name in ("r0", "r1"):
        stage.raas(name, "--lane-gate", str(lane_gate))
    trainer = peers.Trainer(stage.url)
    peers.until(lambda: len(trainer.status().instances) == 2, 30, "both instances")
    assert trainer.ready().eval_at_start

    def both_work() -> bool:
        found = trainer.status().instances
        held = [peers.SyncClient(i.url, trainer.client.identity).call(RaaSAPI.leases, timeout_s=peers.WAIT_S).held for i in found]
        return all(any(lease.lane for lease in leases) for leases in held)

    peers.until(both_work, 30, "tasks on both instances")
    assert trainer.status().ledger.made == 0, "nothing is generated for training before it"
    edge = peers.until(lambda: waits(trainer, "dataflow:eval-0001", "raas:r0, raas:r1"), 30, "who runs them")
    assert 0 < edge.deadline_s <= 300.0
    stage.kill("r1")
    lane_gate.touch()
    (result,) = peers.until(lambda: results(trainer), 30, "the evaluation")
    assert (result.missing, result.n_tasks, result.metrics["avg@2"]) == (0, TASKS, 0.5)
    assert result.versions["default"].version == 0
    for _ in range(3):
        trainer.step()
    status = trainer.status()
    assert adds_up(status.ledger)
    assert status.ledger.trained == 3 * 8
    assert any("eval-0001: try 1 on r1 ended" in event for event in status.events)


def test_past_its_deadline_what_is_missing_is_said_and_training_goes_on(stage: Any) -> None:
    """Fault 13: the wait of an evaluation can loop for ever."""
    stage.process.dataflow.eval.deadline_s = 1.0
    stage.dataflow()
    stage.raas("r0", "--lane-gate", str(stage.directory / "never"))
    trainer = peers.Trainer(stage.url)
    trainer.ready()
    trainer.step(run_eval=True)
    (result,) = peers.until(lambda: results(trainer), 30, "the evaluation")
    assert (result.missing, result.metrics["avg@2"]) == (TASKS * N, 0.0)
    assert result.note == "not done within 1 s"
    trainer.step()
    trainer.step()
    assert adds_up(trainer.status().ledger)
    assert trainer.status().ledger.trained == 3 * 8


def test_a_killed_dataflow_holds_submission_again_until_its_evaluation_is_done(stage: Any) -> None:
    lane_gate = stage.directory / "lane-gate"
    stage.dataflow()
    stage.raas("r0", "--lane-gate", str(lane_gate))
    trainer = peers.Trainer(stage.url)
    trainer.ready()
    trainer.step(run_eval=True)
    stage.kill("dataflow")
    stage.dataflow()
    peers.until(lambda: waits(trainer, "dataflow:submit", "dataflow:eval-0001"), 30, "submission is held")
    lane_gate.touch()
    (result,) = peers.until(lambda: results(trainer), 30, "the evaluation")
    assert (result.missing, result.versions["default"].version) == (0, 1)
    trainer.step()
    assert adds_up(trainer.status().ledger)
