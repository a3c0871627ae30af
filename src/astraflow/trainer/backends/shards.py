"""What a rank holds of sharded parameters, as plain tensors that an optimizer moves."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate


def own_rows(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's rows of DTensors, in memory shared with them."""
    return [parameter.to_local().detach() for parameter in parameters if isinstance(parameter, DTensor)]


def take_gradients(own: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
    """Move the gradients of DTensors to this rank's rows of them."""
    for rows, parameter in zip(own, parameters, strict=True):
        rows.grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else None
        parameter.grad = None


def norm_over_ranks(own: Sequence[torch.Tensor], parameters: Sequence[DTensor], device: torch.device) -> torch.Tensor:
    """Norm of the gradients of all ranks: every element counts once, however many hold it."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for rows, parameter in zip(own, parameters, strict=True):
        if rows.grad is not None and rows.numel():
            total += rows.grad.double().square().sum() / holders(parameter)
    dist.all_reduce(total)
    return total.sqrt().float()


def as_whole(rows: torch.Tensor, like: DTensor) -> DTensor:
    """The tensor of which every rank holds these rows, split as `like` is."""
    return DTensor.from_local(rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def holders(parameter: DTensor) -> int:
    """Ranks that hold the same rows of a parameter."""
    axes = [axis for axis, placement in enumerate(parameter.placements) if not isinstance(placement, Replicate)]
    pieces = math.prod(parameter.device_mesh.size(axis) for axis in axes)
    return dist.get_world_size() // pieces
