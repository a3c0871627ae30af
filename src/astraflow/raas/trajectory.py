"""The workflow boundary: what a workflow returned becomes a checked protocol `Trajectory`, or an error that names the field."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, get_args

import numpy as np

from astraflow.protocol.codec import Column, array, check_column
from astraflow.protocol.errors import BadMessage
from astraflow.protocol.rollout import Finish, RolloutError, Segment, Trajectory, VersionSpan
from astraflow.workflows.api import Episode, EpisodeError, as_episode

COLUMN_DTYPES = {"input_ids": "int32", "loss_mask": "uint8", "logprobs": "float32", "versions": "int32"}


def to_episode(result: Any, policies: list[str], temperature: float = 1.0) -> Episode:
    """`Episode | Trajectory | dict | None` as an `Episode` whose trajectory keeps every promise of `protocol/rollout.py`.

    A dict without its own temperature was sampled at `temperature`. Raises EpisodeError(workflow, bad_result) naming the field.
    """
    if isinstance(result, dict):
        result = _with_defaults(result, temperature)
    episode = as_episode(result, policies)
    check_trajectory(episode.trajectory, policies)
    return episode


def _with_defaults(result: dict[str, Any], temperature: float) -> dict[str, Any]:
    out = dict(result)
    if "rewards" in out and "reward" not in out:
        out["reward"] = out.pop("rewards")
    if isinstance(out.get("segments"), list):
        out["segments"] = [{"temperature": temperature, **row} if isinstance(row, dict) else row for row in out["segments"]]
    else:
        out.setdefault("temperature", temperature)
    return out


def check_trajectory(trajectory: Trajectory, policies: list[str]) -> None:
    """Raise EpisodeError(workflow, bad_result) unless the trajectory can cross the wire."""
    if trajectory.reward is not None and not math.isfinite(trajectory.reward):
        raise _bad("reward", f"{trajectory.reward} is not a finite number")
    if trajectory.finish not in get_args(Finish):
        raise _bad("finish", f"{trajectory.finish!r} is not one of {', '.join(get_args(Finish))}")
    if not trajectory.segments and trajectory.error is None and trajectory.finish != "rejected":
        raise _bad("segments", "empty, but the episode neither failed nor was rejected")
    for index, segment in enumerate(trajectory.segments):
        _check_segment(segment, f"segments[{index}]", index, policies)


def _check_segment(segment: Segment, where: str, index: int, policies: list[str]) -> None:
    unknown = [name for name in segment.policies if name not in policies]
    if unknown or not segment.policies:
        raise _bad(f"{where}.policies", f"{segment.policies} must name policies of the workflow: {', '.join(policies)}")
    if segment.parent is not None and not 0 <= segment.parent < index:
        raise _bad(f"{where}.parent", f"{segment.parent} is not an earlier segment")
    if not (math.isfinite(segment.temperature) and segment.temperature >= 0):
        raise _bad(f"{where}.temperature", f"{segment.temperature} is not a temperature")
    length = len(segment.input_ids)
    for name, dtype in COLUMN_DTYPES.items():
        _check_tokens(getattr(segment, name), f"{where}.{name}", length, dtype)
    if segment.policy_of_token is not None:
        _check_tokens(segment.policy_of_token, f"{where}.policy_of_token", length, "uint8")
        if length and int(array(segment.policy_of_token).max()) >= len(segment.policies):
            raise _bad(f"{where}.policy_of_token", f"an index over {len(segment.policies) - 1}")
    for name, col in segment.extra.items():
        _check_tokens(col, f"{where}.extra.{name}", length, None)
    for policy, credit in segment.credit.items():
        if policy not in segment.policies:
            raise _bad(f"{where}.credit", f"{policy!r} has no tokens in this segment")
        if credit is not None and not math.isfinite(credit):
            raise _bad(f"{where}.credit.{policy}", f"{credit} is not a finite number")
    _check_values(segment, where)


def _check_tokens(col: Column, where: str, length: int, dtype: str | None) -> None:
    try:
        check_column(col, where)
    except BadMessage as error:
        raise EpisodeError("workflow", "bad_result", str(error)) from None
    if dtype is not None and (col.dtype != dtype or len(col.shape) != 1):
        raise _bad(where, f"{col.dtype} of shape {col.shape}, expected a row of {dtype}")
    if not col.shape or col.shape[0] != length:
        raise _bad(where, f"{len(col)} tokens, input_ids has {length}")


def _check_values(segment: Segment, where: str) -> None:
    mask, logprobs, versions = array(segment.loss_mask), array(segment.logprobs), array(segment.versions)
    if mask.size == 0:
        raise _bad(f"{where}.input_ids", "no tokens")
    if int(array(segment.input_ids).min()) < 0:
        raise _bad(f"{where}.input_ids", "a negative token id")
    if int(mask.max()) > 1:
        raise _bad(f"{where}.loss_mask", "must be 0 or 1")
    if not np.isfinite(logprobs).all():
        raise _bad(f"{where}.logprobs", f"{logprobs[~np.isfinite(logprobs)][0]} is not finite")
    own = mask == 1
    if (logprobs[~own] != 0).any():
        raise _bad(f"{where}.logprobs", "must be 0 where loss_mask is 0")
    if (versions[own] < 0).any():
        raise _bad(f"{where}.versions", "must be ≥ 0 where loss_mask is 1")
    if (versions[~own] != -1).any():
        raise _bad(f"{where}.versions", "must be −1 where loss_mask is 0")


def _bad(field: str, what: str) -> EpisodeError:
    return EpisodeError("workflow", "bad_result", f"{field}: {what}")


def version_spans(trajectories: Iterable[Trajectory], timelines: Mapping[str, int]) -> dict[str, VersionSpan]:
    """Per policy the smallest and largest version over its own sampled tokens.

    timelines: oldest timeline that each policy's responses came from; a policy without an entry has timeline 0.
    """
    spans: dict[str, VersionSpan] = {}
    for trajectory in trajectories:
        for segment in trajectory.segments:
            own = array(segment.loss_mask) == 1
            versions = array(segment.versions)
            owner = None if segment.policy_of_token is None else array(segment.policy_of_token)
            for position, policy in enumerate(segment.policies):
                mine = versions[own & (owner == position)] if owner is not None else versions[own] if position == 0 else versions[:0]
                if mine.size:
                    _widen(spans, policy, int(mine.min()), int(mine.max()), timelines.get(policy, 0))
    return spans


def _widen(spans: dict[str, VersionSpan], policy: str, low: int, high: int, timeline: int) -> None:
    span = spans.get(policy)
    if span is None:
        spans[policy] = VersionSpan(timeline=timeline, min=low, max=high)
    else:
        span.min, span.max = min(span.min, low), max(span.max, high)


def failed(index: int, error: RolloutError, record_ref: str = "") -> Trajectory:
    """A member without a usable result."""
    return Trajectory(index=index, error=error, finish="error", record_ref=record_ref)
