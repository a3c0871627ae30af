"""`unit: sequences`: batches of exactly B trajectories, groups that straddle two of them."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.protocol import codec

_spec = importlib.util.spec_from_file_location("dataflow_bench", Path(__file__).with_name("bench.py"))
assert _spec is not None
assert _spec.loader is not None
_bench: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_bench)
Bench, run = _bench.Bench, _bench.run

REWARDS = [0.0, 0.5, 0.25, 1.0]


def sequences(n: int = 4, **buffer: Any) -> Callable[[Any], None]:
    def change(process: Any) -> None:
        process.workflow.n_samples = n
        process.dataflow.buffer.unit = "sequences"
        for name, value in buffer.items():
            setattr(process.dataflow.buffer, name, value)

    return change


def replaying(ratio: float, **buffer: Any) -> Callable[[Any], None]:
    def change(process: Any) -> None:
        sequences(**buffer)(process)
        process.dataflow.buffer.replay.ratio = ratio
        process.dataflow.buffer.replay.max_staleness = None

    return change


def rows(reply: Any) -> list[str]:
    assert reply.kind == "batch", (reply.kind, reply.reason)
    found: list[str] = reply.batch.trajectory_ids
    return found


def test_a_batch_holds_exactly_its_trajectories_and_a_group_may_straddle_two(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path, n_tasks=4, change=lambda p: (sequences(4)(p), setattr(p.train_dataset, "repeat", 1)), batch=6).start()
        leases = await bench.lease()
        for lease_id in leases:
            await bench.deliver(lease_id, REWARDS)
        expected = [f"{lease_id}/{index}" for lease_id in leases for index in range(4)]
        seen: list[str] = []
        for version, size in enumerate([6, 6, 4]):
            reply = await bench.ask(version)
            assert len(rows(reply)) == size
            assert codec.array(reply.batch.rows["group_size"]).tolist() == [4] * size, "statistics of the whole group"
            np.testing.assert_array_equal(codec.array(reply.batch.rows["group_reward_mean"]), np.mean(REWARDS))
            np.testing.assert_allclose(codec.array(reply.batch.rows["group_reward_std"]), np.std(REWARDS, ddof=1), rtol=1e-15)
            seen += rows(reply)
            assert await bench.train(version + 1) == size
            bench.shelf.ledger.check()
        assert seen == expected
        assert (await bench.ask(3)).kind == "end_of_data"
        assert bench.shelf.ledger.snapshot.trained == 16
        bench.close()

    run(scene)


def test_unscored_members_take_no_place_in_a_batch_nor_in_the_pace(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path, change=sequences(4, max_staleness=0), batch=6).start()
        (first, second) = await bench.lease()
        await bench.deliver(first, [None, 0.0, None, 1.0])
        await bench.deliver(second, [1.0, None, None, 0.0])
        assert bench.shelf.buffers["m"].pace.accepted == 4
        (third,) = await bench.lease()
        await bench.deliver(third, [0.0, 1.0, None, None])
        assert rows(await bench.ask(0)) == [f"{first}/1", f"{first}/3", f"{second}/0", f"{second}/3", f"{third}/0", f"{third}/1"]
        bench.close()

    run(scene)


def test_a_split_is_found_again_after_a_kill_with_the_same_bytes(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path, change=sequences(4), batch=6).start()
        await bench.service.save()
        leases = await bench.lease()
        for lease_id in leases[:3]:
            await bench.deliver(lease_id, REWARDS)
        before = await bench.ask(0)
        bench.close()
        again = Bench(tmp_path, change=sequences(4), batch=6)
        assert codec.encode((await again.ask(0)).batch) == codec.encode(before.batch)
        assert again.shelf.buffers["m"].trajectories == 6
        assert again.shelf.buffers["m"].pace.accepted == 12
        assert await again.train(1) == 6
        again.close()
        third = Bench(tmp_path, change=sequences(4), batch=6)
        assert rows(await third.ask(1)) == [f"{leases[1]}/2", f"{leases[1]}/3", *(f"{leases[2]}/{i}" for i in range(4))]
        assert await third.train(2) == 6
        assert third.shelf.ledger.check().trained == 12
        third.close()

    run(scene)


def test_after_a_rollback_the_parts_are_one_group_of_the_new_batch(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path, change=sequences(4, max_staleness=4), batch=3).start()
        leases = await bench.lease()
        for lease_id in leases[:3]:
            await bench.deliver(lease_id, REWARDS)
        old = []
        for version in range(3):
            old.append(rows(await bench.ask(version)))
            await bench.train(version + 1, checkpoint=1)
        await bench.back(1)
        bench.batch = 8
        await bench.back(1)
        reply = await bench.ask(1)
        assert rows(reply) == [*old[1], *old[2], f"{leases[2]}/1", f"{leases[2]}/2"]
        assert reply.batch.group_ids == leases[:3], "each once, although the second came in two parts"
        assert codec.array(reply.batch.rows["group_index"]).tolist() == [0, 1, 1, 1, 1, 2, 2, 2]
        await bench.train(2)
        assert bench.shelf.ledger.check().trained == 3 + 8
        bench.close()

    run(scene)


def test_the_rest_of_a_group_expires_by_its_rows_and_the_run_goes_on(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path, change=sequences(4, max_staleness=0), batch=6).start()
        for version in range(4):
            leases = await bench.lease()
            assert len(leases) == 2, "6 trajectories need two groups of 4"
            for lease_id in leases:
                await bench.deliver(lease_id, REWARDS, version=version)
            assert len(rows(await bench.ask(version))) == 6
            await bench.train(version + 1)
            bench.serves(version + 1)
            assert (await bench.ask(version + 1)).kind == "wait"
        assert bench.shelf.ledger.check().dropped == {"stale": 8}
        bench.close()

    run(scene)


def test_a_split_group_is_replayed_whole_and_only_once_all_of_it_is_trained(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path, change=replaying(0.7, max_staleness=None, max_groups=12), batch=6).start()
        await bench.service.save()
        leases = await bench.lease()
        for lease_id in leases[:9]:
            await bench.deliver(lease_id, REWARDS)
        assert len(rows(await bench.ask(0))) == 6
        await bench.train(1, checkpoint=1)
        assert bench.shelf.buffers["m"].replay_ids == {leases[0]}, "the second group is half trained"
        reply = await bench.ask(1)
        assert rows(reply) == [f"{leases[1]}/2", f"{leases[1]}/3", *(f"{leases[0]}/{i}" for i in range(4))]
        assert codec.array(reply.batch.rows["replayed"]).tolist() == [False] * 2 + [True] * 4
        await bench.train(2, checkpoint=2)
        assert bench.shelf.buffers["m"].replay_ids == {leases[0], leases[1]}
        bench.close()
        again = Bench(tmp_path, change=replaying(0.7, max_staleness=None, max_groups=12), batch=6)
        assert again.shelf.buffers["m"].replay_ids == {leases[0], leases[1]}
        reply = await again.ask(2)
        assert rows(reply) == [*(f"{leases[2]}/{i}" for i in range(2)), *(f"{leases[1]}/{i}" for i in range(4))], "latest, and whole"
        await again.train(3, checkpoint=3)
        counts = again.shelf.ledger.check()
        assert (counts.trained, counts.replayed) == (6 + 2 + 2, 8)
        again.close()

    run(scene)


def test_a_damaged_group_that_would_have_been_split_is_dropped_whole(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path, change=sequences(4), batch=6).start()
        leases = (await bench.lease())[:3]
        for lease_id in leases:
            await bench.deliver(lease_id, REWARDS)
        place = bench.shelf.ledger.places[leases[1]]
        path = next((tmp_path / "ledger").rglob(f"segment-{place.segment:06d}.bin"))
        data = bytearray(path.read_bytes())
        data[place.offset + place.length // 2] ^= 1
        path.write_bytes(data)
        replies = [await bench.ask(0) for _ in range(2)]
        assert rows(replies[-1]) == [*(f"{leases[0]}/{i}" for i in range(4)), f"{leases[2]}/0", f"{leases[2]}/1"]
        assert bench.shelf.ledger.check().dropped == {"damaged": 4}
        assert bench.shelf.buffers["m"].pace.accepted == 8
        bench.close()

    run(scene)


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_every_trajectory_is_trained_once_or_counted_whatever_is_split_rolled_back_or_killed(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("run")
    n, batch = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 9))
    change = sequences(n, max_staleness=data.draw(st.sampled_from([0, 1, 3, None])), order=data.draw(st.sampled_from(["edf", "fifo"])))

    async def scene() -> None:
        bench = await Bench(path, change=change, batch=batch).start()
        await bench.service.save()
        version, trained = 0, dict[int, list[str]]()
        """Version → rows of its batch, on the live line of the history."""
        for action in data.draw(st.lists(st.sampled_from(["work", "work", "step", "step", "kill", "back"]), max_size=14)):
            if action == "work":
                for lease_id in await bench.lease():
                    scored = data.draw(st.integers(0, n))
                    await bench.deliver(lease_id, [float(i) if i < scored else None for i in range(n)], version=version)
            elif action == "step":
                reply = await bench.ask(version)
                assert reply.kind in ("batch", "wait")
                if reply.kind == "batch":
                    assert len(rows(reply)) == batch
                    trained[version] = rows(reply)
                    version += 1
                    assert await bench.train(version, checkpoint=version - 2) == batch
                    bench.serves(version)
            elif action == "kill":
                bench.close()
                bench = Bench(path, change=change, batch=batch)
                bench.timeline = bench.shelf.barrier.models["m"].timeline
                bench.shelf.pool.instances["r"].state = "live"
                bench.serves(version)
            elif version:
                version = max(version - 1, 0)
                await bench.back(version)
                bench.serves(version)
                trained.pop(version)
            live = [row for part in trained.values() for row in part]
            assert len(set(live)) == len(live), "no row twice on a timeline"
            counts = bench.shelf.ledger.check()
            assert counts.trained == len(live)
            buffer = bench.shelf.buffers["m"]
            assert counts.in_flight["buffered"] == buffer.trajectories == buffer.places == sum(e.rows for e in buffer.entries())
            under_way = bench.shelf.groups_in_flight
            if reply_possible(bench, version, batch) is False and not under_way:
                assert bench.service.acquisition.room() >= n, "the batch that is waited for can always be filled"
        bench.close()

    def reply_possible(bench: Any, version: int, batch: int) -> bool:
        limit = bench.shelf.buffers["m"].config.max_staleness
        servable = [e for e in bench.shelf.buffers["m"].entries() if limit is None or version - e.min_version <= limit]
        enough: bool = sum(e.rows for e in servable) >= batch
        if len(servable) != len(bench.shelf.buffers["m"].entries()):
            return True  # places come back when it is asked for
        return enough

    asyncio.run(asyncio.wait_for(scene(), 60))
