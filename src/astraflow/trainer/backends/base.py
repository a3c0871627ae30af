"""The backend Protocol, the learning-rate schedule and the state that a checkpoint holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from astraflow.protocol.errors import ConfigError
from astraflow.trainer.batch import RaggedBatch
from astraflow.trainer.config import OptimizerConfig
from astraflow.weights.lora import LowRank

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state beside its step."""


@dataclass
class TrainState:
    """Tensors by name (live: a writer reads them until the next update) and plain JSON values."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def fill(self, into: dict[str, torch.Tensor]) -> None:
        """Overwrite these tensors with ours of the same names. Raises ConfigError when one is missing or of another shape."""
        check_shapes({name: tuple(tensor.shape) for name, tensor in self.tensors.items()}, into)
        with torch.no_grad():
            for name, tensor in into.items():
                tensor.copy_(self.tensors[name])


def check_shapes(saved: Mapping[str, tuple[int, ...]], wanted: Mapping[str, torch.Tensor]) -> None:
    """Raise ConfigError, naming the tensor, unless a saved state holds all that are wanted, in their shapes."""
    for name, tensor in wanted.items():
        if saved.get(name) != tuple(tensor.shape):
            raise ConfigError(f"checkpoint: {name} is {saved.get(name, 'nothing')}, the model has {tuple(tensor.shape)}")


class Backend(Protocol):
    """Holds the model and takes optimizer steps. With several ranks every rank has one and calls the same methods in the same order."""

    tied: dict[str, str]
    """Tied name → published name that holds its bytes."""

    def train_step(self, batch: RaggedBatch, before_update: Callable[[], None]) -> dict[str, float]:
        """Train on one batch; `before_update` is called before each change of masters or moments. Returns metrics."""
        ...

    def published(self) -> Iterable[tuple[str, torch.Tensor | LowRank]]:
        """HF names and tensors of the weights that engines shall run."""
        ...

    def state(self) -> TrainState:
        """Everything that the next step depends on."""
        ...

    def load_state(self, values: dict[str, Any], fill: Callable[[dict[str, torch.Tensor]], None]) -> None:
        """Continue from a `state()` with these values, bit for bit; `fill` overwrites tensors by name with its own ones (of sharded
        tensors this rank's part). Raises ConfigError when it belongs to another model."""
        ...

    def export(self, path: Path) -> None:
        """Write a plain HF directory."""
        ...


def learning_rate(config: OptimizerConfig, position: int, total_steps: int) -> float:
    """Rate of optimizer step number `position` (from 1): a pure function, so that a resumed run cannot advance it twice.

    Linear warm-up over `warmup_steps`, then constant, linear or cosine decay from the end of the warm-up to `total_steps`.
    """
    if config.warmup_steps and position < config.warmup_steps:
        return config.lr * position / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(total_steps - config.warmup_steps, 1)
    progress = min(max(position - config.warmup_steps, 0) / span, 1.0)
    fraction = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_fraction + (1 - config.min_lr_fraction) * fraction)
