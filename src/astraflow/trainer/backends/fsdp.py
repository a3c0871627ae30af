"""The fsdp backend: the local backend's step over several ranks, with FSDP2, HSDP, tensor, sequence and context parallelism.

Every rank gets the whole batch and makes the same plan of it, so that advantages, denominators and M2PO's bound are those of the whole
batch by construction. The passes are then dealt out, gradients are added, and each rank's optimizer moves the rows that it holds.
Masters and words lie as the parameters do: a rank holds fp32 rows of both, or, when the forward pass computes in the published dtype,
only masters, which FSDP2 rounds to words as it gathers them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from astraflow.protocol.errors import ConfigError
from astraflow.trainer.adapters import FreshlyMergedLayers, trained, whole
from astraflow.trainer.algorithms.base import Floats
from astraflow.trainer.algorithms.critic import Critic
from astraflow.trainer.algorithms.objective import StepPlan, Sums
from astraflow.trainer.algorithms.reference import Reference
from astraflow.trainer.backends.base import TrainState
from astraflow.trainer.backends.fsdp_critic import ShardedCritic
from astraflow.trainer.backends.fsdp_parallel import Grid, TokenModel, parallelize
from astraflow.trainer.backends.local import DTYPES, LocalBackend
from astraflow.trainer.backends.shards import as_whole, norm_over_ranks, own_rows, take_gradients
from astraflow.trainer.config import TrainEngineConfig
from astraflow.trainer.models import export_hf, load_model
from astraflow.trainer.packing import PackedRows, pack, schedule
from astraflow.trainer.ranks import carriers, own_device
from astraflow.weights import lora
from astraflow.weights.config import ModelConfig, PublishedLora
from astraflow.weights.lora import LowRank
from astraflow.weights.manager import exchange


class ShardedReference(Reference):
    """FSDP2 keeps the memory of its shards: contents are exchanged, not tensors."""

    @contextmanager
    def active(self, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
        """Inside, the model computes with the reference's weights."""
        own = list(parameters)
        self._exchange(own)
        try:
            yield
        finally:
            self._exchange(own)

    def _exchange(self, own: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(own, self.values, strict=True):
                held = parameter.clone()
                parameter.copy_(value)
                value.copy_(held)


class FsdpBackend(LocalBackend):
    """Holds this rank's part of the model and takes optimizer steps in step with the other ranks."""

    _reference_type = ShardedReference
    _merged_type = FreshlyMergedLayers

    def __init__(
        self,
        config: TrainEngineConfig,
        model: ModelConfig,
        published_dtype: str,
        max_new_tokens: int,
        published_lora: PublishedLora = "merged",
    ):
        """Raises ConfigError for a model that cannot be split as `trainer.parallel` says. A collective of all ranks."""
        if model.lora is not None and config.parallel.tensor > 1:
            raise ConfigError(f"trainer.parallel.tensor: {config.parallel.tensor}, but adapters are not split; expected 1 with lora")
        self._device, self._compute = own_device(), DTYPES[model.dtype]
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        if not dist.is_initialized():  # a trainer of one process, e.g. with one GPU
            dist.init_process_group(carriers(self._device), store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        if dist.get_rank():
            self._rng = f"{LocalBackend._rng}.{dist.get_rank()}"
        self._everyone = dist.new_group(backend="gloo")
        self._grid = Grid.of(config.ranks, config.parallel, self._device)
        super().__init__(config, model, published_dtype, max_new_tokens, published_lora)
        if self.vision is not None and self._grid.shares_passes:
            raise ConfigError("trainer.parallel: the tokens of a pass with images are not split; expected context 1 and tensor 1")

    def _load(self, model: ModelConfig) -> nn.Module:
        whole = load_model(model, self.config.packing.attention)
        self._root = TokenModel(whole, self._grid, self.config.packing.head_chunk_bytes)
        parallelize(self._root, self._compute)
        self._root.to(self._device)  # buffers; FSDP2 has moved the parameters
        return whole

    def _make_critic(self, trunk: nn.Module) -> Critic:
        return ShardedCritic(self.config, trunk, self._grid, self._compute, self._device)

    @property
    def _sharded(self) -> list[DTensor]:
        return [parameter for _, parameter in trained(self.model) if isinstance(parameter, DTensor)]

    def _own_parameters(self) -> list[torch.Tensor]:
        return own_rows(self._sharded)

    # --- passes ---------------------------------------------------------------------------------------------------------

    def _rounds(self, plan: StepPlan, rows: np.ndarray) -> Iterator[tuple[PackedRows, bool]]:
        """This rank's passes. All ranks run equally many, because each gathers every layer: whoever has none repeats one row, and whoever
        has no images in a pass computes one of the batch's."""
        index, ranks = self._grid.place("data")
        cut = schedule(plan.batch, plan.mask, rows, self.config.packing.max_nodes, ranks)
        for turn in zip(*cut, strict=True):
            packed = pack(plan.batch, plan.mask, turn[index] or next(filter(None, turn))[:1])
            yield packed if packed.images else replace(packed, idle_images=plan.batch.images[:1]), bool(turn[index])

    def _forward(self, packed: PackedRows) -> tuple[torch.Tensor, torch.Tensor]:
        logp, entropy = self._root(packed.to(self._device))
        return logp, entropy

    def logprobs(self, plan: StepPlan, rows: np.ndarray) -> Floats:
        """Log-probs [N] of the loss tokens of `rows` under the model as it is, on every rank; 0 elsewhere."""
        found = torch.from_numpy(super().logprobs(plan, rows)).to(self._device)
        self._root.reshard()  # type: ignore[operator]  # without a backward pass the root stays gathered, and would miss the next change
        dist.all_reduce(found, group=self._grid.work.get_group("data"))
        result: Floats = found.cpu().numpy()
        return result

    def _join(self, sums: Sums, metrics: dict[str, float]) -> None:
        counted = {name: value for name, value in metrics.items() if name in ("perf/micro_batches", "perf/nodes")}
        told = msgspec.json.encode([sums.values, sums.maxima, counted] if self._grid.counts else [{}, {}, {}])
        sums.values, sums.maxima = {}, {}
        metrics.update(dict.fromkeys(counted, 0.0))
        for values, maxima, numbers in map(msgspec.json.decode, exchange(told, self._everyone)):
            sums.add(**values)
            for name, value in maxima.items():
                sums.peak(name, value)
            for name, value in numbers.items():
                metrics[name] += value

    # --- the update -----------------------------------------------------------------------------------------------------

    def _apply(self, rate: float, before_update: Callable[[], None]) -> float:
        take_gradients(self._parameters, self._sharded)
        return super()._apply(rate, before_update)

    def _total_norm(self, grads: list[torch.Tensor]) -> torch.Tensor:
        return norm_over_ranks(self._parameters, self._sharded, self._device)

    # --- what leaves the backend ----------------------------------------------------------------------------------------

    def published(self) -> Iterable[tuple[str, torch.Tensor | LowRank]]:
        """HF names and sharded tensors; rounding them to the transport dtype is exact (or is the rounding)."""
        if self._lora:
            return super().published()
        return zip(self._names, (parameter.detach() for parameter in self._sharded), strict=True)

    def export(self, path: Path) -> None:
        """Gather tensor by tensor; rank 0 writes a plain HF directory in bf16."""
        leads = dist.get_rank() == 0
        gathered = {}
        for name, source in lora.published(self.model, "merged") if self._lora else self.published():
            tensor = whole(source)
            tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if leads:
                gathered[name] = tensor.detach().to("cpu", torch.bfloat16)
        if leads:
            export_hf(gathered.items(), self._source, path)

    def state(self) -> TrainState:
        """Masters and moments as sharded tensors; each rank's own random generator."""
        state = super().state()
        state.values["ranks"] = dist.get_world_size()
        return state

    def load_state(self, values: dict[str, Any], fill: Callable[[dict[str, torch.Tensor]], None]) -> None:
        """Continue, also on another number of ranks; a rank that was not there goes on from the first one's random generator."""
        own = self._rng
        if dist.get_rank() >= values.get("ranks", 1):
            self._rng = LocalBackend._rng
        super().load_state(values, fill)
        self._rng = own

    def _whole(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        return as_whole(tensor, self._sharded[index])
