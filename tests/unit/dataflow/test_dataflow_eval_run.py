"""Synchronous evaluations step by step, on a service without sockets and with the test's own clock: the barrier, the hold, the reset,
and that nothing of an evaluation can enter a training queue."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astraflow.dataflow.config import WorkflowConfig
from astraflow.dataflow.eval_lane import reset
from astraflow.dataflow.eval_run import EvalJob, EvalRun, EvalSet
from astraflow.dataflow.evals import EvalManager
from astraflow.dataflow.service import workflows
from astraflow.datasets.api import Task
from astraflow.datasets.config import ValidDatasetConfig
from astraflow.protocol import codec
from astraflow.protocol.control import NotifyVersion, Ready, RegisterRaaS
from astraflow.protocol.errors import ConfigError, DeadlinePassed, Unavailable
from astraflow.protocol.rollout import Delivery, HeldLease, Leases, ResetEngineReply, Serving

_spec = importlib.util.spec_from_file_location("dataflow_bench", Path(__file__).with_name("bench.py"))
assert _spec is not None
assert _spec.loader is not None
_bench: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_bench)
Bench, run, until, made = _bench.Bench, _bench.run, _bench.until, _bench.made


def synchronous(process: Any) -> None:
    process.dataflow.eval.mode = "synchronous"


def both(process: Any) -> None:
    synchronous(process)
    process.models = ["m", "k"]


async def trainer(bench: Any, name: str, version: int = 0, recovered: int | None = None) -> None:
    message = Ready(model_id=name, train_batch_size=4, sender_endpoint="", version=version, digest=f"{name}{version}")
    message.recovered_version = recovered
    await bench.service.trainers.ready(message)


async def publish(bench: Any, name: str, version: int, run_eval: bool = False) -> str:
    state = bench.shelf.barrier.models[name]
    message = NotifyVersion(model_id=name, timeline=state.timeline, version=version, digest=f"{name}{version}", run_eval=run_eval)
    return str((await bench.service.trainers.notify(message)).eval_id)


def instance(bench: Any, name: str, **serving: int) -> None:
    bench.shelf.pool.register(RegisterRaaS(instance_id=name, url=f"http://{name}", models=["m", "k"], total_slots=64, incarnation="i"), 0.0)
    weights = {model: Serving(timeline=0, version=version, digest=f"{model}{version}") for model, version in serving.items()}
    bench.service.fleet.receipts(name, weights)
    bench.shelf.pool.catch_up(lambda one: True)


async def two_policies(path: Path, can_serve: Callable[[str], bool] = lambda model: True) -> tuple[Any, EvalManager, list[float]]:
    """Both trainers at version 0, two instances that serve it, and the clock in a list."""
    bench, now = Bench(path, change=both), [0.0]
    bench.shelf.clock = bench.shelf.waits._clock = lambda: now[0]
    for name in ("m", "k"):
        await trainer(bench, name)
    for name in ("r", "s"):
        instance(bench, name, m=0, k=0)
    evals = EvalManager(bench.shelf, bench.service.fleet, [EvalSet("heldout", [Task("t", {})], 1, "w", None)], can_serve)
    bench.service.trainers._request_eval = evals.request
    return bench, evals, now


def barrier(bench: Any, evals: EvalManager, end: float = 300.0) -> tuple[EvalRun, asyncio.Task[bool]]:
    found = EvalRun(bench.shelf, bench.service.fleet, evals._sets, evals.queue[0], evals.pins, evals._can_serve)
    return found, asyncio.ensure_future(found._all_reach(end))


def edge(bench: Any, who: str) -> tuple[str, float | None] | None:
    return next(((e.waits_for, e.deadline_s) for e in bench.shelf.waits.edges() if e.who == who), None)


def test_from_the_notice_on_nothing_is_submitted_and_the_version_is_held_everywhere(tmp_path: Path) -> None:
    async def scene() -> None:
        bench, evals, _ = await two_policies(tmp_path)
        plan = await bench.service.acquisition._plan()
        assert sum(len(rows) for rows in plan.values()) > 0
        leased = {row.lease_id for rows in plan.values() for row in rows}
        assert await publish(bench, "m", 1, run_eval=True) == "eval-0001"
        assert bench.shelf.held_for == "eval-0001"
        assert bench.service.fleet.pins == {
            name: {"m": Serving(timeline=0, version=1, digest="m1")} for name in ("r", "s")
        }, "k is brought to whatever it publishes, until that is version 1"
        for name, rows in plan.items():  # planned before, not sent yet
            bench.service.fleet._clients[name] = Scripted()
            await bench.service.acquisition._submit(name, rows)
        assert all(not one.held for one in bench.shelf.pool.instances.values())
        assert set(bench.shelf.leases.pending) == leased, "to be issued again afterwards"
        assert {bench.shelf.leases.open[key].attempt for key in leased} == {1}
        found, waiting = barrier(bench, evals)
        await until(lambda: edge(bench, "dataflow:eval-0001") == ("trainer:k", 300.0), "the barrier names whom it waits for")
        await publish(bench, "m", 2)  # it may go on with what is queued, and version 1 stays the one that is held
        assert await publish(bench, "k", 1, run_eval=True) == "eval-0001"
        assert await waiting
        assert bench.service.fleet.pins["r"] == {m: Serving(timeline=0, version=1, digest=f"{m}1") for m in ("m", "k")}
        assert found._notes == []
        evals._let_go()
        assert (bench.shelf.held_for, bench.service.fleet.pins) == ("", {})
        bench.close()

    run(scene)


def test_a_dead_trainer_leaves_the_barrier_and_a_slow_one_is_named_at_the_deadline(tmp_path: Path) -> None:
    async def scene() -> None:
        bench, evals, now = await two_policies(tmp_path)
        await publish(bench, "m", 1, run_eval=True)
        found, waiting = barrier(bench, evals)
        await until(lambda: edge(bench, "dataflow:eval-0001"), "it waits")
        now[0] = 299.0
        bench.shelf.pulse.fire()
        await until(lambda: edge(bench, "dataflow:eval-0001") == ("trainer:k", 1.0), "its age is kept, its deadline comes nearer")
        now[0] = 301.0
        assert await waiting
        assert found._notes == ["k did not reach version 1 in time"]
        assert evals.pins.wanted(1)["k"].version == 0, "evaluated at what it has, and labelled so"
        again, waiting = barrier(bench, evals, end=2000.0)
        now[0] = 1000.0
        bench.shelf.barrier.touch("m", now[0])
        assert bench.shelf.barrier.tick(now[0]) == ["k"]
        bench.shelf.pulse.fire()
        assert await waiting
        assert again._notes == []
        assert evals.pins.reached(1) == {"m": Serving(timeline=0, version=1, digest="m1"), "k": Serving(timeline=0, version=0, digest="k0")}
        bench.close()

    run(scene)


def test_a_version_whose_trainer_went_back_is_not_evaluated(tmp_path: Path) -> None:
    async def scene() -> None:
        bench, evals, _ = await two_policies(tmp_path)
        for version in (1, 2):
            await publish(bench, "m", version, run_eval=version == 2)
        found, waiting = barrier(bench, evals)
        await until(lambda: edge(bench, "dataflow:eval-0001"), "it waits")
        await trainer(bench, "m", 1, recovered=1)
        assert not await waiting
        assert await found.results() == []
        assert edge(bench, "dataflow:eval-0001") is None
        assert await publish(bench, "m", 2, run_eval=True) == "eval-0002", "asked for again on the new timeline"
        bench.close()

    run(scene)


def test_the_hold_never_starves_the_barrier_that_it_waits_for(tmp_path: Path) -> None:
    async def scene() -> None:
        served: set[str] = set()
        bench, evals, _ = await two_policies(tmp_path, can_serve=lambda model: model in served)
        plan = await bench.service.acquisition._plan()
        await publish(bench, "m", 1, run_eval=True)
        found, waiting = barrier(bench, evals)
        await until(lambda: edge(bench, "dataflow:eval-0001"), "it waits")
        assert bench.shelf.held_for == "eval-0001", "leases are out: what they bring may be k's batch"
        for name in plan:
            bench.shelf.pool.instances[name].held.clear()
        found._hold(["k"])
        assert bench.shelf.held_for == "", "nothing runs, and k has no batch: it needs new groups to get to version 1"
        served.add("k")
        found._hold(["k"])
        assert bench.shelf.held_for == "eval-0001", "its batch is there"
        waiting.cancel()
        bench.close()

    run(scene)


class Scripted:
    """A rollout service that answers with what the test says, call by call."""

    url = "http://scripted"

    def __init__(self, **answers: list[Any]) -> None:
        self._answers = answers
        self.calls: list[str] = []

    async def call(self, route: Any, request: Any = None, *, timeout_s: float, ref: str = "") -> Any:
        name = route.path.strip("/")
        self.calls.append(name)
        answer = self._answers[name].pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None:
        return None


def test_a_reset_whose_reply_is_lost_costs_no_attempt_and_no_lease(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path, change=synchronous).start()
        leases = await bench.lease()
        cancelled, finished = leases[:-1], leases[-1]
        there = Leases(
            held=[
                HeldLease(lease_id=finished, attempt=1, state="done"),
                HeldLease(lease_id="eval-0001.0~x-h-00000", attempt=1, state="running", lane="eval-0001.0~x"),
            ]
        )
        answers = [DeadlinePassed("the reply is lost"), ResetEngineReply(cancelled=[])]
        peer = Scripted(reset_training_engine=answers, leases=[there])
        bench.service.fleet._clients["r"] = peer
        assert await reset(bench.shelf, bench.service.fleet, "r") == len(cancelled) == 5
        assert peer.calls == ["reset_training_engine", "reset_training_engine", "leases"]
        assert list(bench.shelf.pool.instances["r"].held) == [finished], "what is finished is still handed out"
        assert list(bench.shelf.leases.pending) == cancelled
        assert {bench.shelf.leases.open[key].attempt for key in leases} == {1}
        assert bench.shelf.meter.counts["rollout/cancelled_leases"] == 5
        assert not bench.service.fleet.reconciling
        again = await bench.lease()
        assert again == cancelled, "the same leases, before any new one"
        await bench.deliver(again[0], [0.0, 1.0])
        assert len(bench.shelf.buffers["m"]) == 1
        bench.close()

    run(scene)


def test_a_reset_that_fails_leaves_the_books_as_they_are(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path, change=synchronous).start()
        leases = await bench.lease()
        bench.service.fleet._clients["r"] = Scripted(reset_training_engine=[Unavailable("gone")] * 3)
        with pytest.raises(Unavailable):
            await reset(bench.shelf, bench.service.fleet, "r")
        assert list(bench.shelf.pool.instances["r"].held) == leases
        assert not bench.shelf.leases.pending
        assert not bench.service.fleet.reconciling
        bench.service.fleet._clients.clear()
        with pytest.raises(Unavailable, match="r left"):
            await reset(bench.shelf, bench.service.fleet, "r")
        bench.close()

    run(scene)


def test_an_evaluation_can_not_enter_a_training_queue(tmp_path: Path) -> None:
    """A result of an evaluation that is delivered as training data is acknowledged, counted, and leaves no trace."""

    async def scene() -> None:
        bench = await Bench(tmp_path).start()
        (leased, *_) = await bench.lease()
        before = await bench.shelf.write(bench.shelf.ledger.counts)
        evals = EvalManager(bench.shelf, bench.service.fleet, [EvalSet("h", [Task("t", {})], 2, "w", None)], lambda model: True)
        job = EvalJob(eval_id="eval-0001", wanted={}, why="test")
        book = EvalRun(bench.shelf, bench.service.fleet, evals._sets, job, evals.pins, lambda model: True)._book(0)
        (lease_id,) = book.leases
        group = made.group([made.trajectory(0, 1.0), made.trajectory(1, 0.0)], lease_id)
        foreign = Delivery(delivery_id="d", lease_id=lease_id, attempt=1, group=codec.encode(group))
        assert await bench.service.intake.take("r", [foreign]) == ["d"], "acknowledged: it must not come again and again"
        assert bench.shelf.meter.counts["rollout/foreign_deliveries"] == 1
        assert len(bench.shelf.buffers["m"]) == 0
        assert not bench.service.intake.held
        assert await bench.shelf.write(bench.shelf.ledger.counts) == before
        assert lease_id not in bench.shelf.ledger.places
        book.take("r", 2, 1)
        assert not book.scored("r", leased, 1, [1.0, 1.0]), "nor does training data enter an evaluation"
        assert not any(key.startswith(bench.shelf.leases.prefix) for key in book.leases), "the names can not meet"
        bench.close()

    run(scene)


def test_rows_of_a_valid_set_with_the_same_prompt_are_one_task_and_greedy_needs_one_sample(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    process = bench.service.process
    process.valid_datasets = {"h": ValidDatasetConfig(n_samples=4)}
    rows = [Task("h:1", {"prompt": "a"}), Task("h:2", {"prompt": "b"}), Task("h:1", {"prompt": "a"})]
    _, _, (valid,) = workflows(process, {"h": rows})
    assert [task.task_id for task in valid.tasks] == ["h:1", "h:2"]
    process.eval_workflows = {"careful": WorkflowConfig(generation={"greedy": True})}
    process.valid_datasets = {"h": ValidDatasetConfig(n_samples=4, workflow="careful")}
    with pytest.raises(ConfigError, match=r"valid_datasets\.h\.n_samples: 4 with greedy decoding; expected 1"):
        process.validate()
    process.valid_datasets = {"h": ValidDatasetConfig(n_samples=1, workflow="careful")}
    process.validate()
    bench.close()


def test_an_instance_that_is_full_keeps_its_next_free_places_for_the_evaluation(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path).start()
        bench.shelf.reserved.add("r")
        assert await bench.lease() == []
        bench.shelf.reserved.discard("r")
        assert len(await bench.lease()) == 6
        bench.close()

    run(scene)
