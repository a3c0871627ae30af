"""What the manager and its sender process tell each other over their socketpair: frames as in `lib/frames.py`.

    manager → sender   Setup (once, first), Claim, Publish, Numbers, Stop
    sender → manager   Ready (or Failed, once, first), Granted, Published, Stats
A claim is granted when nobody reads that half any more; only then does the manager write, and only Publish makes the bytes readable.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from astraflow.lib.frames import FrameReader
from astraflow.lib.tls import Tls
from astraflow.protocol.weights import TensorMeta
from astraflow.weights.config import WeightsConfig


class HalfState(msgspec.Struct, frozen=True):
    version: int
    digest: str
    """Empty = still to be computed."""


class Setup(msgspec.Struct, tag=True, kw_only=True):
    """All that a sender needs to know, at its first start and at a restart alike."""

    model_id: str
    run_id: str
    token: str
    tls: Tls
    config: WeightsConfig
    tensors: list[TensorMeta]
    tied: dict[str, str]
    memory_fd: int
    """Inherited descriptor of the two halves."""
    halves: tuple[HalfState | None, HalfState | None]
    newest: int
    port: int
    """HTTP port of the previous life, so that receivers find the sender where it was; 0 = any."""
    stream_port: int


class Claim(msgspec.Struct, tag=True):
    number: int
    half: int
    patience_s: float


class Publish(msgspec.Struct, tag=True):
    half: int
    version: int


class Numbers(msgspec.Struct, tag=True):
    """The trainer's newest step, for `GET /metrics` of its sender: the trainer itself serves nothing."""

    values: dict[str, float]


class Stop(msgspec.Struct, tag=True):
    pass


class Ready(msgspec.Struct, tag=True):
    port: int
    stream_port: int


class Failed(msgspec.Struct, tag=True):
    """Instead of Ready: the sender cannot listen where it should."""

    message: str


class Granted(msgspec.Struct, tag=True):
    number: int
    half: int
    waited_s: float
    cancelled: int
    """Transfers that were in the way and had to be cancelled."""


class Published(msgspec.Struct, tag=True):
    half: int
    version: int
    digest: str
    seconds: float


class Stats(msgspec.Struct, tag=True):
    counters: dict[str, float]
    """Since the start of this sender process."""
    gauges: dict[str, float]
    """Latest values."""
    receivers: dict[str, dict[str, float]]
    """Counters per receiver."""


def summed(*parts: Mapping[str, float]) -> dict[str, float]:
    """Counters added up by name."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total


ToSender = Setup | Claim | Publish | Numbers | Stop
FromSender = Ready | Failed | Granted | Published | Stats


def to_sender() -> FrameReader[ToSender]:
    """Reads what the sender gets."""
    return FrameReader(ToSender, "control frame")


def from_sender() -> FrameReader[FromSender]:
    """Reads what the manager gets."""
    return FrameReader(FromSender, "control frame")
