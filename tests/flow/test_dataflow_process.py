"""A real Dataflow process between scripted rollout services and a trainer that speak the routes."""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from astraflow.datasets.config import ValidDatasetConfig
from astraflow.protocol import codec, control
from astraflow.protocol.errors import ConfigError, Conflict, Replaced, Unavailable
from astraflow.protocol.routes import DataflowAPI

_spec = importlib.util.spec_from_file_location("peers", Path(__file__).with_name("peers.py"))
assert _spec is not None
assert _spec.loader is not None
peers: Any = importlib.util.module_from_spec(_spec)
sys.modules["peers"] = peers
_spec.loader.exec_module(peers)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Any]:
    with peers.staged(tmp_path) as made:
        yield made


def adds_up(ledger: control.LedgerCounts) -> bool:
    return ledger.made == ledger.trained + sum(ledger.dropped.values()) + sum(ledger.in_flight.values())


def test_batches_flow_and_the_same_name_is_the_same_bytes(stage: Any) -> None:
    stage.dataflow()
    stage.raas("r0", "--lose-every", "3")
    trainer = peers.Trainer(stage.url)
    assert trainer.ready(digest="first").timeline == 0
    for _ in range(5):
        first = trainer.batch()
        assert first.kind == "batch"
        again = trainer.ask()
        assert codec.encode(first.batch) == codec.encode(again.batch)
        assert len(first.batch.group_ids) == 2
        trainer.seen += first.batch.trajectory_ids
        assert trainer.notify().trained == 8
    assert len(set(trainer.seen)) == 40, "a lost pull reply was delivered again, and nothing was trained twice"
    with pytest.raises(Conflict, match="is committed"):
        trainer.ask(version=2)
    status = trainer.status()
    assert adds_up(status.ledger)
    assert status.ledger.trained == 40
    assert sum(status.staleness["default"].values()) == 40
    assert max(status.staleness["default"]) <= 2
    trainer.shutdown()
    assert stage.children["dataflow"].wait(peers.WAIT_S) == 0
    assert stage.children["r0"].wait(peers.WAIT_S) == 0


def test_kill_of_dataflow_loses_nothing_and_serves_the_same_batch_again(stage: Any) -> None:
    stage.dataflow()
    stage.raas("r0")
    stage.raas("r1")
    trainer = peers.Trainer(stage.url)
    trainer.ready()
    for round_number in range(3):
        trainer.step()
        before = trainer.batch()
        stage.kill("dataflow")
        stage.dataflow()
        after = trainer.batch()
        assert codec.encode(before.batch) == codec.encode(after.batch), f"round {round_number}"
        trainer.step()
        trainer.step()
    assert len(set(trainer.seen)) == len(trainer.seen) == 9 * 8
    status = trainer.status()
    assert adds_up(status.ledger)
    assert status.ledger.trained == 9 * 8
    trainer.shutdown()
    assert stage.children["dataflow"].wait(peers.WAIT_S) == 0


def test_leases_of_a_dead_instance_run_elsewhere(stage: Any) -> None:
    stage.dataflow()
    stage.raas("slow", "--delay", "60")
    trainer = peers.Trainer(stage.url)
    trainer.ready()
    peers.until(lambda: any(i.in_flight for i in trainer.status().instances), peers.WAIT_S, "leases on the slow instance")
    stage.raas("r1")
    stage.kill("slow")
    for _ in range(3):
        trainer.step()
    peers.until(lambda: [i.instance_id for i in trainer.status().instances] == ["r1"], peers.WAIT_S, "the dead instance is out")
    status = trainer.status()
    assert any("slow is out of the pool" in event for event in status.events)
    assert adds_up(status.ledger)
    assert "max_attempts" not in status.ledger.dropped


def test_a_trainer_that_comes_back_lower_gets_a_new_timeline_and_its_rows_again(stage: Any) -> None:
    stage.dataflow()
    stage.raas("r0")
    trainer = peers.Trainer(stage.url)
    trainer.ready()
    trainer.step()
    trainer.step()
    trainer.batch()
    second = peers.Trainer(stage.url)
    assert second.ready(recovered=1).timeline == 1
    for call in (trainer.ask, trainer.notify, trainer.shutdown):
        with pytest.raises(Replaced, match="has taken its place"):
            call()
    second.timeline = 0
    assert second.ask().kind == "stale_timeline"
    with pytest.raises(Conflict, match="timeline 0 is dead"):
        second.notify()
    second.timeline = 1
    second.step()
    second.step()
    assert len(set(second.seen)) == 16
    assert not set(second.seen) & set(trainer.seen[:8]), "batch 0 is part of version 1 and is not trained again"
    status = second.status()
    assert adds_up(status.ledger)
    assert status.ledger.trained == 24


def test_one_epoch_ends_with_a_partial_batch_and_then_says_so(stage: Any) -> None:
    stage.process.train_dataset.repeat = 1
    stage.dataflow(n_tasks=7)
    stage.raas("r0")
    trainer = peers.Trainer(stage.url, batch_size=16)
    trainer.ready()
    assert [len(trainer.step().batch.group_ids) for _ in range(2)] == [4, 3]
    assert trainer.batch().kind == "end_of_data"
    assert trainer.status().ledger.trained == 28


def test_rejected_groups_end_in_a_starvation_report_and_shutdown_works(stage: Any) -> None:
    stage.process.dataflow.policies.filter = "filter_zero_adv"
    stage.process.dataflow.buffer.max_rejected_groups = 20
    stage.dataflow()
    stage.raas("r0", "--reward", "zero")
    trainer = peers.Trainer(stage.url)
    trainer.ready()
    reply = trainer.batch()
    assert reply.kind == "starved"
    assert reply.counts["dropped/zero_variance"] >= 20
    drawn = trainer.status().tasks_drawn
    peers.until(lambda: trainer.status().tasks_drawn > drawn, peers.WAIT_S, "new prompts are drawn all the same")
    assert adds_up(trainer.status().ledger)
    trainer.shutdown()
    assert stage.children["dataflow"].wait(peers.WAIT_S) == 0


def test_two_policies_advance_together(stage: Any) -> None:
    stage.process.models = ["solver", "checker"]
    stage.dataflow()
    stage.raas("r0", "--policies", "solver,checker")
    solver, checker = (peers.Trainer(stage.url, model_id=name) for name in ("solver", "checker"))
    solver.ready()
    assert solver.ask(wait_s=0.3).waits[0].waits_for == "trainer:checker"
    checker.ready()
    for _ in range(3):
        solver.step()
        reply = solver.ask(wait_s=0.3)
        assert reply.kind == "wait"
        assert reply.waits[0].waits_for == "trainer:checker"
        checker.step()
    assert adds_up(solver.status().ledger)
    solver.shutdown()
    checker.shutdown()
    assert stage.children["dataflow"].wait(peers.WAIT_S) == 0


def test_evaluations_run_in_a_pinned_lane_and_never_reach_the_buffer(stage: Any) -> None:
    stage.process.valid_datasets = {"heldout": ValidDatasetConfig(n_samples=2)}
    stage.process.dataflow.eval.at_start = True
    stage.dataflow()
    stage.raas("r0")
    trainer = peers.Trainer(stage.url)
    assert trainer.ready().eval_at_start
    trainer.step()
    trainer.step(run_eval=True)
    trainer.step()

    def results() -> Any:
        reply = trainer.client.call(DataflowAPI.eval_results, control.EvalResultsRequest(wait_s=1.0), timeout_s=peers.WAIT_S)
        return reply.results if not reply.running else None

    first, second = peers.until(results, peers.WAIT_S, "two evaluations")
    assert first.versions["default"].version == 0
    assert second.versions["default"].version in (2, 3)
    assert first.metrics["avg@2"] == 0.5
    assert first.metrics["pass@2"] == 1.0
    assert first.metrics["pass@4"] is None
    assert first.missing == 0
    assert not any(name.startswith("eval") for name in trainer.seen)


def test_a_url_that_does_not_answer_is_refused_in_one_line(stage: Any) -> None:
    stage.dataflow()
    trainer = peers.Trainer(stage.url)
    trainer.status()
    request = control.RegisterRaaS(instance_id="ghost", url="http://127.0.0.1:9", models=["default"], total_slots=8)
    for error in (Unavailable, Unavailable, ConfigError):
        with pytest.raises(error, match=r"url: http://127.0.0.1:9 .* does not answer"):
            trainer.client.call(DataflowAPI.register_raas, request, timeout_s=peers.WAIT_S)
    assert msgspec.json.encode(trainer.client.call(DataflowAPI.raas_pool, timeout_s=peers.WAIT_S).instances) == b"[]"


def test_an_instance_that_freezes_inside_an_evaluation_is_replaced_and_dataflow_lives(stage: Any) -> None:
    stage.process.valid_datasets = {"heldout": ValidDatasetConfig(n_samples=2)}
    stage.process.dataflow.eval.at_start = True
    stage.process.dataflow.pool.status_timeout_s = 1.0
    stage.dataflow()
    frozen = stage.raas("r0", "--delay", "60")
    trainer = peers.Trainer(stage.url)
    trainer.ready()
    raas = peers.SyncClient(peers.until(lambda: trainer.status().instances, peers.WAIT_S, "an instance")[0].url, trainer.client.identity)
    peers.until(lambda: raas.call(peers.RaaSAPI.status, timeout_s=peers.WAIT_S).lanes, peers.WAIT_S, "an open lane")
    frozen.send_signal(signal.SIGSTOP)
    stage.raas("r1")
    peers.until(lambda: [i.instance_id for i in trainer.status().instances] == ["r1"], peers.WAIT_S, "the frozen instance is out")
    request = control.EvalResultsRequest(wait_s=1.0)
    results = lambda: trainer.client.call(DataflowAPI.eval_results, request, timeout_s=peers.WAIT_S).results  # noqa: E731
    (result,) = peers.until(results, peers.WAIT_S, "its result")
    assert result.missing == 0
    assert stage.children["dataflow"].poll() is None
    trainer.step()


def test_what_an_instance_drops_at_a_rollback_runs_again_without_waiting_for_a_heartbeat(stage: Any) -> None:
    stage.process.dataflow.pool.heartbeat_s = 600.0
    stage.dataflow()
    gate = stage.directory / "gate"
    gate.touch()
    stage.raas("r0", "--gate", str(gate))
    trainer = peers.Trainer(stage.url)
    trainer.ready()
    trainer.step()
    peers.until(lambda: trainer.status().ledger.in_flight["buffered"] >= 16, peers.WAIT_S, "two more batches")
    gate.unlink()
    trainer.step()
    raas = peers.SyncClient(trainer.status().instances[0].url, trainer.client.identity)
    held = lambda: raas.call(peers.RaaSAPI.status, timeout_s=peers.WAIT_S).availability.in_flight  # noqa: E731
    peers.until(held, peers.WAIT_S, "leases of the timeline that dies")
    second = peers.Trainer(stage.url)
    assert second.ready(recovered=0).timeline == 1
    gate.touch()
    second.step()
    second.step()
    peers.until(lambda: any("does not hold them" in event for event in second.status().events), peers.WAIT_S, "its leases are missed")
    assert adds_up(second.status().ledger)


def test_sigterm_leaves_the_run_as_it_is_and_the_next_process_goes_on(stage: Any) -> None:
    stage.dataflow()
    raas = stage.raas("r0")
    trainer = peers.Trainer(stage.url)
    trainer.ready()
    trainer.step()
    before = trainer.batch()
    child = stage.children["dataflow"]
    child.terminate()
    assert child.wait(peers.WAIT_S) == 0
    assert raas.poll() is None, "instances are told to end by /shutdown only"
    stage.dataflow()
    assert codec.encode(trainer.batch().batch) == codec.encode(before.batch)
    trainer.step()
    assert len(set(trainer.seen)) == len(trainer.seen) == 16


def test_an_evaluation_that_a_kill_interrupts_is_run_again_and_reported_once(stage: Any) -> None:
    stage.process.valid_datasets = {"heldout": ValidDatasetConfig(n_samples=2)}
    stage.process.dataflow.eval.at_start = True
    stage.dataflow()
    gate = stage.directory / "gate"
    stage.raas("r0", "--lane-gate", str(gate))
    trainer = peers.Trainer(stage.url)
    trainer.ready()
    raas = peers.SyncClient(peers.until(lambda: trainer.status().instances, peers.WAIT_S, "an instance")[0].url, trainer.client.identity)
    peers.until(lambda: raas.call(peers.RaaSAPI.status, timeout_s=peers.WAIT_S).lanes, peers.WAIT_S, "an open lane")
    stage.kill("dataflow")
    gate.touch()
    stage.dataflow()
    trainer.step()
    request = control.EvalResultsRequest(wait_s=1.0)
    ask = lambda: trainer.client.call(DataflowAPI.eval_results, request, timeout_s=peers.WAIT_S)  # noqa: E731
    peers.until(lambda: not ask().running, peers.WAIT_S, "the evaluation")
    assert [(r.dataset, r.missing) for r in ask().results] == [("heldout", 0)]
    assert adds_up(trainer.status().ledger)


def test_both_policies_find_their_batches_again_after_a_kill(stage: Any) -> None:
    stage.process.models = ["solver", "checker"]
    stage.dataflow()
    stage.raas("r0", "--policies", "solver,checker")
    solver, checker = (peers.Trainer(stage.url, model_id=name) for name in ("solver", "checker"))
    solver.ready()
    checker.ready()
    solver.step()
    before = checker.batch()
    stage.kill("dataflow")
    stage.dataflow()
    assert codec.encode(checker.batch().batch) == codec.encode(before.batch)
    for _ in range(2):
        checker.step()
        solver.step()
    status = solver.status()
    assert adds_up(status.ledger)
    assert status.ledger.trained == 8 * 5


def test_status_is_json_for_whoever_asks_plainly(stage: Any) -> None:
    stage.dataflow()
    stage.raas("r0")
    trainer = peers.Trainer(stage.url)
    trainer.ready()
    trainer.step()
    with urllib.request.urlopen(f"{stage.url}/status", timeout=peers.WAIT_S) as reply:
        status = json.loads(reply.read())
    assert status["ledger"]["trained"] == 8
    assert status["staleness"]["default"] == {"0": 8}
    assert status["trainers"][0]["version"] == 1


def test_a_trainer_that_was_replaced_stays_out_over_a_restart_and_the_other_goes_on(stage: Any) -> None:
    stage.dataflow()
    stage.raas("r0")
    zombie, heir = peers.Trainer(stage.url), peers.Trainer(stage.url)
    zombie.ready()
    zombie.step()
    zombie.batch()
    assert heir.ready(recovered=1, digest="default-0-1").timeline == 0, "the same version with the same bytes: the same timeline"
    heir.step()
    stage.kill("dataflow")
    stage.dataflow()
    with pytest.raises(Replaced, match=f"process {zombie.client.identity.incarnation}, but process {heir.client.identity.incarnation}"):
        zombie.patiently(zombie.ask)
    heir.step()
    status = heir.status()
    assert (status.trainers[0].version, status.ledger.trained) == (3, 24)
    assert adds_up(status.ledger)


def test_a_trainer_that_is_done_is_told_when_the_others_are(stage: Any) -> None:
    stage.process.models = ["solver", "checker"]
    stage.dataflow()
    stage.raas("r0", "--policies", "solver,checker")
    solver, checker = (peers.Trainer(stage.url, model_id=name) for name in ("solver", "checker"))
    solver.ready()
    checker.ready()
    solver.step()
    checker.step()

    def stay(wait_s: float) -> control.ShutdownReply:
        request = control.Shutdown(model_id="solver", wait_s=wait_s)
        return solver.client.call(DataflowAPI.shutdown, request, timeout_s=40.0)

    reply = stay(0.1)
    assert (reply.run_ended, reply.waits_for) == (False, ["checker"])
    stage.raas("late", "--policies", "solver,checker")
    live = lambda: {i.instance_id for i in checker.status().instances if i.state == "live"} == {"r0", "late"}  # noqa: E731
    peers.until(live, 20, "an instance that joins now is brought to the weights of both")
    checker.step()
    with ThreadPoolExecutor(1) as threads:
        ended = threads.submit(stay, 30.0)
        checker.shutdown()
        assert ended.result(30).run_ended
    assert stage.children["dataflow"].wait(20) == 0


def test_a_version_without_its_batch_is_believed_and_said(stage: Any) -> None:
    stage.dataflow()
    stage.raas("r0")
    trainer = peers.Trainer(stage.url)
    trainer.ready()
    trainer.step()
    trainer.batch()
    trainer.version = 2  # version 2 was published, and nobody was told; now version 3 is
    assert trainer.notify().trained == 8, "the batch that was served is part of it"
    status = trainer.status()
    assert (status.trainers[0].version, status.service_version) == (3, 3)
    assert status.metrics["rollout/versions_without_batch"] == 1
    assert any("went from version 1 to 3" in event for event in status.events)
    reply = trainer.step()
    assert reply.batch.version == 3
    assert adds_up(trainer.status().ledger)
    assert trainer.status().ledger.trained == 24
