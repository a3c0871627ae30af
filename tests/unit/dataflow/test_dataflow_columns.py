"""Admission and collation look at all segments at once; here they are compared with the same done one segment at a time."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.dataflow.admission import check_group, examine
from astraflow.dataflow.collate import Item, collate
from astraflow.dataflow.columns import HIGHEST, LOWEST, Columns
from astraflow.dataflow.policies.shape import Overlong
from astraflow.protocol import codec
from astraflow.protocol.errors import BadMessage
from astraflow.protocol.rollout import Group, RolloutError, Segment, Trajectory


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"dataflow_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


made, plain = _load("groups"), _load("per_segment")
POLICIES = ["m", "other"]
SHAPERS = [Overlong(max_len=6, tail=4, factor=0.5)]
seeds = st.integers(0, 2**32)


def random_segment(rng: random.Random, number: int, extra: bool) -> Segment:
    length = rng.choice([0, 1, 3, 9])
    mask = np.array([rng.random() < 0.6 for _ in range(length)], np.uint8)
    shared = rng.random() < 0.3
    versions = np.array([rng.randrange(5) for _ in range(length)], np.int32)
    off_mask = rng.random() < 0.5  # what stands on tokens that nobody sampled is of no interest
    segment = Segment(
        policies=rng.sample(POLICIES, 2) if shared else [rng.choice(POLICIES)],
        policy_of_token=codec.column([rng.randrange(2) for _ in range(length)], "uint8") if shared else None,
        parent=rng.randrange(number) if number and rng.random() < 0.3 else None,
        input_ids=codec.column(np.array([rng.randrange(1000) for _ in range(length)], np.int32), "int32"),
        loss_mask=codec.column(mask, "uint8"),
        logprobs=codec.column(np.array([-rng.random() * (m or off_mask) for m in mask], np.float32), "float32"),
        versions=codec.column(versions if off_mask else np.where(mask == 1, versions, -1).astype(np.int32), "int32"),
        temperature=rng.choice([1.0, 0.7]),
        credit={p: rng.choice([None, rng.random(), 1.0]) for p in POLICIES if rng.random() < 0.4},
        media=["a" * rng.randrange(3)] if rng.random() < 0.2 else [],
    )
    if extra:
        segment.extra = {"values": codec.column(np.zeros((length, 2), np.float32) + rng.random(), "float32")}
    if rng.random() < 0.2:
        segment.extra["some"] = codec.column(np.zeros(length, np.float64), rng.choice(["float32", "float64"]))
    return segment


def random_group(rng: random.Random, name: str = "g", extra: bool = False) -> Group:
    members = []
    for index in range(rng.choice([1, 2, 4, 9])):
        kind = rng.random()
        segments = [random_segment(rng, number, extra) for number in range(0 if kind < 0.1 else rng.choice([1, 1, 2, 3]))]
        members.append(
            Trajectory(
                index=index,
                segments=segments,
                reward=rng.choice([None, 0.0, 1.0, 1.0, rng.random(), 3]),
                error=RolloutError(boundary="tool", kind="timeout") if 0.1 < kind < 0.2 else None,
                finish=rng.choice(["stop", "stop", "length", "rejected", "error"]),
            )
        )
    return made.group(members, name, f"task {name}")


@given(seeds)
@settings(max_examples=150, deadline=None)
def test_shares_are_those_of_one_segment_at_a_time(seed: int) -> None:
    group = random_group(random.Random(seed))
    data, n = codec.encode(group), len(group.trajectories)
    checked = examine(data, "g", 1, n, POLICIES, SHAPERS)
    assert plain.check_group(data, "g", 1, n) == checked.group
    assert checked.shares == [plain.make_share(group, policy, SHAPERS) for policy in POLICIES]
    masks = [codec.array(segment.loss_mask) for trajectory in group.trajectories for segment in trajectory.segments]
    assert checked.tokens == sum(int(mask.sum()) for mask in masks)
    assert sum(checked.finishes.values()) == n


def defect(rng: random.Random, group: Group) -> None:
    """One thing that breaks the contract."""
    segments = [segment for trajectory in group.trajectories for segment in trajectory.segments]
    if not segments or rng.random() < 0.1:
        rng.choice(group.trajectories).reward = rng.choice([float("nan"), float("inf")])
        return
    segment = rng.choice(segments)
    length, name = len(segment.input_ids), rng.choice(["input_ids", "loss_mask", "logprobs", "versions", "policy_of_token"])
    column = getattr(segment, name) or segment.loss_mask
    kind = rng.randrange(8)
    if kind == 0:
        setattr(segment, name, codec.Column(rng.choice(["int64", "float16", "bool"]), column.shape, column.data))
    elif kind == 1:
        setattr(segment, name, codec.Column(column.dtype, rng.choice([(), (length + 1,), (length, 1), (-length,), (2**63,)]), column.data))
    elif kind == 2:
        setattr(segment, name, codec.Column(column.dtype, column.shape, column.data + b"x"))
    elif kind == 3:
        segment.extra["odd"] = rng.choice([codec.Column("float32", (length,), b"x"), codec.column(np.zeros(length + 2), "float64")])
    elif kind == 4:
        segment.policies = rng.choice([[], ["m", "other", "third"]])
        segment.policy_of_token = None
    elif kind == 5:
        segment.parent = rng.choice([-1, 7])
    elif kind == 6:
        segment.credit["m"] = float("nan")
    elif length:
        at, sampled = rng.randrange(length), codec.array(segment.loss_mask).copy()
        values = {"loss_mask": 2, "logprobs": rng.choice([np.nan, np.inf]), "versions": -1, "policy_of_token": 200}
        field = rng.choice([name for name in values if getattr(segment, name) is not None])
        changed = codec.array(getattr(segment, field)).copy()
        changed[at] = values[field]
        setattr(segment, field, codec.column(changed, getattr(segment, field).dtype))
        if field in ("versions", "policy_of_token"):
            sampled[at] = 1
            segment.loss_mask = codec.column(sampled, "uint8")


@given(seeds)
@settings(max_examples=300, deadline=None)
def test_a_defect_is_named_as_by_one_segment_at_a_time(seed: int) -> None:
    rng = random.Random(seed)
    group = random_group(rng)
    defect(rng, group)
    data, n = codec.encode(group), len(group.trajectories)
    said: list[str] = []
    for check in (check_group, plain.check_group):
        try:
            check(data, "g", 1, n)
            said.append("")
        except BadMessage as error:
            said.append(str(error))
    assert said[0] == said[1]


def test_an_impossible_length_is_a_malformed_group_and_no_crash() -> None:
    for extent in (-4, 2**63):
        group = made.rewarded([1.0, 0.0])
        group.trajectories[1].segments[0].input_ids = codec.Column("int32", (extent,), b"")
        with pytest.raises(BadMessage, match=r"trajectories\[1\].segments\[0\].input_ids"):
            check_group(codec.encode(group), "g", 1, 2)


def test_of_several_defects_one_is_named() -> None:
    group = made.rewarded([1.0, 0.0])
    group.trajectories[0].segments[0].logprobs = codec.column([float("nan")] * 4, "float32")
    group.trajectories[1].segments[0].versions = codec.column([-1] * 4, "int32")
    with pytest.raises(BadMessage, match=r"trajectories\[0\].segments\[0\].logprobs: a value is not finite"):
        check_group(codec.encode(group), "g", 1, 2)


@given(seeds)
@settings(max_examples=100, deadline=None)
def test_batches_are_those_of_one_segment_at_a_time_byte_by_byte(seed: int) -> None:
    rng = random.Random(seed)
    policy, extra = rng.choice(POLICIES), rng.random() < 0.5
    items = []
    for number in range(rng.choice([1, 2, 5])):
        group = random_group(rng, f"g{number}", extra)
        stats = plain.make_share(group, policy, SHAPERS).stats
        if stats is not None:
            some = tuple(sorted(rng.sample(sorted(stats.values), rng.randint(1, stats.size)))) if rng.random() < 0.3 else ()
            items.append(Item(codec.encode(group), stats, rng.random() < 0.3, some))
    if items:
        one, two = collate(items, policy, 1, 2), plain.collate(items, policy, 1, 2)
        assert msgspec.to_builtins(one) == msgspec.to_builtins(two)
        assert codec.encode(one) == codec.encode(two)


def test_a_segment_without_tokens_has_none_and_the_others_keep_theirs() -> None:
    segments = [made.segment([], prompt=0), made.segment([3, 1]), made.segment([], prompt=0), made.segment([2], prompt=0)]
    columns = Columns([*segments, made.segment([], prompt=0)])
    spans = columns.spans("m")
    assert spans.counts == [0, 2, 0, 1, 0]
    assert spans.low == [HIGHEST, 1, HIGHEST, 2, HIGHEST]
    assert spans.high == [LOWEST, 3, LOWEST, 2, LOWEST]
    assert columns.leading("m", [1, 3]) == [2, 0]
    assert [columns.segment_of(token) for token in range(5)] == [1, 1, 1, 1, 3]
    assert columns.spans("nobody").counts == [0] * 5
    assert Columns([]).spans("m").counts == []
