"""What a trainer trains on: batches named by (model_id, timeline, version)."""

from __future__ import annotations

from typing import Literal

import msgspec

from astraflow.protocol.codec import Column
from astraflow.protocol.message import Message, Name, Version

FINISH_CODES: tuple[str, ...] = ("stop", "length", "error", "rejected")
"""`Batch.rows["finish"]` is an index into this tuple."""


class BatchRequest(Message, kw_only=True):
    """GET /batch. The same name returns the same bytes, however often."""

    model_id: Name
    """The policy."""
    timeline: Version
    """Of the caller; a dead one is answered with `stale_timeline`."""
    version: Version
    """The trainer's version now; the batch moves it to version + 1."""
    wait_s: float = 20.0
    """Long-poll; `wait` is answered when nothing is ready by then."""


class Batch(msgspec.Struct, kw_only=True):
    """Groups as ragged columns: whole ones, or, with `dataflow.buffer.unit: sequences`, exactly train_batch_size trajectories, where
    the first and the last group may lack members that another batch has (statistics are the whole group's). A row is one segment
    of one trajectory; R rows, N tokens in all."""

    model_id: str
    """The policy."""
    timeline: int
    """Life of the policy's history (contracts: Words)."""
    version: int
    """Publishes after the first; the first is version 0."""
    offsets: Column
    """int64 [R+1]; tokens of row r are [offsets[r], offsets[r+1])."""
    tokens: dict[str, Column]
    """[N] each: input_ids int32, loss_mask uint8 (this policy's own tokens only), logprobs float32, versions int32 (−1 off the mask)."""
    rows: dict[str, Column]
    """[R] each: rewards f4, reward_shaped f8, credit f8 (NaN = unscored), temperature f4, group_index i8, trajectory_index i8,
    segment_index i8, group_reward_mean f8, group_reward_std f8, group_size i8 (scored members), n_segments i8, min_version i4,
    max_version i4, finish uint8, scored bool, replayed bool, prompt_length i4 (leading tokens with loss_mask 0), reward_all_equal bool."""
    group_ids: list[str]
    """Lease id per group; `group_index` points here."""
    prompt_ids: list[str]
    """Task id per group."""
    trajectory_ids: list[str]
    """Per distinct trajectory; `trajectory_index` points here."""
    extra: dict[str, Column] = {}
    """Optional token columns, first axis N."""
    media: list[list[str]] = []
    """Per row, sha256 of its media; empty list of lists when there is none."""
    digest: str = ""
    """xxh3-128 of the columns, for logs and replays."""


class WaitEdge(msgspec.Struct, kw_only=True):
    """Who waits for whom, since when."""

    who: str
    """e.g. `trainer:default`."""
    waits_for: str
    """e.g. `groups` or `trainer:verifier`."""
    why: str
    """What exactly is missing."""
    since_s: float
    """Age of the wait."""
    deadline_s: float | None = None
    """Time left; a wait without a deadline of its own has the run's (`dataflow.stall_s`). None = the run has none either."""


class BatchReply(Message, kw_only=True):
    """An answer is always a value: a batch, or why there is none."""

    kind: Literal["batch", "wait", "end_of_data", "starved", "stalled", "stale_timeline"]
    """`wait` = ask again; `end_of_data` = every task was used and nothing is in flight; `starved` = too many groups in a row
    were rejected (counts in `counts`); `stalled` = nothing moved for too long and the run ends (the reason names who is stuck);
    `stale_timeline` = the caller belongs to a dead timeline and must /ready again."""
    batch: Batch | None = None
    """Set when kind is `batch`."""
    reason: str = ""
    """One line for people."""
    waits: list[WaitEdge] = []
    """Who waits for whom."""
    counts: dict[str, int] = {}
    """Groups seen and dropped by reason since the last batch of this model."""
    metrics: dict[str, float] = {}
    """`buffer/…`, `staleness/…`, `rollout/…` at the moment of serving."""
    save_checkpoint: bool = False
    """An operator wants a checkpoint of the present version, before the next step."""
