"""Pure core: from a delivered group to what may be trained on.

Order (numerics 7): unscored out → shaping → statistics over scored members, once → filters. Later drops never change
the statistics.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from astraflow.dataflow.columns import OUTSIDE, Array, Columns, joined
from astraflow.dataflow.policies.base import GroupStats, Shaper
from astraflow.protocol import codec
from astraflow.protocol.errors import BadMessage
from astraflow.protocol.rollout import Group, Segment, Trajectory

EQUAL_RTOL = 1e-6
TOKEN_COLUMNS = (
    ("input_ids", "int32", 4),
    ("loss_mask", "uint8", 1),
    ("logprobs", "float32", 4),
    ("versions", "int32", 4),
    ("policy_of_token", "uint8", 1),
)
"""(field of a segment, dtype, bytes of an item)"""


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
    return _checked(data, lease_id, attempt, n_samples)[0]


def _checked(data: bytes, lease_id: str, attempt: int, n_samples: int) -> tuple[Group, Columns]:
    group = codec.decode(data, Group)
    if (group.lease_id, group.attempt) != (lease_id, attempt):
        raise BadMessage(f"group of lease {group.lease_id!r} attempt {group.attempt} in a delivery of {lease_id!r} attempt {attempt}")
    indices = [trajectory.index for trajectory in group.trajectories]
    if indices != list(range(n_samples)):
        raise BadMessage(f"group {lease_id}: trajectory indices {indices[:20]}, expected 0 … {n_samples - 1}")
    for trajectory in group.trajectories:
        if trajectory.reward is not None and not math.isfinite(trajectory.reward):
            raise BadMessage(f"group {lease_id} trajectories[{trajectory.index}].reward: {trajectory.reward} is not finite")
        for number, segment in enumerate(trajectory.segments):
            _check_shape(segment, number, lease_id, trajectory.index)
    columns = Columns(segments_of(group))
    _check_values(group, columns)
    return group, columns


def segments_of(group: Group) -> list[Segment]:
    """All of them, in order."""
    return [segment for trajectory in group.trajectories for segment in trajectory.segments]


def _check_shape(segment: Segment, number: int, lease_id: str, index: int) -> None:
    """What can be said of a segment without a look at its tokens."""
    length = segment.input_ids.shape[0] if segment.input_ids.shape else 1  # not len(): a peer may claim any number
    for name, dtype, size in TOKEN_COLUMNS:
        col: codec.Column | None = getattr(segment, name)
        if col is not None and (col.dtype != dtype or col.shape != (length,) or len(col.data) != size * length):
            codec.check_column(col, f"{_where(lease_id, index, number)}.{name}")
            raise BadMessage(f"{_where(lease_id, index, number)}.{name}: {col.dtype}{list(col.shape)}, expected {dtype}[{length}]")
    for name, extra in segment.extra.items():
        codec.check_column(extra, f"{_where(lease_id, index, number)}.extra.{name}")
        if len(extra) != length:
            raise BadMessage(f"{_where(lease_id, index, number)}.extra.{name}: first axis {len(extra)}, expected {length}")
    if not segment.policies or (len(segment.policies) > 1 and segment.policy_of_token is None):
        raise BadMessage(f"{_where(lease_id, index, number)}.policies: {segment.policies!r} without policy_of_token")
    if segment.parent is not None and not 0 <= segment.parent < number:
        raise BadMessage(f"{_where(lease_id, index, number)}.parent: {segment.parent}, expected an earlier segment")
    for policy, credit in segment.credit.items():
        if credit is not None and not math.isfinite(credit):
            raise BadMessage(f"{_where(lease_id, index, number)}.credit.{policy}: {credit} is not finite")


def _where(lease_id: str, index: int, number: int) -> str:
    return f"group {lease_id} trajectories[{index}].segments[{number}]"


def _check_values(group: Group, columns: Columns) -> None:
    """What the tokens say, and that the declared version spans say the same. The first segment at fault is named."""
    places = [(t.index, number) for t in group.trajectories for number in range(len(t.segments))]

    def fault(bad: Array, name: str) -> tuple[str, Segment, slice] | None:
        """Path of the field, segment and its tokens."""
        if not bad.any():
            return None
        at = columns.segment_of(int(bad.argmax()))
        end = int(columns.ends[at])
        return f"{_where(group.lease_id, *places[at])}.{name}", columns.segments[at], slice(end - int(columns.lengths[at]), end)

    if found := fault(columns.mask > 1, "loss_mask"):
        raise BadMessage(f"{found[0]}: {int(columns.mask[found[2]].max())}, expected 0 or 1")
    if columns.owner is not None and (found := fault(columns.sampled & (columns.owner == OUTSIDE), "policy_of_token")):
        path, segment, tokens = found
        assert segment.policy_of_token is not None
        owner = int(codec.array(segment.policy_of_token)[columns.sampled[tokens]].max())
        raise BadMessage(f"{path}: {owner} on a sampled token, policies are {segment.policies!r}")
    if found := fault(~np.isfinite(joined([s.logprobs for s in columns.segments], "float32")), "logprobs"):
        raise BadMessage(f"{found[0]}: a value is not finite")
    owned = columns.sampled if columns.owner is None else columns.sampled & (columns.owner >= 0)
    if found := fault(owned & (columns.versions < 0), "versions"):
        path, segment, tokens = found
        versions = [columns.versions[tokens][columns.own(policy)[tokens]] for policy in segment.policies]
        low = next(int(own.min()) for own in versions if own.size and own.min() < 0)
        raise BadMessage(f"{path}: {low} on a sampled token")
    spans = {policy: columns.spans(policy) for policy in columns.policies}
    seen = {policy: [min(span.low), max(span.high)] for policy, span in spans.items() if any(span.counts)}
    declared = {policy: [span.min, span.max] for policy, span in group.versions.items()}
    if declared != seen:
        raise BadMessage(f"group {group.lease_id}.versions: {declared}, but the tokens say {seen}")


def credit_of(trajectory: Trajectory, segment: Segment, policy: str) -> float | None:
    """This segment's reward for the policy; without an entry the trajectory's."""
    return segment.credit.get(policy, trajectory.reward)


def scored(trajectory: Trajectory, policy: str, counts: Sequence[int]) -> list[tuple[int, float]]:
    """(index, credit) of the segments that hold own sampled tokens of the policy (`counts` per segment) and are scored for it."""
    found = []
    for number, segment in enumerate(trajectory.segments):
        if counts[number] and (credit := credit_of(trajectory, segment, policy)) is not None:
            found.append((number, float(credit)))
    return found


def _lost_because(trajectory: Trajectory, tokens: int) -> str:
    """Why a trajectory without a scored segment of this policy, or that failed, gives it nothing; empty = it may be scored."""
    if trajectory.error is not None:
        return f"error:{trajectory.error.boundary}.{trajectory.error.kind}"
    if trajectory.finish in ("rejected", "error"):
        return trajectory.finish
    return "" if tokens else "no_tokens"


def make_share(group: Group, policy: str, shapers: Sequence[Shaper], columns: Columns | None = None) -> Share:
    """Scored members, shaping and statistics of one policy. `columns`: of all segments of the group, where they are known."""
    spans = (columns or Columns(segments_of(group))).spans(policy)
    lost: dict[int, str] = {}
    values: dict[int, float] = {}
    shaped: dict[int, float] = {}
    lengths: dict[int, int] = {}
    finishes: dict[int, str] = {}
    low, high, first = 2**31 - 1, -1, 0
    for trajectory in group.trajectories:
        start, first = first, first + len(trajectory.segments)
        counts = spans.counts[start:first]
        own = scored(trajectory, policy, counts)
        reason = _lost_because(trajectory, sum(counts)) or ("" if own else "unscored")
        if reason:
            lost[trajectory.index] = reason
            continue
        low = min(low, *(spans.low[start + number] for number, _ in own))
        high = max(high, *(spans.high[start + number] for number, _ in own))
        tokens = sum(counts[number] for number, _ in own)
        lengths[trajectory.index] = tokens
        if trajectory.finish != "stop":
            finishes[trajectory.index] = trajectory.finish
        value = _mean([credit for _, credit in own])
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
        loss_tokens=sum(lengths.values()),
        lengths=lengths,
        finishes=finishes,
    )
    return Share(policy, lost, stats)


def _mean(credits: list[float]) -> float:
    """A trajectory's value (numerics 8), in float64."""
    return credits[0] if len(credits) == 1 else float(np.mean(np.asarray(credits, dtype=np.float64)))


def statistics(values: Sequence[float]) -> tuple[float, float, bool]:
    """(mean, unbiased std, all equal within rtol 1e-6) in float64; equal values have std exactly 0 (case G08)."""
    array = np.asarray(values, dtype=np.float64)
    low, high = float(array.min()), float(array.max())
    if high - low <= EQUAL_RTOL * max(abs(low), abs(high)):
        return float(array.mean()), 0.0, True
    return float(array.mean()), float(array.std(ddof=1)), False


def examine(data: bytes, lease_id: str, attempt: int, n_samples: int, policies: Sequence[str], shapers: Sequence[Shaper]) -> Checked:
    """The CPU-heavy part of admission; runs in a thread. Raises BadMessage."""
    group, columns = _checked(data, lease_id, attempt, n_samples)
    unknown = set(group.versions) - set(policies)
    if unknown:
        raise BadMessage(f"group {lease_id}.versions: policy {min(unknown)!r} is not in this workflow ({', '.join(policies)})")
    finishes = dict(Counter[str](trajectory.finish for trajectory in group.trajectories))
    shares = [make_share(group, policy, shapers, columns) for policy in policies]
    return Checked(group, shares, int(np.count_nonzero(columns.sampled)), finishes)
