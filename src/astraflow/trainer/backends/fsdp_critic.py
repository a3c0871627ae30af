"""The critic over several ranks: laid out like the policy, its AdamW on the rows that this rank holds."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from astraflow.trainer.algorithms.base import Floats
from astraflow.trainer.algorithms.critic import Critic
from astraflow.trainer.backends.fsdp_parallel import Grid, ValueModel, parallelize
from astraflow.trainer.backends.shards import as_whole, norm_over_ranks, own_rows, take_gradients
from astraflow.trainer.config import TrainEngineConfig
from astraflow.trainer.packing import PackedRows


class ShardedCritic(Critic):
    """Trunk and head split over a grid. Values, losses and updates are those of the critic of one process."""

    def __init__(self, config: TrainEngineConfig, model: nn.Module, grid: Grid, compute: torch.dtype, device: torch.device):
        """`compute`: dtype of forward and backward. A collective of all ranks."""
        self._grid, self._compute, self._device = grid, compute, device
        super().__init__(config, model)

    def _join_head(self, model: nn.Module, head: nn.Linear) -> None:
        self._root = ValueModel(model, head, self._grid)
        parallelize(self._root, self._compute)
        self._root.to(self._device)

    @property
    def _sharded(self) -> list[DTensor]:
        return [parameter for _, parameter in self.named if isinstance(parameter, DTensor)]

    def _own_parameters(self) -> list[torch.Tensor]:
        return [rows.requires_grad_() for rows in own_rows(self._sharded)]

    def _forward(self, packed: PackedRows) -> torch.Tensor:
        values: torch.Tensor = self._root(packed.to(self._device))[0]
        return values

    def _joined(self, part: Floats) -> Floats:
        self._root.reshard()  # type: ignore[operator]  # after passes without gradients the root stays gathered
        found = torch.from_numpy(part).to(self._device)
        dist.all_reduce(found, group=self._grid.work.get_group("data"))
        result: Floats = found.cpu().numpy()
        return result

    def _total_norm(self) -> torch.Tensor:
        take_gradients(self.parameters, self._sharded)
        return norm_over_ranks(self.parameters, self._sharded, self._device)

    def _whole(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        return as_whole(tensor, self._sharded[index])
