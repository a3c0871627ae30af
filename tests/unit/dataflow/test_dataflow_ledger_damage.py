"""A ledger whose disk is full, whose batches or database were damaged, or whose database is gone."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astraflow.dataflow.journal import BatchRow, LeaseRow, Pick, Result, ShareResult
from astraflow.dataflow.ledger import Ledger
from astraflow.dataflow.ledger_lives import LedgerDamaged
from astraflow.dataflow.segments import DiskRefused
from astraflow.dataflow.service import MISTAKE
from astraflow.protocol import codec
from astraflow.protocol.errors import UserError


def module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"damage_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


_bench, _kills = module("bench"), module("test_dataflow_ledger_kills")
Bench, run, filled, refusal, disk_of, stats = _bench.Bench, _bench.run, _kills.filled, _kills.refusal, _kills.disk_of, _kills.stats


def opened(path: Path) -> Ledger:
    return Ledger(path / "ledger", 1 << 20)


# --- the disk -----------------------------------------------------------------------------------------------------------


def test_a_full_disk_at_the_start_is_no_damage_and_a_later_start_goes_on(tmp_path: Path) -> None:
    filled(tmp_path, 20).close()
    for path in (tmp_path, tmp_path / "new"):
        with disk_of(1000), pytest.raises(DiskRefused, match=r"cannot write .*free space.*then resume") as caught:
            opened(path)
        assert not isinstance(caught.value, UserError), "exit status 1: whoever supervises it may start it again"
    assert opened(tmp_path).check().made == 80


def test_a_file_that_cannot_be_opened_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "ledger" / "ledger.sqlite").mkdir(parents=True)
    with pytest.raises(DiskRefused, match="unable to open"):
        opened(tmp_path)


def test_a_segment_that_cannot_be_begun_is_refused_like_one_that_cannot_be_written(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger", 1)
    ledger.issue([LeaseRow(f"g{n}", "t", 0, 0, 4, 0, 1, "r", ("m",)) for n in range(2)], {})
    result = [Result(f"g{n}", 1, b"payload", [ShareResult("m", "buffered", "", stats(), {}, n + 1)]) for n in range(2)]
    ledger.record(result[:1])
    in_the_way = tmp_path / "ledger" / "segments" / "segment-000002.bin"
    in_the_way.mkdir()
    with pytest.raises(DiskRefused, match="segment-000002"):
        ledger.record(result[1:])
    in_the_way.rmdir()
    ledger.record(result[1:])
    assert ledger.payload("g1") == b"payload"
    ledger.close()


# --- batches ------------------------------------------------------------------------------------------------------------


def in_sequences(process: Any) -> None:
    process.workflow.n_samples = 4
    process.dataflow.buffer.unit = "sequences"
    process.dataflow.buffer.replay.ratio, process.dataflow.buffer.replay.size = 0.5, 4


async def served(path: Path) -> tuple[bytes, Path]:
    """Die after a batch was served that holds the rest of a group, a part of another and a replayed one; its bytes, and its file."""
    bench = await Bench(path, change=in_sequences, batch=8).start()
    await bench.service.save()
    for lease_id in (await bench.lease())[:5]:
        await bench.deliver(lease_id, [0.0, 1.0, None, 2.0])
    assert (await bench.ask(0)).kind == "batch"
    await bench.train(1, checkpoint=1)
    bench.serves(1)
    batch = (await bench.ask(1)).batch
    rows = {name: codec.array(batch.rows[name]).tolist() for name in ("replayed", "group_index")}
    assert sorted(zip(rows["replayed"], map(rows["group_index"].count, rows["group_index"]), strict=True)) == [
        (False, 1), (False, 1), (False, 3), (False, 3), (False, 3), (True, 3), (True, 3), (True, 3)
    ]  # fmt: skip
    bench.close()
    (file,) = (path / "ledger" / "batches").iterdir()
    data = codec.encode(batch)
    assert file.read_bytes() == data
    return data, file


def flip(file: Path) -> None:
    """A value of a column: the file is as long as it was, and can be decoded."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


@pytest.mark.parametrize("harm", [flip, cut, Path.unlink])
@pytest.mark.parametrize("when", ["before the start", "after it"])
def test_a_damaged_batch_is_made_again_byte_for_byte_and_told(tmp_path: Path, harm: Callable[[Path], None], when: str) -> None:
    async def scene() -> None:
        data, file = await served(tmp_path)
        if when == "before the start":
            harm(file)
        again = Bench(tmp_path, change=in_sequences, batch=8)
        if when == "after it":
            harm(file)
        again.timeline = again.shelf.barrier.models["m"].timeline
        assert codec.encode((await again.ask(1)).batch) == data
        assert file.read_bytes() == data
        assert len([event for event in again.shelf.events if f"{file.name} was" in event and "made again" in event]) == 1
        assert await again.train(2) > 0
        again.close()

    run(scene)


def test_a_damaged_batch_that_cannot_be_made_again_is_refused_by_name(tmp_path: Path) -> None:
    _, file = asyncio.run(served(tmp_path))
    flip(file)
    (tmp_path / "ledger" / "segments" / "segment-000001.bin").write_bytes(b"")
    assert f"{file.name}, a batch that is open, is damaged and cannot be made again" in refusal(tmp_path)
    assert file.exists()


def test_a_batch_that_would_be_made_from_other_statistics_is_refused_by_name(tmp_path: Path) -> None:
    _, file = asyncio.run(served(tmp_path))
    flip(file)
    with sqlite3.connect(tmp_path / "ledger" / "ledger.sqlite") as db:
        db.execute("UPDATE shares SET stats=?", (codec.encode(stats()),))
    db.close()
    assert f"{file.name}, a batch that is open, is damaged, and its groups make another one now" in refusal(tmp_path)


def test_a_service_that_finds_its_batch_past_help_ends_as_after_a_mistake(tmp_path: Path) -> None:
    async def scene() -> None:
        _, file = await served(tmp_path)
        again = Bench(tmp_path, change=in_sequences, batch=8)
        flip(file)
        (tmp_path / "ledger" / "segments" / "segment-000001.bin").write_bytes(b"")
        again.timeline = again.shelf.barrier.models["m"].timeline
        with pytest.raises(LedgerDamaged, match="cannot be made again"):
            await again.ask(1)
        assert await again.service.run() == MISTAKE
        assert any("cannot be made again" in event for event in again.shelf.events)

    run(scene)


# --- the database -------------------------------------------------------------------------------------------------------


def test_files_whose_database_is_gone_are_kept_and_the_start_is_refused(tmp_path: Path) -> None:
    ledger = filled(tmp_path, 4)
    ledger.serve(BatchRow("m", 0, 0, [Pick("g000000")], []), b"x")
    ledger.close()
    path = tmp_path / "ledger" / "ledger.sqlite"
    whole = path.read_bytes()
    files = sorted([*(tmp_path / "ledger" / "segments").iterdir(), *(tmp_path / "ledger" / "batches").iterdir()])
    path.unlink()
    for _ in range(2):  # the first start leaves an empty database
        text = refusal(tmp_path)
        assert "segments/ has 1 files, batches/ has 1 files" in text
        assert "missing or empty" in text
        assert "ledger.sqlite-wal belongs to it" in text
    assert sorted([*(tmp_path / "ledger" / "segments").iterdir(), *(tmp_path / "ledger" / "batches").iterdir()]) == files
    path.write_bytes(whole)
    again = opened(tmp_path)
    assert again.check().made == 16
    again.close()


def test_a_database_without_its_log_is_a_lost_one(tmp_path: Path) -> None:
    ledger = filled(tmp_path / "whole", 4)
    shutil.copytree(tmp_path / "whole" / "ledger", tmp_path / "ledger", ignore=shutil.ignore_patterns("*-wal", "*-shm"))
    ledger.close()
    assert "missing or empty" in refusal(tmp_path)


def overwrite(path: Path) -> None:
    """All pages but the first."""
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))


def test_damage_in_the_middle_is_refused_when_the_file_is_opened(tmp_path: Path) -> None:
    filled(tmp_path, 600).close()
    path = tmp_path / "ledger" / "ledger.sqlite"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2 // 4096 * 4096)
        file.write(b"\xff" * 4096)
    with pytest.raises(LedgerDamaged, match="is damaged"):
        opened(tmp_path)


def test_damage_that_a_running_ledger_meets_is_named_and_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    filled(tmp_path, 600).close()
    calls: dict[str, Callable[[Ledger], object]] = {
        "write": lambda ledger: ledger.put({"key": b"x"}),
        "read": lambda ledger: ledger.shares_of("m", ["g000300"]),
        "check": lambda ledger: ledger.check(),
        "batch": lambda ledger: ledger.batch_bytes("m", 0, 0),
    }
    whole = (tmp_path / "ledger" / "ledger.sqlite").read_bytes()
    for what, call in calls.items():
        (tmp_path / "ledger" / "ledger.sqlite").write_bytes(whole)
        ledger = opened(tmp_path)
        ledger._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        ledger._db.execute("PRAGMA shrink_memory")
        overwrite(tmp_path / "ledger" / "ledger.sqlite")
        with pytest.raises(LedgerDamaged, match=r"is damaged .*put back a copy") as caught:
            call(ledger)
        assert "\n" not in str(caught.value), what
        assert "cannot write" not in str(caught.value), what
        ledger._db.close()


def test_a_row_that_cannot_be_decoded_is_damage(tmp_path: Path) -> None:
    filled(tmp_path, 4).close()
    with sqlite3.connect(tmp_path / "ledger" / "ledger.sqlite") as db:
        db.execute("UPDATE shares SET stats=x'c1'")
    db.close()
    assert "a row of it cannot be decoded" in refusal(tmp_path)


def test_a_service_whose_database_is_damaged_ends_as_after_a_mistake(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = Bench(tmp_path)
        await bench.service.save()
        bench.shelf.ledger._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        bench.shelf.ledger._db.execute("PRAGMA shrink_memory")
        overwrite(tmp_path / "ledger" / "ledger.sqlite")
        with pytest.raises(LedgerDamaged):
            await bench.service.save()
        assert bench.service._ended.is_set()
        await bench.service._end(tell_instances=False)  # reads the ledger no more
        assert isinstance(bench.service._failure, LedgerDamaged)

    run(scene)
