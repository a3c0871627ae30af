"""What a kill, a rollback or a leaving instance may find half done."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

from astraflow.protocol import codec
from astraflow.protocol.rollout import Serving

_spec = importlib.util.spec_from_file_location("dataflow_bench", Path(__file__).with_name("bench.py"))
assert _spec is not None
assert _spec.loader is not None
_bench: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_bench)
Bench, run, until = _bench.Bench, _bench.run, _bench.until


def accounted(bench: Any) -> bool:
    """Every accepted place of the pace is queued, held or served since the last restart or rollback."""
    buffer, served = bench.shelf.buffers["m"], bench.service.serving.open.get("m")
    places = buffer.places + bench.service.intake.held_places("m") + sum(e.places for e in (served.fresh if served else []))
    return bool(buffer.pace.accepted == places)


def test_a_group_whose_instance_leaves_while_it_is_written_is_queued_all_the_same(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path).start()
        lease_id = (await bench.lease())[0]
        with bench.slow_disk():
            collecting = asyncio.ensure_future(bench.deliver(lease_id, [0.0, 1.0]))
            await until(lambda: bench.shelf.recording, "the group is being written")
            collecting.cancel()
            await asyncio.wait({collecting})
        await until(lambda: len(bench.shelf.buffers["m"]) == 1, "the group is in the queue")
        assert accounted(bench)
        bench.close()

    run(scene)


def test_a_copy_is_acknowledged_only_when_the_first_one_is_durable(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path).start()
        lease_id = (await bench.lease())[0]
        with bench.slow_disk():
            first = asyncio.ensure_future(bench.deliver(lease_id, [0.0, 1.0]))
            await until(lambda: bench.shelf.recording, "the group is being written")
            copy = asyncio.ensure_future(bench.deliver(lease_id, [0.0, 1.0]))
            await asyncio.wait({copy}, timeout=0.05)
            assert not copy.done()
        assert await copy == await first == [f"{lease_id}/1"]
        assert bench.shelf.ledger.snapshot.in_flight["buffered"] == 2
        bench.close()

    run(scene)


def test_a_rollback_while_a_group_is_written_does_not_let_its_dead_tokens_in(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path).start()
        leases = await bench.lease()
        await bench.train(1)
        await bench.train(2)
        bench.serves(2)
        with bench.slow_disk():
            arriving = asyncio.ensure_future(bench.deliver(leases[0], [0.0, 1.0], version=2))
            await until(lambda: bench.shelf.recording, "the group is being written")
            rolling = asyncio.ensure_future(bench.back(1))
            await asyncio.wait({rolling}, timeout=0.02)
        await asyncio.gather(arriving, rolling)
        assert accounted(bench)
        for lease_id in leases[1:3]:
            await bench.deliver(lease_id, [0.0, 1.0], version=1)
        bench.serves(1)
        await bench.service.intake.reconsider()
        reply = await bench.ask(1)
        assert reply.kind == "batch"
        assert sorted(reply.batch.group_ids) == sorted(leases[1:3])
        assert bench.shelf.ledger.snapshot.dropped == {"dead_timeline": 2}
        assert accounted(bench)
        bench.close()

    run(scene)


def test_a_kill_in_the_middle_of_a_rollback_does_not_let_dead_tokens_in(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path).start()
        await bench.service.save()
        leases = await bench.lease()
        for version in (1, 2):
            await bench.train(version)
        bench.serves(2)
        for lease_id, version in zip(leases[:4], (0, 1, 2, 2), strict=True):
            await bench.deliver(lease_id, [0.0, 1.0], version=version)
        shelf = bench.shelf
        message = _bench.Ready(model_id="m", train_batch_size=4, sender_endpoint="", recovered_version=1)
        shelf.barrier.ready(message, shelf.clock())
        await shelf.write(shelf.ledger.rollback, "m", 1, shelf.versions_meta())
        bench.close()
        again = Bench(tmp_path)
        again.timeline = 1
        reply = await again.ask(1)
        assert reply.batch.group_ids == leases[:2]
        assert again.shelf.ledger.snapshot.dropped == {"dead_timeline": 4}
        again.close()

    run(scene)


def test_leases_of_a_lost_submit_run_again_and_those_of_a_lost_reply_go_on(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path).start()
        await bench.service.save()
        lost, accepted = (await bench.lease())[:2]
        bench.close()
        again = Bench(tmp_path)
        pool = again.shelf.pool
        assert pool.instances["r"].state == "suspect"
        gone, foreign = pool.reconcile("r", {accepted: 1, "another run's": 1}, before=again.shelf.clock() + 1.0)
        assert lost in [held.lease_id for held in gone]
        assert foreign == ["another run's"]
        await again.service.acquisition.lost(gone, "test")
        assert pool.instances["r"].held[accepted].confirmed
        assert again.shelf.leases.verdict(accepted, 1) == "wanted"
        assert (again.shelf.leases.verdict(lost, 1), again.shelf.leases.verdict(lost, 2)) == ("superseded", "wanted")
        again.close()

    run(scene)


def test_a_lease_that_cannot_be_sent_is_dropped_and_the_others_go_elsewhere(tmp_path: Path) -> None:
    class Encoding:
        async def call(self, route: object, request: object, **options: object) -> None:
            codec.encode(request)
            raise AssertionError("it can be sent")

    async def scene() -> None:
        bench = await Bench(tmp_path).start()
        ((name, rows),) = (await bench.service.acquisition._plan()).items()
        bench.shelf.leases.data[rows[1].lease_id] = {"x": [10**25]}
        bench.service.fleet._clients[name] = Encoding()
        await bench.service.acquisition._submit(name, rows)
        assert bench.shelf.ledger.snapshot.dropped == {"unsendable": 2}
        assert sorted(bench.shelf.leases.pending) == [row.lease_id for row in rows if row is not rows[1]]
        assert not bench.shelf.pool.instances[name].held
        assert any("field `x.0` cannot be sent" in text for text in map(str, bench.shelf.events))
        bench.close()

    run(scene)


def test_a_notice_lost_between_checkpoint_and_kill_is_made_up_for_by_ready(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path).start()
        await bench.service.save()
        for lease_id in (await bench.lease())[:2]:
            await bench.deliver(lease_id, [0.0, 1.0])
        assert (await bench.ask(0)).kind == "batch"
        bench.close()
        again = Bench(tmp_path)
        await again.back(1, "d1")
        assert again.timeline == 0
        assert again.shelf.ledger.snapshot.trained == 4
        assert await again.train(1) == 0, "the notice itself comes late"
        assert (await again.ask(1)).kind == "wait"
        assert again.shelf.buffers["m"].pace.accepted == 4
        again.close()

    run(scene)


def test_other_bytes_under_the_same_version_serve_the_rows_again_on_a_new_timeline(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path).start()
        leases = await bench.lease()
        for lease_id in leases[:2]:
            await bench.deliver(lease_id, [0.0, 1.0])
        await bench.train(1)
        bench.serves(1)
        for lease_id in leases[2:4]:
            await bench.deliver(lease_id, [0.0, 1.0], version=1)
        first = await bench.ask(1)
        assert first.batch.group_ids == leases[:2]
        await bench.back(1, "other bytes")
        assert bench.timeline == 1
        second = await bench.ask(1)
        assert second.batch.group_ids == leases[:2], "sampled at version 0, which both timelines share"
        assert bench.shelf.ledger.snapshot.dropped == {"dead_timeline": 4}, "sampled at the version whose bytes are gone"
        assert accounted(bench)
        bench.close()

    run(scene)


def test_a_replayed_batch_is_the_same_bytes_after_a_kill_and_rollback_keeps_its_payloads(tmp_path: Path) -> None:
    def change(process: Any) -> None:
        process.dataflow.buffer.replay.ratio = 0.5
        process.dataflow.buffer.max_staleness = 4

    async def scene() -> None:
        bench = await Bench(tmp_path, change=change).start()
        await bench.service.save()
        leases = await bench.lease()
        for lease_id in leases[:6]:
            await bench.deliver(lease_id, [0.0, 1.0])
        await bench.ask(0)
        await bench.train(1, checkpoint=0)
        before = await bench.ask(1)
        assert sum(bool(x) for x in codec.array(before.batch.rows["replayed"])) == 2
        bench.close()
        again = Bench(tmp_path, change=change)
        assert codec.encode((await again.ask(1)).batch) == codec.encode(before.batch)
        await again.train(2)
        await again.back(0)  # both batches are open again, and what was replayable is not any more
        assert again.shelf.buffers["m"].replay_groups == 0
        for version in range(3):
            assert (await again.ask(version)).kind == "batch"
            await again.train(version + 1, checkpoint=version + 1)
            again.shelf.ledger.check()
        again.close()

    run(scene)


def test_a_receipt_of_an_earlier_timeline_confirms_only_the_published_bytes(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path).start()
        await bench.train(1)
        await bench.train(2)
        await bench.back(1, "d1")
        fleet, confirmed = bench.service.fleet, bench.shelf.barrier.confirmed
        fleet.receipts("r", {"m": Serving(timeline=0, version=1, digest="other")})
        assert not confirmed("r", "m", 0, 1)
        fleet.receipts("r", {"m": Serving(timeline=0, version=1, digest="d1")})
        assert confirmed("r", "m", 0, 1)
        bench.close()

    run(scene)


def test_a_payload_that_was_damaged_on_disk_costs_its_group_and_nothing_else(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path).start()
        leases = (await bench.lease())[:3]
        for lease_id in leases:
            await bench.deliver(lease_id, [0.0, 1.0])
        place = bench.shelf.ledger.places[leases[0]]
        path = next((tmp_path / "ledger").rglob(f"segment-{place.segment:06d}.bin"))
        data = bytearray(path.read_bytes())
        data[place.offset + place.length // 2] ^= 1
        path.write_bytes(data)
        replies = [await bench.ask(0) for _ in range(2)]
        batch = replies[-1].batch
        assert batch is not None
        assert batch.group_ids == leases[1:]
        assert bench.shelf.ledger.counts().dropped == {"damaged": 2}
        assert any(leases[0] in event and "damaged" in event for event in bench.shelf.events)
        assert accounted(bench)
        bench.close()

    run(scene)
