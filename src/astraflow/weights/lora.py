"""What of a model with LoRA adapters (peft) is published: the base with the adapter merged in, or the adapter alone.

Merged is what every engine understands: the names of the base model, each adapted weight as base + scaling · B·A. The sum is made
while it is copied (copy.py), so that the model itself is neither changed nor held twice. The adapter alone is a few MB under the
names of peft's adapter_model.safetensors; the engine has base and adapter_config.json already.

peft is recognised by the shape of its modules and never imported; nor is torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from astraflow.protocol.errors import UserError
from astraflow.weights.config import PublishedLora

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class LowRank:
    """A published tensor that is the sum base + scaling · b·a, or base + scaling · (b·a)ᵀ when `transposed`."""

    base: torch.Tensor
    """[out, in]; [in, out] when transposed."""
    a: torch.Tensor
    """[r, in]."""
    b: torch.Tensor
    """[out, r]."""
    scaling: float
    transposed: bool = False

    @property
    def shape(self) -> torch.Size:
        return self.base.shape


PREFIX = "base_model.model."


def published(model: nn.Module, lora: PublishedLora) -> Iterator[tuple[str, torch.Tensor | LowRank]]:
    """Names and tensors for `WeightManager.offload`. A model without adapters is published as it is.

    Raises UserError for adapters that cannot be published this way: several active ones, DoRA, convolutions, biases.
    """
    layers = dict(_layers(model))
    if not layers:
        return iter(model.named_parameters())
    return _merged(model, layers) if lora == "merged" else _adapter(model, layers)


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "lora_A"):
            yield path, module


def _merged(model: nn.Module, layers: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor | LowRank]]:
    holders = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        if path.endswith(".base_layer"):
            path = path.removesuffix(".base_layer")
            layer = layers.get(path)
            hf_name = f"{path}.{leaf}".removeprefix(PREFIX)
            if layer is None or leaf != "weight" or layer.merged:
                yield hf_name, parameter
                continue
            if holders[id(parameter)] > 1:
                raise UserError(f"parameter {hf_name!r} is tied to another one: an adapter of one of the two cannot be merged")
            yield hf_name, _sum(hf_name, parameter, layer)
        elif ".lora_" not in name and ".original_module." not in name:
            yield _plain(name), parameter


def _adapter(model: nn.Module, layers: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for path, layer in layers.items():
        adapter = _active(path, layer)
        if adapter in layer.lora_A:
            yield f"{path}.lora_A.weight", layer.lora_A[adapter].weight
            yield f"{path}.lora_B.weight", layer.lora_B[adapter].weight
        else:
            yield f"{path}.lora_embedding_A", layer.lora_embedding_A[adapter]
            yield f"{path}.lora_embedding_B", layer.lora_embedding_B[adapter]
    for name, parameter in model.named_parameters():
        if ".modules_to_save." in name:
            yield PREFIX + _plain(name), parameter


def _plain(name: str) -> str:
    """Name in the base model: without the wrappers of peft."""
    name = name.removeprefix(PREFIX)
    head, wrapped, tail = name.partition(".modules_to_save.")
    return f"{head}.{tail.partition('.')[2]}" if wrapped else name


def _active(path: str, layer: Any) -> str:
    """The one active adapter. Raises UserError for what base + scaling · b·a does not say."""
    active = list(layer.active_adapters)
    if len(active) != 1 or layer.disable_adapters:
        raise UserError(f"{path}: {len(active)} active adapters ({', '.join(map(str, active))}); exactly one, enabled, can be published")
    adapter = str(active[0])
    if adapter in layer.lora_variant or layer.lora_bias.get(adapter):
        raise UserError(f"{path}: adapter {adapter!r} is a variant (DoRA, with bias, …); plain LoRA can be published")
    return adapter


def _sum(name: str, base: torch.Tensor, layer: Any) -> LowRank:
    adapter = _active(name, layer)
    if base.ndim != 2:
        raise UserError(f"parameter {name!r} has {base.ndim} axes: adapters of matrices can be merged")
    if adapter in layer.lora_A:
        a, b, transposed = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight, bool(layer.fan_in_fan_out)
    else:
        a, b, transposed = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter], True
    return LowRank(base, a, b, float(layer.scaling[adapter]), transposed)
