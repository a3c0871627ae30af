"""From parameters to published words: which tensors travel, and their copy into a half of the shared memory.

A float32 master becomes bf16 by torch's conversion, round to nearest even (numerics 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from astraflow.protocol.errors import LayoutMismatch, UserError
from astraflow.weights.config import PublishedDtype
from astraflow.weights.layout import Layout

WIRE: dict[PublishedDtype, tuple[str, torch.dtype]] = {
    "bfloat16": ("BF16", torch.bfloat16),
    "float16": ("F16", torch.float16),
    "float32": ("F32", torch.float32),
}
"""Published dtype → its safetensors name and torch dtype."""


def collect(
    named: Iterable[tuple[str, torch.Tensor]], tied: Mapping[str, str]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """(tensors that hold bytes, tied name → the one that holds its bytes). Ties are taken from `tied` and seen in shared storage.

    Raises UserError for what cannot be published: no floating point, no data, or only a shard of a tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    ties = dict(tied)
    owners: dict[tuple[object, ...], str] = {}
    for name, tensor in named:
        if name in ties:
            continue
        if hasattr(tensor, "placements"):
            raise UserError(f"parameter {name!r} is sharded (DTensor); plain tensors are expected here")
        if not tensor.is_floating_point() or tensor.is_meta:
            raise UserError(f"parameter {name!r} is {tensor.dtype} on {tensor.device}: only floating point data can be published")
        place = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and place in owners:
            ties[name] = owners[place]
            continue
        owners[place] = name
        tensors[name] = tensor.detach()
    return tensors, ties


def specs(tensors: Mapping[str, torch.Tensor], dtype: PublishedDtype) -> list[tuple[str, tuple[int, ...], str]]:
    """Names, shapes and safetensors dtypes for `layout.build`."""
    return [(name, tuple(tensor.shape), WIRE[dtype][0]) for name, tensor in tensors.items()]


def check_same(layout: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise LayoutMismatch, naming the first tensor, unless these fill the layout exactly."""
    for name, tensor in tensors.items():
        meta = layout.by_name.get(name)
        if meta is None or meta.shape != tuple(tensor.shape):
            was = "absent" if meta is None else str(meta.shape)
            raise LayoutMismatch(f"parameter {name!r}: shape {tuple(tensor.shape)}, was {was} when the first version was published")
    missing = layout.by_name.keys() - tensors.keys()
    if missing:
        raise LayoutMismatch(f"parameter {min(missing)!r} was published before and is missing now")


def copy_into(half: memoryview, layout: Layout, tensors: Mapping[str, torch.Tensor], dtype: PublishedDtype) -> None:
    """Write all tensors to their places in the half, converted to `dtype`; returns when the bytes are there."""
    kind = WIRE[dtype][1]
    cuda = False
    with torch.no_grad():
        for meta in layout.tensors:
            if not meta.size_bytes:
                continue
            source = tensors[meta.name]
            target = torch.frombuffer(half[meta.offset : meta.offset + meta.size_bytes], dtype=kind).view(meta.shape)
            target.copy_(source, non_blocking=True)
            cuda = cuda or source.is_cuda
    if cuda:
        torch.cuda.synchronize()
