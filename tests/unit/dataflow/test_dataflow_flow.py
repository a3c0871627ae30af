"""What was trained on against what was generated (spec section 9, fault 15), counted apart and checked against sums by hand."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.dataflow.buffer import make_entry
from astraflow.dataflow.flow import Flow
from astraflow.dataflow.logbook import Logbook
from astraflow.dataflow.policies.base import GroupStats
from astraflow.protocol import codec
from astraflow.protocol.rollout import Delivery

_spec = importlib.util.spec_from_file_location("dataflow_bench_flow", Path(__file__).with_name("bench.py"))
assert _spec is not None
assert _spec.loader is not None
_bench: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_bench)
Bench, run = _bench.Bench, _bench.run


def stats(rewards: Sequence[float], lengths: Sequence[int]) -> GroupStats:
    return GroupStats(
        task_id="t",
        n_samples=len(rewards),
        values=dict(enumerate(rewards)),
        shaped=dict(enumerate(rewards)),
        mean=fmean(rewards),
        std=0.0,
        all_equal=len(set(rewards)) == 1,
        timeline=0,
        min_version=0,
        max_version=0,
        loss_tokens=sum(lengths),
        lengths=dict(enumerate(lengths)),
    )


group = st.tuples(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(1, 50)), min_size=2, max_size=5), st.booleans())


@given(st.lists(group, max_size=12), st.integers(0, 12))
def test_means_are_those_of_the_trajectories_one_by_one(groups: list[tuple[list[tuple[float, int]], bool]], half: int) -> None:
    flow = Flow()
    generated: list[tuple[float, int]] = []
    trained: list[tuple[float, int]] = []
    parts = []
    for number, (members, kept) in enumerate(groups):
        if number == half:
            parts.append(flow.interval())
        made = stats(*zip(*members, strict=True))
        flow.came(made)
        generated += members
        if kept:
            flow.committed([make_entry(str(number), number, made, "groups")])
            trained += members
    parts.append(flow.interval())
    totals = flow.totals()
    for word, members in (("generated", generated), ("trained", trained)):
        if members:
            assert totals[f"reward/mean_{word}"] == pytest.approx(fmean(reward for reward, _ in members))
            assert totals[f"rollout/tokens_mean_{word}"] == pytest.approx(fmean(length for _, length in members))
        else:
            assert f"reward/mean_{word}" not in totals
        assert sum(part.get(f"rollout/groups_{word}", 0) for part in parts) == totals.get(f"rollout/groups_{word}", 0)
    assert flow.interval() == {}, "nothing came since"


def delivery(bench: Any, lease_id: str, rewards: Sequence[float | None], length: int) -> Delivery:
    members = [_bench.made.trajectory(i, reward, [0] * length) for i, reward in enumerate(rewards)]
    made = _bench.made.group(members, lease_id, task_id=bench.shelf.leases.open[lease_id].task_id)
    return Delivery(delivery_id=lease_id, lease_id=lease_id, attempt=1, group=msgspec.Raw(codec.encode(made)))


def test_fault_15_what_a_filter_takes_out_is_in_the_one_mean_and_not_in_the_other(tmp_path: Path) -> None:
    """If one were made from the other, or both after the filter, they would be equal here."""

    async def scene() -> None:
        bench = await Bench(tmp_path, change=lambda p: setattr(p.dataflow.policies, "filter", "filter_zero_adv")).start()
        leases = await bench.lease()
        groups = [([1.0, 1.0], 30), ([0.0, 1.0], 10), ([1.0, 1.0], 50), ([1.0, 0.0], 20), ([None, None], 99), ([0.5, None], 7)]
        for lease_id, (rewards, length) in zip(leases, groups, strict=True):
            await bench.service.intake.take("r", [delivery(bench, lease_id, rewards, length)])
        before = bench.service._handlers.numbers()
        assert before["rollout/tokens_mean_generated/m"] == pytest.approx((2 * 30 + 2 * 10 + 2 * 50 + 2 * 20 + 7) / 9)
        assert before["reward/mean_generated/m"] == pytest.approx((2 + 1 + 2 + 1 + 0.5) / 9)
        assert "reward/mean_trained/m" not in before, "a batch that is not committed is not trained on"
        reply = await bench.ask(0)
        assert reply.metrics["rollout/effective_groups"] == 2.0
        await bench.train(1)
        values = bench.service._handlers.numbers()
        assert values["rollout/tokens_mean_trained/m"] == 15.0
        assert values["reward/mean_trained/m"] == 0.5
        assert values["reward/mean_generated/m"] == before["reward/mean_generated/m"]
        assert values["rollout/groups_per_trained_group/m"] == 6 / 2
        assert values["rollout/effective_groups/m"] == 2.0
        assert values["rollout/tokens_mean_generated/m"] != values["rollout/tokens_mean_trained/m"]
        assert values["reward/mean_generated/m"] != values["reward/mean_trained/m"]
        bench.service._log_metrics()
        rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        (line,) = [row for row in rows if row.get("over") == "interval"]
        assert (line["model"], line["step"]) == ("m", 1)
        assert line["values"]["rollout/tokens_mean_trained"] == 15.0
        assert line["values"]["rollout/groups_per_trained_group"] == 3.0
        bench.service._log_metrics()
        assert sum('"interval"' in row for row in (tmp_path / "metrics.jsonl").read_text().splitlines()) == 1, "nothing since"
        with Logbook(tmp_path) as log:
            found = log.flows()["m"]
        assert found == pytest.approx({name: values[f"{name}/m"] for name in found})
        bench.close()

    run(scene)


def test_a_group_that_two_batches_share_counts_once_and_its_trajectories_where_they_were_trained(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path, change=lambda p: setattr(p.dataflow.buffer, "unit", "sequences"), batch=3).start()
        leases = await bench.lease()
        for number, lease_id in enumerate(leases[:3]):
            await bench.service.intake.take("r", [delivery(bench, lease_id, [0.0, float(number)], 4)])
        trained = []
        for version in (0, 1):
            assert (await bench.ask(version)).kind == "batch"
            await bench.train(version + 1)
            trained.append(bench.shelf.flows["m"].trained)
        assert [sums.trajectories for sums in trained] == [3, 6]
        assert [sums.groups for sums in trained] == [1, 3], "the second is complete with its second part"
        with Logbook(tmp_path) as log:
            found = log.flows()["m"]
        assert found["rollout/groups_trained"] == 3.0
        assert found["rollout/tokens_mean_trained"] == 4.0
        assert found["reward/mean_trained"] == pytest.approx(3.0 / 6)
        bench.close()

    run(scene)


def test_the_newest_drops_are_listed_with_lease_task_policy_and_reason(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path, change=lambda p: setattr(p.dataflow.buffer, "max_rejected_groups", 1000)).start()
        seen = []
        for _ in range(5):
            for lease_id in await bench.lease():
                seen.append((lease_id, bench.shelf.leases.open[lease_id].task_id))
                await bench.deliver(lease_id, [None, None])
        assert len(seen) == 30
        drops = bench.service._handlers.now().recent_drops
        assert [(drop.lease_id, drop.task_id, drop.policy, drop.reason) for drop in drops] == [
            (lease_id, task_id, "m", "unscored") for lease_id, task_id in seen[-20:]
        ]
        await asyncio.sleep(0)
        bench.close()

    run(scene)
