"""The local backend: one process, fp32 masters, forward and backward on the published words. The oracle of all others.

Masters w32 take the gradients of a model that holds w16 upcast (straight-through, numerics 1): after each optimizer step the
model's parameters become bf16 round-to-nearest-even of the masters, which is also what is published. With `forward_masters` or a
float32 transport the model's parameters are the masters themselves.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from astraflow.lib.trace import TRACE
from astraflow.protocol.errors import BadMessage, ConfigError
from astraflow.trainer.adapters import MergedLayers, freeze_words, trained
from astraflow.trainer.algorithms.base import Floats
from astraflow.trainer.algorithms.critic import Critic
from astraflow.trainer.algorithms.objective import Objective, StepPlan, Sums, step_metrics
from astraflow.trainer.algorithms.reference import Reference, WithoutAdapters
from astraflow.trainer.backends.base import MOMENTS, TrainState, learning_rate
from astraflow.trainer.batch import RaggedBatch
from astraflow.trainer.config import TrainEngineConfig
from astraflow.trainer.logprobs import token_logprobs
from astraflow.trainer.models import export_hf, has_vision, hidden_states, load_model, output_embedding, tied_names
from astraflow.trainer.packing import PackedRows, micro_batches, pack
from astraflow.trainer.vision import Vision
from astraflow.weights import lora
from astraflow.weights.config import ModelConfig, PublishedLora
from astraflow.weights.lora import LowRank

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class LocalBackend:
    """Holds the model and takes optimizer steps."""

    def __init__(
        self,
        config: TrainEngineConfig,
        model: ModelConfig,
        published_dtype: str,
        max_new_tokens: int,
        published_lora: PublishedLora = "merged",
    ):
        """`published_dtype`: transport dtype of the weights; `max_new_tokens`: L_max of numerics 8; `published_lora`: what of a model
        with adapters is published.
        """
        self.config = config
        self.objective = Objective(config.algorithm, max_new_tokens)
        self._source = Path(model.path)
        self.model = self._load(model)
        self.tied = tied_names(self.model)
        self._names = [name for name, _ in trained(self.model)]
        self._parameters = self._own_parameters()
        self._words = DTYPES[published_dtype]
        self._shares_masters = config.forward_masters or self._words in (torch.float32, self._compute)
        self._lora = model.lora and published_lora
        self._merged: MergedLayers | None = None
        if self._lora and not self._shares_masters:
            freeze_words(self.model, self._words)
            if self._lora == "merged":
                self._merged, self._shares_masters = self._merged_type(self.model, self._words), True
        self._save_memory(self.model)
        self.masters: list[torch.Tensor] = [p if self._shares_masters else p.detach().clone() for p in self._parameters]
        self._refresh_words()
        self.optimizer = _adamw(self.masters, config)
        self.position = 0
        """Optimizer steps taken or passed over; the schedule's only state."""
        self._total_steps = config.optimizer.total_steps or config.max_steps * config.optimizer_steps
        self.reference = self._make_reference() if config.algorithm.needs_reference else None
        self.vision = Vision(self.model, self._source, Path(config.media_dir)) if has_vision(self.model.config) else None
        self.critic: Critic | None = None
        if config.algorithm.needs_critic:
            trunk = load_model(msgspec.structs.replace(model, lora=None), config.packing.attention)
            self.critic = self._make_critic(trunk)
            self._save_memory(trunk)

    # --- what a backend of several ranks does in its own way ---------------------------------------------------------------

    _reference_type = Reference
    _merged_type = MergedLayers
    _rng = "rng.torch"
    """Name of this process's random generator in a checkpoint."""
    _compute = torch.float32
    """Dtype of forward and backward; equal to the published one, the forward pass itself rounds masters to words."""

    def _load(self, model: ModelConfig) -> nn.Module:
        return load_model(model, self.config.packing.attention)

    def _make_critic(self, trunk: nn.Module) -> Critic:
        return Critic(self.config, trunk)

    def _own_parameters(self) -> list[torch.Tensor]:
        """What this process holds of each parameter, in memory shared with it."""
        return [parameter for _, parameter in trained(self.model)]

    def _rounds(self, plan: StepPlan, rows: np.ndarray) -> Iterator[tuple[PackedRows, bool]]:
        """The forward passes of this process over `rows`; false = only to keep step with other ranks, its result does not count."""
        for members in micro_batches(plan.batch, plan.mask, rows, self.config.packing.max_nodes):
            yield pack(plan.batch, plan.mask, members), True

    def _join(self, sums: Sums, metrics: dict[str, float]) -> None:
        """Add what other ranks have counted."""

    def _total_norm(self, grads: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.utils.get_total_norm(grads)

    def _whole(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of which `tensor` is this process's part, as parameter number `index` is split."""
        return tensor

    # --- one batch ------------------------------------------------------------------------------------------------------

    def train_step(self, batch: RaggedBatch, before_update: Callable[[], None]) -> dict[str, float]:
        """Optimizer steps on one batch (`minibatches` × `epochs` of them) and its metrics. `before_update` runs before each
        change of masters or moments.
        """
        if self.vision is not None:
            batch = self.vision.prepare(batch)
        elif any(batch.media):
            raise BadMessage(f"batch.media: rows with images, but the model in {self._source} reads text only")
        outline = self.objective.outline(batch)
        ref = self._reference_logprobs(outline) if self.reference is not None else None
        values = self.critic.values(outline, self._rounds(outline, outline.compute)) if self.critic is not None else None
        with TRACE.span("plan"):
            plan = self.objective.plan(batch, ref, values)
        if self.config.optimizer_steps > 1:
            plan.prox = self.logprobs(plan, plan.compute)
        sums, n_tokens = Sums(), 0
        steps = []
        for _ in range(self.config.epochs):
            for part in self._minibatches(plan):
                steps.append(self._optimizer_step(part, sums, before_update))
                n_tokens += part.n_tokens
        metrics = over_steps(steps)
        self._join(sums, metrics)
        metrics |= step_metrics(sums, n_tokens, len(steps))
        metrics["policy/effective_rows"] = float(len(plan.compute))
        if ref is not None:
            metrics["policy/kl_ref"] = float((plan.batch.tokens["logprobs"] - ref)[plan.mask].mean()) if plan.n_tokens else 0.0
        return metrics

    def _save_memory(self, model: nn.Module) -> None:
        if self.config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]

    def _make_reference(self) -> Reference:
        if self._lora and self.config.reference.kind == "initial":
            if self._merged is not None:
                return WithoutAdapters(self._merged.without_adapters)
            return WithoutAdapters(self.model.disable_adapter)  # type: ignore[arg-type]
        return self._reference_type(self._parameters, self.config.reference)

    def _reference_logprobs(self, outline: StepPlan) -> Floats:
        assert self.reference is not None
        with self.reference.active(self._parameters):
            if self._merged is not None and self.reference.moves:
                self._merged.refresh()
            ref = self.logprobs(outline, outline.compute)
        if self._merged is not None:
            self._merged.refresh()
        return ref

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
        passes = nodes = 0
        for packed, counts in self._rounds(plan, plan.compute):
            passes, nodes = passes + 1, nodes + len(packed.input_ids)
            with TRACE.span("forward", nodes=len(packed.input_ids)):
                logp, entropy = self._forward(packed)
                loss = self.objective.loss(plan, packed, logp, entropy, sums) if counts else (logp.sum() + entropy.sum()) * 0.0
            with TRACE.span("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
        if passes:
            with TRACE.span("update"):
                norm = self._apply(rate, before_update)
            metrics["policy/grad_norm"] = norm
            metrics["policy/skipped_updates"] = 0.0 if np.isfinite(norm) else 1.0
        if self.critic is not None:
            metrics |= self.critic.step(plan, self._rounds(plan, np.unique(plan.batch.row_of_token[plan.mask])), before_update)
        lengths = np.diff(plan.batch.offsets)
        metrics |= {"perf/micro_batches": float(passes), "perf/nodes": float(nodes), "perf/row_tokens": float(lengths.sum())}
        return metrics

    def _apply(self, rate: float, before_update: Callable[[], None]) -> float:
        """Clip and step; returns the gradient norm before clipping. A norm that is not finite leaves everything as it was."""
        grads = [p.grad for p in self._parameters if p.grad is not None]
        norm = self._total_norm(grads)
        if torch.isfinite(norm):
            before_update()
            if 0 < self.config.optimizer.max_grad_norm < norm:
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
            for packed, counts in self._rounds(plan, rows):
                logp, _ = self._forward(packed)
                if counts:
                    result[packed.flat] = logp.cpu().numpy()
        return result

    def _forward(self, packed: PackedRows) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = hidden_states(self.model, packed)
        chunk = self.config.packing.head_chunk_bytes
        return token_logprobs(hidden, output_embedding(self.model), packed.head_temperature, packed.token_head, packed.target, chunk)

    def _refresh_words(self) -> None:
        """Model parameters := published words of the masters (round to nearest even), upcast."""
        if self._merged is not None:
            self._merged.refresh()
        if self._shares_masters:
            return
        with torch.no_grad():
            for parameter, master in zip(self._parameters, self.masters, strict=True):
                parameter.copy_(master.to(self._words))

    # --- what leaves the backend ----------------------------------------------------------------------------------------

    def published(self) -> Iterable[tuple[str, torch.Tensor | LowRank]]:
        """HF names and fp32 tensors that hold the words; rounding them to the transport dtype is exact (or is the rounding)."""
        if self._lora:
            return lora.published(self.model, self._lora)
        return zip(self._names, (parameter.detach() for parameter in self._parameters), strict=True)

    def export(self, path: Path) -> None:
        """Write a plain HF directory in bf16, adapters merged."""
        export_hf(lora.published(self.model, "merged") if self._lora else self.published(), self._source, path)

    def state(self) -> TrainState:
        """Masters, moments, schedule position, random generators, moving reference."""
        tensors: dict[str, torch.Tensor] = {}
        steps: dict[str, float] = {}
        for index, (name, master) in enumerate(zip(self._names, self.masters, strict=True)):
            tensors[f"master.{name}"] = self._whole(index, master.detach())
            moments = self.optimizer.state.get(master)
            if moments:
                steps[name] = float(moments["step"])
                for moment in MOMENTS:
                    tensors[f"{moment}.{name}"] = self._whole(index, moments[moment])
            if self.reference is not None and self.reference.moves:
                tensors[f"reference.{name}"] = self._whole(index, self.reference.values[index])
        if self.critic is not None:
            tensors |= self.critic.tensors()
        tensors[self._rng] = torch.get_rng_state()
        generator = random.getstate()
        values = {"position": self.position, "adam_steps": steps, "rng_python": [generator[0], list(generator[1]), generator[2]]}
        if self.critic is not None:
            values["critic_steps"] = self.critic.steps
        return TrainState(tensors, values)

    def load_state(self, values: dict[str, Any], fill: Callable[[dict[str, torch.Tensor]], None]) -> None:
        """Continue from a `state()` with these values, bit for bit. Raises ConfigError when it belongs to another model."""
        for name, master in zip(self._names, self.masters, strict=True):
            self.optimizer.state.pop(master, None)
            if name in values["adam_steps"]:
                step = torch.tensor(float(values["adam_steps"][name]), dtype=torch.float32, device=master.device)
                self.optimizer.state[master] = {"step": step} | {moment: torch.zeros_like(master.detach()) for moment in MOMENTS}
        if self.critic is not None:
            if "critic_steps" not in values:
                raise ConfigError("checkpoint: it holds no critic, which trainer.algorithm.advantage 'gae' needs")
            self.critic.prepare(values["critic_steps"])
        tensors = self.state().tensors
        fill(tensors)
        self._refresh_words()
        self.position = int(values["position"])
        torch.set_rng_state(tensors[self._rng])
        version, internal, gauss = values["rng_python"]
        random.setstate((version, tuple(internal), gauss))


def over_steps(steps: list[dict[str, float]]) -> dict[str, float]:
    """Numbers of the optimizer steps of one batch as one: counts add up, the norm is the largest, the rate is the last."""
    merged = dict(steps[-1])
    for name in ("policy/skipped_updates", "perf/micro_batches", "perf/nodes", "perf/row_tokens"):
        merged[name] = sum(step[name] for step in steps)
    norms = [step["policy/grad_norm"] for step in steps]
    merged["policy/grad_norm"] = max(norms) if np.all(np.isfinite(norms)) else float("nan")  # max() may pass over a nan
    return merged


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
