"""Products of float32 matrices on a CPU, by oneDNN: on CPUs that torch's BLAS was not written for it is twice as fast.

Measured with one thread on a Zen 5 core, 400 × 576 by 576 × 1536: 56 GFLOP/s by `F.linear`, 243 by oneDNN. Everything else (other
dtypes and devices, DTensor, builds without oneDNN) takes torch's own path; results differ by summation order only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # type: ignore[no-untyped-call]


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x·Wᵀ: x [..., K], weight [N, K], either with any strides; without gradients."""
    if _ONEDNN and _is_plain(x) and _is_plain(weight) and x.numel() and weight.numel():
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return result
    return x @ weight.t()


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.dtype is torch.float32 and tensor.device.type == "cpu"


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        to_x = product(grad, weight.t()) if ctx.needs_input_grad[0] else None
        to_weight = product(grad.flatten(0, -2).t(), x.flatten(0, -2).t()) if ctx.needs_input_grad[1] else None
        return to_x, to_weight


class Linear(nn.Linear):
    """`nn.Linear` by `product`, forwards and backwards."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not (_is_plain(x) and _is_plain(self.weight)):
            return super().forward(x)
        result: torch.Tensor = _Linear.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return result if self.bias is None else result + self.bias


def use_fast_products(model: nn.Module) -> None:
    """Let the model's linear layers use `product`. Parameters, names and hooks stay as they are."""
    if not _ONEDNN:
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
