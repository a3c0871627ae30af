"""From parameters to published words: which tensors travel, which rows of them this rank writes, and their copy into a half.

A float32 master becomes bf16 by torch's conversion, round to nearest even (numerics 1), piece by piece on its way into the half: no
second copy of the model exists, neither on the device nor in memory. How a parameter travels follows from its placements:

    plain                   the first rank of every node writes it
    Replicate, Shard(0)     shard copy: each rank writes its own rows at their true place; of ranks with equal rows the first of a node
    anything else           gathered, one tensor at a time; also where a node does not hold all rows of a sharded tensor in its ranks,
                            because every node's sender serves the whole model
    LowRank                 as its base; the adapter is gathered (it is small) and added on a grid of rows that does not depend on shards
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from astraflow.protocol.errors import LayoutMismatch, UserError
from astraflow.weights import shards
from astraflow.weights.config import PublishedDtype
from astraflow.weights.layout import Layout
from astraflow.weights.lora import LowRank
from astraflow.weights.shards import Mesh

Source = torch.Tensor | LowRank
"""What `offload` takes for one name."""

WIRE: dict[PublishedDtype, tuple[str, torch.dtype]] = {
    "bfloat16": ("BF16", torch.bfloat16),
    "float16": ("F16", torch.float16),
    "float32": ("F32", torch.float32),
}
"""Published dtype → its safetensors name and torch dtype."""
TORCH = dict(WIRE.values())
PIECE_BYTES = 64 << 20
"""Most bytes of anything that is made on the way."""


@dataclass(frozen=True)
class Standing:
    """Where this process stands among the trainer's ranks."""

    rank: int = 0
    node_of: tuple[int, ...] = (0,)
    """Node of every global rank."""

    @property
    def node(self) -> list[int]:
        """Ranks of this node; the first one owns memory and sender."""
        return [rank for rank, node in enumerate(self.node_of) if node == self.node_of[self.rank]]

    @property
    def leads(self) -> bool:
        return self.node[0] == self.rank


ALONE = Standing()


def collect(named: Iterable[tuple[str, Source]], tied: Mapping[str, str]) -> tuple[dict[str, Source], dict[str, str]]:
    """(what holds bytes, tied name → the one that holds its bytes). Ties are taken from `tied` and seen in shared storage.

    Raises UserError for what cannot be published: no floating point, or no data.
    """
    tensors: dict[str, Source] = {}
    ties = dict(tied)
    owners: dict[tuple[object, ...], str] = {}
    for name, source in named:
        if name in ties:
            continue
        tensor = source.base if isinstance(source, LowRank) else source
        if not tensor.is_floating_point() or tensor.is_meta:
            raise UserError(f"parameter {name!r} is {tensor.dtype} on {tensor.device}: only floating point data can be published")
        places = _places(tensor)
        owner = next((owners[place] for place in places if place in owners), None)
        if owner is not None and not isinstance(source, LowRank):
            ties[name] = owner
            continue
        owners.update(dict.fromkeys(places, name))
        tensors[name] = source if isinstance(source, LowRank) or _is_sharded(tensor) else tensor.detach()
    return tensors, ties


def _places(tensor: torch.Tensor) -> list[tuple[object, ...]]:
    """What two names of the same tensor have in common. A rank without rows of a sharded tensor sees the same object only; another
    rank's answer is taken for it (manager)."""
    with torch.no_grad():
        local = _local(tensor)
    found: list[tuple[object, ...]] = [("object", id(tensor))] if _is_sharded(tensor) else []
    if local.numel():
        found.append((local.device, local.data_ptr(), tuple(tensor.shape), local.stride(), local.dtype))
    return found


def _is_sharded(tensor: object) -> bool:
    """True for a DTensor, replicated ones included."""
    return hasattr(tensor, "placements")


def _local(tensor: Any) -> torch.Tensor:
    """The rows of this rank."""
    rows: torch.Tensor = tensor.to_local() if _is_sharded(tensor) else tensor
    return rows


def sharded_names(tensors: Mapping[str, Source]) -> frozenset[str]:
    """Names of the DTensors."""
    return frozenset(name for name, source in tensors.items() if _is_sharded(source.base if isinstance(source, LowRank) else source))


def specs(
    tensors: Mapping[str, Source], dtype: PublishedDtype, float32_names: Sequence[str] = ()
) -> list[tuple[str, tuple[int, ...], str]]:
    """Names, global shapes and safetensors dtypes for `layout.build`; names that match a pattern of `float32_names` stay float32."""
    return [
        (name, tuple(source.shape), "F32" if any(fnmatchcase(name, pattern) for pattern in float32_names) else WIRE[dtype][0])
        for name, source in tensors.items()
    ]


def check_same(layout: Layout, tensors: Mapping[str, Source], sharded: AbstractSet[str] = frozenset()) -> None:
    """Raise LayoutMismatch, naming the first tensor, unless these fill the layout exactly and `sharded` are still sharded."""
    for name, source in tensors.items():
        meta = layout.by_name.get(name)
        if meta is None or meta.shape != tuple(source.shape):
            was = "absent" if meta is None else str(meta.shape)
            raise LayoutMismatch(f"parameter {name!r}: shape {tuple(source.shape)}, was {was} when the first version was published")
    missing = layout.by_name.keys() - tensors.keys()
    if missing:
        raise LayoutMismatch(f"parameter {min(missing)!r} was published before and is missing now")
    whole = sharded - sharded_names(tensors)
    if whole:
        # FSDP2 leaves a module unsharded after some forwards; the optimizer does not see those tensors, so they may be out of date.
        raise LayoutMismatch(f"parameter {min(whole)!r} was sharded before and is a plain tensor now: call reshard() first")


def copy_into(half: memoryview, layout: Layout, tensors: Mapping[str, Source], at: Standing = ALONE) -> None:
    """Write what this rank has to write into the half, converted to the layout's dtypes; returns when the bytes are there.

    Every rank calls it with the same layout: tensors that must be gathered are, by all ranks, in the layout's order.
    """
    devices: set[torch.device] = set()
    with torch.no_grad():
        for meta in layout.tensors:
            part = _part(tensors[meta.name], at) if meta.size_bytes else None
            if part is None or not part.rows.numel():
                continue
            word_bytes = meta.size_bytes // max(1, part.total)
            begin = meta.offset + part.start * (part.total // part.length) * word_bytes
            span = half[begin : begin + part.rows.numel() * word_bytes]
            target = torch.frombuffer(span, dtype=TORCH[meta.dtype]).view(part.rows.shape)
            for piece, words in part.pieces(target):
                # Converted on the device, where that is fast; copied while the next piece is converted if the half is page-locked.
                piece.copy_(words.to(piece.dtype) if words.is_cuda else words, non_blocking=True)
            if part.rows.is_cuda:
                devices.add(part.rows.device)
    for device in devices:
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class _Part:
    """Rows [start, start + len(rows)) of a tensor of `length` rows and `total` elements; a scalar is one row."""

    rows: torch.Tensor
    start: int
    length: int
    total: int
    factors: tuple[torch.Tensor, torch.Tensor, float] | None = None
    """(left [length, r], right [r, columns], scaling) of an adapter."""

    def pieces(self, target: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(piece of the target, its values) in pieces of at most PIECE_BYTES."""
        source = self.rows
        if self.factors is not None:
            yield from self._sums(target, *self.factors)
            return
        if source.is_contiguous():
            target, source = target.view(-1), source.view(-1)
        step = max(1, PIECE_BYTES * len(source) // max(1, source.numel() * source.element_size()))
        for first in range(0, len(source), step):
            yield target[first : first + step], source[first : first + step]

    def _sums(
        self, target: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scaling: float
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        # Matrix products round differently for different shapes: always the same blocks of rows, whoever holds which of them.
        block = max(1, PIECE_BYTES // (4 * max(1, right.shape[1])))
        end = self.start + len(self.rows)
        for first in range(self.start // block * block, end, block):
            low, high = max(first, self.start), min(first + block, end)
            product = (left[first : first + block] @ right)[low - first : high - first]
            mine = slice(low - self.start, high - self.start)
            yield target[mine], self.rows[mine].float() + product * scaling


def _part(source: Source, at: Standing) -> _Part | None:
    """What this rank writes of a tensor; None when others do."""
    factors = None
    base = source
    if isinstance(source, LowRank):
        a, b = _whole(source.a).float(), _whole(source.b).float()
        factors = (a.T, b.T, source.scaling) if source.transposed else (b, a, source.scaling)
        base = source.base
    assert isinstance(base, torch.Tensor)
    mine = _rows(base, at)
    if mine is None:
        return None
    rows, start = mine
    return _Part(rows, start, base.shape[0] if base.ndim else 1, base.numel(), factors)


def _rows(tensor: torch.Tensor, at: Standing) -> tuple[torch.Tensor, int] | None:
    """(rows that this rank writes, index of the first one), or None."""
    if not _is_sharded(tensor):
        return (tensor, 0) if at.leads else None
    mesh, split_axes = _sharding(tensor)
    share = None
    if split_axes is not None:
        share = shards.share(tensor.shape[0] if tensor.ndim else 1, mesh, split_axes, at.rank, at.node_of)
    if share is None:
        whole = _whole(tensor)
        return (whole, 0) if shards.first_of_node(mesh, at.rank, at.node_of) else None
    local = _local(tensor)
    if tensor.ndim and len(local) != share.count:
        raise LayoutMismatch(f"a shard of {tuple(tensor.shape)} has {len(local)} rows on rank {at.rank}; torch's split gives {share.count}")
    return (local, share.start) if share.writes else None


def _sharding(tensor: Any) -> tuple[Mesh, tuple[int, ...] | None]:
    """(mesh of a DTensor, axes of the mesh that split its rows); no axes when it is laid out in any other way."""
    from torch.distributed.tensor import Replicate, Shard  # loaded already: there is a DTensor

    ranks = tensor.device_mesh.mesh
    mesh = Mesh(tuple(ranks.shape), tuple(ranks.flatten().tolist()))
    split_axes = []
    for axis, placement in enumerate(tensor.placements):
        if type(placement) is Shard and placement.dim == 0:
            split_axes.append(axis)
        elif type(placement) is not Replicate:  # other columns, sums, and splits in another order (FSDP on top of TP)
            return mesh, None
    return mesh, tuple(split_axes)


def _whole(tensor: Any) -> torch.Tensor:
    """All rows; a collective of all ranks of its mesh for a DTensor."""
    whole: torch.Tensor = tensor.full_tensor() if _is_sharded(tensor) else tensor
    return whole


def on_cuda(tensors: Mapping[str, Source]) -> bool:
    """Whether anything is copied from a GPU."""
    return any((source.base if isinstance(source, LowRank) else source).is_cuda for source in tensors.values())


def page_lock(memory: memoryview) -> Callable[[], object] | None:
    """Let GPUs copy into this (writable) memory directly and in the background; returns the undo.

    None when the driver refuses: copies then go through its own buffers, slower and one after the other.
    """
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(cudart.cudaHostRegister(address, len(memory), 0)) != 0:
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # takes the error that would be blamed on the next kernel otherwise
        return None
    return lambda: cudart.cudaHostUnregister(address)
