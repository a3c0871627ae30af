"""Prefix-trie packing: the rows of a forward pass become one token tree in which every distinct prefix is computed once.

A node is a token after a distinct prefix. Templates, few-shot turns, the prompt of a group and sampled prefixes that happen to be
equal are therefore shared. The tree is laid out in depth-first order, so "ancestor of i" is the interval test
`j ≤ i < end[j]`; a node's position id is its depth. With an ancestor-only attention mask this equals the padded forward of every
row, gradients included. Only nodes that predict a loss token, and their ancestors, exist at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from astraflow.trainer.batch import Array, RaggedBatch


@dataclass(frozen=True)
class PackedRows:
    """One forward pass: T nodes, P predictions (node, temperature), M loss tokens of B rows."""

    input_ids: torch.Tensor
    """int64 [T]."""
    position_ids: torch.Tensor
    """int64 [T], depth in the tree."""
    end: torch.Tensor
    """int64 [T], one past the last node of the subtree."""
    head_node: torch.Tensor
    """int64 [P], node whose logits are needed."""
    head_temperature: torch.Tensor
    """float32 [P]."""
    token_head: torch.Tensor
    """int64 [M], prediction that covers the loss token."""
    target: torch.Tensor
    """int64 [M], the sampled token."""
    flat: Array
    """int64 [M], index into the batch's token columns."""
    row: torch.Tensor
    """int64 [M], 0 … n_rows − 1."""
    n_rows: int

    def attention_mask(self) -> torch.Tensor:
        """bool [T, T], true where the column is the row's node or an ancestor of it."""
        index = torch.arange(len(self.end))
        return (index[None, :] <= index[:, None]) & (index[:, None] < self.end[None, :])


@dataclass(frozen=True)
class _Row:
    index: int
    """Row of the batch."""
    prefix: Array
    """int32, tokens up to the last one that predicts a loss token."""
    key: bytes
    """Sorts like the token sequence."""


def micro_batches(batch: RaggedBatch, mask: Array, rows: Array, max_nodes: int) -> list[list[int]]:
    """Cut `rows` (int64 indices) into passes of at most `max_nodes` nodes, on group boundaries where a group fits.

    `mask` is the loss mask [N]; rows without loss tokens are left out. A single row over the budget is a pass of its own. The
    count is an upper bound: of what groups share with each other only the prefix common to their first rows is taken off.
    """
    groups: dict[int, list[_Row]] = {}
    for row in _rows(batch, mask, rows):
        groups.setdefault(int(batch.rows["group_index"][row.index]), []).append(row)
    passes: list[list[int]] = []
    used, first = max_nodes + 1, None
    for members in groups.values():
        members.sort(key=lambda row: row.key)
        costs = [len(members[0].prefix), *(len(b.prefix) - _common(a, b) for a, b in pairwise(members))]
        total = sum(costs)
        shared = _common(first, members[0]) if first is not None else 0
        if used + total - shared <= max_nodes:
            passes[-1] += [row.index for row in members]
            used += total - shared
            continue
        used = max_nodes + 1
        for row, cost in zip(members, costs, strict=True):
            if used + cost > max_nodes:
                passes.append([])
                used, first, cost = 0, row, len(row.prefix)
            passes[-1].append(row.index)
            used += cost
    return passes


def pack(batch: RaggedBatch, mask: Array, rows: list[int]) -> PackedRows:
    """The token tree of these rows. `mask` is the loss mask [N]. The result does not depend on the order of `rows`."""
    members = sorted(_rows(batch, mask, np.asarray(rows, dtype=np.int64)), key=lambda row: row.key)
    ids: list[Array] = []
    depths: list[Array] = []
    end: Array = np.zeros(sum(len(row.prefix) for row in members), dtype=np.int64)
    path: Array = np.zeros(0, dtype=np.int64)
    parents: list[Array] = []
    flats: list[Array] = []
    count = 0
    previous: _Row | None = None
    for row in members:
        shared = _common(previous, row) if previous is not None else 0
        fresh = len(row.prefix) - shared
        end[path[shared:]] = count
        path = np.concatenate((path[:shared], np.arange(count, count + fresh)))
        ids.append(row.prefix[shared:])
        depths.append(np.arange(shared, len(row.prefix)))
        low, high = batch.offsets[row.index], batch.offsets[row.index + 1]
        positions = np.flatnonzero(mask[low:high])
        parents.append(path[positions - 1])
        flats.append(positions + low)
        count += fresh
        previous = row
    end[path] = count
    flat, parent = np.concatenate(flats), np.concatenate(parents)
    return _tensors(batch, np.concatenate(ids), np.concatenate(depths), end[:count], flat, parent)


def _tensors(batch: RaggedBatch, ids: Array, depths: Array, end: Array, flat: Array, parent: Array) -> PackedRows:
    row_of_token = batch.row_of_token[flat]
    temperature = batch.rows["temperature"][row_of_token].astype(np.float32)
    temperatures, which = np.unique(temperature, return_inverse=True)
    heads, token_head = np.unique(parent * len(temperatures) + which, return_inverse=True)
    distinct, local_row = np.unique(row_of_token, return_inverse=True)
    return PackedRows(
        input_ids=torch.from_numpy(ids.astype(np.int64)),
        position_ids=torch.from_numpy(depths.astype(np.int64)),
        end=torch.from_numpy(end),
        head_node=torch.from_numpy(heads // len(temperatures)),
        head_temperature=torch.from_numpy(temperatures[heads % len(temperatures)]),
        token_head=torch.from_numpy(token_head.astype(np.int64)),
        target=torch.from_numpy(batch.tokens["input_ids"][flat].astype(np.int64)),
        flat=flat,
        row=torch.from_numpy(local_row.astype(np.int64)),
        n_rows=len(distinct),
    )


def _rows(batch: RaggedBatch, mask: Array, rows: Array) -> list[_Row]:
    found = []
    for index in rows:
        low, high = int(batch.offsets[index]), int(batch.offsets[index + 1])
        positions = np.flatnonzero(mask[low:high])
        if positions.size:
            prefix = batch.tokens["input_ids"][low : low + int(positions[-1])]
            found.append(_Row(int(index), prefix, prefix.astype(">i4").tobytes()))
    return found


def _common(a: _Row, b: _Row) -> int:
    """Length of the common prefix."""
    n = min(len(a.prefix), len(b.prefix))
    different = np.flatnonzero(a.prefix[:n] != b.prefix[:n])
    return int(different[0]) if different.size else n
