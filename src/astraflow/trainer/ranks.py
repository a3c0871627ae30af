"""The processes of one trainer, and what they tell each other.

Who is who comes from the environment that torchrun made common (RANK, WORLD_SIZE, LOCAL_RANK); `astraflow trainer` sets it for the
ranks that it starts (launch/ranks.py). Messages between ranks travel as msgpack over a gloo group of their own, whatever carries the
tensors: a trainer's ranks trust each other, but nothing that they exchange names code.

A rank that dies closes its connections, so that the others raise RankLost at once; one that hangs is given up after
`deadlines.ranks_s` in a step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist

from astraflow.lib.aio import one_line
from astraflow.protocol.errors import ConfigError, RemoteError
from astraflow.trainer.config import TrainEngineConfig
from astraflow.weights.manager import exchange

STORE_ENV = "ASTRAFLOW_RANKS_STORE"
"""File through which ranks on one machine find each other; without it torch's `env://` (MASTER_ADDR, MASTER_PORT)."""
WORDS_OF_LOSS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset")
"""In the RuntimeErrors by which torch says that another rank is gone."""


class RankLost(RemoteError):
    """Another rank of this trainer is gone, or hangs."""


class Ranks:
    """One rank's view of all of them. `Ranks()` is a trainer of one process, in which all of this is nothing."""

    def __init__(self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None, wait_s: float = 0.0, step_s: float = 0.0):
        """`wait_s`: longest wait for an order, `step_s`: within a step."""
        self.rank, self.size, self.group, self._wait_s, self._step_s = rank, size, group, wait_s, step_s

    @classmethod
    def join(cls, config: TrainEngineConfig) -> Ranks:
        """Meet the other ranks. Raises ConfigError when this process was not started as one of `trainer.ranks`."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size != config.ranks:
            raise ConfigError(f"trainer.ranks: {config.ranks}, but this process was started as one of {size} (WORLD_SIZE)")
        if size == 1:
            return cls()
        rank, waits = int(os.environ["RANK"]), config.deadlines
        method = f"file://{os.environ[STORE_ENV]}" if STORE_ENV in os.environ else "env://"
        with lost(rank, waits.ranks_s):
            dist.init_process_group(
                carriers(own_device()),
                init_method=method,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=waits.ranks_s),
            )
            # Between two orders rank 0 waits for Dataflow, an evaluation or a digest, each with its own deadline.
            idle_s = waits.ranks_s + max(waits.dataflow_s, waits.final_eval_s, waits.publish_s) + waits.call_s
            return cls(rank, size, dist.new_group(backend="gloo", timeout=timedelta(seconds=idle_s)), idle_s, waits.ranks_s)

    @property
    def leads(self) -> bool:
        """Rank 0 talks to Dataflow and says what is done next."""
        return self.rank == 0

    def exchange(self, data: bytes) -> list[bytes]:
        """Everybody's bytes, in the order of ranks. Raises RankLost when a rank is gone."""
        if self.group is None:
            return [data]
        with lost(self.rank, self._wait_s):
            return exchange(data, self.group)

    def told(self, data: bytes = b"") -> bytes:
        """The bytes of rank 0, on every rank."""
        if self.group is None:
            return data
        with lost(self.rank, self._wait_s):
            size = torch.tensor([len(data)])
            dist.broadcast(size, 0, group=self.group)
            row = torch.empty(int(size), dtype=torch.uint8)
            if self.leads:
                row.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            dist.broadcast(row, 0, group=self.group)
            return row.numpy().tobytes()

    def apart(self) -> Ranks:
        """The same ranks on connections of their own, for another thread; a collective."""
        if self.group is None:
            return self
        with lost(self.rank, self._wait_s):
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._step_s))
            return Ranks(self.rank, self.size, group, self._step_s, self._step_s)

    def guarded(self) -> AbstractContextManager[None]:
        """Inside, torch's error about another rank becomes RankLost."""
        return lost(self.rank, self._step_s) if self.group is not None else nullcontext()

    def close(self) -> None:
        """Leave in order."""
        if self.group is not None:
            dist.destroy_process_group()


def own_device() -> torch.device:
    """This rank's GPU; the CPU where there is none. Raises ConfigError when there are fewer GPUs than ranks on this machine."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= count:
        raise ConfigError(f"trainer.ranks: rank {local} of this machine has no GPU; {count} are visible")
    return torch.device("cuda", local)


def carriers(device: torch.device) -> str:
    """Which library carries tensors between ranks, in torch's words."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


@contextmanager
def lost(rank: int, wait_s: float) -> Iterator[None]:
    """Turn torch's error about another rank into RankLost."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(word in str(error) for word in WORDS_OF_LOSS):
            raise
        raise RankLost(f"rank {rank}: another rank has ended, or did not come within {wait_s:g} s: {one_line(error)[:300]}") from None
