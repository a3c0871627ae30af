"""A service that is killed at every one of its ledger transactions, and a ledger whose files are damaged or whose disk is full."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import resource
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from astraflow.dataflow.journal import BatchRow, LeaseRow, Pick, Result, Settled, ShareResult
from astraflow.dataflow.ledger import NOT_DONE, Ledger
from astraflow.dataflow.ledger_lives import LedgerDamaged
from astraflow.dataflow.policies.base import GroupStats
from astraflow.dataflow.segments import DiskRefused
from astraflow.dataflow.surroundings import Surroundings
from astraflow.protocol.batch import BatchReply
from astraflow.protocol.errors import AstraFlowError

_spec = importlib.util.spec_from_file_location("dataflow_bench", Path(__file__).with_name("bench.py"))
assert _spec is not None
assert _spec.loader is not None
_bench: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_bench)
Bench, run = _bench.Bench, _bench.run


class Killed(BaseException):
    """The process is gone: nothing below catches it."""


class MortalLedger(Ledger):
    """Dies at its k-th transaction: before it began, when everything but the commit is done, or just after the commit."""

    lives = 10**9
    where = "before"
    made = 0

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        MortalLedger.made += 1
        last = MortalLedger.made == MortalLedger.lives
        if MortalLedger.made > MortalLedger.lives or (last and self.where == "before"):
            raise Killed
        with super()._transaction():
            yield
            if last and self.where == "inside":
                raise Killed
        if last:
            raise Killed


class Life:
    """A short run of two epochs over five tasks, with a trainer that remembers its checkpoints and instances that never forget."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trained: list[str] = []
        self.version, self.checkpoint = 0, 0
        self.held: dict[str, int] = {}
        """What the instance works on: lease → attempt."""
        self.prompts: dict[str, str] = {}
        """Lease → task, as it was submitted."""
        self.restarts = 0

    def change(self, process: Any) -> None:
        process.workflow.n_samples = 4
        process.seed = 5
        process.train_dataset.repeat, process.train_dataset.shuffle = 2, True
        process.dataflow.buffer.unit = "sequences"
        process.dataflow.buffer.max_staleness = 2
        process.dataflow.buffer.replay.ratio, process.dataflow.buffer.replay.size = 0.7, 2

    async def go_on(self) -> None:
        """From where the ledger is to the end of the data. Raises Killed."""
        outside = Surroundings(ledger=MortalLedger)
        bench = Bench(self.path, n_tasks=5, change=self.change, batch=6, outside=outside)
        self.bench = bench
        await bench.service.save()
        await bench.start(self.version)
        assert bench.timeline == 0
        pool = bench.shelf.pool
        gone, _ = pool.reconcile("r", self.held, before=bench.shelf.clock() + 1.0)
        await bench.service.acquisition.lost(gone, "a lost submit")
        idle = 0
        while True:
            for instance in pool.instances.values():
                instance.state = "live"
            for rows in (await bench.service.acquisition._plan()).values():
                for row in rows:
                    self.held[row.lease_id] = row.attempt
                    self.prompts.setdefault(row.lease_id, row.task_id)
                    assert self.prompts[row.lease_id] == row.task_id
            for lease_id, attempt in list(self.held.items()):
                await bench.deliver(lease_id, rewards(lease_id), version=self.version, attempt=attempt)
                del self.held[lease_id]
            reply: BatchReply = await bench.ask(self.version)
            if reply.kind == "end_of_data":
                return
            idle = idle + 1 if reply.kind == "wait" else 0
            assert idle < 3, reply.reason
            if idle:  # what it asked for was stale: its places are free again
                continue
            assert reply.kind == "batch", reply.reason
            batch = reply.batch
            assert batch is not None
            old = {int(i) for i, again in zip(_bench.codec.array(batch.rows["trajectory_index"]),
                                              _bench.codec.array(batch.rows["replayed"]), strict=True) if again}  # fmt: skip
            fresh = [name for index, name in enumerate(batch.trajectory_ids) if index not in old]
            if self.version == self.checkpoint:
                self.trained += fresh
                self.checkpoint = self.version + 1  # its own step is done: a repeated notice is the same step
            self.version = self.checkpoint
            await bench.train(self.version, checkpoint=self.version)
            bench.serves(self.version)

    async def end(self) -> None:
        while True:
            try:
                await self.go_on()
            except Killed:
                self.restarts += 1
                MortalLedger.lives = 10**9
                self.leave()
                continue
            self.bench.close()
            return

    def leave(self) -> None:
        shelf = self.bench.shelf
        shelf.thread.close()
        shelf.ledger.close()
        shelf.metrics.close()


def rewards(lease_id: str) -> list[float | None]:
    rng = random.Random(lease_id.rpartition("-")[2])
    return [None if rng.random() < 0.2 else rng.random() for _ in range(4)]


def whole_life(path: Path, lives: int, where: str) -> Life:
    MortalLedger.lives, MortalLedger.where, MortalLedger.made = lives, where, 0
    life = Life(path)
    asyncio.run(asyncio.wait_for(life.end(), 60))
    return life


def numbered(life: Life) -> list[tuple[int, str]]:
    """(number of the lease, task), which do not depend on the name of the run directory."""
    return sorted((int(lease_id.rpartition("-")[2]), task) for lease_id, task in life.prompts.items())


EVERY = [pytest.param(where, 1, marks=pytest.mark.full) for where in ("before", "inside", "after")]


@pytest.mark.parametrize(("where", "step"), [("before", 5), ("inside", 4), ("after", 5), *EVERY])
def test_a_kill_at_any_transaction_changes_neither_prompts_nor_what_is_trained(tmp_path: Path, where: str, step: int) -> None:
    calm = whole_life(tmp_path / "calm", 10**9, where)
    total = MortalLedger.made
    counts = Ledger(tmp_path / "calm" / "ledger", 1).check()
    assert (counts.made, calm.restarts) == (40, 0)
    assert counts.trained == len(calm.trained) == len(set(calm.trained))
    assert sum(counts.in_flight.values()) == 0
    assert len(numbered(calm)) == 10
    assert len({task for _, task in numbered(calm)}) == 5, "two epochs"
    for k in range(1, total + 1, step):
        path = tmp_path / f"{where}{k}"
        life = whole_life(path, k, where)
        assert life.restarts == 1, f"killed at {k}"
        assert numbered(life) == numbered(calm), f"killed at {k}: other prompts"
        assert len(set(life.trained)) == len(life.trained), f"killed at {k}: trained twice"
        ledger = Ledger(path / "ledger", 1)
        after = ledger.check()
        ledger.close()
        assert (after.made, after.trained, sum(after.in_flight.values())) == (40, len(life.trained), 0), f"killed at {k}: {after}"
        assert {key.rpartition("-")[2] for key in life.trained} == {key.rpartition("-")[2] for key in calm.trained}, f"killed at {k}"


# --- damage -------------------------------------------------------------------------------------------------------------


def stats() -> GroupStats:
    values = {i: float(i) for i in range(4)}
    return GroupStats(
        task_id="t", n_samples=4, values=values, shaped=values, mean=1.5, std=1.3, all_equal=False,
        timeline=0, min_version=0, max_version=0, loss_tokens=9,
    )  # fmt: skip


def filled(path: Path, leases: int = 300) -> Ledger:
    ledger = Ledger(path / "ledger", 1 << 20)
    for first in range(0, leases, 50):
        numbers = range(first, min(first + 50, leases))
        ledger.issue([LeaseRow(f"g{n:06d}", "t", 0, 0, 4, 0, 1, "r", ("m",)) for n in numbers], {"ledger_id": b"x"})
        ledger.record([Result(f"g{n:06d}", 1, b"payload-%d" % n, [ShareResult("m", "buffered", "", stats(), {}, n + 1)]) for n in numbers])
    return ledger


def refusal(path: Path) -> str:
    with pytest.raises(LedgerDamaged) as caught:
        Ledger(path / "ledger", 1 << 20).recover()
    text = str(caught.value)
    assert "\n" not in text
    assert str(path / "ledger" / "ledger.sqlite") in text
    return text


def test_a_truncated_file_is_refused_by_name_when_it_is_opened(tmp_path: Path) -> None:
    filled(tmp_path).close()
    path = tmp_path / "ledger" / "ledger.sqlite"
    size = path.stat().st_size
    for left in (size - 1, size // 2, 5000, 100):
        with path.open("r+b") as file:
            file.truncate(left)
        assert "damaged" in refusal(tmp_path)


def test_a_file_that_is_no_database_and_one_of_another_layout_are_refused(tmp_path: Path) -> None:
    filled(tmp_path, 10).close()
    path = tmp_path / "ledger" / "ledger.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version=1")
    db.close()
    assert "layout 1, this one reads" in refusal(tmp_path)
    path.write_bytes(b"something else altogether" * 400)
    assert "not a database" in refusal(tmp_path)


def test_an_open_batch_whose_bytes_are_gone_is_never_another_one(tmp_path: Path) -> None:
    ledger = filled(tmp_path, 4)
    ledger.serve(BatchRow("m", 0, 0, [Pick("g000000")], []), b"x")
    ledger.close()
    (tmp_path / "ledger" / "batches" / "m-0-0.batch").unlink()
    assert "m-0-0.batch, a batch that is open, is missing" in refusal(tmp_path)


def test_a_missing_segment_costs_its_groups_and_is_counted(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path).start()
        await bench.service.save()
        leases = (await bench.lease())[:3]
        for lease_id in leases:
            await bench.deliver(lease_id, [0.0, 1.0])
        bench.close()
        for file in (tmp_path / "ledger" / "segments").iterdir():
            file.unlink()
        again = Bench(tmp_path)
        assert [(await again.ask(0)).kind for _ in leases] == ["wait"] * 3
        assert again.shelf.ledger.check().dropped == {"damaged": 4}
        assert again.shelf.buffers["m"].pace.accepted == 2
        for instance in again.shelf.pool.instances.values():
            instance.state = "live"
        again.serves(0)
        new = (await again.lease())[:2]
        for lease_id in new:
            await again.deliver(lease_id, [0.0, 1.0])
        assert (await again.ask(0)).kind == "wait"
        assert (await again.ask(0)).batch.group_ids == new
        assert again.shelf.ledger.check().dropped == {"damaged": 6}
        again.close()

    run(scene)


@contextmanager
def disk_of(size_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond this."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_ends_the_call_with_one_line_and_leaves_the_books_in_order(tmp_path: Path) -> None:
    ledger = filled(tmp_path, 20)
    before = ledger.check()
    ledger.issue([LeaseRow(f"big{n}", "t", 0, 0, 4, 0, 1, "r", ("m",)) for n in range(3)], {})
    row = BatchRow("m", 0, 0, [Pick("g000000"), Pick("g000001", 0, (2, 3))], [])
    calls = {
        "segment": lambda: ledger.record([Result("big0", 1, b"x" * 500_000, [ShareResult("m", "buffered", "", stats(), {}, 99)])]),
        "batch": lambda: ledger.serve(row, b"x" * 500_000),
        "sqlite": lambda: ledger.put({"state": b"x" * 500_000}),
    }
    for what, call in calls.items():
        with disk_of(300_000), pytest.raises(DiskRefused, match="cannot write") as caught:
            call()
        assert "\n" not in str(caught.value), what
        assert ledger.check().made == before.made + 12
    ledger.serve(row, b"x" * 500_000)
    assert ledger.commit("m", 0, 0, 1, 1, set(), {}) == 6
    ledger.record([Result("big0", 1, b"x" * 500_000, [ShareResult("m", "buffered", "", stats(), {}, 99)])])
    assert ledger.payload("big0") == b"x" * 500_000
    ledger.close()
    again = Ledger(tmp_path / "ledger", 1 << 20)
    assert len(again.recover().leases) == 2
    assert again.payload("big0") == b"x" * 500_000
    assert again.check().trained == 6
    again.close()


def test_a_service_whose_disk_is_full_ends_and_says_so(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path).start()
        await bench.service.save()
        leases = (await bench.lease())[:2]
        for lease_id in leases:
            await bench.deliver(lease_id, [0.0, 1.0])
        await bench.ask(0)
        bench.shelf.steps["m"] = {"a" * 400_000: 0.0}
        with disk_of(300_000), pytest.raises(AstraFlowError, match="cannot write"):
            await bench.service.save()
        assert bench.service._ended.is_set()
        assert isinstance(bench.service._failure, DiskRefused)
        assert any("cannot write" in event for event in bench.shelf.events)
        bench.close()
        again = Bench(tmp_path)
        assert await again.train(1) == 4
        again.close()

    run(scene)


# --- size ---------------------------------------------------------------------------------------------------------------


def test_files_go_only_after_the_rows_that_named_them(tmp_path: Path) -> None:
    """A kill between the two would leave rows without their payload."""
    MortalLedger.lives, MortalLedger.where, MortalLedger.made = 10**9, "inside", 0
    for call in ("settle", "commit", "forget"):
        path = tmp_path / call
        ledger = MortalLedger(path / "ledger", 1)
        ledger.issue([LeaseRow(f"g{n}", "t", 0, 0, 4, 0, 1, "r", ("m",)) for n in range(2)], {})
        ledger.record([Result(f"g{n}", 1, b"payload", [ShareResult("m", "buffered", "", stats(), {}, n + 1)]) for n in range(2)])
        if call != "settle":
            ledger.serve(BatchRow("m", 0, 0, [Pick("g0")], []), b"x")
        if call == "forget":
            ledger.commit("m", 0, 0, 1, 1, {"g0"}, {})
        MortalLedger.lives = MortalLedger.made + 1
        ends = {
            "settle": lambda ledger: ledger.settle([Settled("g0", "m", "dropped", "stale")]),
            "commit": lambda ledger: ledger.commit("m", 0, 0, 1, 1, set(), {}),
            "forget": lambda ledger: ledger.forget("m", ["g0"]),
        }
        with pytest.raises(Killed):
            ends[call](ledger)
        MortalLedger.lives = 10**9
        again = Ledger(path / "ledger", 1)
        again.recover()
        assert again.payload("g0") == b"payload", call
        again.close()
        ledger.close()


def grown(path: Path, shares: int) -> None:
    """A ledger with this many finished shares (4 rows each), written in one go."""
    ledger = filled(path, 8)
    ledger.serve(BatchRow("m", 0, 0, [Pick(f"g{n:06d}") for n in range(8)], []), b"x")
    ledger.commit("m", 0, 0, 1, 1, set(), {})
    db = ledger._db
    db.execute("BEGIN")
    numbers = f"WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM c WHERE x<{shares})"
    db.execute(
        f"{numbers} INSERT INTO leases SELECT printf('h%07d', x), task_id, task_index, epoch, n_samples, seed, attempt, instance,"
        " state, place FROM c, leases WHERE lease_id='g000000'"
    )
    db.execute(
        f"{numbers} INSERT INTO shares SELECT printf('h%07d', x), policy, part, members, n, live, state, reason, arrival, stats,"
        " min_version, timeline, version, final, kept, uses FROM c, shares WHERE lease_id='g000000'"
    )
    db.execute("COMMIT")
    ledger._use(ledger._count_all())
    ledger.put({})
    ledger.close()


@pytest.mark.parametrize("shares", [50_000, pytest.param(200_000, marks=pytest.mark.full)])
def test_a_long_run_opens_without_reading_its_finished_rows(tmp_path: Path, shares: int) -> None:
    grown(tmp_path, shares)
    begun = time.process_time()
    ledger = Ledger(tmp_path / "ledger", 1 << 20)
    found = ledger.recover()
    spent_s = time.process_time() - begun
    assert found.shares == []
    assert ledger.snapshot.trained == 4 * (shares + 8)
    assert ledger.staleness("m") == {0: 4 * (shares + 8)}
    assert spent_s < 2.0, "CPU time; measured 0.02 s, for 200 000 shares 0.07 s: nearly all of it SQLite's quick_check"
    queries = {
        "open leases": "SELECT lease_id FROM leases WHERE state='open' ORDER BY lease_id",
        "finals": "SELECT lease_id FROM shares WHERE policy='m' AND state='trained' AND final=0 AND version<3",
        **{which: f"SELECT * FROM shares s JOIN leases l USING(lease_id) WHERE {which} ORDER BY s.arrival" for which in NOT_DONE},
    }
    for name, query in queries.items():
        plan = [row[3] for row in ledger._db.execute(f"EXPLAIN QUERY PLAN {query}")]
        assert all("INDEX" in step or "PRIMARY KEY" in step for step in plan if "SCAN" in step or "SEARCH" in step), f"{name}: {plan}"
    ledger.check()
    ledger.close()
