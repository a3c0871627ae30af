"""Every wait of Dataflow has a name, an age and a deadline, and what moves a run is told apart from what does not."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import msgspec
import pytest

from astraflow.dataflow.stall import StallReport, roots
from astraflow.dataflow.stall_guard import StallGuard
from astraflow.dataflow.waits import WaitBook
from astraflow.lib.aio import Waits
from astraflow.protocol.batch import WaitEdge
from astraflow.protocol.control import EvalResult, RegisterRaaS

_spec = importlib.util.spec_from_file_location("dataflow_bench_waits", Path(__file__).with_name("bench.py"))
assert _spec is not None
assert _spec.loader is not None
_bench: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_bench)
Bench, run, until = _bench.Bench, _bench.run, _bench.until


class Scene:
    """A bench under a clock of its own."""

    def __init__(self, tmp_path: Path, **options: Any) -> None:
        self.now = 1000.0
        self.bench = Bench(tmp_path, **options)
        service, shelf = self.bench.service, self.bench.shelf
        shelf.clock, shelf.waits = self.clock, Waits(self.clock)
        self.book = WaitBook(shelf, service.fleet, service.intake, service.serving, service.evals)
        self.guard = StallGuard(shelf, self.book)
        service.fleet._introduced["r"] = "one"

    def clock(self) -> float:
        return self.now

    def edges(self) -> dict[tuple[str, str], WaitEdge]:
        return {(edge.who, edge.waits_for): edge for edge in self.guard.edges()}

    async def submits(self) -> None:
        """Let the submit loop come to its wait."""
        task = asyncio.ensure_future(self.bench.service.acquisition.submit_loop())
        await until(lambda: any(edge.who == "dataflow:submit" for edge in self.bench.shelf.waits.edges()), "the submit loop waits")
        task.cancel()


def test_before_the_start_submission_waits_for_the_trainers_that_are_missing(tmp_path: Path) -> None:
    async def scene() -> None:
        stage = Scene(tmp_path, change=lambda p: setattr(p, "models", ["a", "b"]))
        await stage.submits()
        assert ("dataflow:submit", "trainer:a, trainer:b") in stage.edges()
        stage.bench.close()

    run(scene)


def test_leases_that_run_are_waited_for_since_they_were_given_out(tmp_path: Path) -> None:
    async def scene() -> None:
        stage = Scene(tmp_path)
        await stage.bench.start()
        await stage.bench.lease()
        stage.now += 31.0
        await stage.bench.ask(0)
        edges = stage.edges()
        assert edges["groups", "raas:r"].since_s == 31.0
        assert edges["groups", "raas:r"].deadline_s == stage.bench.service.process.dataflow.pool.lease_deadline_s - 31.0
        assert edges["groups", "raas:r"].why == "6 leases run there, 6 of them not confirmed"
        assert ("trainer:m", "groups") in edges
        assert edges["trainer:m", "groups"].deadline_s == 3600.0 - stage.guard.idle_s, "without one of its own: that of the run"
        await stage.submits()
        assert [(edge.who, edge.waits_for) for edge in roots(stage.guard.edges())] == [("groups", "raas:r")]
        stage.bench.close()

    run(scene)


def test_a_trainer_that_has_a_batch_and_says_nothing_is_named_with_what_it_has(tmp_path: Path) -> None:
    async def scene() -> None:
        stage = Scene(tmp_path)
        await stage.bench.start()
        for lease_id in await stage.bench.lease():
            await stage.bench.deliver(lease_id, [0.0, 1.0])
        assert (await stage.bench.ask(0)).kind == "batch"
        stage.now += 100.0
        await stage.submits()
        edge = stage.edges()["batch:m", "trainer:m"]
        assert (edge.since_s, edge.deadline_s) == (100.0, 900.0 - 100.0)
        assert "has the batch of version 0" in edge.why
        found = [(one.who, one.waits_for) for one in roots(stage.guard.edges())]
        assert ("batch:m", "trainer:m") in found
        assert {waits_for for _, waits_for in found} == {"trainer:m"}
        stage.bench.close()

    run(scene)


def test_a_wait_keeps_its_age_over_the_polls_of_a_trainer_and_ends_with_them(tmp_path: Path) -> None:
    async def scene() -> None:
        stage = Scene(tmp_path)
        await stage.bench.start()
        for _ in range(5):
            await stage.bench.ask(0)
            stage.now += 2.0
        assert stage.edges()["trainer:m", "groups"].since_s == 10.0
        stage.now += 60.0  # it does not ask any more: now it is waited for
        assert ("trainer:m", "groups") not in stage.edges()
        assert stage.edges()["batch:m", "trainer:m"].since_s == 62.0
        stage.bench.close()

    run(scene)


def test_held_groups_leases_without_an_instance_and_late_loads_are_waits(tmp_path: Path) -> None:
    async def scene() -> None:
        stage = Scene(tmp_path)
        bench = await stage.bench.start()
        first, *_ = await bench.lease()
        await bench.train(1)
        edges = stage.edges()
        assert edges["dataflow:notify m", "raas:r"].why == "told to load version 1 of m, serves version 0"
        assert ("raas", "raas:r") not in edges, "nobody waits for an instance"
        bench.shelf.waits.note("dataflow:submit", "raas", "no instance has a free place for a group")
        assert stage.edges()["raas", "raas:r"].why == edges["dataflow:notify m", "raas:r"].why
        bench.shelf.pool.remove("r")
        await bench.service.acquisition.lost(list(bench.shelf.pool.instances.values()), "gone")
        bench.shelf.leases.requeue(first)
        assert stage.edges()["groups", "raas"].why == "leases are to be issued again"
        bench.shelf.leases.pending.clear()
        bench.shelf.pool.register(RegisterRaaS(instance_id="r", url="http://r", models=["m"], total_slots=64, incarnation="one"), stage.now)
        bench.serves(1, digest="other bytes")
        await bench.deliver(first, [0.0, 1.0], version=1)
        stage.now += 12.0
        held = stage.edges()["groups", "raas:r"]
        assert (held.since_s, held.deadline_s) == (12.0, 60.0 - 12.0)
        assert held.why == "1 groups of m wait for the receipt of their weights"
        bench.close()

    run(scene)


def test_a_disk_that_does_not_answer_is_a_wait_and_status_answers_all_the_same(tmp_path: Path) -> None:
    async def scene() -> None:
        stage = Scene(tmp_path)
        bench = await stage.bench.start()
        with bench.slow_disk():
            await until(bench.shelf.writing, "the ledger's thread is busy")
            stage.now += 7.0
            edge = stage.edges()["groups", "disk"]
            assert (edge.since_s, edge.why) == (7.0, "the ledger's call 'wait' has not returned")
            assert bench.service._handlers.now().ledger == bench.shelf.ledger.snapshot
        await until(lambda: not bench.shelf.writing(), "it answers again")
        bench.close()

    run(scene)


def test_a_suspect_is_what_the_pool_waits_for_since_it_was_heard_of_last(tmp_path: Path) -> None:
    async def scene() -> None:
        stage = Scene(tmp_path)
        bench = await stage.bench.start()
        bench.shelf.pool.instances["r"].last_seen = stage.now
        bench.shelf.pool.suspect("r", "pull: refused")
        stage.now += 9.0
        edge = stage.edges()["dataflow:heartbeat", "raas:r"]
        assert edge.since_s == 9.0
        assert edge.why == "suspect, 0 of 2 heartbeats failed: pull: refused"
        await stage.submits()
        stage.now += 5.0
        stage.guard.edges()
        assert stage.edges()["dataflow:submit", "raas"].since_s == 5.0
        assert ("raas", "raas:r") in [(one.who, one.waits_for) for one in roots(stage.guard.edges())]
        bench.close()

    run(scene)


def test_a_wait_that_ended_by_a_lease_and_comes_back_is_a_new_one(tmp_path: Path) -> None:
    async def scene() -> None:
        stage = Scene(tmp_path)
        await stage.bench.start()
        assert stage.edges()["groups", "dataflow:submit"].since_s == 0.0
        stage.now += 4.0
        assert stage.edges()["groups", "dataflow:submit"].since_s == 4.0
        await stage.bench.lease()
        assert ("groups", "dataflow:submit") not in stage.edges()
        stage.now += 1.0
        for lease_id in list(stage.bench.shelf.leases.open):
            stage.bench.shelf.leases.close(lease_id)
        assert stage.edges()["groups", "dataflow:submit"].since_s == 0.0
        stage.bench.shelf.ledger.abandon([], "max_attempts")
        stage.bench.close()

    run(scene)


# --- what moves a run ---------------------------------------------------------------------------------------------------


def test_rows_versions_evaluations_and_joins_move_a_run_and_nothing_else_does(tmp_path: Path) -> None:
    async def scene() -> None:
        stage = Scene(tmp_path, change=lambda p: setattr(p.dataflow, "stall_s", 10.0))
        bench = await stage.bench.start()

        def idle_after(wait_s: float) -> float:
            stage.now += wait_s
            assert not stage.guard.look()
            return stage.guard.idle_s

        assert idle_after(1.0) == 0.0
        await bench.ask(0)  # a poll
        bench.serves(0)  # a receipt
        bench.shelf.event("talk")
        await bench.service.save()
        assert idle_after(3.0) == 3.0
        leases = await bench.lease()
        assert idle_after(3.0) == 0.0, "rows were leased"
        await bench.deliver(leases[0], [0.0, 1.0])
        assert idle_after(3.0) == 0.0, "a group came"
        await bench.deliver(leases[1], [None, None])
        assert idle_after(3.0) == 0.0, "a group was dropped"
        bench.shelf.pool.instances["r"].held.clear()
        bench.shelf.pool.remove("r")
        assert idle_after(3.0) == 3.0, "an instance left"
        bench.shelf.pool.register(RegisterRaaS(instance_id="r", url="http://r", models=["m"], total_slots=64, incarnation="one"), stage.now)
        assert idle_after(3.0) == 6.0, "the same process of it again"
        bench.shelf.pool.register(RegisterRaaS(instance_id="r", url="http://r", models=["m"], total_slots=64, incarnation="two"), stage.now)
        assert idle_after(3.0) == 0.0, "a new one"
        await bench.train(1)
        assert idle_after(3.0) == 0.0, "a version moved"
        result = EvalResult(
            eval_id="e", dataset="d", versions={}, n_tasks=1, n_samples=1, missing=0, metrics={"avg@1": 1.0}, duration_s=1.0
        )
        bench.service.evals.results.append(result)
        assert idle_after(3.0) == 0.0, "an evaluation gave a result"
        assert idle_after(9.5) == 9.5
        stage.now += 0.5
        assert stage.guard.look(), "ten seconds without any of it"
        bench.close()

    run(scene)


def test_a_slow_run_that_moves_outlives_any_limit(tmp_path: Path) -> None:
    """A group every 0.9 limits: the run takes ten times the limit and is never called stalled."""

    async def scene() -> None:
        stage = Scene(tmp_path, change=lambda p: setattr(p.dataflow, "stall_s", 100.0))
        bench = await stage.bench.start()
        bench.shelf.process.dataflow.pool.trainer_deadline_s = 1e9
        begun, version, queue = stage.now, 0, await bench.lease()
        while stage.now - begun < 1000.0:
            stage.now += 90.0
            assert not stage.guard.look()
            await bench.deliver(queue.pop(0), [0.0, 1.0], version=version)
            if (await bench.ask(version)).kind == "batch":
                version += 1
                await bench.train(version)
                bench.serves(version)
            queue += await bench.lease()
        assert version >= 5
        bench.close()

    run(scene)


def test_an_empty_pool_ends_the_run_with_3_and_a_report_that_says_so(tmp_path: Path) -> None:
    """The whole service with its sockets; a trainer is ready and waits, and no instance ever joins."""

    async def scene() -> None:
        bench = Bench(tmp_path, change=lambda p: setattr(p.dataflow, "stall_s", 1.5))
        reply = await bench.service.trainers.ready(
            _bench.Ready(model_id="m", train_batch_size=4, sender_endpoint="", version=0, digest="d0", recovered_version=0)
        )
        bench.timeline = reply.timeline
        (tmp_path / "stall.json").write_text("of an earlier life")
        asked = asyncio.ensure_future(bench.ask(0, wait_s=19.0))
        assert await bench.service.run() == 3
        answer = await asked
        assert answer.kind == "stalled"
        report = msgspec.json.decode((tmp_path / "stall.json").read_bytes(), type=StallReport)
        assert answer.reason == report.summary
        assert [(edge.who, edge.waits_for) for edge in report.roots] == [("dataflow:submit", "raas")]
        assert "no live instance at the current versions (0 registered)" in report.roots[0].why
        chain = report.chains[0]
        assert [(edge.who, edge.waits_for) for edge in chain] == [
            ("trainer:m", "groups"), ("groups", "dataflow:submit"), ("dataflow:submit", "raas"),
        ]  # fmt: skip
        assert report.idle_s >= report.stall_s == 1.5
        assert (tmp_path / "stall.txt").read_text().startswith(report.summary)
        assert report.status.trainers[0].state == "live"

    run(scene)


def test_a_run_without_a_limit_has_no_deadline_for_its_waits(tmp_path: Path) -> None:
    async def scene() -> None:
        stage = Scene(tmp_path, change=lambda p: setattr(p.dataflow, "stall_s", None))
        await stage.bench.start()
        stage.now += 1e6
        assert not stage.guard.look()
        assert stage.edges()["groups", "dataflow:submit"].deadline_s is None
        assert stage.bench.service._handlers.now().stall_s is None
        stage.bench.close()

    run(scene)


@pytest.mark.parametrize("limit", [1.0, 3600.0])
def test_status_says_how_long_nothing_moved_and_when_that_is_a_stall(tmp_path: Path, limit: float) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path, change=lambda p: setattr(p.dataflow, "stall_s", limit)).start()
        status = bench.service._handlers.now()
        assert status.stall_s == limit
        assert status.idle_s >= 0.0
        bench.close()

    run(scene)
