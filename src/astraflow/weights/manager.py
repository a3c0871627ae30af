"""WeightManager: the trainer's handle on published weights.

`offload` copies the parameters into the half that does not serve and switches; everything else (digest, deltas, transfers) happens in
the sender process meanwhile. The trainer waits only for the copy and, rarely, for readers of the half it needs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from astraflow.lib.net import http_url, reachable_host
from astraflow.lib.wire import Identity
from astraflow.protocol.errors import UserError
from astraflow.weights import copy, layout
from astraflow.weights.config import WeightsConfig
from astraflow.weights.control import SenderLink
from astraflow.weights.frames import HalfState, Setup
from astraflow.weights.memory import HalfMemory

log = logging.getLogger(__name__)


class WeightManager:
    """Publishes the versions of one model. Call it from one thread; `published` and `stats` may be called from others too."""

    def __init__(self, model_id: str, config: WeightsConfig, identity: Identity, run_dir: Path):
        self.model_id, self.config, self._identity = model_id, config, identity
        self._log_path = Path(run_dir) / "logs" / f"sender-{model_id}.log"
        self._layout: layout.Layout | None = None
        self._memory: HalfMemory | None = None
        self._link: SenderLink | None = None
        self._own: dict[str, float] = {"offloads": 0.0, "offload_s": 0.0, "offload_wait_s": 0.0}

    def offload(
        self,
        named: Iterable[tuple[str, torch.Tensor]],
        version: int,
        rank: int = 0,
        world_size: int = 1,
        tied: Mapping[str, str] | None = None,
    ) -> None:
        """Publish these parameters as `version`; returns when their words are copied. The first call starts the sender.

        Every rank may call it; with replicated parameters rank 0 alone copies. `tied`: name → the name that holds its bytes.
        Raises UserError or LayoutMismatch for tensors that cannot be published, DeadlinePassed when readers do not let go,
        RemoteError when the sender had to be given up. After an error nothing of this version is served.
        """
        if not 0 <= rank < world_size:
            raise UserError(f"rank {rank}: expected 0…{world_size - 1}")
        if version < 0:
            raise UserError(f"version {version}: expected 0 or more")
        if rank != 0:
            return
        tensors, ties = copy.collect(named, tied or {})
        link, shape, memory = self._ready(tensors, ties)
        began = time.monotonic()
        half = link.target()
        granted = link.claim(half, self.config.reader_wait_s)
        if granted.cancelled:
            log.warning("version %d: %d slow transfers of the older version were cancelled", version, granted.cancelled)
        claimed = time.monotonic()
        copy.copy_into(memory.half(half), shape, tensors, self.config.dtype)
        link.publish(half, version)
        self._own["offloads"] += 1
        self._own["offload_wait_s"] = claimed - began
        self._own["offload_s"] = time.monotonic() - claimed

    def _ready(self, tensors: dict[str, torch.Tensor], ties: dict[str, str]) -> tuple[SenderLink, layout.Layout, HalfMemory]:
        if self._layout is None or self._memory is None or self._link is None:
            shape = layout.build(copy.specs(tensors, self.config.dtype), ties)
            memory = HalfMemory.create(f"astraflow-{self._identity.run_id}-{self.model_id}", shape.size_bytes)
            link = SenderLink(f"sender of {self.model_id}", self.config, self._log_path, (memory.fd,), self._setup)
            self._layout, self._memory, self._link = shape, memory, link
            started = False
            try:
                link.start()
                started = True
            finally:
                if not started:
                    self.close()
        copy.check_same(self._layout, tensors)
        return self._link, self._layout, self._memory

    def _setup(self, halves: tuple[HalfState | None, HalfState | None], newest: int, ports: tuple[int, int]) -> Setup:
        assert self._layout is not None
        assert self._memory is not None
        return Setup(
            model_id=self.model_id,
            run_id=self._identity.run_id,
            token=self._identity.token,
            config=self.config,
            tensors=list(self._layout.tensors),
            tied=dict(self._layout.tied),
            memory_fd=self._memory.fd,
            halves=halves,
            newest=newest,
            port=ports[0],
            stream_port=ports[1],
        )

    @property
    def _sender(self) -> SenderLink:
        if self._link is None:
            raise UserError("nothing was offloaded yet")
        return self._link

    def published(self, version: int, deadline_s: float = 60.0) -> str:
        """Digest of a published version, computed by the sender. Raises DeadlinePassed, or RemoteError when there is no sender."""
        return self._sender.published(version, deadline_s)

    @property
    def endpoint(self) -> str:
        """http address of the sender for receivers; the same over restarts of the sender."""
        return http_url(self.config.advertise_host or reachable_host(self.config.host), self._sender.port)

    @property
    def sender_pid(self) -> int:
        """Process id of the sender; 0 while it is being restarted."""
        return self._sender.pid

    def check(self) -> None:
        """Raise RemoteError when the sender died too often. A dead sender is restarted on its own; this is the trainer's look at it."""
        if self._link is not None:
            self._link.check()

    def stats(self) -> dict[str, float]:
        """Numbers for metrics and report, over all lives of the sender: `weights/{full,delta}_{transfers,bytes,s}`, … """
        values = dict(self._own)
        if self._link is not None:
            stats = self._link.stats()
            for name in ("full_transfers", "full_bytes", "delta_transfers", "delta_bytes", "failed_transfers", "cancelled_transfers"):
                values[name] = 0.0
            values |= stats.counters | stats.gauges | {"sender_restarts": float(self._link.restarts)}
        return {f"weights/{name}": float(value) for name, value in values.items()}

    def receivers(self) -> dict[str, dict[str, float]]:
        """The same counters per receiver (instance id)."""
        return self._link.stats().receivers if self._link is not None else {}

    def close(self) -> int | None:
        """End the sender and free the memory; the sender's exit code, None when there was none to end. Safe to call twice."""
        code = self._link.close() if self._link is not None else None
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        return code
