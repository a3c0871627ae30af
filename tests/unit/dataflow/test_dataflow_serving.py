"""What is served to whom: several policies from one payload, answers that are no batch, and queues that stay bounded."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from astraflow.protocol import codec
from astraflow.protocol.batch import BatchRequest
from astraflow.protocol.control import NotifyVersion, Ready, RegisterRaaS
from astraflow.protocol.rollout import Delivery, Segment, Serving, Trajectory

_spec = importlib.util.spec_from_file_location("dataflow_bench", Path(__file__).with_name("bench.py"))
assert _spec is not None
assert _spec.loader is not None
_bench: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_bench)
Bench, run, made = _bench.Bench, _bench.run, _bench.made

POLICIES = ["planner", "solver"]


def shared(credit: dict[str, float | None], version: int = 0) -> Segment:
    """Two prompt tokens, three of the planner, a forced one, two of the solver: one context for both."""
    owner = [0, 0, 0, 0, 0, 1, 1, 1]
    mask = [0, 0, 1, 1, 1, 0, 1, 1]
    return Segment(
        policies=POLICIES,
        input_ids=codec.column(np.arange(8), "int32"),
        loss_mask=codec.column(mask, "uint8"),
        logprobs=codec.column(np.array([-0.25 * m for m in mask], dtype=np.float32), "float32"),
        versions=codec.column([version if m else -1 for m in mask], "int32"),
        policy_of_token=codec.column(owner, "uint8"),
        credit=credit,
    )


class Two:
    """A service with two policies whose instance and trainers are this test."""

    def __init__(self, path: Path) -> None:
        def change(process: Any) -> None:
            process.models = POLICIES
            process.dataflow.ledger.segment_bytes = 1 << 30

        self.bench = Bench(path, change=change)
        self.shelf, self.service = self.bench.shelf, self.bench.service

    async def start(self) -> Two:
        for name in POLICIES:
            await self.service.trainers.ready(Ready(model_id=name, train_batch_size=4, sender_endpoint="", digest="d0"))
        self.shelf.pool.register(RegisterRaaS(instance_id="r", url="http://r", models=POLICIES, total_slots=64, incarnation="one"), 0.0)
        self.serves(0)
        self.shelf.pool.catch_up(lambda instance: True)
        return self

    def serves(self, version: int) -> None:
        self.service.fleet.receipts("r", {name: Serving(timeline=0, version=version, digest=f"d{version}") for name in POLICIES})

    async def deliver(self, lease_id: str, members: Sequence[Trajectory]) -> int:
        lease = self.shelf.leases.open[lease_id]
        data = codec.encode(made.group(list(members), lease_id, task_id=lease.task_id))
        delivery = Delivery(delivery_id=f"{lease_id}/1", lease_id=lease_id, attempt=1, group=msgspec.Raw(data))
        await self.service.intake.take("r", [delivery])
        return len(data)

    async def ask(self, name: str, version: int = 0) -> Any:
        return await self.service.serving.batch(BatchRequest(model_id=name, timeline=0, version=version, wait_s=0.0))

    async def train(self, name: str, version: int) -> int:
        message = NotifyVersion(model_id=name, timeline=0, version=version, digest=f"d{version}", checkpoint_version=version)
        return (await self.service.trainers.notify(message)).trained  # type: ignore[no-any-return]


def stored_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in (path / "ledger" / "segments").iterdir())


def test_a_sequence_of_two_policies_is_stored_once_and_each_gets_its_own_rows(tmp_path: Path) -> None:
    async def scene() -> None:
        two = await Two(tmp_path).start()
        plan = await two.service.acquisition._plan()
        leases = [row.lease_id for rows in plan.values() for row in rows][:2]
        size = 0
        for number, lease_id in enumerate(leases):
            members = [
                Trajectory(index=i, segments=[shared({"planner": 0.25 * (i + number), "solver": float(i)})], reward=-7.0) for i in range(2)
            ]
            size += await two.deliver(lease_id, members)
        assert stored_bytes(tmp_path) == size, "one copy, however many policies"
        assert two.shelf.ledger.snapshot.in_flight["buffered"] == 2 * 2 * 2
        batches = {name: (await two.ask(name)).batch for name in POLICIES}
        assert stored_bytes(tmp_path) == size
        own = {"planner": [2, 3, 4], "solver": [6, 7]}
        credit = {"planner": [0.0, 0.25, 0.25, 0.5], "solver": [0.0, 1.0, 0.0, 1.0]}
        for name, batch in batches.items():
            assert batch.group_ids == leases
            masks = codec.array(batch.tokens["loss_mask"]).reshape(4, 8)
            assert [np.flatnonzero(mask).tolist() for mask in masks] == [own[name]] * 4, "the full context, the policy's own tokens"
            assert codec.array(batch.tokens["input_ids"]).tolist() == list(range(8)) * 4
            assert codec.array(batch.rows["credit"]).tolist() == credit[name]
            assert codec.array(batch.rows["rewards"]).tolist() == [-7.0] * 4, "what the user sees"
            pairs = np.array(credit[name]).reshape(2, 2)
            np.testing.assert_allclose(codec.array(batch.rows["group_reward_mean"]).reshape(2, 2)[:, 0], pairs.mean(axis=1))
            np.testing.assert_allclose(codec.array(batch.rows["group_reward_std"]).reshape(2, 2)[:, 0], pairs.std(axis=1, ddof=1))
        assert await two.train("planner", 1) == 4
        assert set(two.shelf.ledger.places) == set(leases), "the solver still needs it"
        assert await two.train("solver", 1) == 4
        assert not two.shelf.ledger.places
        two.shelf.ledger.check()
        two.bench.close()

    run(scene)


def test_a_policy_without_credit_loses_its_rows_and_the_other_keeps_them(tmp_path: Path) -> None:
    async def scene() -> None:
        two = await Two(tmp_path).start()
        plan = await two.service.acquisition._plan()
        lease_id = next(iter(plan.values()))[0].lease_id
        members = [Trajectory(index=i, segments=[shared({"planner": float(i), "solver": None})], reward=1.0) for i in range(2)]
        await two.deliver(lease_id, members)
        counts = two.shelf.ledger.check()
        assert counts.dropped == {"unscored": 2}
        assert counts.in_flight["buffered"] == 2
        assert {name: len(two.shelf.buffers[name]) for name in POLICIES} == {"planner": 1, "solver": 0}
        two.bench.close()

    run(scene)


def sequences(process: Any) -> None:
    process.workflow.n_samples = 4
    process.dataflow.buffer.unit = "sequences"


@pytest.mark.parametrize("unit", ["groups", "sequences"])
def test_zero_variance_groups_end_in_starvation_and_leave_nothing_behind(tmp_path: Path, unit: str, case: Any) -> None:
    """Case G24 c: group size 4, all rewards 0, batch of 2 groups, a cap of 10 candidate batches."""
    candidates = 10

    def change(process: Any) -> None:
        sequences(process)
        process.dataflow.buffer.unit = unit
        process.dataflow.policies.filter = "filter_zero_adv"
        process.dataflow.buffer.max_rejected_groups = 2 * candidates

    async def scene() -> None:
        assert "group size 4, all rewards 0" in case("G24")["input"]["c"]
        bench = await Bench(tmp_path, change=change, batch=8).start()
        await bench.service.save()
        sizes, drawn = [], 0
        while (reply := await bench.ask(0)).kind == "wait":
            leases = await bench.lease()
            assert leases, "new prompts are drawn all the same"
            for lease_id in leases:
                await bench.deliver(lease_id, [0.0] * 4)
            drawn += len(leases)
            shelf, buffer = bench.shelf, bench.shelf.buffers["m"]
            assert shelf.groups_in_flight == 0
            kept = [shelf.leases.open, shelf.leases.data, shelf.leases.pending, shelf.ledger.places, bench.service.intake.held]
            sizes.append([*map(len, [*kept, buffer, buffer._fresh._heap]), buffer.pace.accepted, stored_bytes(tmp_path)])
        assert reply.kind == "starved"
        assert reply.counts == {"seen": drawn, "dropped/zero_variance": drawn}
        assert drawn >= 2 * candidates
        assert all(size == [0] * 9 for size in sizes), "memory and disk do not grow with rejected groups"
        bench.close()

    run(scene)


def test_every_other_answer_is_a_value_in_sequences_too(tmp_path: Path) -> None:
    def change(process: Any) -> None:
        sequences(process)
        process.train_dataset.repeat = 1
        process.dataflow.buffer.max_rejected_groups = 3

    async def scene() -> None:
        bench = await Bench(tmp_path, n_tasks=4, change=change, batch=6).start()
        reply = await bench.ask(0)
        assert reply.kind == "wait"
        assert "0 of 6 trajectories are there, 0 groups are in flight" in reply.reason
        leases = await bench.lease()
        await bench.deliver(leases[0], [0.0, 1.0, None, 0.5])
        assert "3 of 6 trajectories are there, 3 groups are in flight" in (await bench.ask(0)).reason
        for lease_id in leases[1:]:
            await bench.deliver(lease_id, [None] * 4)
        last = await bench.ask(0)
        assert last.kind == "batch", "nothing else will come: what there is, is trained on"
        assert last.batch.trajectory_ids == [f"{leases[0]}/{i}" for i in (0, 1, 3)]
        assert await bench.train(1) == 3
        assert (await bench.ask(1)).kind == "end_of_data"
        await bench.back(0)
        bench.timeline = 0
        assert (await bench.ask(0)).kind == "stale_timeline"
        bench.close()

    run(scene)


def test_a_starved_policy_hears_so_in_sequences(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(
            tmp_path, change=lambda p: (sequences(p), setattr(p.dataflow.buffer, "max_rejected_groups", 3)), batch=6
        ).start()
        leases = await bench.lease()
        await bench.deliver(leases[0], [0.0, 1.0, None, 0.5])
        for lease_id in leases[1:4]:
            await bench.deliver(lease_id, [None] * 4)
        reply = await bench.ask(0)
        assert reply.kind == "starved"
        assert reply.counts == {"seen": 4, "dropped/unscored": 3}
        bench.close()

    run(scene)


@pytest.mark.parametrize("treatment", ["pace", "drop"])
def test_a_full_queue_holds_submission_back_and_evicts_nothing(tmp_path: Path, treatment: str) -> None:
    def change(process: Any) -> None:
        process.dataflow.buffer.max_groups = 5
        process.dataflow.buffer.treatment = treatment
        process.dataflow.buffer.max_staleness = None if treatment == "pace" else 2

    async def scene() -> None:
        bench = await Bench(tmp_path, change=change).start()
        leases = await bench.lease()
        assert len(leases) == 5
        for lease_id in leases:
            await bench.deliver(lease_id, [0.0, 1.0])
        assert await bench.lease() == []
        assert bench.shelf.ledger.check().dropped == {}
        assert (await bench.ask(0)).batch.group_ids == leases[:2]
        assert len(await bench.lease()) == 2, "as many as left"
        bench.close()

    run(scene)


def test_groups_that_wait_for_their_receipt_have_a_place_in_the_queue(tmp_path: Path) -> None:
    def change(process: Any) -> None:
        process.dataflow.buffer.max_groups = 5
        process.dataflow.buffer.treatment = "drop"

    async def scene() -> None:
        bench = await Bench(tmp_path, change=change).start()
        leases = await bench.lease()
        await bench.train(1)
        for lease_id in leases:
            await bench.deliver(lease_id, [0.0, 1.0], version=1)
        assert bench.service.intake.held_groups("m") == 5
        assert await bench.lease() == [], "held back, not generated and dropped for want of room"
        bench.serves(1)
        await bench.service.intake.reconsider()
        assert len(bench.shelf.buffers["m"]) == 5
        assert bench.shelf.ledger.check().dropped == {}
        bench.close()

    run(scene)


def columns(batch: Any, replayed: bool) -> dict[str, dict[str, list[float]]]:
    """Trajectory → what a replay must bring back as it was."""
    offsets = codec.array(batch.offsets)
    found = {}
    for row, name in enumerate(batch.trajectory_ids):
        if bool(codec.array(batch.rows["replayed"])[row]) == replayed:
            span = slice(offsets[row], offsets[row + 1])
            tokens = {key: codec.array(batch.tokens[key])[span].tolist() for key in ("input_ids", "logprobs", "versions", "loss_mask")}
            kept = ("rewards", "reward_shaped", "group_reward_mean", "group_reward_std", "group_size", "min_version", "max_version")
            found[name] = tokens | {key: [codec.array(batch.rows[key])[row].item()] for key in kept}
    return found


@pytest.mark.parametrize("selection", ["latest", "uniform", "prioritised"])
def test_a_replay_brings_back_log_probs_versions_and_statistics_as_they_were(tmp_path: Path, selection: str) -> None:
    def change(process: Any) -> None:
        process.dataflow.buffer.replay.ratio, process.dataflow.buffer.replay.max_staleness = 0.5, 2
        process.dataflow.buffer.replay.selection = selection
        process.dataflow.buffer.max_staleness = 0

    async def scene() -> None:
        bench = await Bench(tmp_path, change=change).start()
        await bench.service.save()
        seen: dict[str, Any] = {}
        uses = 0
        for version in range(5):
            for instance in bench.shelf.pool.instances.values():
                instance.state = "live"
            bench.serves(version)
            for number, lease_id in enumerate(await bench.lease()):
                await bench.deliver(lease_id, [0.25 * number, 1.0 + version], version=version)
            batch = (await bench.ask(version)).batch
            assert len(set(batch.group_ids)) == len(batch.group_ids) == 2, "no duplicate in a batch"
            again = columns(batch, replayed=True)
            assert len(again) == (2 if version else 0)
            assert again == {name: seen[name] for name in again}
            assert all(version - values["min_version"][0] <= 2 for values in again.values()), "its own limit"
            seen |= columns(batch, replayed=False)
            uses += len(again)
            await bench.train(version + 1, checkpoint=version + 1)
            counts = bench.shelf.ledger.check()
            assert (counts.trained, counts.replayed) == (len(seen), uses)
            kept = bench.shelf.buffers["m"].replay_ids
            bench.close()
            bench = Bench(tmp_path, change=change)
            assert bench.shelf.buffers["m"].replay_ids == kept, "the replay queue survives a restart"
        bench.close()

    run(scene)
