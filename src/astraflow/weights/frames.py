"""What the manager and its sender process tell each other over their socketpair: length-prefixed msgpack frames.

    manager → sender   Setup (once, first), Claim, Publish, Stop
    sender → manager   Ready (or Failed, once, first), Granted, Published, Stats
A claim is granted when nobody reads that half any more; only then does the manager write, and only Publish makes the bytes readable.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from astraflow.protocol.codec import encode
from astraflow.protocol.errors import BadMessage
from astraflow.protocol.weights import TensorMeta
from astraflow.weights.config import WeightsConfig

MAX_FRAME = 256 << 20
"""A Setup names every tensor of the model."""


class HalfState(msgspec.Struct, frozen=True):
    version: int
    digest: str
    """Empty = still to be computed."""


class Setup(msgspec.Struct, tag=True, kw_only=True):
    """All that a sender needs to know, at its first start and at a restart alike."""

    model_id: str
    run_id: str
    token: str
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


ToSender = Setup | Claim | Publish | Stop
FromSender = Ready | Failed | Granted | Published | Stats


def pack(frame: ToSender | FromSender) -> bytes:
    """One frame with its length in front."""
    body = encode(frame)
    return struct.pack("<I", len(body)) + body


class FrameReader:
    """Cuts a byte stream into frames of one direction."""

    def __init__(self, from_sender: bool):
        self._decoder = msgspec.msgpack.Decoder[Any](FromSender if from_sender else ToSender)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Add bytes; the frames that are complete now. Raises BadMessage for what is no frame."""
        self._buffer += data
        while len(self._buffer) >= 4:
            (length,) = struct.unpack_from("<I", self._buffer)
            if length > MAX_FRAME:
                raise BadMessage(f"control frame of {length} bytes")
            if len(self._buffer) < 4 + length:
                return
            body = bytes(self._buffer[4 : 4 + length])
            del self._buffer[: 4 + length]
            try:
                yield self._decoder.decode(body)
            except msgspec.DecodeError as error:
                raise BadMessage(f"control frame: {error}") from None
