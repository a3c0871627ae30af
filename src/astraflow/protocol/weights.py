"""Calls between the trainer's sender agent and receivers, and the notice that makes a RaaS pull.

Weights are named by (version, digest). Timelines are Dataflow's: the sender does not know them.
Stream (one TCP connection of several): the receiver connects to `stream_port` and sends a 4-byte little-endian length and an
encoded `StreamHello`; the sender answers with exactly `length` raw bytes from `offset` of the transfer, or closes. Further hellos
may follow on the same connection, also before the bytes of the previous one have come; they are answered in their order.
Chunk i of a transfer covers bytes [i·chunk_bytes, (i+1)·chunk_bytes) and has its own xxh3-64 in the ticket.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from astraflow.protocol.message import Message, Name, Url, Version
from astraflow.protocol.rollout import Serving

TransferMode = Literal["full", "delta"]


class TensorMeta(msgspec.Struct, kw_only=True, frozen=True):
    """One published tensor. Its bytes follow the previous one's without a hole (safetensors allows none), so that a half is the data
    part of a safetensors file; tensors of a multiple of 64 bytes come first and are therefore aligned to 64 bytes."""

    name: str
    """HF parameter name."""
    shape: tuple[int, ...]
    """Row-major."""
    dtype: str
    """safetensors dtype: BF16, F32 or F16."""
    offset: int
    """Bytes from the start of the half."""
    size_bytes: int
    """Without padding."""


class BufferInfo(Message, kw_only=True):
    """Layout of the published weights and the newest version."""

    model_id: str
    """The policy."""
    version: int
    """Newest published version; −1 before the first publish."""
    digest: str
    """Hash over the published bytes; empty = unverified."""
    layout_hash: str
    """xxh3-128 over names, shapes, dtypes and offsets."""
    size_bytes: int
    """Bytes of one half: the sum of all tensors."""
    tensors: list[TensorMeta]
    """In layout order."""
    tied: dict[str, str] = {}
    """Tied name → the tensor that holds its bytes (tied weights travel once)."""
    stream_port: int
    """TCP port of the weight streams, on the sender's host."""
    available: list[int] = []
    """Versions that can be pulled in full now (both halves)."""
    deltas: list[tuple[int, int]] = []
    """(base version, version) pairs with a ready delta."""


class Capabilities(Message, kw_only=True):
    modes: list[TransferMode]
    """Kinds of transfer that it offers."""
    codecs: list[str]
    """Delta codecs that the sender can produce."""
    max_streams: int
    """Most parallel connections of one transfer."""


class SenderVersion(Message, kw_only=True):
    model_id: str
    """The policy."""
    version: int
    """Publishes after the first; the first is version 0."""
    digest: str
    """Hash over the published bytes; empty = unverified."""


class RegisterReceiver(Message, kw_only=True):
    """A receiver introduces itself (its first call to this sender)."""

    instance_id: Name
    """Name of the rollout service, stable across its restarts."""
    layout_hash: Name = ""
    """Empty the first time; otherwise the layout that the receiver staged: a different one is refused."""


class RegisterReceiverReply(Message, kw_only=True):
    layout_hash: str
    """Hash of the agreed layout."""
    stream_port: int
    """TCP port of the weight streams, on the sender's host."""
    max_streams: int
    """Most parallel connections of one transfer."""


class TransferRequest(Message, kw_only=True):
    """Ask for one exact version."""

    instance_id: Name
    """Name of the rollout service, stable across its restarts."""
    version: Version
    """The exact version wanted."""
    digest: Name = ""
    """Expected digest (from the notice); the sender refuses when it published another one under this version."""
    mode: TransferMode = "full"
    """What the receiver would like."""
    base_version: Version = -1
    """What the receiver holds; used for mode `delta`."""
    base_digest: Name = ""
    """Digest that the delta starts from."""
    codecs: Annotated[list[Name], Meta(max_length=256)] = []
    """Delta codecs that the receiver can apply, best first."""


class DeltaLink(msgspec.Struct, kw_only=True, frozen=True):
    """One delta of a chain; it starts where the one before it ends."""

    base_version: int
    """Version that this delta starts from."""
    base_digest: str
    """Digest that this delta starts from."""
    version: int
    """Version that it leads to."""
    digest: str
    """Digest that it leads to."""
    size_bytes: int
    """Its share of the transfer."""
    changed_elements: int
    """Words that it changes."""


class TransferTicket(Message, kw_only=True):
    """What to fetch. It holds the half (or delta) alive until `/transfer_done` or its deadline."""

    transfer_id: str
    """Names one transfer."""
    mode: TransferMode
    """`full` also when a delta was asked for but is not to be had (`fallback` says why)."""
    fallback: str = ""
    """Why a delta that was asked for is not sent."""
    version: int
    """Publishes after the first; the first is version 0."""
    digest: str
    """Hash over the published bytes; empty = unverified."""
    base_version: int = -1
    """Version that the delta starts from."""
    base_digest: str = ""
    """Digest that the delta starts from."""
    codec: str = ""
    """Delta codec; empty for a full sync."""
    size_bytes: int
    """Bytes of the whole transfer."""
    chunk_bytes: int
    """Size of every chunk but the last."""
    chunk_hashes: list[int]
    """xxh3-64 of every chunk."""
    stream_port: int
    """TCP port of the weight streams, on the sender's host."""
    deadline_s: float
    """The sender cancels the transfer after this time without progress."""
    changed_elements: int = -1
    """For a delta: words that differ, added up over its links; −1 for a full sync."""
    links: list[DeltaLink] = []
    """Deltas that lie one behind the other in the transfer, to be applied in this order; empty = one, from base to version."""


class TransferDone(Message, kw_only=True):
    """The receiver's verdict; releases the half. `ok` only after bytes were staged and the digest verified."""

    instance_id: Name
    """Name of the rollout service, stable across its restarts."""
    transfer_id: Name
    """Names one transfer."""
    ok: bool
    """Staged and verified."""
    error: str = ""
    """One line for people; empty when ok."""


class StreamHello(msgspec.Struct, kw_only=True):
    """First bytes on a weight stream."""

    protocol_version: int
    """As in the envelope."""
    token: str
    """Cluster token; compared in constant time."""
    transfer_id: str
    """Names one transfer."""
    offset: int
    """First byte wanted, from the start of the transfer."""
    length: int
    """Bytes wanted."""


class NotifyRaaS(Message, kw_only=True):
    """Dataflow → RaaS: these weights exist; pull and load them."""

    model_id: Name
    """The policy."""
    timeline: Version
    """A new timeline means rollback: pull full, drop what the dead timeline produced."""
    version: Version
    """Publishes after the first; the first is version 0."""
    digest: Name
    """Hash over the published bytes; empty = unverified."""
    sender_endpoint: Url
    """http address of the sender agent."""
    wait_s: float = 0.0
    """How long to wait for the load before replying."""


class NotifyRaaSReply(Message, kw_only=True):
    state: Literal["current", "loaded", "loading", "failed"]
    """`current` = already served; `loading` = wait_s passed first."""
    message: str = ""
    """One line for people."""
    serving: dict[str, Serving]
    """Receipts per model."""
