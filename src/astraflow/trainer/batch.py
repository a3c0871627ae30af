"""Ragged batches as numpy columns, and padding on request. Shapes: R rows (segments), N tokens, L the longest row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from astraflow.protocol.batch import FINISH_CODES, Batch
from astraflow.protocol.codec import Column, array
from astraflow.protocol.errors import BadMessage

Array = npt.NDArray[Any]

TRUNCATED = FINISH_CODES.index("length")
TOKEN_COLUMNS = ("input_ids", "loss_mask", "logprobs", "versions")
ROW_COLUMNS = (
    "rewards",
    "reward_shaped",
    "credit",
    "temperature",
    "group_index",
    "trajectory_index",
    "group_reward_mean",
    "group_reward_std",
    "group_size",
    "finish",
    "scored",
    "reward_all_equal",
)
"""Row columns that the trainer cannot do without."""


@dataclass(frozen=True)
class RaggedBatch:
    """A batch as the trainer works on it: read-only views, no padding. Members of a group may be in another batch."""

    model_id: str
    timeline: int
    version: int
    offsets: Array
    """int64 [R+1]; tokens of row r are [offsets[r], offsets[r+1])."""
    tokens: dict[str, Array]
    """[N, …] each, as in `protocol.batch.Batch`; its `extra` columns as `extra.<name>`."""
    rows: dict[str, Array]
    """[R] each."""
    row_of_token: Array
    """int64 [N]."""
    n_groups: int
    n_trajectories: int
    media: tuple[tuple[str, ...], ...] = ()
    """Per row, sha256 of its images in order; empty when there is none."""
    images: tuple[Any, ...] = ()
    """What `vision.Vision` has made of them."""

    @property
    def n_rows(self) -> int:
        """R."""
        return len(self.offsets) - 1

    def loss_mask(self, truncated: Literal["train", "mask"] = "train") -> Array:
        """bool [N]: the policy's own tokens of scored rows; rows that the engine cut off are left out with `mask`."""
        live = self.rows["scored"].astype(bool) & np.isfinite(self.rows["credit"])
        if truncated == "mask":
            live &= self.rows["finish"] != TRUNCATED
        mask: Array = self.tokens["loss_mask"].astype(bool) & live[self.row_of_token]
        return mask

    def select(self, rows: Array) -> RaggedBatch:
        """The batch of these rows (int64 indices, ascending); row statistics stay as stamped."""
        keep = np.zeros(self.n_rows, dtype=bool)
        keep[rows] = True
        token = keep[self.row_of_token]
        lengths = np.diff(self.offsets)[keep]
        return replace(
            self,
            offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
            tokens={name: values[token] for name, values in self.tokens.items()},
            rows={name: values[keep] for name, values in self.rows.items()},
            row_of_token=np.repeat(np.arange(len(lengths), dtype=np.int64), lengths),
            n_groups=len(np.unique(self.rows["group_index"][keep])),
            media=tuple(names for names, kept in zip(self.media, keep, strict=False) if kept),
        )


def ragged(batch: Batch) -> RaggedBatch:
    """Views of a served batch. Raises BadMessage when columns contradict each other or cannot be trained on (numerics 2)."""
    offsets = array(batch.offsets).astype(np.int64)
    if len(offsets) < 1 or offsets[0] != 0 or np.any(np.diff(offsets) < 0):
        raise BadMessage("batch.offsets: expected ascending offsets from 0")
    tokens = _columns(batch.tokens, TOKEN_COLUMNS, int(offsets[-1]), "tokens")
    tokens |= {f"extra.{name}": values for name, values in _columns(batch.extra, (), int(offsets[-1]), "extra").items()}
    rows = _columns(batch.rows, ROW_COLUMNS, len(offsets) - 1, "rows")
    if batch.media and len(batch.media) != len(offsets) - 1:
        raise BadMessage(f"batch.media: {len(batch.media)} entries, expected {len(offsets) - 1}")
    lengths = np.diff(offsets)
    result = RaggedBatch(
        batch.model_id,
        batch.timeline,
        batch.version,
        offsets,
        tokens,
        rows,
        np.repeat(np.arange(len(lengths), dtype=np.int64), lengths),
        len(batch.group_ids),
        len(batch.trajectory_ids),
        tuple(tuple(names) for names in batch.media),
    )
    _check(result)
    return result


def _columns(columns: dict[str, Column], needed: Sequence[str], length: int, where: str) -> dict[str, Array]:
    missing = [name for name in needed if name not in columns]
    if missing:
        raise BadMessage(f"batch.{where}: no column {', '.join(missing)}")
    found = {name: array(values) for name, values in columns.items()}
    for name, values in found.items():
        if len(values) != length:
            raise BadMessage(f"batch.{where}[{name!r}]: {len(values)} entries, expected {length}")
    return found


def _check(batch: RaggedBatch) -> None:
    mask = batch.loss_mask()
    if not np.all(batch.rows["temperature"] > 0):
        raise BadMessage("batch.rows['temperature']: training needs temperatures > 0 (numerics 2)")
    if not np.all(np.isfinite(batch.tokens["logprobs"][mask])):
        raise BadMessage("batch.tokens['logprobs']: a sampled token has no finite behaviour log-prob")
    starts = batch.offsets[:-1][np.diff(batch.offsets) > 0]
    if np.any(mask[starts]):
        raise BadMessage("batch.tokens['loss_mask']: a row begins with a sampled token; nothing predicts it")
    for name, count in (("group_index", batch.n_groups), ("trajectory_index", batch.n_trajectories)):
        index = batch.rows[name]
        if len(index) and (index.min() < 0 or index.max() >= count):
            raise BadMessage(f"batch.rows[{name!r}]: an index outside 0…{count - 1}")


@dataclass(frozen=True)
class PaddedBatch:
    """Rectangles [R, L] for trainers that want them."""

    input_ids: Array
    attention_mask: Array
    """1 on real tokens, from lengths and never from token values (a pad id inside a prompt stays 1)."""
    loss_mask: Array
    columns: dict[str, Array]
    """The other token columns."""


def pad(batch: RaggedBatch, pad_id: int, side: Literal["left", "right"] = "right", to_length: int = 0) -> PaddedBatch:
    """Pad every row to the longest, or to `to_length` when that is more."""
    lengths = np.diff(batch.offsets)
    width = max(int(lengths.max(initial=0)), to_length)
    position = np.arange(len(batch.row_of_token)) - batch.offsets[:-1][batch.row_of_token]
    if side == "left":
        position = position + (width - lengths)[batch.row_of_token]
    shape = (batch.n_rows, width)
    attention = np.zeros(shape, dtype=np.int64)
    attention[batch.row_of_token, position] = 1
    fill = {"input_ids": pad_id, "versions": -1}
    columns = {}
    for name, values in batch.tokens.items():
        columns[name] = np.full(shape + values.shape[1:], fill.get(name, 0), dtype=values.dtype)
        columns[name][batch.row_of_token, position] = values
    return PaddedBatch(columns.pop("input_ids"), attention, columns.pop("loss_mask"), columns)
