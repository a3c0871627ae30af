"""Groups → one `Batch`: ragged columns, a row per segment. Pure and deterministic; runs in a thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from astraflow.dataflow.admission import credit_of, own_segments, own_tokens
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
TOKEN_DTYPES = {"input_ids": "int32", "loss_mask": "uint8", "logprobs": "float32", "versions": "int32"}


@dataclass(frozen=True)
class Item:
    """One group of the batch."""

    data: bytes
    """The encoded Group, as delivered."""
    stats: GroupStats
    replayed: bool


@dataclass
class _Columns:
    rows: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in ROW_DTYPES})
    tokens: dict[str, list[np.ndarray[Any, Any]]] = field(default_factory=lambda: {name: [] for name in TOKEN_DTYPES})
    extra: list[dict[str, np.ndarray[Any, Any]]] = field(default_factory=list)
    media: list[list[str]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)


def collate(items: Sequence[Item], model_id: str, timeline: int, version: int) -> Batch:
    """Rows in the order of the groups, trajectories and segments; only scored segments with own tokens become rows."""
    columns = _Columns()
    group_ids: list[str] = []
    prompt_ids: list[str] = []
    trajectory_ids: list[str] = []
    for item in items:
        group = codec.decode(item.data, Group)
        for trajectory in group.trajectories:
            if trajectory.index in item.stats.values:
                _add(columns, trajectory, item, model_id, len(group_ids), len(trajectory_ids))
                trajectory_ids.append(f"{group.lease_id}/{trajectory.index}")
        group_ids.append(group.lease_id)
        prompt_ids.append(group.task_id)
    offsets = np.concatenate([[0], np.cumsum(columns.lengths, dtype=np.int64)])
    batch = Batch(
        model_id=model_id,
        timeline=timeline,
        version=version,
        offsets=codec.column(offsets, "int64"),
        tokens={name: codec.column(np.concatenate(columns.tokens[name]), dtype) for name, dtype in TOKEN_DTYPES.items()},
        rows={name: codec.column(columns.rows[name], dtype) for name, dtype in ROW_DTYPES.items()},
        group_ids=group_ids,
        prompt_ids=prompt_ids,
        trajectory_ids=trajectory_ids,
        extra=_extra(columns.extra),
        media=columns.media if any(columns.media) else [],
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


def _add(columns: _Columns, trajectory: Trajectory, item: Item, policy: str, group_index: int, trajectory_index: int) -> None:
    segments = own_segments(trajectory, policy)
    bonus = item.stats.shaped[trajectory.index] - item.stats.values[trajectory.index]
    for number, segment, _ in segments:
        mask = own_tokens(segment, policy)
        own_versions = codec.array(segment.versions)[mask]
        credit = credit_of(trajectory, segment, policy)
        assert credit is not None
        row = {
            "rewards": np.nan if trajectory.reward is None else trajectory.reward,
            "reward_shaped": credit + bonus,
            "credit": credit,
            "temperature": segment.temperature,
            "group_index": group_index,
            "trajectory_index": trajectory_index,
            "segment_index": number,
            "group_reward_mean": item.stats.mean,
            "group_reward_std": item.stats.std,
            "group_size": item.stats.size,
            "n_segments": len(segments),
            "min_version": int(own_versions.min()),
            "max_version": int(own_versions.max()),
            "finish": FINISH_CODES.index(trajectory.finish),
            "scored": True,
            "replayed": item.replayed,
            "prompt_length": int(np.argmax(mask)),
            "reward_all_equal": item.stats.all_equal,
        }
        for name, value in row.items():
            columns.rows[name].append(value)
        _add_tokens(columns, segment, mask)


def _add_tokens(columns: _Columns, segment: Segment, mask: np.ndarray[Any, Any]) -> None:
    columns.tokens["input_ids"].append(codec.array(segment.input_ids))
    columns.tokens["loss_mask"].append(mask.astype(np.uint8))
    columns.tokens["logprobs"].append(np.where(mask, codec.array(segment.logprobs), np.float32(0)))
    columns.tokens["versions"].append(np.where(mask, codec.array(segment.versions), np.int32(-1)))
    columns.extra.append({name: codec.array(col) for name, col in segment.extra.items()})
    columns.media.append(list(segment.media))
    columns.lengths.append(mask.size)


def _extra(rows: list[dict[str, np.ndarray[Any, Any]]]) -> dict[str, codec.Column]:
    """Optional columns that every row has with one dtype and trailing shape."""
    if not rows:
        return {}
    found = {}
    for name, first in rows[0].items():
        same = all(name in row and row[name].dtype == first.dtype and row[name].shape[1:] == first.shape[1:] for row in rows)
        if same:
            found[name] = codec.column(np.concatenate([row[name] for row in rows]), first.dtype.newbyteorder("=").name)
    return found
