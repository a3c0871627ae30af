"""Prefix-trie packing: the rows of a forward pass become one token tree in which every distinct prefix is computed once.

A node is a token after a distinct prefix. Templates, few-shot turns, the prompt of a group and sampled prefixes that happen to be
equal are therefore shared. The tree is laid out in depth-first order, so "ancestor of i" is the interval test
`j ≤ i < end[j]`; a node's position id is its depth. With an ancestor-only attention mask this equals the padded forward of every
row, gradients included. Only nodes that predict a loss token, and their ancestors, exist at all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from astraflow.trainer.batch import Array, RaggedBatch

IDENTITY, POSITIONS = "vision.identity", "vision.positions"
"""Token columns of batches with images (vision.py): int64 [N], the token id, or −1 − number of the image that the token is a part of;
int64 [N, 3], positions along time, height and width."""


@dataclass(frozen=True)
class PackedRows:
    """One forward pass: T nodes, P predictions (node, temperature), M loss tokens of B rows."""

    input_ids: torch.Tensor
    """int64 [T]."""
    position_ids: torch.Tensor
    """int64 [T], depth in the tree; [3, T] for models with images."""
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
    images: tuple[Any, ...] = ()
    """Of the batch's images those of this pass, in the order of their tokens."""
    idle_images: tuple[Any, ...] = ()
    """What the vision tower computes in vain in a pass without images, to keep step with other ranks."""

    def to(self, device: torch.device) -> PackedRows:
        """The same pass with its tensors on a device."""
        tensors: dict[str, Any] = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **tensors)

    def attention_mask(self) -> torch.Tensor:
        """bool [T, T], true where the column is the row's node or an ancestor of it."""
        index = torch.arange(len(self.end), device=self.end.device)
        return (index[None, :] <= index[:, None]) & (index[:, None] < self.end[None, :])


@dataclass(frozen=True)
class _Row:
    index: int
    """Row of the batch."""
    prefix: Array
    """Tokens (or identities) up to the last one that predicts a loss token."""
    key: bytes
    """Sorts like the token sequence."""


@dataclass(frozen=True)
class _Item:
    """Rows of one group that stay together."""

    rows: list[_Row]
    """Sorted."""
    nodes: int


def micro_batches(batch: RaggedBatch, mask: Array, rows: Array, max_nodes: int) -> list[list[int]]:
    """Cut `rows` (int64 indices) into passes of at most `max_nodes` nodes: `schedule` for one rank."""
    return schedule(batch, mask, rows, max_nodes, 1)[0]


def schedule(batch: RaggedBatch, mask: Array, rows: Array, max_nodes: int, ranks: int) -> list[list[list[int]]]:
    """Passes of at most `max_nodes` nodes for each rank: [rank][pass] → rows. Every rank has as many passes as the others (empty
    ones when there are too few rows), and passes of the same number cost about the same, because ranks wait for each other in each.

    First-fit decreasing over whole groups says how many passes are needed; those are then filled evenly, largest group first. Groups
    are only cut where they exceed the budget or a rank's share. `mask` is the loss mask [N]; rows without loss tokens are left out.
    A single row over the budget is a pass of its own. Counts are upper bounds: of what groups share with each other only the prefix
    common to all of them is taken off. The result does not depend on the order of `rows`.
    """
    groups: dict[int, list[_Row]] = {}
    for row in _rows(batch, mask, rows):
        groups.setdefault(int(batch.rows["group_index"][row.index]), []).append(row)
    if not groups:
        return [[] for _ in range(ranks)]
    wholes = [_item(sorted(members, key=lambda row: row.key)) for members in groups.values()]
    template = _template(wholes)
    share = template + -(-sum(item.nodes - template for item in wholes) // ranks)
    items = [piece for whole in wholes for piece in _pieces(whole, min(max_nodes, share))]
    items.sort(key=lambda item: (-item.nodes, item.rows[0].key))
    count = -(-_first_fit(items, template, max_nodes) // ranks) * ranks
    while (passes := _even(items, template, max_nodes, count)) is None:
        count += ranks
    passes.sort(key=lambda found: -found[0])
    rounds = [passes[low : low + ranks] for low in range(0, count, ranks)]
    # the largest of a round goes to the first rank, of the next to the last: sums come out even
    return [[turn[rank if number % 2 == 0 else -1 - rank][1] for number, turn in enumerate(rounds)] for rank in range(ranks)]


def _item(rows: list[_Row]) -> _Item:
    return _Item(rows, len(rows[0].prefix) + sum(len(b.prefix) - _common(a, b) for a, b in pairwise(rows)))


def _template(items: list[_Item]) -> int:
    """Length of the prefix that all rows have."""
    every = [row for item in items for row in (item.rows[0], item.rows[-1])]
    return min(_common(every[0], row) for row in every)


def _pieces(item: _Item, limit: int) -> list[_Item]:
    """The item, or neighbouring rows of it of at most `limit` nodes (at least one row each)."""
    if item.nodes <= limit:
        return [item]
    pieces: list[list[_Row]] = []
    used = 0
    for row in item.rows:
        fresh = len(row.prefix) - _common(pieces[-1][-1], row) if pieces else 0
        if pieces and used + fresh <= limit:
            pieces[-1].append(row)
            used += fresh
        else:
            pieces.append([row])
            used = len(row.prefix)
    return [_item(rows) for rows in pieces]


def _first_fit(items: list[_Item], template: int, max_nodes: int) -> int:
    """Passes that first-fit decreasing needs."""
    used: list[int] = []
    for item in items:
        fits = (number for number, nodes in enumerate(used) if nodes + item.nodes - template <= max_nodes)
        number = next(fits, None)
        if number is None:
            used.append(item.nodes)
        else:
            used[number] += item.nodes - template
    return len(used)


def _even(items: list[_Item], template: int, max_nodes: int, count: int) -> list[tuple[int, list[int]]] | None:
    """(nodes, rows) of `count` passes, each item into the emptiest; None when that exceeds the budget."""
    used: list[int] = [template] * count
    rows: list[list[int]] = [[] for _ in range(count)]
    for item in items:
        number = used.index(min(used))
        used[number] += item.nodes - template
        if used[number] > max_nodes and rows[number]:
            return None
        rows[number] += [row.index for row in item.rows]
    return list(zip(used, rows, strict=True))


def pack(batch: RaggedBatch, mask: Array, rows: list[int]) -> PackedRows:
    """The token tree of these rows. `mask` is the loss mask [N]. The result does not depend on the order of `rows`."""
    members = sorted(_rows(batch, mask, np.asarray(rows, dtype=np.int64)), key=lambda row: row.key)
    nodes: list[Array] = []
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
        low, high = batch.offsets[row.index], batch.offsets[row.index + 1]
        nodes.append(np.arange(low + shared, low + len(row.prefix)))
        depths.append(np.arange(shared, len(row.prefix)))
        positions = np.flatnonzero(mask[low:high])
        parents.append(path[positions - 1])
        flats.append(positions + low)
        count += fresh
        previous = row
    end[path] = count
    flat, parent = np.concatenate(flats), np.concatenate(parents)
    return _tensors(batch, np.concatenate(nodes), np.concatenate(depths), end[:count], flat, parent)


def _tensors(batch: RaggedBatch, nodes: Array, depths: Array, end: Array, flat: Array, parent: Array) -> PackedRows:
    """`nodes`: for each node a token of the batch that it stands for."""
    row_of_token = batch.row_of_token[flat]
    temperature = batch.rows["temperature"][row_of_token].astype(np.float32)
    temperatures, which = np.unique(temperature, return_inverse=True)
    heads, token_head = np.unique(parent * len(temperatures) + which, return_inverse=True)
    distinct, local_row = np.unique(row_of_token, return_inverse=True)
    return PackedRows(
        input_ids=torch.from_numpy(batch.tokens["input_ids"][nodes].astype(np.int64)),
        position_ids=torch.from_numpy(batch.tokens[POSITIONS][nodes].T.copy() if POSITIONS in batch.tokens else depths.astype(np.int64)),
        end=torch.from_numpy(end),
        head_node=torch.from_numpy(heads // len(temperatures)),
        head_temperature=torch.from_numpy(temperatures[heads % len(temperatures)]),
        token_head=torch.from_numpy(token_head.astype(np.int64)),
        target=torch.from_numpy(batch.tokens["input_ids"][flat].astype(np.int64)),
        flat=flat,
        row=torch.from_numpy(local_row.astype(np.int64)),
        n_rows=len(distinct),
        images=_images(batch, nodes),
    )


def _images(batch: RaggedBatch, nodes: Array) -> tuple[Any, ...]:
    if IDENTITY not in batch.tokens:
        return ()
    identity = batch.tokens[IDENTITY][nodes]
    begins = (identity < 0) & np.append(True, (identity[1:] != identity[:-1]) | (nodes[1:] != nodes[:-1] + 1))
    return tuple(batch.images[-1 - index] for index in identity[begins])


def _rows(batch: RaggedBatch, mask: Array, rows: Array) -> list[_Row]:
    found = []
    identity = batch.tokens.get(IDENTITY, batch.tokens["input_ids"])
    for index in rows:
        low, high = int(batch.offsets[index]), int(batch.offsets[index + 1])
        positions = np.flatnonzero(mask[low:high])
        if positions.size:
            prefix = identity[low : low + int(positions[-1])]
            found.append(_Row(int(index), prefix, prefix.astype(">i8").tobytes()))
    return found


def _common(a: _Row, b: _Row) -> int:
    """Length of the common prefix."""
    n = min(len(a.prefix), len(b.prefix))
    different = np.flatnonzero(a.prefix[:n] != b.prefix[:n])
    return int(different[0]) if different.size else n
