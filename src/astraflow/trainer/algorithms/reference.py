"""The reference policy of KL terms: the initial weights, or a moving average of the trained ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from astraflow.trainer.config import ReferenceConfig


class Reference:
    """Own copies of a model's parameters, swapped in for a forward pass without gradients."""

    def __init__(self, parameters: Sequence[torch.Tensor], config: ReferenceConfig):
        """`parameters`: the model's, as loaded; they are copied."""
        self.config = config
        self.moves = config.kind == "ema"
        """Whether it is part of a checkpoint."""
        self.values = [parameter.detach().clone() for parameter in parameters]

    @contextmanager
    def active(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        """Inside, the model computes with the reference's weights."""
        own = [parameter.data for parameter in parameters]
        for parameter, value in zip(parameters, self.values, strict=True):
            parameter.data = value
        try:
            yield
        finally:
            for parameter, value in zip(parameters, own, strict=True):
                parameter.data = value

    def update(self, parameters: Sequence[torch.Tensor]) -> None:
        """After an optimizer step: ema ← decay·ema + (1 − decay)·θ. The initial reference never moves."""
        if self.moves:
            with torch.no_grad():
                torch._foreach_lerp_(self.values, list(parameters), 1 - self.config.ema_decay)


class WithoutAdapters(Reference):
    """The base of a model with LoRA adapters: nothing is copied, they are left out for a pass."""

    def __init__(self, leave_out: Callable[[], AbstractContextManager[None]]):
        """`leave_out`: inside it the model computes without them."""
        self.moves = False
        self._leave_out = leave_out

    @contextmanager
    def active(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        """Inside, the model computes with its base alone."""
        with self._leave_out():
            yield
