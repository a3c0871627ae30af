"""Groups → one `Batch`: ragged columns, a row per segment. Pure and deterministic; runs in a thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from astraflow.dataflow.admission import scored, segments_of
from astraflow.dataflow.columns import Columns, joined
from astraflow.dataflow.policies.base import GroupStats
from astraflow.protocol import codec
from astraflow.protocol.batch import FINISH_CODES, Batch
from astraflow.protocol.rollout import Group, Segment, Trajectory

ROW_DTYPES = {
    "rewards": "float32",
    "reward_shaped": "float64",
    "credit": "float64",
    "temperature": "float32",
    "group_index": "int64",
    "trajectory_index": "int64",
    "segment_index": "int64",
    "group_reward_mean": "float64",
    "group_reward_std": "float64",
    "group_size": "int64",
    "n_segments": "int64",
    "min_version": "int32",
    "max_version": "int32",
    "finish": "uint8",
    "scored": "bool",
    "replayed": "bool",
    "prompt_length": "int32",
    "reward_all_equal": "bool",
}
GIVEN = tuple(name for name in ROW_DTYPES if name not in ("min_version", "max_version", "prompt_length"))
"""What is known of a row without its tokens, in the order of `ROW_DTYPES`."""


@dataclass(frozen=True)
class Item:
    """One group of the batch."""

    data: bytes
    """The encoded Group, as delivered."""
    stats: GroupStats
    replayed: bool
    members: tuple[int, ...] = ()
    """Trajectories of the group that are in this batch; empty = all that are scored."""


@dataclass(frozen=True)
class _Chosen:
    """A segment that becomes a row."""

    at: int
    """Among all segments of the batch's groups."""
    segment: Segment
    row: tuple[Any, ...]
    """Its values of ROW_DTYPES but for those of its tokens."""


def collate(items: Sequence[Item], model_id: str, timeline: int, version: int) -> Batch:
    """Rows in the order of the groups, trajectories and segments; only scored segments with own tokens become rows."""
    groups = [codec.decode(item.data, Group) for item in items]
    columns = Columns([segment for group in groups for segment in segments_of(group)])
    counts = columns.spans(model_id).counts
    chosen: list[_Chosen] = []
    trajectory_ids: list[str] = []
    first = 0
    for number, (item, group) in enumerate(zip(items, groups, strict=True)):
        members = set(item.members or item.stats.values)
        for trajectory in group.trajectories:
            start, first = first, first + len(trajectory.segments)
            if trajectory.index in members:
                name = (number, len(trajectory_ids))
                chosen += _rows(trajectory, item, scored(trajectory, model_id, counts[start:first]), start, name)
                trajectory_ids.append(f"{group.lease_id}/{trajectory.index}")
    offsets = np.concatenate([[0], np.cumsum(columns.lengths[[row.at for row in chosen]], dtype=np.int64)])
    batch = Batch(
        model_id=model_id,
        timeline=timeline,
        version=version,
        offsets=codec.column(offsets, "int64"),
        tokens=_tokens(columns, chosen, model_id),
        rows=_row_columns(columns, chosen, model_id),
        group_ids=[group.lease_id for group in groups],
        prompt_ids=[group.task_id for group in groups],
        trajectory_ids=trajectory_ids,
        extra=_extra([row.segment.extra for row in chosen]),
        media=[list(row.segment.media) for row in chosen] if any(row.segment.media for row in chosen) else [],
    )
    batch.digest = digest(batch)
    return batch


def digest(batch: Batch) -> str:
    """xxh3-128 over the columns' names and bytes."""
    state = xxhash.xxh3_128()
    state.update(batch.offsets.data)
    for family in (batch.tokens, batch.rows, batch.extra):
        for name, col in sorted(family.items()):
            state.update(name.encode())
            state.update(col.data)
    return state.hexdigest()


def _rows(trajectory: Trajectory, item: Item, own: list[tuple[int, float]], start: int, name: tuple[int, int]) -> list[_Chosen]:
    """The rows of one trajectory: `own` = (segment, credit) of those that are scored; `start` = where its segments begin; `name` =
    (group, trajectory) in the batch."""
    stats = item.stats
    bonus = stats.shaped[trajectory.index] - stats.values[trajectory.index]
    reward = np.nan if trajectory.reward is None else trajectory.reward
    finish = FINISH_CODES.index(trajectory.finish)
    same = (stats.mean, stats.std, stats.size, len(own), finish, True, item.replayed, stats.all_equal)
    return [
        _Chosen(
            start + number,
            trajectory.segments[number],
            (reward, credit + bonus, credit, trajectory.segments[number].temperature, *name, number, *same),
        )
        for number, credit in own
    ]


def _row_columns(columns: Columns, chosen: list[_Chosen], policy: str) -> dict[str, codec.Column]:
    """`rows` of the batch."""
    spans, places = columns.spans(policy), [row.at for row in chosen]
    found: dict[str, Sequence[Any]] = dict(zip(GIVEN, zip(*(row.row for row in chosen), strict=True), strict=True))
    found["min_version"] = [spans.low[at] for at in places]
    found["max_version"] = [spans.high[at] for at in places]
    found["prompt_length"] = columns.leading(policy, places)
    return {name: codec.column(found[name], dtype) for name, dtype in ROW_DTYPES.items()}


def _tokens(columns: Columns, chosen: list[_Chosen], policy: str) -> dict[str, codec.Column]:
    """`tokens` of the batch: what another policy sampled is context, without log-probs and versions."""
    own, versions = columns.own(policy), columns.versions
    ids = [row.segment.input_ids.data for row in chosen]
    logprobs = joined([row.segment.logprobs for row in chosen], "float32")
    if len(chosen) < len(columns.segments):
        kept = np.zeros(len(columns.segments), bool)
        kept[[row.at for row in chosen]] = True
        there = np.repeat(kept, columns.lengths)
        own, versions = own[there], versions[there]
    return {
        "input_ids": codec.Column("int32", own.shape, b"".join(ids)),
        "loss_mask": codec.Column("uint8", own.shape, own.tobytes()),
        "logprobs": codec.column(np.where(own, logprobs, np.float32(0)), "float32"),
        "versions": codec.column(np.where(own, versions, np.int32(-1)), "int32"),
    }


def _extra(rows: list[dict[str, codec.Column]]) -> dict[str, codec.Column]:
    """Optional columns that every row has with one dtype and trailing shape."""
    found = {}
    for name, first in rows[0].items() if rows else ():
        parts = [row[name] for row in rows if name in row]
        if len(parts) == len(rows) and all((part.dtype, part.shape[1:]) == (first.dtype, first.shape[1:]) for part in parts):
            shape = (sum(len(part) for part in parts), *first.shape[1:])
            found[name] = codec.Column(first.dtype, shape, b"".join([part.data for part in parts]))
    return found
