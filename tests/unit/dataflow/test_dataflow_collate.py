from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from astraflow.dataflow.admission import make_share
from astraflow.dataflow.collate import ROW_DTYPES, Item, collate
from astraflow.dataflow.policies.shape import Overlong
from astraflow.protocol import codec
from astraflow.protocol.batch import Batch
from astraflow.protocol.rollout import Group, Segment, Trajectory

_spec = importlib.util.spec_from_file_location("dataflow_groups", Path(__file__).with_name("groups.py"))
assert _spec is not None
assert _spec.loader is not None
made: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(made)


def item(group: Group, policy: str = "m", replayed: bool = False, **shape: int) -> Item:
    stats = make_share(group, policy, [Overlong(**shape)] if shape else []).stats
    assert stats is not None
    return Item(codec.encode(group), stats, replayed)


def test_rows_are_segments_of_scored_members_as_ragged_columns() -> None:
    first = made.group([made.trajectory(0, 1.0, [0, 1, 2]), made.trajectory(1, None), made.trajectory(2, 0.0, [4])], "g1", "t1")
    parts = [made.segment([5], credit={"m": 0.5}), made.segment([6, 6]), made.segment([7], policy="other")]
    second = made.group([Trajectory(index=0, segments=parts, reward=1.0, finish="length"), made.trajectory(1, 0.0, [6])], "g2", "t2")
    batch = collate([item(first), item(second, replayed=True)], "m", 3, 9)
    rows = {name: codec.array(col) for name, col in batch.rows.items()}
    assert set(rows) == set(ROW_DTYPES)
    assert codec.array(batch.offsets).tolist() == [0, 5, 8, 11, 15, 18]
    assert rows["group_index"].tolist() == [0, 0, 1, 1, 1]
    assert rows["trajectory_index"].tolist() == [0, 1, 2, 2, 3]
    assert rows["segment_index"].tolist() == [0, 0, 0, 1, 0]
    assert rows["n_segments"].tolist() == [1, 1, 2, 2, 1]
    assert rows["credit"].tolist() == [1.0, 0.0, 0.5, 1.0, 0.0]
    assert rows["group_reward_mean"].tolist() == [0.5, 0.5, 0.375, 0.375, 0.375]
    assert rows["group_size"].tolist() == [2] * 5
    assert rows["min_version"].tolist() == [0, 4, 5, 6, 6]
    assert rows["max_version"].tolist() == [2, 4, 5, 6, 6]
    assert rows["prompt_length"].tolist() == [2] * 5
    assert rows["replayed"].tolist() == [False, False, True, True, True]
    assert rows["finish"].tolist() == [0, 0, 1, 1, 0]
    assert batch.trajectory_ids == ["g1/0", "g1/2", "g2/0", "g2/1"]
    assert (batch.group_ids, batch.prompt_ids) == (["g1", "g2"], ["t1", "t2"])
    assert (batch.timeline, batch.version) == (3, 9)


def test_other_policies_tokens_are_context_only() -> None:
    shared = Segment(
        policies=["m", "other"],
        policy_of_token=codec.column([0, 0, 1, 1], "uint8"),
        input_ids=codec.column([1, 2, 3, 4], "int32"),
        loss_mask=codec.column([0, 1, 0, 1], "uint8"),
        logprobs=codec.column(np.array([0, -1, 0, -2], dtype=np.float32), "float32"),
        versions=codec.column([-1, 7, -1, 2], "int32"),
    )
    group = made.group([Trajectory(index=i, segments=[shared], reward=float(i)) for i in range(2)])
    batch = collate([item(group, "other")], "other", 0, 0)
    assert codec.array(batch.tokens["input_ids"]).tolist() == [1, 2, 3, 4] * 2
    assert codec.array(batch.tokens["loss_mask"]).tolist() == [0, 0, 0, 1] * 2
    assert codec.array(batch.tokens["logprobs"]).tolist() == [0, 0, 0, -2] * 2
    assert codec.array(batch.tokens["versions"]).tolist() == [-1, -1, -1, 2] * 2
    assert codec.array(batch.rows["prompt_length"]).tolist() == [3, 3]


def test_shaping_moves_the_shaped_reward_and_leaves_the_raw_one() -> None:
    group = made.group([made.trajectory(0, 1.0, [0] * 8), made.trajectory(1, 0.0, [0] * 2)])
    batch = collate([item(group, max_len=8, tail=4)], "m", 0, 0)
    assert codec.array(batch.rows["rewards"]).tolist() == [1.0, 0.0]
    assert codec.array(batch.rows["reward_shaped"]).tolist() == [0.0, 0.0]
    assert codec.array(batch.rows["reward_all_equal"]).tolist() == [True, True]


def test_optional_columns_travel_when_every_row_has_them() -> None:
    group = made.group([made.trajectory(0, 1.0), made.trajectory(1, 0.0)])
    for trajectory in group.trajectories:
        trajectory.segments[0].extra = {"values": codec.column(np.ones((4, 2), dtype=np.float32), "float32")}
    group.trajectories[0].segments[0].extra["teacher"] = codec.column(np.ones(4, dtype=np.float32), "float32")
    group.trajectories[1].segments[0].media = ["abc"]
    batch = collate([item(group)], "m", 0, 0)
    assert list(batch.extra) == ["values"]
    assert codec.array(batch.extra["values"]).shape == (8, 2)
    assert batch.media == [[], ["abc"]]


def test_the_same_groups_are_the_same_bytes_and_survive_the_wire() -> None:
    items = [item(made.rewarded([1.0, 0.0], lease_id=name)) for name in ("a", "b")]
    one, two = codec.encode(collate(items, "m", 0, 1)), codec.encode(collate(items, "m", 0, 1))
    assert one == two
    again = codec.decode(one, Batch)
    assert codec.encode(again) == one
    assert again.digest
