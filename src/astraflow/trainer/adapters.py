"""LoRA by peft: which parameters are trained, and what the forward pass computes with (numerics 1).

Published merged, an engine computes on w16 = round(base + scaling · B·A). So does the forward pass here: each adapted layer multiplies
by these very words, and the gradient goes straight through the rounding to A and B. Published as an adapter, A and B are rounded
like any other weight and peft's own sum of two products is computed, as engines do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from astraflow.protocol.errors import ConfigError
from astraflow.trainer.linear import product
from astraflow.weights.config import LoraConfig
from astraflow.weights.lora import LowRank


def add_adapters(model: nn.Module, config: LoraConfig) -> nn.Module:
    """The model with fresh adapters (B = 0) in its linear layers; everything else is frozen. Raises ConfigError for unknown targets."""
    import peft

    settings = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, lora_dropout=0.0, bias="none", target_modules=config.targets or "all-linear"
    )
    try:
        adapted: nn.Module = peft.get_peft_model(model, settings)
    except ValueError as error:
        raise ConfigError(f"model.lora.targets: {', '.join(config.targets)}: {error}") from None
    return adapted


def freeze_words(model: nn.Module, words: torch.dtype) -> None:
    """Round what is never trained to the dtype that it is published in."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.copy_(parameter.to(words))


class MergedLayers:
    """The adapted layers of a model, computing on merged words."""

    def __init__(self, model: nn.Module, words: torch.dtype):
        """`words`: dtype that the sum is published in."""
        self._words = words
        self._layers: list[Any] = [module for module in model.modules() if hasattr(module, "base_layer") and hasattr(module, "lora_A")]
        for layer in self._layers:
            layer.merged_words = torch.empty_like(layer.base_layer.weight, requires_grad=False)
            layer.forward = MethodType(_forward, layer)

    def refresh(self) -> None:
        """Words := round(base + scaling · B·A), after A or B have changed."""
        with torch.no_grad():
            for layer in self._layers:
                a, b, scaling = _factors(layer)
                layer.merged_words.copy_((layer.base_layer.weight + (b @ a) * scaling).to(self._words))

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Inside, the model computes with the base alone."""
        for layer in self._layers:
            layer.merged_words.copy_(layer.base_layer.weight.detach())
        try:
            yield
        finally:
            self.refresh()


class FreshlyMergedLayers(MergedLayers):
    """The same where nobody holds a whole base between two layers (sharded ones): every pass makes the sums, forwards and backwards."""

    def __init__(self, model: nn.Module, words: torch.dtype):
        self._words, self._alone = words, False
        self._layers = [module for module in model.modules() if hasattr(module, "base_layer") and hasattr(module, "lora_A")]
        for layer in self._layers:
            layer.forward = MethodType(self._forward, layer)

    def refresh(self) -> None:
        """Nothing is kept."""

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Inside, the model computes with the base alone."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    def _forward(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        a, b, scaling = _factors(layer)
        base = layer.base_layer
        out: torch.Tensor = _FreshProduct.apply(x, base.weight, a, b, 0.0 if self._alone else scaling, self._words)  # type: ignore[no-untyped-call]
        return out if base.bias is None else out + base.bias


def whole(source: torch.Tensor | LowRank) -> torch.Tensor:
    """A published tensor with its adapter added."""
    if not isinstance(source, LowRank):
        return source
    with torch.no_grad():
        delta = (source.b @ source.a) * source.scaling
        return source.base + (delta.t() if source.transposed else delta)


def _factors(layer: Any) -> tuple[torch.Tensor, torch.Tensor, float]:
    (name,) = layer.active_adapters
    return layer.lora_A[name].weight, layer.lora_B[name].weight, float(layer.scaling[name])


def _forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = _MergedProduct.apply(x, layer.merged_words, *_factors(layer))  # type: ignore[no-untyped-call]
    bias = layer.base_layer.bias
    return out if bias is None else out + bias


class _MergedProduct(torch.autograd.Function):
    """x·Wᵀ; gradients of A and B as if W were base + scaling · B·A."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, words: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
        ctx.save_for_backward(x, words, a, b)
        ctx.scaling = scaling
        return product(x, words)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, words, a, b = ctx.saved_tensors
        to_x = product(grads[0], words.t()) if ctx.needs_input_grad[0] else None
        return to_x, None, *_to_factors(grads[0], x, a, b, ctx.scaling), None


class _FreshProduct(torch.autograd.Function):
    """The same with words that are made when they are needed."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, words: torch.dtype
    ) -> torch.Tensor:
        ctx.save_for_backward(x, base, a, b)
        ctx.scaling, ctx.words = scaling, words
        return product(x, _sum(base, a, b, scaling, words))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, base, a, b = ctx.saved_tensors
        to_x = product(grads[0], _sum(base, a, b, ctx.scaling, ctx.words).t()) if ctx.needs_input_grad[0] else None
        return to_x, None, *_to_factors(grads[0], x, a, b, ctx.scaling), None, None


def _sum(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, words: torch.dtype) -> torch.Tensor:
    return (base + (b @ a) * scaling).to(words).to(base.dtype)


def _to_factors(
    grad: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of A and B."""
    scaled, rows = grad.flatten(0, -2) * scaling, x.flatten(0, -2)
    return product(product(scaled, b.t()).t(), rows.t()), product(scaled.t(), product(rows, a).t())


def trained(model: nn.Module) -> Sequence[tuple[str, nn.Parameter]]:
    """Names and parameters that have gradients, as `named_parameters()` lists them."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
