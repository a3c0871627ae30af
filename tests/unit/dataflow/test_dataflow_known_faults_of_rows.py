"""Known faults of the public implementation in what Dataflow does with rows and tokens (spec section 9), each as a whole kind."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.dataflow.admission import examine
from astraflow.dataflow.buffer import fresh_enough
from astraflow.dataflow.collate import Item, collate
from astraflow.dataflow.config import DataflowProcess
from astraflow.dataflow.policies.shape import Overlong, Unshaped
from astraflow.protocol import codec
from astraflow.protocol.batch import FINISH_CODES
from astraflow.protocol.errors import ConfigError
from astraflow.protocol.rollout import Group, Segment, Trajectory

_spec = importlib.util.spec_from_file_location("known_faults_rows_bench", Path(__file__).with_name("bench.py"))
assert _spec is not None
assert _spec.loader is not None
bench: Any = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = bench
_spec.loader.exec_module(bench)
made, Bench = bench.made, bench.Bench


# --- 14, 22: staleness and statistics -----------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=2, max_size=4), st.integers(0, 6), st.integers(0, 4))
def test_fault_14_version_0_counts_wherever_it_stands(versions: list[list[int]], now: int, limit: int) -> None:
    group = made.group([made.trajectory(i, float(i), row) for i, row in enumerate(versions)])
    checked = examine(codec.encode(group), "g", 1, len(versions), ["m"], [Unshaped()])
    stats = checked.shares[0].stats
    assert stats is not None
    smallest = min(min(row) for row in versions)
    assert stats.min_version == smallest
    assert fresh_enough(now, stats.min_version, limit) == (now - smallest <= limit)


@given(st.lists(st.sampled_from([None, 0.0, 0.3, 1.0]), min_size=2, max_size=6))
def test_fault_22_a_single_scored_row_is_never_normalised(rewards: list[float | None]) -> None:
    """Group normalisation on single rows: its spread is 0, not NaN, and a group-relative estimator never sees it."""
    checked = examine(codec.encode(made.rewarded(rewards)), "g", 1, len(rewards), ["m"], [Unshaped()])
    stats, scored = checked.shares[0].stats, [r for r in rewards if r is not None]
    assert (stats is None) == (not scored)
    if stats is not None:
        assert stats.size == len(scored)
        assert np.isfinite([stats.mean, stats.std]).all()
        assert stats.std == pytest.approx(np.std(scored, ddof=1) if len(scored) > 1 else 0.0, abs=1e-7)


def test_fault_22_a_group_of_one_is_dropped_at_the_door_and_refused_in_the_configuration(tmp_path: Path) -> None:
    async def scene() -> None:
        b = await Bench(tmp_path).start()
        (first, second, *_) = await b.lease()
        await b.deliver(first, [1.0, None])
        await b.deliver(second, [1.0, 0.0])
        assert b.shelf.ledger.snapshot.dropped == {"too_few_scored": 1, "unscored": 1}
        assert len(b.shelf.buffers["m"]) == 1
        b.close()

    bench.run(scene)
    process = DataflowProcess(run_id="r", run_dir=str(tmp_path), models=["m"])
    process.workflow.n_samples = 1
    with pytest.raises(ConfigError, match=r"workflow.n_samples: 1 .* at least 2"):
        process.validate()


# --- 17, 18, 19, 27: tokens ---------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 20), st.sampled_from(["stop", "length"]))
def test_fault_17_the_overlong_penalty_is_reached_by_every_length_over_its_tail(length: int, tail: int, finish: str) -> None:
    """It was unreachable: only what had been cut off at the very limit could have it. Here it begins a tail before the limit."""
    shaper, limit = Overlong(max_len=20, tail=tail), 20
    bonus = shaper.bonus(length, finish)
    assert (bonus < 0) == (length > limit - tail)
    assert bonus == pytest.approx(-min(max(length - (limit - tail), 0) / tail, 1.0))


@given(st.lists(st.tuples(st.integers(1, 6), st.sampled_from(["stop", "length"])), min_size=2, max_size=5))
def test_fault_18_truncated_is_what_the_engine_said_and_not_who_is_longest(rows: list[tuple[int, str]]) -> None:
    """Truncation detected by padded length."""
    members = [
        Trajectory(index=i, segments=[made.segment([0] * length)], reward=float(i), finish=finish)  # type: ignore[arg-type]
        for i, (length, finish) in enumerate(rows)
    ]
    batch = _batch(made.group(members), "m")
    assert [FINISH_CODES[code] for code in codec.array(batch.rows["finish"])] == [finish for _, finish in rows]
    assert np.diff(codec.array(batch.offsets)).tolist() == [length + 2 for length, _ in rows]


@st.composite
def shared_sequences(draw: st.DrawFn) -> list[list[int]]:
    """Per trajectory, whose each token is: −1 = context, else the number of a policy."""
    return draw(st.lists(st.lists(st.integers(-1, 2), min_size=3, max_size=9), min_size=2, max_size=3))


@given(shared_sequences())
def test_fault_19_every_policys_queue_has_the_whole_sequence_in_its_order_and_its_own_mask(owners: list[list[int]]) -> None:
    """A multi-model workflow scrambles token order."""
    policies = ["a", "b", "c"]
    members = []
    for index, own in enumerate(owners):
        tokens = np.arange(len(own)) * 10 + index
        segment = Segment(
            policies=policies,
            policy_of_token=codec.column([max(o, 0) for o in own], "uint8"),
            input_ids=codec.column(tokens, "int32"),
            loss_mask=codec.column([int(o >= 0) for o in own], "uint8"),
            logprobs=codec.column(np.array([-float(t + 1) if o >= 0 else 0.0 for t, o in enumerate(own)], dtype=np.float32), "float32"),
            versions=codec.column([o if o >= 0 else -1 for o in own], "int32"),
        )
        members.append(Trajectory(index=index, segments=[segment], reward=float(index)))
    group = made.group(members)
    for number, policy in enumerate(policies):
        mine = [(index, own) for index, own in enumerate(owners) if number in own]
        batch = _batch(group, policy, policies)
        assert (batch is None) == (not mine)
        if batch is None:
            continue
        offsets, columns = codec.array(batch.offsets), {name: codec.array(col) for name, col in batch.tokens.items()}
        assert len(offsets) == len(mine) + 1
        for row, (index, own) in enumerate(mine):
            part = slice(offsets[row], offsets[row + 1])
            assert columns["input_ids"][part].tolist() == [t * 10 + index for t in range(len(own))]
            assert columns["loss_mask"][part].tolist() == [int(o == number) for o in own]
            assert columns["logprobs"][part].tolist() == [-float(t + 1) if o == number else 0.0 for t, o in enumerate(own)]
            assert columns["versions"][part].tolist() == [number if o == number else -1 for o in own]


def _batch(group: Group, policy: str, policies: list[str] | None = None) -> Any:
    data = codec.encode(group)
    shares = examine(data, "g", 1, len(group.trajectories), policies or [policy], [Unshaped()]).shares
    stats = next(share.stats for share in shares if share.policy == policy)
    return collate([Item(data, stats, False)], policy, 0, 0) if stats is not None else None


@pytest.mark.parametrize("column", ["input_ids", "loss_mask", "logprobs", "versions"])
@pytest.mark.parametrize("change", [-1, 1])
def test_fault_27_a_sequence_with_one_version_too_few_dies_at_the_door(tmp_path: Path, column: str, change: int) -> None:
    """So does one with any column too short or too long, and it is counted."""

    async def scene() -> None:
        b = await Bench(tmp_path).start()
        lease_id = (await b.lease())[0]
        good = b.delivery(lease_id, [0.0, 1.0])
        group = codec.decode(bytes(good.group), Group)
        segment = group.trajectories[1].segments[0]
        values = codec.array(getattr(segment, column))
        resized = values[:change] if change < 0 else np.append(values, values[-1])
        setattr(segment, column, codec.column(resized, str(values.dtype)))
        bad = msgspec.structs.replace(good, group=msgspec.Raw(codec.encode(group)))
        assert await b.service.intake.take("r", [bad]) == [bad.delivery_id]
        assert b.shelf.ledger.check().dropped == {"malformed": 2}
        assert len(b.shelf.buffers["m"]) == 0
        b.close()

    bench.run(scene)
