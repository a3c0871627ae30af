"""What the training loop drives: backend, weights and checkpoints, on every rank of the trainer alike.

Rank 0 runs the loop. Each of these verbs is told to the other ranks as an order and then done by all of them, in the same order;
`follow` is the loop of the other ranks. With one rank nothing is told to anybody.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from astraflow.protocol.batch import Batch
from astraflow.protocol.codec import encode
from astraflow.trainer.backends.base import Backend
from astraflow.trainer.batch import RaggedBatch, ragged
from astraflow.trainer.checkpoint import Checkpoints, Saved
from astraflow.trainer.ranks import Ranks
from astraflow.weights.manager import WeightManager


class Train(msgspec.Struct, tag=True):
    batch: Batch


class Publish(msgspec.Struct, tag=True):
    version: int


class Save(msgspec.Struct, tag=True):
    version: int
    values: dict[str, Any]


class Durable(msgspec.Struct, tag=True):
    """Wait for the last save."""


class Export(msgspec.Struct, tag=True):
    path: str


class Forget(msgspec.Struct, tag=True):
    """Training is done."""


class Idle(msgspec.Struct, tag=True):
    """Rank 0 waits for somebody else and is alive."""


class End(msgspec.Struct, tag=True):
    code: int


Order = Train | Publish | Save | Durable | Export | Forget | Idle | End
_ORDER = msgspec.msgpack.Decoder(Order)


class Team:
    """One rank's part. Every method is a collective: all ranks do it, or RankLost is raised on those that are left."""

    def __init__(self, backend: Backend, weights: WeightManager, checkpoints: Checkpoints, ranks: Ranks):
        self.backend, self.weights, self.checkpoints, self.ranks = backend, weights, checkpoints, ranks
        self.senders: list[str] = []
        """Addresses of the senders, one per node, rank 0's first; known once something was published."""

    def _tell(self, order: Order) -> None:
        if self.ranks.leads and self.ranks.size > 1:
            self.ranks.told(encode(order))

    def resume(self) -> Saved | None:
        """Load the newest complete checkpoint of this run directory, if there is one. The first thing that all ranks do."""
        saved = self.checkpoints.newest()
        if saved is not None:
            with self.ranks.guarded():
                self.backend.load_state(saved.backend, lambda into: self.checkpoints.fill(saved, into))
        return saved

    def train_step(self, raw: Batch, batch: RaggedBatch) -> dict[str, float]:
        """Train on one batch, given as it came and as views."""
        self._tell(Train(raw))
        with self.ranks.guarded():
            return self.backend.train_step(batch, before_update=self.checkpoints.wait)

    def publish(self, version: int) -> None:
        """Copy this rank's part of the weights to where the sender of its node serves them; returns when all nodes do."""
        self._tell(Publish(version))
        self.weights.check()
        with self.ranks.guarded():
            self.weights.offload(self.backend.published(), version, self.ranks.rank, self.ranks.size, tied=self.backend.tied)
        if len(self.senders) != 1:  # the ranks of one node are together already
            mine = self.weights.endpoint if self.weights.serves else ""
            self.senders = [told.decode("utf-8") for told in self.ranks.exchange(mine.encode("utf-8")) if told]

    def save(self, version: int, values: dict[str, Any]) -> None:
        """Begin a checkpoint."""
        self._tell(Save(version, values))
        self.checkpoints.save(version, self.backend.state(), values)

    def durable(self) -> int:
        """Newest version that is safely on disk, once the last save has ended."""
        self._tell(Durable())
        self.checkpoints.wait()
        return self.checkpoints.durable

    def export(self, path: Path) -> None:
        """Write a plain HF directory."""
        self._tell(Export(str(path)))
        with self.ranks.guarded():
            self.backend.export(path)

    def forget(self) -> None:
        """Drop the model: only the published bytes are needed from here on, and they lie in shared memory."""
        self._tell(Forget())
        del self.backend

    def check(self) -> None:
        """While rank 0 waits for others: raise when the sender was given up or a rank is gone."""
        self.weights.check()
        self._tell(Idle())

    def end(self, code: int) -> None:
        """The trainer ends with this exit code."""
        self._tell(End(code))

    def follow(self) -> int:
        """Do what rank 0 says until the end; the exit code."""
        self.resume()
        while True:
            match _ORDER.decode(self.ranks.told()):
                case Train(batch):
                    self.train_step(batch, ragged(batch))
                case Publish(version):
                    self.publish(version)
                case Save(version, values):
                    self.save(version, values)
                case Durable():
                    self.durable()
                case Export(path):
                    self.export(Path(path))
                case Forget():
                    self.forget()
                case Idle():
                    self.weights.check()
                case End(code):
                    return code
