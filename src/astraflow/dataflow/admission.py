"""Pure core: from a delivered group to what may be trained on.

Order (numerics 7): unscored out → shaping → statistics over scored members, once → filters. Later drops never change
the statistics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from astraflow.dataflow.policies.base import GroupStats, Shaper
from astraflow.protocol import codec
from astraflow.protocol.errors import BadMessage
from astraflow.protocol.rollout import Group, Segment, Trajectory

EQUAL_RTOL = 1e-6


@dataclass(frozen=True)
class Share:
    """What one policy gets of a group."""

    policy: str
    lost: dict[int, str]
    """Trajectory index → why its row ends here (unscored, no tokens, failed at a boundary)."""
    stats: GroupStats | None
    """None when no member is scored."""


@dataclass(frozen=True)
class Checked:
    """A group that passed the door."""

    group: Group
    shares: list[Share]
    tokens: int
    """Sampled tokens of all policies."""
    finishes: dict[str, int] = field(default_factory=dict)
    """Trajectories by finish."""


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
    length = len(segment.input_ids)
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
    )
    return Share(policy, lost, stats)


def statistics(values: Sequence[float]) -> tuple[float, float, bool]:
    """(mean, unbiased std, all equal within rtol 1e-6) in float64; equal values have std exactly 0 (case G08)."""
    array = np.asarray(values, dtype=np.float64)
    low, high = float(array.min()), float(array.max())
    if high - low <= EQUAL_RTOL * max(abs(low), abs(high)):
        return float(array.mean()), 0.0, True
    return float(array.mean()), float(array.std(ddof=1)), False


def examine(data: bytes, lease_id: str, attempt: int, n_samples: int, policies: Sequence[str], shapers: Sequence[Shaper]) -> Checked:
    """The CPU-heavy part of admission; runs in a thread. Raises BadMessage."""
    group = check_group(data, lease_id, attempt, n_samples)
    unknown = set(group.versions) - set(policies)
    if unknown:
        raise BadMessage(f"group {lease_id}.versions: policy {min(unknown)!r} is not in this workflow ({', '.join(policies)})")
    finishes: dict[str, int] = {}
    tokens = 0
    for trajectory in group.trajectories:
        finishes[trajectory.finish] = finishes.get(trajectory.finish, 0) + 1
        tokens += sum(int(codec.array(segment.loss_mask).sum()) for segment in trajectory.segments)
    return Checked(group, [make_share(group, policy, shapers) for policy in policies], tokens, finishes)
