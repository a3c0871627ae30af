"""The local backend: one process, fp32 masters, forward and backward on the published words. The oracle of all others.

Masters w32 take the gradients of a model that holds w16 upcast (straight-through, numerics 1): after each optimizer step the
model's parameters become bf16 round-to-nearest-even of the masters, which is also what is published. With `forward_masters` or a
float32 transport the model's parameters are the masters themselves.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from astraflow.protocol.errors import ConfigError
from astraflow.trainer.algorithms.base import Floats
from astraflow.trainer.algorithms.objective import Objective, StepPlan, Sums, step_metrics
from astraflow.trainer.algorithms.reference import Reference
from astraflow.trainer.backends.base import TrainState, learning_rate
from astraflow.trainer.batch import RaggedBatch
from astraflow.trainer.config import TrainEngineConfig
from astraflow.trainer.logprobs import token_logprobs
from astraflow.trainer.models import export_hf, hidden_states, load_model, output_embedding, tied_names
from astraflow.trainer.packing import PackedRows, micro_batches, pack
from astraflow.weights.config import ModelConfig

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class LocalBackend:
    """Holds the model and takes optimizer steps."""

    def __init__(self, config: TrainEngineConfig, model: ModelConfig, published_dtype: str, max_new_tokens: int):
        """`published_dtype`: transport dtype of the weights; `max_new_tokens`: L_max of numerics 8."""
        self.config = config
        self.objective = Objective(config.algorithm, max_new_tokens)
        self._source = Path(model.path)
        self.model = load_model(model, config.packing.attention)
        self.tied = tied_names(self.model)
        self._names = [name for name, _ in self.model.named_parameters()]
        self._parameters = [parameter for _, parameter in self.model.named_parameters()]
        self._head = output_embedding(self.model)
        self._words = DTYPES[published_dtype]
        self._shares_masters = config.forward_masters or self._words is torch.float32
        self.masters: list[torch.Tensor] = [p if self._shares_masters else p.detach().clone() for p in self._parameters]
        self._refresh_words()
        self.optimizer = _adamw(self.masters, config)
        self.position = 0
        """Optimizer steps taken or passed over; the schedule's only state."""
        self._total_steps = config.optimizer.total_steps or config.max_steps * config.optimizer_steps
        self.reference = Reference(self._parameters, config.reference) if config.algorithm.needs_reference else None

    # --- one batch ------------------------------------------------------------------------------------------------------

    def train_step(self, batch: RaggedBatch, before_update: Callable[[], None]) -> dict[str, float]:
        """Optimizer steps on one batch (`minibatches` × `epochs` of them) and its metrics. `before_update` runs before each
        change of masters or moments.
        """
        ref = None
        plan = self.objective.plan(batch, None)
        if self.reference is not None:
            with self.reference.active(self._parameters):
                ref = self.logprobs(plan, np.unique(batch.row_of_token[plan.mask]))
            plan = self.objective.plan(batch, ref)
        if self.config.optimizer_steps > 1:
            plan.prox = self.logprobs(plan, plan.compute)
        sums, n_tokens = Sums(), 0
        steps = []
        for _ in range(self.config.epochs):
            for part in self._minibatches(plan):
                steps.append(self._optimizer_step(part, sums, before_update))
                n_tokens += part.n_tokens
        metrics = over_steps(steps) | step_metrics(sums, n_tokens, len(steps))
        metrics["policy/effective_rows"] = float(len(plan.compute))
        if ref is not None:
            metrics["policy/kl_ref"] = float((plan.batch.tokens["logprobs"] - ref)[plan.mask].mean()) if plan.n_tokens else 0.0
        return metrics

    def _minibatches(self, plan: StepPlan) -> list[StepPlan]:
        if self.config.minibatches == 1:
            return [plan]
        group = plan.batch.rows["group_index"]
        parts = []
        for groups in np.array_split(np.unique(group), self.config.minibatches):
            part = plan.select(np.flatnonzero(np.isin(group, groups)))
            self.objective.divide(part)
            parts.append(part)
        return parts

    def _optimizer_step(self, plan: StepPlan, sums: Sums, before_update: Callable[[], None]) -> dict[str, float]:
        """Backward over the micro-batches, then AdamW. Without any gradient (all advantages zero) the weights stay and only the
        schedule moves: moments of earlier steps must not push the weights when there is nothing to learn from.
        """
        self.position += 1
        rate = learning_rate(self.config.optimizer, self.position, self._total_steps)
        metrics = {"policy/lr": rate, "policy/grad_norm": 0.0, "policy/skipped_updates": 1.0}
        if self.objective.needs_prepass(1) and len(plan.compute):
            self.objective.fix_masks(plan, self.logprobs(plan, plan.compute))
        passes = micro_batches(plan.batch, plan.mask, plan.compute, self.config.packing.max_nodes)
        nodes = 0
        for rows in passes:
            packed = pack(plan.batch, plan.mask, rows)
            nodes += len(packed.input_ids)
            logp, entropy = self._forward(packed)
            self.objective.loss(plan, packed, logp, entropy, sums).backward()  # type: ignore[no-untyped-call]
        if passes:
            norm = self._apply(rate, before_update)
            metrics["policy/grad_norm"] = norm
            metrics["policy/skipped_updates"] = 0.0 if np.isfinite(norm) else 1.0
        lengths = np.diff(plan.batch.offsets)
        metrics |= {"perf/micro_batches": float(len(passes)), "perf/nodes": float(nodes), "perf/row_tokens": float(lengths.sum())}
        return metrics

    def _apply(self, rate: float, before_update: Callable[[], None]) -> float:
        """Clip and step; returns the gradient norm before clipping. A norm that is not finite leaves everything as it was."""
        grads = [p.grad for p in self._parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        if torch.isfinite(norm):
            before_update()
            if self.config.optimizer.max_grad_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(self._parameters, self.config.optimizer.max_grad_norm, norm)
            for master, parameter in zip(self.masters, self._parameters, strict=True):
                master.grad = parameter.grad
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self._refresh_words()
            if self.reference is not None:
                self.reference.update(self._parameters)
        for tensor in (*self.masters, *self._parameters):
            tensor.grad = None
        return float(norm)

    def logprobs(self, plan: StepPlan, rows: np.ndarray) -> Floats:
        """Log-probs [N] of the loss tokens of `rows` under the model as it is, without gradients; 0 elsewhere."""
        result = np.zeros(len(plan.mask))
        with torch.no_grad():
            for members in micro_batches(plan.batch, plan.mask, rows, self.config.packing.max_nodes):
                packed = pack(plan.batch, plan.mask, members)
                result[packed.flat] = self._forward(packed)[0].numpy()
        return result

    def _forward(self, packed: PackedRows) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = hidden_states(self.model, packed)
        chunk = self.config.packing.head_chunk_bytes
        return token_logprobs(hidden, self._head, packed.head_temperature, packed.token_head, packed.target, chunk)

    def _refresh_words(self) -> None:
        """Model parameters := published words of the masters (round to nearest even), upcast."""
        if self._shares_masters:
            return
        with torch.no_grad():
            for parameter, master in zip(self._parameters, self.masters, strict=True):
                parameter.copy_(master.to(self._words))

    # --- what leaves the backend ----------------------------------------------------------------------------------------

    def published(self) -> Iterable[tuple[str, torch.Tensor]]:
        """HF names and fp32 tensors that hold the words; rounding them to the transport dtype is exact (or is the rounding)."""
        return zip(self._names, (parameter.detach() for parameter in self._parameters), strict=True)

    def export(self, path: Path) -> None:
        """Write a plain HF directory in bf16."""
        export_hf(self.published(), self._source, path)

    def state(self) -> TrainState:
        """Masters, moments, schedule position, random generators, moving reference."""
        tensors = {f"master.{name}": master.detach() for name, master in zip(self._names, self.masters, strict=True)}
        steps: dict[str, float] = {}
        for name, master in zip(self._names, self.masters, strict=True):
            moments = self.optimizer.state.get(master)
            if moments:
                steps[name] = float(moments["step"])
                tensors[f"exp_avg.{name}"] = moments["exp_avg"]
                tensors[f"exp_avg_sq.{name}"] = moments["exp_avg_sq"]
        if self.reference is not None and self.reference.config.kind == "ema":
            tensors |= {f"reference.{name}": value for name, value in zip(self._names, self.reference.values, strict=True)}
        tensors["rng.torch"] = torch.get_rng_state()
        generator = random.getstate()
        values = {"position": self.position, "adam_steps": steps, "rng_python": [generator[0], list(generator[1]), generator[2]]}
        return TrainState(tensors, values)

    def load_state(self, state: TrainState) -> None:
        """Continue from `state()`, bit for bit. Raises ConfigError when it belongs to another model."""
        shapes = {f"master.{name}": master.shape for name, master in zip(self._names, self.masters, strict=True)}
        for key, shape in shapes.items():
            if key not in state.tensors or state.tensors[key].shape != shape:
                found = tuple(state.tensors[key].shape) if key in state.tensors else "nothing"
                raise ConfigError(f"checkpoint: {key} is {found}, the model in {self._source} has {tuple(shape)}")
        with torch.no_grad():
            for name, master in zip(self._names, self.masters, strict=True):
                master.copy_(state.tensors[f"master.{name}"])
                self.optimizer.state.pop(master, None)
                if name in state.values["adam_steps"]:
                    self.optimizer.state[master] = _moments(state, name)
            if self.reference is not None and self.reference.config.kind == "ema":
                for name, value in zip(self._names, self.reference.values, strict=True):
                    value.copy_(state.tensors[f"reference.{name}"])
        self._refresh_words()
        self.position = int(state.values["position"])
        torch.set_rng_state(state.tensors["rng.torch"])
        version, internal, gauss = state.values["rng_python"]
        random.setstate((version, tuple(internal), gauss))


def over_steps(steps: list[dict[str, float]]) -> dict[str, float]:
    """Numbers of the optimizer steps of one batch as one: counts add up, the norm is the largest, the rate is the last."""
    merged = dict(steps[-1])
    for name in ("policy/skipped_updates", "perf/micro_batches", "perf/nodes", "perf/row_tokens"):
        merged[name] = sum(step[name] for step in steps)
    norms = [step["policy/grad_norm"] for step in steps]
    merged["policy/grad_norm"] = max(norms) if np.all(np.isfinite(norms)) else float("nan")  # max() may pass over a nan
    return merged


def _moments(state: TrainState, name: str) -> dict[str, Any]:
    return {
        "step": torch.tensor(float(state.values["adam_steps"][name]), dtype=torch.float32),
        "exp_avg": state.tensors[f"exp_avg.{name}"].clone(),
        "exp_avg_sq": state.tensors[f"exp_avg_sq.{name}"].clone(),
    }


def _adamw(masters: list[torch.Tensor], config: TrainEngineConfig) -> torch.optim.AdamW:
    """Decay on matrices only: norms and biases have no scale to shrink."""
    settings = config.optimizer
    for master in masters:
        master.requires_grad_(True)
    groups = [
        {"params": [m for m in masters if m.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [m for m in masters if m.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)
