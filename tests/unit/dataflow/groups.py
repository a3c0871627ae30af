"""Groups for the tests of this directory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from astraflow.protocol import codec
from astraflow.protocol.rollout import Group, RolloutError, Segment, Trajectory, VersionSpan


def segment(
    versions: Sequence[int], policy: str = "m", prompt: int = 2, credit: dict[str, float | None] | None = None, dtype: str = "int32"
) -> Segment:
    """`prompt` context tokens, then one sampled token per entry of `versions`."""
    n = prompt + len(versions)
    return Segment(
        policies=[policy],
        input_ids=codec.column(np.arange(n), dtype),
        loss_mask=codec.column([0] * prompt + [1] * len(versions), "uint8"),
        logprobs=codec.column(np.array([0.0] * prompt + [-0.5] * len(versions), dtype=np.float32), "float32"),
        versions=codec.column([-1] * prompt + list(versions), "int32"),
        credit=credit or {},
    )


def trajectory(index: int, reward: float | None, versions: Sequence[int] = (0, 0), error: str = "") -> Trajectory:
    return Trajectory(
        index=index,
        segments=[] if error else [segment(versions)],
        reward=None if error else reward,
        error=RolloutError(boundary="reward", kind=error) if error else None,
        finish="error" if error else "stop",
    )


def group(trajectories: list[Trajectory], lease_id: str = "g", task_id: str = "t", timeline: int = 0) -> Group:
    """With the spans that its tokens say."""
    spans: dict[str, VersionSpan] = {}
    for one in trajectories:
        for part in one.segments:
            versions = codec.array(part.versions)[codec.array(part.loss_mask) == 1]
            for number, policy in enumerate(part.policies):
                own = versions
                if part.policy_of_token is not None:
                    mask = (codec.array(part.loss_mask) == 1) & (codec.array(part.policy_of_token) == number)
                    own = codec.array(part.versions)[mask]
                if own.size:
                    span = spans.setdefault(policy, VersionSpan(timeline=timeline, min=2**31 - 1, max=-1))
                    span.min, span.max = min(span.min, int(own.min())), max(span.max, int(own.max()))
    return Group(lease_id=lease_id, attempt=1, task_id=task_id, versions=spans, trajectories=trajectories)


def rewarded(rewards: Sequence[float | None], **options: str) -> Group:
    return group([trajectory(i, r) for i, r in enumerate(rewards)], **options)
