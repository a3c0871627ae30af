"""What curators and the source know is durable: a kill at any point resumes with exactly the state that the ledger shows."""

from __future__ import annotations

import importlib.util
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.dataflow.admission import statistics
from astraflow.dataflow.config import DataflowProcess
from astraflow.dataflow.journal import LeaseRow, Result, ShareResult
from astraflow.dataflow.ledger import Ledger
from astraflow.dataflow.policies import CURATORS
from astraflow.dataflow.policies.base import GroupStats, build
from astraflow.dataflow.policies.curation import Curation
from astraflow.dataflow.source import SourceState, TaskSource
from astraflow.datasets.api import Task

_spec = importlib.util.spec_from_file_location("dataflow_bench", Path(__file__).with_name("bench.py"))
assert _spec is not None
assert _spec.loader is not None
_bench: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_bench)
Bench, run = _bench.Bench, _bench.run

MODELS = ("a", "b")
CHOICE: list[str | dict[str, Any]] = [
    {"name": "greso", "warmup_epochs": 1, "delta_p": 0.2},
    {"name": "filter_solved", "threshold": 0.8},
    {"name": "curriculum", "decay": 0.3},
]
DRAW = st.tuples(st.just("draw"), st.integers(1, 4))
GROUP = st.tuples(st.just("group"), st.lists(st.sampled_from([(1.0, 1.0), (0.0, 0.0), (0.0, 1.0)]), min_size=2, max_size=2))
VERSION = st.tuples(st.just("version"), st.sampled_from(MODELS))


def stats(task_id: str, rewards: tuple[float, ...]) -> GroupStats:
    values, (mean, std, equal) = dict(enumerate(rewards)), statistics(rewards)
    return GroupStats(
        task_id=task_id, n_samples=2, values=values, shaped=values, mean=mean, std=std, all_equal=equal,
        timeline=0, min_version=0, max_version=0, loss_tokens=4, lengths=dict.fromkeys(values, 2),
    )  # fmt: skip


class Life:
    """The parts that know something, from one start to the next kill. Five tasks, so that epochs end all the time."""

    def __init__(self, directory: Path) -> None:
        self.ledger = Ledger(directory, 1 << 20)
        found = self.ledger.recover()
        self.source = TaskSource([Task(f"t{i}", {}) for i in range(5)], seed=2)
        self.curation = Curation(build(CURATORS, "f", CHOICE), seed=2)
        self.curation.restore(found.meta, found.prompts)
        if "source" in found.meta:
            self.source.state = msgspec.msgpack.decode(found.meta["source"], type=SourceState)
        self.open = deque(found.leases)
        self.number = msgspec.msgpack.decode(found.meta.get("number", b"\x00"))
        self.versions: dict[str, int] = msgspec.msgpack.decode(found.meta.get("versions", b"\x80"))
        self.arrivals = found.arrivals

    def take(self, event: Any) -> None:
        """One event, with its one transaction."""
        if event[0] == "draw":
            self._issue(event[1])
        elif event[0] == "group" and self.open:
            self._record(self.open.popleft(), event[1])
        elif event[0] == "version":
            first = self.versions.get(event[1], 0)
            self.versions[event[1]] = first + 1
            meta = self.curation.moved(event[1], first + 1, self.source.state.epoch)
            meta["versions"] = msgspec.msgpack.encode(self.versions)
            self.ledger.commit(event[1], 0, first, first + 1, -1, set(), meta)

    def _issue(self, count: int) -> None:
        rows = []
        for _ in range(count):
            draw = self.source.draw(lambda task, number: self.curation.wants(MODELS, task, number))
            assert draw is not None
            rows.append(LeaseRow(f"g{self.number:04d}", draw.task.task_id, draw.index, draw.epoch, 2, 0, 1, "r", MODELS))
            self.number += 1
        meta = {"source": msgspec.msgpack.encode(self.source.state), "number": msgspec.msgpack.encode(self.number)}
        self.ledger.issue(rows, meta)
        self.open.extend(rows)

    def _record(self, lease: LeaseRow, rewards: list[tuple[float, ...]]) -> None:
        shares = []
        for model, values in zip(MODELS, rewards, strict=True):
            self.arrivals += 1
            one = stats(lease.task_id, values)
            self.curation.observe(model, one)
            shares.append(ShareResult(model, "dropped", "test", one, {}, self.arrivals))
        self.ledger.record([Result(lease.lease_id, 1, b"", shares)], self.curation.learned())

    def knows(self) -> Any:
        """Everything that decides on what comes next: what is written down, and what the living parts would do."""
        tables = self.ledger.recover()
        wanted = [[self.curation.wants([model], f"t{i}", number) for number in range(40)] for model in MODELS for i in range(5)]
        state = (self.curation.meta(), self.source.state, [lease.lease_id for lease in self.open], self.number, self.versions)
        return wanted, state, sorted((r.curator, r.policy, r.task_id, r.state) for r in tables.prompts), tables.meta


@settings(max_examples=25, deadline=None)
@given(st.lists(st.one_of(DRAW, GROUP, GROUP, VERSION), max_size=30), st.lists(st.integers(0, 30), max_size=4))
def test_lives_that_are_cut_anywhere_know_what_one_long_life_knows(events: list[Any], cuts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        whole = Life(Path(directory) / "whole")
        cut = [Life(Path(directory) / "cut")]
        for number, event in enumerate(events):
            for _ in range(cuts.count(number)):
                cut.append(Life(Path(directory) / "cut"))  # nothing of the life before was closed
            whole.take(event)
            cut[-1].take(event)
        cut.append(Life(Path(directory) / "cut"))
        assert cut[-1].knows() == whole.knows()
        for life in (whole, *cut):
            life.ledger.close()


def choose(choice: Any) -> Any:
    def change(process: DataflowProcess) -> None:
        process.dataflow.policies.curator = choice

    return change


def rewards_of(task_id: str) -> list[float]:
    return [[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]][int(task_id[1:]) % 3]


async def reopened(run_dir: Path, n_tasks: int, choice: Any, version: int) -> Any:
    """The service after a kill, with the trainer and the instance that outlived it."""
    bench = await Bench(run_dir, n_tasks, choose(choice)).start(version)
    bench.shelf.pool.answered("r", "one", 0.0)
    bench.serves(version)
    bench.shelf.pool.catch_up(lambda instance: True)
    return bench


async def three_steps(bench: Any, first: int) -> list[str]:
    """Drawn tasks of three steps, every group of a step delivered before its version."""
    drawn = []
    for version in range(first, first + 3):
        bench.serves(version)
        for lease_id in await bench.lease():
            task_id = bench.shelf.leases.open[lease_id].task_id
            drawn.append(task_id)
            await bench.deliver(lease_id, rewards_of(task_id), version=version)
        await bench.ask(version)
        await bench.train(version + 1)
    return drawn


@pytest.mark.parametrize("name", ["greso", "filter_solved", "curriculum"])
def test_a_killed_service_draws_the_tasks_that_it_would_have_drawn(tmp_path: Path, name: str) -> None:
    """Seven tasks and some twenty draws: the kill comes in another epoch than the start, and the next one is begun after it."""

    async def scene() -> None:
        option = {"name": name, "warmup_epochs": 0} if name == "greso" else name
        whole = await Bench(tmp_path / "whole", 7, choose(option)).start()
        cut = await Bench(tmp_path / "cut", 7, choose(option)).start()
        for bench in (whole, cut):
            await bench.service.save()
        drawn = [(await three_steps(bench, 0), bench.shelf.source.state) for bench in (whole, cut)]
        assert drawn[0] == drawn[1]
        cut.close()
        again = await reopened(tmp_path / "cut", 7, option, 3)
        assert again.service._curation.meta() == whole.service._curation.meta()
        assert again.shelf.source.state == whole.shelf.source.state
        assert await three_steps(again, 3) == await three_steps(whole, 3)
        assert again.shelf.source.state.epoch >= 2
        assert again.shelf.source.state == whole.shelf.source.state
        again.close()
        whole.close()

    run(scene)


def test_an_observation_and_what_it_taught_are_one_transaction(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path, change=choose("greso")).start()
        lease_id = (await bench.lease())[0]
        task_id = bench.shelf.leases.open[lease_id].task_id
        read = bench.shelf.ledger.recover
        with bench.slow_disk():
            arriving = _bench.asyncio.ensure_future(bench.deliver(lease_id, [1.0, 1.0]))
            await _bench.until(lambda: bench.shelf.recording, "the group is being written")
            assert read().prompts == [], "the curator has seen it, the ledger has not"
        await arriving
        assert [(row.policy, row.task_id, msgspec.msgpack.decode(row.state)) for row in read().prompts] == [("m", task_id, [1, "easy"])]
        assert msgspec.msgpack.decode(read().meta["curators"])["greso"]["m"]["groups"] == 1
        await bench.train(1)
        assert msgspec.msgpack.decode(read().meta["curators"])["greso"]["m"]["groups"] == 0
        bench.close()

    run(scene)


def test_a_version_that_ready_makes_up_for_moves_the_curators_once(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path, change=choose({"name": "greso", "warmup_epochs": 0})).start()
        await bench.service.save()
        for lease_id in (await bench.lease())[:2]:
            await bench.deliver(lease_id, [1.0, 1.0])
        assert (await bench.ask(0)).kind == "batch"
        bench.close()
        again = Bench(tmp_path, change=choose({"name": "greso", "warmup_epochs": 0}))
        await again.back(1, "d1")
        assert again.service._curation.meta()["curators"] == again.shelf.ledger.recover().meta["curators"]
        state = msgspec.msgpack.decode(again.service._curation.meta()["curators"])["greso"]["m"]
        assert (round(state["p"]["easy"], 9), round(state["p"]["hard"], 9), state["groups"]) == (0.49, 0.51, 0)
        await again.train(1)
        assert msgspec.msgpack.decode(again.service._curation.meta()["curators"])["greso"]["m"] == state, "the notice itself comes late"
        again.close()

    run(scene)


REFUSES = """
from astraflow.dataflow.policies.curate import AcceptAll

asked = 0

class Nothing(AcceptAll):
    def wants(self, policy, task_id, chance):
        global asked
        asked += 1
        return False
"""


def test_a_round_asks_a_curator_of_ones_own_a_bounded_number_of_times_and_goes_on_by_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "refuses_everything.py").write_text(REFUSES)
    monkeypatch.syspath_prepend(tmp_path)

    async def scene() -> None:
        def change(process: DataflowProcess) -> None:
            process.dataflow.policies.curator = "refuses_everything:Nothing"
            process.dataflow.buffer.treatment = "drop"

        bench = await Bench(tmp_path / "run", 1000, change).start()
        import refuses_everything  # type: ignore[import-not-found,unused-ignore]

        for rounds in (1, 2):
            leases = await bench.lease()
            assert len(leases) == 4, "1,024 asked, one forced after each 256"
            assert refuses_everything.asked == rounds * 1024
        numbers = bench.service._handlers.numbers()
        assert (numbers["rollout/curator_skipped"], numbers["rollout/curator_forced"]) == (2048.0, 8.0)
        bench.close()

    run(scene)


def test_what_another_curator_left_in_the_ledger_stays_there_and_is_not_read(tmp_path: Path) -> None:
    async def scene() -> None:
        for choice in ("greso", "filter_solved", "greso"):
            bench = await reopened(tmp_path, 100, choice, 0)
            await bench.service.save()
            await bench.lease()
            await bench.deliver(min(bench.shelf.leases.open), [1.0, 1.0])
            bench.close()
        left = Ledger(tmp_path / "ledger", 1).recover().prompts
        assert sorted(row.curator for row in left) == ["filter_solved", "greso", "greso"]
        assert len({row.task_id for row in left}) == 3

    run(scene)
