"""Admission and collation one segment at a time, as plainly as they can be said: what the fast ones must agree with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from astraflow.dataflow.admission import Share, statistics
from astraflow.dataflow.collate import ROW_DTYPES, Item, digest
from astraflow.dataflow.policies.base import GroupStats, Shaper
from astraflow.protocol import codec
from astraflow.protocol.batch import FINISH_CODES, Batch
from astraflow.protocol.errors import BadMessage
from astraflow.protocol.rollout import Group, Segment, Trajectory

TOKEN_DTYPES = {"input_ids": "int32", "loss_mask": "uint8", "logprobs": "float32", "versions": "int32"}


def check_group(data: bytes, lease_id: str, attempt: int, n_samples: int) -> Group:
    """Decode and check a delivery: ids, lengths of columns, finite rewards, version spans through a view.

    Raises BadMessage naming the field.
    """
    group = codec.decode(data, Group)
    if (group.lease_id, group.attempt) != (lease_id, attempt):
        raise BadMessage(f"group of lease {group.lease_id!r} attempt {group.attempt} in a delivery of {lease_id!r} attempt {attempt}")
    indices = [trajectory.index for trajectory in group.trajectories]
    if indices != list(range(n_samples)):
        raise BadMessage(f"group {lease_id}: trajectory indices {indices[:20]}, expected 0 … {n_samples - 1}")
    seen: dict[str, list[int]] = {}
    for trajectory in group.trajectories:
        where = f"group {lease_id} trajectories[{trajectory.index}]"
        if trajectory.reward is not None and not math.isfinite(trajectory.reward):
            raise BadMessage(f"{where}.reward: {trajectory.reward} is not finite")
        for number, segment in enumerate(trajectory.segments):
            _check_segment(segment, number, f"{where}.segments[{number}]", seen)
    _check_spans(group, seen)
    return group


def _check_segment(segment: Segment, number: int, where: str, seen: dict[str, list[int]]) -> None:
    """Lengths, dtypes, and the versions of each policy's own tokens into `seen` (policy → [min, max])."""
    length = segment.input_ids.shape[0] if segment.input_ids.shape else 1
    columns: list[tuple[str, codec.Column, str]] = [
        ("input_ids", segment.input_ids, "int32"),
        ("loss_mask", segment.loss_mask, "uint8"),
        ("logprobs", segment.logprobs, "float32"),
        ("versions", segment.versions, "int32"),
    ]
    if segment.policy_of_token is not None:
        columns.append(("policy_of_token", segment.policy_of_token, "uint8"))
    for name, col, dtype in columns:
        codec.check_column(col, f"{where}.{name}")
        if col.dtype != dtype or col.shape != (length,):
            raise BadMessage(f"{where}.{name}: {col.dtype}{list(col.shape)}, expected {dtype}[{length}]")
    for name, col in segment.extra.items():
        codec.check_column(col, f"{where}.extra.{name}")
        if len(col) != length:
            raise BadMessage(f"{where}.extra.{name}: first axis {len(col)}, expected {length}")
    if not segment.policies or (len(segment.policies) > 1 and segment.policy_of_token is None):
        raise BadMessage(f"{where}.policies: {segment.policies!r} without policy_of_token")
    if segment.parent is not None and not 0 <= segment.parent < number:
        raise BadMessage(f"{where}.parent: {segment.parent}, expected an earlier segment")
    for policy, credit in segment.credit.items():
        if credit is not None and not math.isfinite(credit):
            raise BadMessage(f"{where}.credit.{policy}: {credit} is not finite")
    versions, mask = codec.array(segment.versions), codec.array(segment.loss_mask)
    if mask.size and int(mask.max()) > 1:
        raise BadMessage(f"{where}.loss_mask: {int(mask.max())}, expected 0 or 1")
    if segment.policy_of_token is not None:
        owners = codec.array(segment.policy_of_token)[mask == 1]
        if owners.size and int(owners.max()) >= len(segment.policies):
            raise BadMessage(f"{where}.policy_of_token: {int(owners.max())} on a sampled token, policies are {segment.policies!r}")
    if not np.isfinite(codec.array(segment.logprobs)).all():
        raise BadMessage(f"{where}.logprobs: a value is not finite")
    for policy in segment.policies:
        own = versions[own_tokens(segment, policy)]
        if own.size:
            low, high = int(own.min()), int(own.max())
            if low < 0:
                raise BadMessage(f"{where}.versions: {low} on a sampled token")
            span = seen.setdefault(policy, [low, high])
            span[0], span[1] = min(span[0], low), max(span[1], high)


def _check_spans(group: Group, seen: dict[str, list[int]]) -> None:
    declared = {policy: [span.min, span.max] for policy, span in group.versions.items()}
    if declared != seen:
        raise BadMessage(f"group {group.lease_id}.versions: {declared}, but the tokens say {seen}")


def own_tokens(segment: Segment, policy: str) -> np.ndarray[Any, Any]:
    """bool [T]: tokens that this policy sampled."""
    mask = codec.array(segment.loss_mask) == 1
    if segment.policy_of_token is None:
        return mask if segment.policies[0] == policy else np.zeros_like(mask)
    if policy not in segment.policies:
        return np.zeros_like(mask)
    mine: np.ndarray[Any, Any] = mask & (codec.array(segment.policy_of_token) == segment.policies.index(policy))
    return mine


def credit_of(trajectory: Trajectory, segment: Segment, policy: str) -> float | None:
    """This segment's reward for the policy; without an entry the trajectory's."""
    return segment.credit.get(policy, trajectory.reward)


def own_segments(trajectory: Trajectory, policy: str) -> list[tuple[int, Segment, int]]:
    """(index, segment, own sampled tokens) of the segments that are scored for this policy and hold tokens of it."""
    found = []
    for number, segment in enumerate(trajectory.segments):
        tokens = int(own_tokens(segment, policy).sum())
        if tokens and credit_of(trajectory, segment, policy) is not None:
            found.append((number, segment, tokens))
    return found


def value_of(trajectory: Trajectory, policy: str) -> float | None:
    """A trajectory's value: mean of its segments' credits for the policy (numerics 8); None = unscored."""
    credits = [credit_of(trajectory, segment, policy) for _, segment, _ in own_segments(trajectory, policy)]
    known = [credit for credit in credits if credit is not None]
    return float(np.mean(np.asarray(known, dtype=np.float64))) if known else None


def lost_because(trajectory: Trajectory, policy: str) -> str:
    """Why a trajectory gives this policy nothing; empty = it is scored."""
    if trajectory.error is not None:
        return f"error:{trajectory.error.boundary}.{trajectory.error.kind}"
    if trajectory.finish in ("rejected", "error"):
        return trajectory.finish
    if not any(own_tokens(segment, policy).any() for segment in trajectory.segments):
        return "no_tokens"
    return "unscored" if value_of(trajectory, policy) is None else ""


def make_share(group: Group, policy: str, shapers: Sequence[Shaper]) -> Share:
    """Scored members, shaping and statistics of one policy."""
    lost: dict[int, str] = {}
    values: dict[int, float] = {}
    shaped: dict[int, float] = {}
    lengths: dict[int, int] = {}
    finishes: dict[int, str] = {}
    loss_tokens, low, high = 0, 2**31 - 1, -1
    for trajectory in group.trajectories:
        reason = lost_because(trajectory, policy)
        value = None if reason else value_of(trajectory, policy)
        if value is None:
            lost[trajectory.index] = reason
            continue
        own = own_segments(trajectory, policy)
        for _, segment, _ in own:
            versions = codec.array(segment.versions)[own_tokens(segment, policy)]
            low, high = min(low, int(versions.min())), max(high, int(versions.max()))
        tokens = sum(count for _, _, count in own)
        loss_tokens += tokens
        lengths[trajectory.index] = tokens
        if trajectory.finish != "stop":
            finishes[trajectory.index] = trajectory.finish
        values[trajectory.index] = value
        shaped[trajectory.index] = value + sum(shaper.bonus(tokens, trajectory.finish) for shaper in shapers)
    if not values:
        return Share(policy, lost, None)
    mean, std, equal = statistics(list(shaped.values()))
    stats = GroupStats(
        task_id=group.task_id,
        n_samples=len(group.trajectories),
        values=values,
        shaped=shaped,
        mean=mean,
        std=std,
        all_equal=equal,
        timeline=group.versions[policy].timeline,
        min_version=low,
        max_version=high,
        loss_tokens=loss_tokens,
        lengths=lengths,
        finishes=finishes,
    )
    return Share(policy, lost, stats)


class _Columns:
    def __init__(self) -> None:
        self.rows: dict[str, list[Any]] = {name: [] for name in ROW_DTYPES}
        self.tokens: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in TOKEN_DTYPES}
        self.extra: list[dict[str, np.ndarray[Any, Any]]] = []
        self.media: list[list[str]] = []
        self.lengths: list[int] = []


def collate(items: Sequence[Item], model_id: str, timeline: int, version: int) -> Batch:
    """Rows in the order of the groups, trajectories and segments; only scored segments with own tokens become rows."""
    columns = _Columns()
    group_ids: list[str] = []
    prompt_ids: list[str] = []
    trajectory_ids: list[str] = []
    for item in items:
        group = codec.decode(item.data, Group)
        for trajectory in group.trajectories:
            if trajectory.index in (item.members or item.stats.values):
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
