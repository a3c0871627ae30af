"""The critic of PPO: a value per loss token, and the clipped value loss (numerics 21). GAE is an advantage like the others.

The value of a token is that of the text before it: the hidden state that predicts the token, through one linear row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import nn

from astraflow.trainer.algorithms.base import Floats
from astraflow.trainer.algorithms.objective import StepPlan
from astraflow.trainer.backends.base import MOMENTS
from astraflow.trainer.config import TrainEngineConfig
from astraflow.trainer.models import hidden_states
from astraflow.trainer.packing import PackedRows

Rounds = Iterable[tuple[PackedRows, bool]]


def value_loss(values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, clip: float) -> tuple[torch.Tensor, torch.Tensor]:
    """([M] ½·max((V − R)², (V_old + clip(V − V_old, ±ε) − R)²), [M] bool where the clipped one was taken): a value may move by ε at
    most per batch (the value term of arXiv 1707.06347 as in its reference implementation)."""
    plain = (values - returns).square()
    bounded = (old + (values - old).clamp(-clip, clip) - returns).square()
    return 0.5 * torch.maximum(plain, bounded), (bounded > plain).detach()


class Critic:
    """A model of its own with a linear head (zero at first), fp32, with its own AdamW. It is never published. What stands before the
    decoder of a vision-language model stays as loaded."""

    def __init__(self, config: TrainEngineConfig, model: nn.Module):
        """`model`: a causal language model, which becomes the trunk."""
        self.config = config.critic
        decoder: nn.Module = model.get_decoder()  # type: ignore[operator]
        model.requires_grad_(False)
        decoder.requires_grad_(True)
        head = nn.Linear(model.config.get_text_config().hidden_size, 1)  # type: ignore[union-attr, operator]
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        self._join_head(model, head)
        self.named = [*decoder.named_parameters(), *((f"value_head.{name}", p) for name, p in head.named_parameters())]
        self.parameters = self._own_parameters()
        adam = config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=self.config.lr, betas=adam.betas, eps=adam.eps, weight_decay=0.0, fused=True
        )

    # --- what a critic of several ranks does in its own way ----------------------------------------------------------------

    def _join_head(self, model: nn.Module, head: nn.Linear) -> None:
        self._trunk, self._head = model, head

    def _own_parameters(self) -> list[torch.Tensor]:
        """What this process holds of each parameter, in memory shared with it."""
        return [parameter for _, parameter in self.named]

    def _forward(self, packed: PackedRows) -> torch.Tensor:
        """[M] values of the loss tokens."""
        values: torch.Tensor = self._head(hidden_states(self._trunk, packed))[:, 0]
        return values[packed.token_head]

    def _joined(self, part: Floats) -> Floats:
        """The sum over ranks of what each has counted."""
        return part

    def _total_norm(self) -> torch.Tensor:
        """Norm of the gradient, which is at `parameters` from here on."""
        return torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])

    def _whole(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of which `tensor` is this process's part, as parameter number `index` is split."""
        return tensor

    # --- one batch ------------------------------------------------------------------------------------------------------

    def values(self, plan: StepPlan, rounds: Rounds) -> Floats:
        """[N] values of the loss tokens before the batch's first update, 0 elsewhere."""
        found = np.zeros(len(plan.mask))
        with torch.no_grad():
            for packed, counts in rounds:
                values = self._forward(packed)
                if counts:
                    found[packed.flat] = values.cpu().numpy()
        return self._joined(found)

    def step(self, plan: StepPlan, rounds: Rounds, before_update: Callable[[], None]) -> dict[str, float]:
        """One update on the loss tokens of the plan: token mean over the whole optimizer batch."""
        assert plan.values is not None, "a value step needs the values before the batch"
        assert plan.returns is not None, "a value step needs returns"
        count, sums = max(plan.n_tokens, 1), np.zeros(2)
        for packed, counts in rounds:
            new = self._forward(packed)
            old, returns = (torch.from_numpy(column[packed.flat]).to(new) for column in (plan.values, plan.returns))
            losses, cut = value_loss(new, old, returns, self.config.value_clip)
            loss = losses.sum() * (counts / count)
            loss.backward()  # type: ignore[no-untyped-call]
            sums += (loss.item(), counts * float(cut.sum()))
        norm = self._total_norm()
        if torch.isfinite(norm):
            before_update()
            if 0 < self.config.max_grad_norm < norm:
                torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.max_grad_norm, norm)
            self.optimizer.step()
        self.optimizer.zero_grad()
        total, clipped = self._joined(sums).tolist()
        returns_here = plan.returns[plan.mask]
        spread = float(returns_here.var()) if returns_here.size else 0.0
        missed = float((returns_here - plan.values[plan.mask]).var()) if returns_here.size else 0.0
        return {
            "loss/value": total,
            "policy/value_clip_frac": clipped / count,
            "policy/value_explained": 1 - missed / spread if spread > 0 else 0.0,
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """Live parameters and moments under names of their own, for a checkpoint."""
        found: dict[str, torch.Tensor] = {}
        for index, ((name, _), own) in enumerate(zip(self.named, self.parameters, strict=True)):
            found[f"critic.{name}"] = self._whole(index, own.detach())
            if moments := self.optimizer.state.get(own):
                found |= {f"critic.{moment}.{name}": self._whole(index, moments[moment]) for moment in MOMENTS}
        return found

    def prepare(self, steps: float) -> None:
        """Make place for the moments of a state after this many updates; after none there are no moments."""
        self.optimizer.state.clear()
        for own in self.parameters if steps else ():
            moments = {moment: torch.zeros_like(own.detach()) for moment in MOMENTS}
            self.optimizer.state[own] = {"step": torch.tensor(steps, device=own.device), **moments}

    @property
    def steps(self) -> float:
        """Updates so far."""
        return next((float(moments["step"]) for moments in self.optimizer.state.values()), 0.0)
