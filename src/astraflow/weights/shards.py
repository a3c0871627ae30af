"""Which rows of a sharded tensor a rank holds, and which rank of a node writes them. Pure: no torch, no communication.

A device mesh is an array of global ranks. Along some of its axes a tensor's rows (axis 0) are split, along the others everybody holds
the same. A split is torch.chunk's: pieces of ceil(n / parts) rows, the last one shorter, and none at all for whoever comes after the
last row. So the true offset of a shard is never index × (rows of my own shard).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class Mesh:
    """A device mesh as something that can be compared and remembered."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    """Global ranks, row-major."""


@dataclass(frozen=True)
class Share:
    """Rows [start, start + count) of a tensor are held by this rank."""

    start: int
    count: int
    writes: bool
    """False when another rank of this node holds the same rows and writes them."""


def split(length: int, parts: int, index: int) -> tuple[int, int]:
    """(start, count) of piece `index` of `length` rows cut into `parts`, as torch.chunk and FSDP2 cut."""
    size = -(-length // parts)
    start = min(index * size, length)
    return start, min(size, length - start)


def rows(length: int, mesh: Mesh, split_axes: Sequence[int], rank: int) -> tuple[int, int]:
    """(start, count) of the rows of `rank`: split along each of `split_axes` in order, each piece cut again by the next axis."""
    start, count = 0, length
    coordinate = np.argwhere(_grid(mesh) == rank)[0]
    for axis in sorted(split_axes):
        offset, count = split(count, mesh.shape[axis], int(coordinate[axis]))
        start += offset
    return start, count


@lru_cache(maxsize=4096)
def share(length: int, mesh: Mesh, split_axes: tuple[int, ...], rank: int, node_of: tuple[int, ...]) -> Share | None:
    """What `rank` holds, or None when some node does not have all rows in its own ranks, so that they must be gathered first.

    `node_of[r]` is the node of global rank r. Every rank of the mesh comes to the same answer about None.
    """
    writers = _writers(mesh, split_axes, node_of)
    if writers is None:
        return None
    start, count = rows(length, mesh, split_axes, rank)
    return Share(start, count, rank in writers)


def first_of_node(mesh: Mesh, rank: int, node_of: tuple[int, ...]) -> bool:
    """True for the rank that writes what every rank of the mesh holds."""
    return rank == min(other for other in mesh.ranks if node_of[other] == node_of[rank])


@lru_cache(maxsize=256)
def _writers(mesh: Mesh, split_axes: tuple[int, ...], node_of: tuple[int, ...]) -> frozenset[int] | None:
    """The ranks that write: per node and piece the lowest rank that holds it. None when a node lacks a piece."""
    pieces = int(np.prod([mesh.shape[axis] for axis in split_axes], dtype=np.int64))
    found: dict[int, dict[tuple[int, ...], int]] = {}
    for coordinate, value in np.ndenumerate(_grid(mesh)):
        rank = int(value)
        held = found.setdefault(node_of[rank], {})
        piece = tuple(coordinate[axis] for axis in split_axes)
        held[piece] = min(rank, held.get(piece, rank))
    if any(len(held) < pieces for held in found.values()):
        return None
    return frozenset(rank for held in found.values() for rank in held.values())


def _grid(mesh: Mesh) -> np.ndarray:
    return np.array(mesh.ranks).reshape(mesh.shape)
