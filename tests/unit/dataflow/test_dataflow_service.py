"""The parts of the service together, without sockets: deliveries in, batches out."""

from __future__ import annotations

import asyncio
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from astraflow.dataflow.fleet import Peer
from astraflow.dataflow.shelf import Pulse
from astraflow.lib.wire import new_identity
from astraflow.lib.wire_client import Client
from astraflow.protocol import codec
from astraflow.protocol.batch import BatchRequest
from astraflow.protocol.control import Ready
from astraflow.protocol.errors import ConfigError, Conflict, Unavailable
from astraflow.protocol.routes import RaaSAPI

_spec = importlib.util.spec_from_file_location("dataflow_bench", Path(__file__).with_name("bench.py"))
assert _spec is not None
assert _spec.loader is not None
_bench: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_bench)
Bench, run = _bench.Bench, _bench.run


def test_accepted_and_rejected_account_for_every_submission(tmp_path: Path, case: Any) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path, change=lambda p: setattr(p.dataflow.policies, "filter", "filter_zero_adv")).start()
        leases = (await bench.lease())[:4]
        for number, lease_id in enumerate(leases):
            await bench.deliver(lease_id, [0.0, 0.0] if number == 0 else [0.0, 1.0])
        expected = case("G24")["expected"]["values"]["a"]
        assert len(bench.shelf.buffers["m"]) == expected["accepted"]
        assert bench.shelf.rejections["m"].dropped["zero_variance"] == expected["rejected"]
        bench.close()

    run(scene)


def test_a_rejecting_workflow_starves_with_counts_and_in_flight_returns_to_zero(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path, change=lambda p: setattr(p.dataflow.buffer, "max_rejected_groups", 12)).start()
        for _ in range(4):
            for lease_id in await bench.lease():
                await bench.deliver(lease_id, [None, None])
        reply = await bench.ask(0)
        assert reply.kind == "starved"
        assert reply.counts["dropped/unscored"] == reply.counts["seen"] == 24
        assert bench.shelf.groups_in_flight == 0
        assert not bench.shelf.pool.instances["r"].held
        assert await bench.lease(), "new prompts are drawn all the same"
        bench.close()

    run(scene)


def test_pace_gives_places_back_and_refuses_the_group_too_many(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path).start()
        leases = await bench.lease()
        assert len(leases) == 6, "(max_staleness 2 + 1) · batch 4 / n 2"
        await bench.deliver(leases[0], [None, None])
        assert len(await bench.lease()) == 1
        for lease_id in leases[1:3]:
            await bench.deliver(lease_id, [0.0, 1.0])
        assert await bench.lease() == []
        assert (await bench.ask(0)).kind == "batch"
        await bench.train(1)
        assert await bench.lease() == [], "begun on version 0 they would be stale when their turn comes"
        bench.serves(1)
        assert len(await bench.lease()) == 2
        bench.close()

    run(scene)


def test_a_data_set_smaller_than_a_batch_is_trained_on_and_then_ends(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path, n_tasks=3, change=lambda p: setattr(p.train_dataset, "repeat", 1)).start()
        leases = await bench.lease()
        for lease_id in leases:
            await bench.deliver(lease_id, [0.0, 1.0])
        sizes = []
        for version in (0, 1):
            reply = await bench.ask(version)
            assert reply.batch is not None
            sizes.append(len(reply.batch.group_ids))
            await bench.train(version + 1)
        assert sizes == [2, 1]
        assert (await bench.ask(2)).kind == "end_of_data"
        bench.close()

    run(scene)


def test_groups_of_unconfirmed_weights_wait_for_the_receipt_or_the_deadline(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path).start()
        first, second = (await bench.lease())[:2]
        await bench.train(1)
        bench.serves(1, digest="other bytes")
        await bench.deliver(first, [0.0, 1.0], version=1)
        await bench.service.intake.reconsider()
        assert bench.service.intake.held_groups("m") == 1
        assert bench.shelf.ledger.snapshot.in_flight["rolled"] == 2
        bench.serves(1)
        await bench.service.intake.reconsider()
        assert len(bench.shelf.buffers["m"]) == 1
        await bench.train(2)
        await bench.deliver(second, [0.0, 1.0], version=2)
        accepted = bench.shelf.buffers["m"].pace.accepted
        bench.shelf.process.dataflow.buffer.hold_s = 1e-9
        await bench.service.intake.reconsider()
        assert bench.shelf.ledger.snapshot.dropped == {"unconfirmed": 2}
        assert bench.shelf.buffers["m"].pace.accepted == accepted - 2
        bench.close()

    run(scene)


def test_duplicates_and_superseded_attempts_are_acknowledged_and_not_used(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path).start()
        first, second = (await bench.lease())[:2]
        assert await bench.deliver(first, [0.0, 1.0]) == [f"{first}/1"]
        assert await bench.deliver(first, [0.0, 1.0]) == [f"{first}/1"]
        await bench.service.acquisition.lost([bench.shelf.pool.release(second)], "test")  # type: ignore[list-item]
        assert await bench.deliver(second, [0.0, 1.0], attempt=1) == [f"{second}/1"]
        assert second in await bench.lease()
        await bench.deliver(second, [0.0, 1.0], attempt=2)
        assert len(bench.shelf.buffers["m"]) == 2
        assert bench.shelf.meter.counts["rollout/duplicate_deliveries"] == 1
        assert bench.shelf.meter.counts["rollout/superseded_deliveries"] == 1
        bench.close()

    run(scene)


def test_a_restart_in_the_middle_keeps_queue_leases_pace_and_bytes(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path).start()
        leases = await bench.lease()
        for lease_id in leases[:4]:
            await bench.deliver(lease_id, [0.0, 1.0])
        before = await bench.ask(0)
        await bench.service.save()
        ledger = bench.shelf.ledger.snapshot
        bench.close()
        again = Bench(tmp_path)
        assert again.shelf.ledger.snapshot == ledger
        assert codec.encode((await again.ask(0)).batch) == codec.encode(before.batch)
        assert set(again.shelf.leases.open) == set(leases[4:])
        assert len(again.shelf.buffers["m"]) == 2
        assert again.shelf.buffers["m"].pace.accepted == 8
        assert again.service.acquisition.room() == 12 - 8 - 4
        assert again.shelf.source.state.drawn == 6
        assert await again.train(1) == 4
        again.close()

    run(scene)


def test_after_a_rollback_old_tokens_are_kept_and_dead_ones_dropped(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path).start()
        for version in range(3):
            for lease_id in (await bench.lease())[:2]:
                await bench.deliver(lease_id, [0.0, 1.0], version=version)
            await bench.ask(version)
            await bench.train(version + 1, checkpoint=1)
            bench.serves(version + 1)
        assert bench.shelf.ledger.snapshot.trained == 12
        again = await bench.service.trainers.ready(Ready(model_id="m", train_batch_size=4, sender_endpoint="", recovered_version=1))
        assert again.timeline == 1
        assert bench.shelf.ledger.snapshot.trained == 4, "batch 0 is in the checkpoint"
        assert len(bench.shelf.buffers["m"]) == 2, "batch 1 was sampled at version 1, which the checkpoint holds"
        assert bench.shelf.ledger.snapshot.dropped == {"dead_timeline": 4}, "batch 2 was sampled by weights that are gone"
        assert (await bench.ask(1)).kind == "stale_timeline"
        bench.timeline = 1
        assert (await bench.ask(1)).kind == "batch"
        bench.close()

    run(scene)


def test_a_version_that_is_committed_or_unknown_is_told_so(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = Bench(tmp_path)
        with pytest.raises(Conflict, match="before /ready"):
            await bench.ask(0)
        await bench.start()
        for lease_id in (await bench.lease())[:2]:
            await bench.deliver(lease_id, [0.0, 1.0])
        await bench.ask(0)
        await bench.train(1)
        with pytest.raises(Conflict, match="version 0 is committed, the trainer is at version 1"):
            await bench.ask(0)
        early = await bench.ask(2)
        assert early.kind == "wait"
        assert "notice of version 2" in early.reason
        with pytest.raises(Conflict, match="not trained in this run"):
            await bench.service.serving.batch(BatchRequest(model_id="x", timeline=0, version=0))
        bench.close()

    run(scene)


def test_a_trainer_with_a_past_that_the_ledger_does_not_know_is_an_event(tmp_path: Path) -> None:
    async def told(bench: Any, *recovered: int | None) -> bool:
        for version in recovered:
            ready = Ready(model_id="m", train_batch_size=bench.batch, sender_endpoint="", version=7, recovered_version=version, digest="d7")
            await bench.service.trainers.ready(ready)
        bench.close()
        return any("resumes at version 7; this ledger knows nothing of its past" in event for event in bench.shelf.events)

    async def scene() -> None:
        assert await told(Bench(tmp_path / "new"), 7)
        assert not await told(Bench(tmp_path / "known"), None, 7)

    run(scene)


@pytest.mark.parametrize("size", [0, -6])
def test_a_batch_size_below_one_is_refused_whatever_the_unit(tmp_path: Path, size: int) -> None:
    async def scene() -> None:
        bench = Bench(tmp_path, change=lambda p: setattr(p.dataflow.buffer, "unit", "sequences"))
        with pytest.raises(ConfigError, match=f"train_batch_size: {size} of 'm', expected at least 1"):
            await bench.service.trainers.ready(Ready(model_id="m", train_batch_size=size, sender_endpoint=""))
        assert bench.shelf.barrier.models["m"].batch_size == 0, "nothing was kept of it"
        bench.close()

    run(scene)


def test_a_batch_size_that_is_no_multiple_of_the_group_is_refused(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = Bench(tmp_path)
        with pytest.raises(ConfigError, match="train_batch_size: 3"):
            await bench.service.trainers.ready(Ready(model_id="m", train_batch_size=3, sender_endpoint=""))
        bench.close()

    run(scene)


def test_stale_groups_are_dropped_when_they_would_be_served(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path, change=lambda p: setattr(p.dataflow.buffer, "max_staleness", 0)).start()
        one, two = await bench.lease()
        await bench.deliver(one, [0.0, 1.0])
        await bench.train(1)
        await bench.deliver(two, [0.0, 1.0])
        assert bench.shelf.ledger.snapshot.dropped == {"stale": 2}, "at the door"
        assert (await bench.ask(1)).kind == "wait"
        assert bench.shelf.ledger.snapshot.dropped == {"stale": 4}
        bench.serves(1)
        assert len(await bench.lease()) == 2, "the places are free again"
        bench.close()

    run(scene)


def test_the_time_of_a_starvation_counts_from_the_first_rejection_and_not_from_the_start(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path, change=lambda p: setattr(p.dataflow.buffer, "starvation_s", 50.0)).start()
        begun = bench.shelf.clock()
        bench.shelf.clock = lambda: begun + 1000.0  # the engines took long to start
        bench.serves(0)
        await bench.deliver((await bench.lease())[0], [None, None])
        assert (await bench.ask(0)).kind == "wait"
        bench.shelf.clock = lambda: begun + 1051.0
        assert (await bench.ask(0)).kind == "starved"
        bench.close()

    run(scene)


def test_a_group_of_another_task_than_was_leased_is_malformed(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path).start()
        lease_id = (await bench.lease())[0]
        bench.shelf.leases.open[lease_id] = replace(bench.shelf.leases.open[lease_id], task_id="another")
        delivery = bench.delivery(lease_id, [0.0, 1.0], task_id="t")
        assert await bench.service.intake.take("r", [delivery]) == [delivery.delivery_id]
        assert bench.shelf.ledger.snapshot.dropped == {"malformed": 2}
        bench.close()

    run(scene)


def test_a_lease_is_given_up_after_its_last_attempt_and_gives_its_places_back(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path, change=lambda p: setattr(p.dataflow.pool, "max_attempts", 2)).start()
        lease_id = (await bench.lease())[0]
        for attempt in (1, 2):
            assert bench.shelf.leases.verdict(lease_id, attempt) == "wanted"
            await bench.service.acquisition.lost([bench.shelf.pool.release(lease_id)], "test")
            assert await bench.lease(), "the lease itself, and then another in its place"
        assert bench.shelf.ledger.snapshot.dropped == {"max_attempts": 2}
        assert await bench.deliver(lease_id, [0.0, 1.0], attempt=2) == [f"{lease_id}/2"], "too late, and acknowledged"
        assert bench.shelf.ledger.check().in_flight["buffered"] == 0
        bench.close()

    run(scene)


def test_an_instance_that_leaves_twice_at_once_leaves_once(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path).start()
        leases = await bench.lease()
        await asyncio.gather(*(bench.service.fleet.leave("r", drain=False, shutdown=True) for _ in range(2)))
        assert not bench.shelf.pool.instances
        assert sorted(bench.shelf.leases.pending) == sorted(leases)
        bench.close()

    run(scene)


def test_a_peer_that_left_the_pool_is_unavailable_and_no_bug_of_ours() -> None:
    async def scene() -> None:
        peer = Peer(Client("http://127.0.0.1:9", new_identity("r")))
        await peer.close()
        with pytest.raises(Unavailable, match="left the pool"):
            await peer.call(RaaSAPI.status, timeout_s=1.0)

    run(scene)


def test_a_pulse_wakes_everybody_in_the_order_in_which_they_wait_and_a_wait_ends_by_its_time() -> None:
    async def scene() -> None:
        pulse, woken = Pulse(), list[int]()

        async def waiter(number: int) -> None:
            await pulse.wait(60.0)
            woken.append(number)

        tasks = [asyncio.ensure_future(waiter(number)) for number in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        pulse.fire()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert woken == [0, 2]
        await pulse.wait(0.001)  # nobody fires
        pulse.fire()

    run(scene)
