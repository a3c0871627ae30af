"""The token columns of many segments, each in one piece: what is asked per segment is answered by a few passes over all of them.

Pure. A segment costs some twenty calls of numpy otherwise, and a batch has hundreds of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from astraflow.protocol import codec
from astraflow.protocol.rollout import Segment

Array = npt.NDArray[Any]

NOBODY, OUTSIDE = -1, -2
"""Owners of tokens that belong to no policy, and whose `policy_of_token` is no index into the segment's policies."""
LOWEST, HIGHEST = np.int32(-(2**31)), np.int32(2**31 - 1)


@dataclass(frozen=True)
class Spans:
    """One policy's own sampled tokens, per segment."""

    counts: list[int]
    low: list[int]
    """Smallest version; HIGHEST where there are no tokens."""
    high: list[int]
    """Largest version; LOWEST where there are no tokens."""


class Columns:
    """Segments whose columns have the right dtypes and lengths."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self.lengths: Array = np.fromiter((len(segment.input_ids) for segment in segments), np.int64, len(segments))
        self.ends: Array = np.cumsum(self.lengths)
        self.mask = joined([segment.loss_mask for segment in segments], "uint8")
        self.versions = joined([segment.versions for segment in segments], "int32")
        self.sampled: Array = self.mask == 1
        names = dict.fromkeys(name for segment in segments for name in segment.policies)
        self.policies = {name: number for number, name in enumerate(names)}
        """Policy → its number in `owner`."""
        self.owner = None if len(names) <= 1 and not any(s.policy_of_token for s in segments) else self._owners()
        """int16 per token; None = every sampled token belongs to the only policy."""
        self._spans: dict[str, Spans] = {}

    def own(self, policy: str) -> Array:
        """bool per token: sampled by this policy."""
        if policy not in self.policies:
            return np.zeros_like(self.sampled)
        if self.owner is None:
            return self.sampled
        mine: Array = self.sampled & (self.owner == self.policies[policy])
        return mine

    def spans(self, policy: str) -> Spans:
        """Of its own tokens, per segment."""
        if policy not in self._spans:
            own, filled = self.own(policy), np.flatnonzero(self.lengths)  # reduceat knows no empty pieces
            starts = (self.ends - self.lengths)[filled]
            counts, low = np.zeros_like(self.lengths), np.full_like(self.lengths, HIGHEST)
            high = np.full_like(self.lengths, LOWEST)
            if filled.size:
                counts[filled] = np.add.reduceat(own, starts, dtype=np.int64)
                low[filled] = np.minimum.reduceat(np.where(own, self.versions, HIGHEST), starts)
                high[filled] = np.maximum.reduceat(np.where(own, self.versions, LOWEST), starts)
            self._spans[policy] = Spans(counts.tolist(), low.tolist(), high.tolist())
        return self._spans[policy]

    def leading(self, policy: str, places: Sequence[int]) -> list[int]:
        """Tokens before the first own one, of segments (by place) that hold some."""
        first = np.flatnonzero(self.own(policy))
        starts = (self.ends - self.lengths)[list(places)]
        leading: list[int] = (first[np.searchsorted(first, starts)] - starts).tolist()
        return leading

    def segment_of(self, token: int) -> int:
        """Where in `segments` the token lies."""
        return int(np.searchsorted(self.ends, token, side="right"))

    def _owners(self) -> Array:
        owners = np.empty(len(self.sampled), np.int16)
        for segment, end, length in zip(self.segments, self.ends.tolist(), self.lengths.tolist(), strict=True):
            if segment.policy_of_token is None:
                owners[end - length : end] = self.policies[segment.policies[0]]
                continue
            meant = np.full(256, OUTSIDE, np.int16)
            for number, name in enumerate(segment.policies[:256]):
                meant[number] = self.policies[name] if segment.policies.index(name) == number else NOBODY
            owners[end - length : end] = meant[codec.array(segment.policy_of_token)]
        return owners


def joined(columns: Sequence[codec.Column], dtype: str) -> Array:
    """One read-only array of columns that have this dtype."""
    return np.frombuffer(b"".join([column.data for column in columns]), dtype=codec.NUMPY_DTYPES[dtype])
