"""Which instance an evaluation takes, and what it holds back."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from astraflow.dataflow.eval_run import EvalJob, EvalSet
from astraflow.dataflow.evals import AT_START, MAX_QUEUED, EvalManager
from astraflow.datasets.api import Task
from astraflow.protocol.control import RegisterRaaS
from astraflow.protocol.rollout import Serving

_spec = importlib.util.spec_from_file_location("dataflow_bench", Path(__file__).with_name("bench.py"))
assert _spec is not None
assert _spec.loader is not None
_bench: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_bench)
Bench, run = _bench.Bench, _bench.run


def at(version: int, timeline: int = 0) -> dict[str, Serving]:
    return {"m": Serving(timeline=timeline, version=version, digest=f"d{version}")}


async def managed(path: Path) -> tuple[Any, EvalManager]:
    bench = await Bench(path).start()
    return bench, EvalManager(bench.shelf, bench.service.fleet, [EvalSet("heldout", [Task("t", {})], 1, "w", None)], lambda model_id: False)


def test_versions_that_nobody_serves_any_more_are_out_of_reach_and_those_still_sent_are_not(tmp_path: Path) -> None:
    async def scene() -> None:
        bench, evals = await managed(tmp_path)
        for version in (1, 2):
            await bench.train(version)
        bench.serves(1)
        assert [(c.instance_id, c.exact) for c in evals.pins.candidates(at(1))] == [("r", True)]
        assert [(c.instance_id, c.exact) for c in evals.pins.candidates(at(2))] == [("r", False)], "it can still get there"
        assert not evals.pins.candidates(at(0)), "it moved on, and the sender keeps two versions"
        bench.serves(2)
        assert not evals.pins.candidates(at(1))
        assert evals.pins.usable == ["r"]
        bench.shelf.pool.suspect("r", "test")
        assert evals.pins.usable == [], "nobody is there: it waits"
        bench.close()

    run(scene)


def test_an_evaluation_pins_one_instance_and_only_one(tmp_path: Path) -> None:
    async def scene() -> None:
        bench, evals = await managed(tmp_path)
        bench.shelf.pool.register(RegisterRaaS(instance_id="s", url="http://s", models=["m"], total_slots=128, incarnation="one"), 0.0)
        bench.service.fleet.receipts("s", at(0))
        bench.shelf.pool.catch_up(lambda instance: True)
        await evals.request("first")
        assert bench.service.fleet.pins == {"s": at(0)}, "most free slots"
        await bench.train(1)
        bench.service.fleet.receipts("r", at(1))
        evals.queue = [EvalJob(eval_id="e", wanted=at(1), why="step 1", step=1)]
        evals._turn()
        assert bench.service.fleet.pins == {"r": at(1)}, "s is free to go on"
        assert not bench.service.fleet.behind("r", "m")
        assert bench.service.fleet.behind("s", "m")
        bench.close()

    run(scene)


def test_the_same_question_is_the_same_evaluation_also_after_a_restart(tmp_path: Path) -> None:
    async def scene() -> None:
        bench, evals = await managed(tmp_path)
        asked = await evals.request("step 4", 4)
        assert await evals.request("step 4", 4) == asked
        again = EvalManager(bench.shelf, bench.service.fleet, evals._sets, lambda model_id: False)
        again.restore([], bench.shelf.ledger.recover().meta)
        assert [job.eval_id for job in again.queue] == [asked]
        assert await again.request("step 4", 4) == asked
        assert await again.request("step 5", 5) != asked
        bench.close()

    run(scene)


def test_the_evaluation_at_the_start_is_made_once_however_many_come_after_it(tmp_path: Path) -> None:
    async def scene() -> None:
        bench, evals = await managed(tmp_path)
        assert await evals.request(AT_START)
        for step in range(2 * MAX_QUEUED):
            evals.queue.clear()
            await evals.request(f"step {step}", step)
        assert await evals.request(AT_START) == "", "each trainer that comes back asks for it"
        bench.close()

    run(scene)
