"""Who holds which rows, for every mesh shape, against torch.chunk and by counting."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from astraflow.weights import shards
from astraflow.weights.shards import Mesh


@given(st.integers(0, 40), st.integers(1, 9))
def test_fault_8_uneven_rows_are_cut_as_torch_cuts_them_and_none_is_left_out_or_written_twice(length: int, parts: int) -> None:
    """Fault 8: the offset of a shard is the sum of the shards before it, also when the last ones are short or empty."""
    chunks = torch.arange(length).chunk(parts) if length else ()
    at = 0
    for index in range(parts):
        start, count = shards.split(length, parts, index)
        assert (start, count) == (at, len(chunks[index]) if index < len(chunks) else 0)
        at += count
    assert at == length


Case = tuple[Mesh, tuple[int, ...], tuple[int, ...]]


@st.composite
def meshes(draw: st.DrawFn) -> Case:
    """(mesh of some permutation of its ranks, axes that split, node of every rank)."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    size = math.prod(shape)
    axes = tuple(sorted(draw(st.sets(st.integers(0, len(shape) - 1)))))
    nodes = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    return Mesh(shape, tuple(draw(st.permutations(range(size))))), axes, tuple(nodes)


@given(meshes(), st.integers(0, 30))
def test_every_node_gets_every_row_exactly_once_or_everybody_gathers(case: Case, length: int) -> None:
    mesh, axes, node_of = case
    shares = {rank: shards.share(length, mesh, axes, rank, node_of) for rank in mesh.ranks}
    if any(share is None for share in shares.values()):
        assert set(shares.values()) == {None}, "all ranks decide alike: gathering takes all of them"
        assert len(set(node_of)) > 1, "one node always has all rows"
        return
    for node in set(node_of):
        written = [
            row
            for rank, share in shares.items()
            if share is not None and share.writes and node_of[rank] == node
            for row in range(share.start, share.start + share.count)
        ]
        assert sorted(written) == list(range(length))
    for node in set(node_of):
        assert sum(shards.first_of_node(mesh, rank, node_of) for rank in mesh.ranks if node_of[rank] == node) == 1


def test_replicas_of_an_hsdp_mesh_skip_on_one_node_and_serve_their_own_node_on_two() -> None:
    mesh = Mesh((2, 2), (0, 1, 2, 3))  # replicate × shard
    one = [shards.share(5, mesh, (1,), rank, (0, 0, 0, 0)) for rank in range(4)]
    assert one == [shards.Share(0, 3, True), shards.Share(3, 2, True), shards.Share(0, 3, False), shards.Share(3, 2, False)]
    two = [shards.share(5, mesh, (1,), rank, (0, 0, 1, 1)) for rank in range(4)]
    assert [share.writes for share in two if share] == [True] * 4, "each node has a replica of its own"
    assert [shards.share(5, mesh, (1,), rank, (0, 1, 0, 1)) for rank in range(4)] == [None] * 4
