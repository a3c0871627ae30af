"""The receiving side in a rollout service: pull one exact version, verified, into a staged safetensors file. Blocking, without torch.

Deltas are applied to what is held on the way into a new file, which counts only if the digest over all tensors is the published one;
whatever goes wrong with them, the same call pulls in full. If that fails too, the call raises and what is held stays held.
"""

from __future__ import annotations

import logging
import mmap
import re
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from astraflow.lib.aio import Backoff, one_line
from astraflow.lib.net import split_host_port
from astraflow.lib.wire import Identity
from astraflow.lib.wire_client import SyncClient
from astraflow.protocol import weights as messages
from astraflow.protocol.errors import (
    AstraFlowError,
    BaseMismatch,
    Conflict,
    DeadlinePassed,
    DigestMismatch,
    LayoutMismatch,
    Retryable,
    Unavailable,
    WeightError,
)
from astraflow.protocol.routes import SenderAPI
from astraflow.weights import chain, codec, layout
from astraflow.weights.assembly import Assembly, InFull, Patched
from astraflow.weights.config import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, WeightsConfig
from astraflow.weights.fetch import Fetch, FetchCounts
from astraflow.weights.staging import Staging

T = TypeVar("T")
log = logging.getLogger(__name__)

VERDICT_S = 5.0
"""Longest time for telling the sender how a transfer ended; without it the half is released by the sender's own deadline."""
PAUSE_S = 0.1
"""How soon a pull that sleeps between two tries notices the end of its receiver."""
DELTA_TICKETS = 3
"""Delta transfers that may break before the full one is tried; a full one goes on until the deadline."""
MAX_LINKS = 1024
"""Deltas of one chain."""
MAX_REPLY_BYTES = 64 << 20
"""Of a sender: a ticket with the checksums of all chunks is the largest."""
_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Staged:
    """A version that is ready to load."""

    path: Path
    """safetensors file with HF names; `astraflow.tied` in its metadata maps tied names unless they are exported as tensors."""
    version: int
    digest: str
    mode: Literal["full", "delta", "held"]
    """`held` = it was staged already; nothing travelled."""
    fallback: str
    """Why a full transfer was made where a delta was wanted; empty otherwise."""
    size_bytes: int
    """Bytes that travelled, failed attempts included."""
    seconds: float
    """From the call to the file in its place."""
    changed_elements: int
    """Words that deltas changed, counted once per delta; −1 for a full transfer."""
    links: int = 0
    """Deltas that were applied one after the other; 0 for a full transfer."""


@dataclass
class _Sender:
    """What is known about the sender at the other end."""

    endpoint: str
    client: SyncClient
    incarnation: str
    shape: layout.Layout
    max_streams: int


class WeightReceiver:
    """One model of one instance; one `pull` at a time."""

    def __init__(self, model_id: str, instance_id: str, staging_dir: Path, config: WeightsConfig, identity: Identity):
        self.model_id, self.instance_id, self.config, self.identity = model_id, instance_id, config, identity
        self._staging = Staging(Path(staging_dir), model_id)
        self._held: tuple[Path, int, str, layout.Layout] | None = None
        self._sender: _Sender | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._fetch: Fetch | None = None
        self.counters: defaultdict[str, float] = defaultdict(float)
        """{full,delta,held}_pulls, chain_pulls (delta pulls of several links), {full,delta}_bytes, {full,delta}_s, failed_pulls,
        changed_elements, `fallback: …`, stream repairs."""
        if config.delta:
            codec.load_ahead()

    @property
    def held(self) -> tuple[int, str] | None:
        """(version, digest) of the staged file; None before the first pull."""
        return None if self._held is None else (self._held[1], self._held[2])

    @property
    def path(self) -> Path | None:
        """The staged file that is held."""
        return None if self._held is None else self._held[0]

    def pull(
        self,
        sender_endpoint: str,
        version: int,
        digest: str,
        *,
        full: bool = False,
        deadline_s: float,
        stop: threading.Event | None = None,
        keep: Path | None = None,
    ) -> Staged:
        """Get exactly this version. `digest` empty = whatever the sender published under that number; `full` = no delta.
        `stop`: what `abandon` ends this pull by. `keep`: a staged file that must stay besides the held one (an engine that
        serves it may have to start again); every other one is removed.

        Raises Conflict when the sender does not have it (superseded, or another digest), DigestMismatch for bytes that stay wrong,
        LayoutMismatch, Unavailable or DeadlinePassed otherwise. `held` changes only when the new file is in place.
        """
        if version < 0 or (digest and not _DIGEST.fullmatch(digest)):
            raise WeightError(f"version {version} with digest {digest[:64]!r}: expected a version ≥ 0 and 32 hex digits")
        with self._lock:
            call = _Pull(self, sender_endpoint, version, digest, full, deadline_s, stop or threading.Event())
            return self._pull(call, version, {path for path in (self.path, keep) if path is not None})

    def _pull(self, call: _Pull, version: int, keep: set[Path]) -> Staged:
        try:
            self._staging.clean(keep)
            staged = call.run()
        except AstraFlowError as error:
            self.counters["failed_pulls"] += 1
            log.warning("%s: version %d not pulled: %s", self.model_id, version, one_line(error))
            raise
        finally:
            self._count_streams(call.counts)
        self.counters[f"{staged.mode}_pulls"] += 1
        self.counters[f"{staged.mode}_bytes"] += staged.size_bytes
        self.counters[f"{staged.mode}_s"] += staged.seconds
        self.counters["chain_pulls"] += staged.links > 1
        self.counters["changed_elements"] += max(0, staged.changed_elements)
        return staged

    def _count_streams(self, counts: FetchCounts) -> None:
        self.counters["streams"] += counts.connections
        self.counters["streams_broken"] += counts.broken
        self.counters["damaged_chunks"] += counts.damaged_chunks
        self.counters["received_bytes"] += counts.received_bytes

    def intact(self, path: Path, digest: str) -> bool:
        """Whether a staged file still has the bytes that its digest names; reads all of it. Any thread."""
        held = self._held
        return held is not None and _file_is_right(path, held[3], digest, self.config.hash_threads)

    def abandon(self, stop: threading.Event) -> None:
        """Nobody needs the running pull any more: it raises Conflict (superseded) soon. `stop` is the one that it was called with."""
        stop.set()
        if (fetch := self._fetch) is not None:
            fetch.abort(_abandoned())

    def close(self) -> None:
        """End a running pull (it raises), remove the staged files and close the connections."""
        self._closed.set()
        if (fetch := self._fetch) is not None:
            fetch.abort(Unavailable("the receiver is closed"))
        with self._lock:
            self._held = None
            self._staging.close()
            if self._sender is not None:
                self._sender.client.close()
                self._sender = None


def _abandoned() -> Conflict:
    return Conflict("superseded: the pull was abandoned for a newer notice")


class _Pull:
    """One call of `pull`."""

    def __init__(
        self, receiver: WeightReceiver, endpoint: str, version: int, digest: str, full: bool, deadline_s: float, stop: threading.Event
    ):
        self._receiver, self._endpoint, self._version, self._digest, self._full = receiver, endpoint.rstrip("/"), version, digest, full
        self._began = time.monotonic()
        self._deadline_s = deadline_s
        self._end_s = self._began + deadline_s
        self._stop = stop
        self._fallback = ""
        self.counts = FetchCounts()

    def run(self) -> Staged:
        receiver = self._receiver
        if not self._full and (staged := self._already_held()) is not None:
            return staged
        if receiver._held is not None and receiver.config.delta and not self._full:
            try:
                return self._transfer("delta")
            except (WeightError, Retryable) as error:
                if time.monotonic() >= self._end_s:
                    raise
                self._fall_back(one_line(error), type(error).__name__)
        self._pause(0)
        return self._transfer("full")

    def _already_held(self) -> Staged | None:
        """The staged file again, when it is exactly what is asked for and its bytes are still right."""
        held = self._receiver._held
        if held is None or not self._digest or (held[1], held[2]) != (self._version, self._digest):
            return None
        if not _file_is_right(held[0], held[3], self._digest, self._receiver.config.hash_threads):
            self._fall_back("the staged file is damaged")
            self._full = True
            return None
        return self._staged(held[0], "held", -1)

    def _fall_back(self, why: str, kind: str = "") -> None:
        """`kind`: what to count it under, where the reason is a text that never comes twice."""
        self._fallback = why
        self._receiver.counters[f"fallback: {kind or why[:200]}"] += 1
        log.warning("%s: version %d: no delta: %s", self._receiver.model_id, self._version, why)

    def _staged(self, path: Path, mode: Literal["full", "delta", "held"], changed: int, links: int = 0) -> Staged:
        seconds = time.monotonic() - self._began
        return Staged(path, self._version, self._digest, mode, self._fallback, self.counts.received_bytes, seconds, changed, links)

    # ---- the sender ----

    def _retrying(self, what: str, call: Callable[[], T]) -> T:
        """Retryable errors (the sender is being restarted) are tried again until the deadline."""
        backoff = Backoff(first_s=0.05, max_s=1.0)
        while True:
            try:
                return call()
            except Retryable as error:
                pause_s = backoff.next()
                if time.monotonic() + pause_s >= self._end_s:
                    raise DeadlinePassed(f"{what}: not within {self._deadline_s:g} s: {one_line(error)}") from error
                self._pause(pause_s)

    def _pause(self, seconds: float) -> None:
        """Sleep, unless the pull is to end. Raises WeightError when the receiver is closed, Conflict when the pull is abandoned."""
        end = time.monotonic() + seconds
        while True:
            if self._receiver._closed.is_set():
                raise WeightError("the receiver is closed")
            left = end - time.monotonic()
            if self._stop.wait(max(0.0, min(left, PAUSE_S))):
                raise _abandoned()
            if left <= PAUSE_S:
                break

    def _timeout_s(self) -> float:
        return max(0.05, min(self._receiver.config.io_timeout_s, self._end_s - time.monotonic()))

    def _connect(self, fresh: bool) -> _Sender:
        """The sender with its layout, checked; asked again when it is a new process (`fresh`)."""
        known = self._receiver._sender
        if known is not None and known.endpoint == self._endpoint and not fresh:
            return known
        if known is not None:
            known.client.close()
            self._receiver._sender = None
        client = SyncClient(self._endpoint, self._receiver.identity, MAX_REPLY_BYTES)
        try:
            info = client.call(SenderAPI.get_buffer_info, timeout_s=self._timeout_s())
            if info.model_id != self._receiver.model_id:
                raise LayoutMismatch(f"{self._endpoint} sends model {info.model_id[:80]!r}, not {self._receiver.model_id!r}")
            shape = layout.check(info.tensors, info.tied, info.size_bytes, info.layout_hash, self._receiver.config.max_model_bytes)
            hello = messages.RegisterReceiver(instance_id=self._receiver.instance_id, layout_hash=shape.hash)
            reply = client.call(SenderAPI.register_receiver, hello, timeout_s=self._timeout_s())
        except AstraFlowError:
            client.close()
            raise
        self._receiver._sender = _Sender(self._endpoint, client, info.incarnation, shape, max(1, reply.max_streams))
        return self._receiver._sender

    def _request(self, mode: messages.TransferMode) -> tuple[_Sender, messages.TransferTicket]:
        """A ticket from a sender whose layout we know."""
        sender = self._connect(fresh=False)
        for _ in range(2):
            held = self._receiver._held
            if mode == "delta" and (held is None or held[3].hash != sender.shape.hash):
                raise LayoutMismatch("the layout changed")
            request = messages.TransferRequest(
                instance_id=self._receiver.instance_id,
                version=self._version,
                digest=self._digest,
                mode=mode,
                codecs=list(codec.available()),
            )
            if mode == "delta" and held is not None:
                request.base_version, request.base_digest = held[1], held[2]
            # The sender may wait for its checksums and for the delta before it answers.
            ticket = sender.client.call(SenderAPI.request_transfer, request, timeout_s=self._timeout_s())
            if ticket.incarnation == sender.incarnation:
                self._check(ticket, sender, mode)
                return sender, ticket
            sender = self._connect(fresh=True)
        raise Unavailable(f"the sender at {self._endpoint} was restarted twice in a row")

    def _check(self, ticket: messages.TransferTicket, sender: _Sender, mode: messages.TransferMode) -> None:
        """A ticket is what we asked for, and within limits."""
        if ticket.version != self._version or not _DIGEST.fullmatch(ticket.digest) or self._digest not in ("", ticket.digest):
            got = f"version {ticket.version} with digest {ticket.digest[:64]!r}"
            raise DigestMismatch(f"ticket for {got}, not version {self._version} with {self._digest!r}")
        size, most = ticket.size_bytes, sender.shape.size_bytes
        chunks = -(-size // ticket.chunk_bytes) if MIN_CHUNK_BYTES <= ticket.chunk_bytes <= MAX_CHUNK_BYTES else -1
        fits = size == most if ticket.mode == "full" else 0 < size <= most
        if not fits or chunks != len(ticket.chunk_hashes) or not 0 < ticket.stream_port < 65536:
            raise WeightError(f"ticket of {size} bytes in {len(ticket.chunk_hashes)} chunks of {ticket.chunk_bytes}: not acceptable")
        if ticket.mode == "delta":
            if mode != "delta" or ticket.codec not in codec.available():
                raise WeightError(f"a delta ({ticket.codec[:40]!r}) was not asked for")
            held, base, target = self._receiver.held, (ticket.base_version, ticket.base_digest), (ticket.version, ticket.digest)
            if base != held:
                raise BaseMismatch(f"delta from version {ticket.base_version}, but {held} is held")
            ticket.links = ticket.links or [
                messages.DeltaLink(
                    base_version=base[0],
                    base_digest=base[1],
                    version=target[0],
                    digest=target[1],
                    size_bytes=size,
                    changed_elements=ticket.changed_elements,
                )
            ]
            if wrong := chain.check(ticket.links, base, target, size, ticket.changed_elements, MAX_LINKS):
                raise BaseMismatch(f"chain of deltas to version {ticket.version}: {wrong}")
        elif ticket.links:
            raise WeightError(f"a full transfer of {len(ticket.links)} deltas")

    def _verdict(self, sender: _Sender, ticket: messages.TransferTicket, error: str) -> None:
        done = messages.TransferDone(
            instance_id=self._receiver.instance_id, transfer_id=ticket.transfer_id, ok=not error, error=error[:1000]
        )
        try:
            sender.client.call(SenderAPI.transfer_done, done, timeout_s=min(VERDICT_S, self._timeout_s()))
        except AstraFlowError as failure:  # e.g. restarted since, or cancelled after our last byte: it forgets us by itself
            log.info("sender not told about transfer of version %d: %s", ticket.version, one_line(failure))

    # ---- bytes ----

    def _transfer(self, mode: messages.TransferMode) -> Staged:
        """Fetch and stage; in full as well where the sender has no such delta (its reason is noted)."""
        fetch: Fetch | None = None
        assembly: Assembly | None = None
        broken = 0
        backoff = Backoff(first_s=0.05, max_s=1.0)
        try:
            while True:
                sender, ticket = self._retrying(f"ticket for version {self._version}", partial(self._request, mode))
                if mode == "delta" and ticket.mode == "full":
                    self._fall_back(ticket.fallback or "the sender gave no reason")
                    mode = "full"
                self._digest = self._digest or ticket.digest
                if assembly is not None and assembly.draft.layout.hash != sender.shape.hash:
                    raise LayoutMismatch("the layout changed during the transfer")  # another trainer took the address over meanwhile
                if fetch is not None and assembly is not None and not fetch.fits(ticket):
                    self._receiver._staging.discard(assembly.draft)
                    assembly = None
                if assembly is None or fetch is None:
                    assembly = self._assembly(sender, ticket)
                    fetch = self._fetch(assembly, sender)
                self._receiver._fetch = fetch
                self._pause(0)
                try:
                    fetch.run(ticket, self._end_s, assembly.follow)
                    break
                except Unavailable as error:
                    broken += 1
                    if time.monotonic() >= self._end_s or (ticket.mode == "delta" and broken >= DELTA_TICKETS):
                        raise
                    log.info("%s: %s; asking for a new ticket", self._receiver.model_id, one_line(error))
                    self._pause(min(backoff.next(), max(0.0, self._end_s - time.monotonic())))
                except AstraFlowError as error:
                    self._verdict(sender, ticket, one_line(error))
                    raise
            return self._stage(sender, ticket, assembly)
        finally:
            self._receiver._fetch = None
            if assembly is not None:
                self._receiver._staging.discard(assembly.draft)

    def _assembly(self, sender: _Sender, ticket: messages.TransferTicket) -> Assembly:
        held = self._receiver._held
        assert ticket.mode == "full" or held is not None, "a delta was asked for with what is held"
        draft = self._receiver._staging.draft(sender.shape, self._receiver.config.export_tied)
        try:
            draft.create(held[0] if held is not None and ticket.mode == "delta" else None)
        except WeightError:
            self._receiver._staging.discard(draft)
            raise
        return InFull(draft, ticket) if ticket.mode == "full" else Patched(draft, ticket, self._receiver.config.codec_threads)

    def _fetch(self, assembly: Assembly, sender: _Sender) -> Fetch:
        config = self._receiver.config
        host, _ = split_host_port(self._endpoint)
        streams = min(config.streams, sender.max_streams)
        identity = self._receiver.identity
        tls = identity.tls if self._endpoint.startswith("https:") else None
        return Fetch(assembly.write, host, identity.token, config, streams, self.counts, tls)

    def _stage(self, sender: _Sender, ticket: messages.TransferTicket, assembly: Assembly) -> Staged:
        """Compare the digest over all tensors, and swap."""
        receiver = self._receiver
        try:
            assembly.verify()
            assembly.draft.finish(ticket.version, ticket.digest)
            path = receiver._staging.place(assembly.draft, ticket.version, ticket.digest)
        except (AstraFlowError, OSError) as error:
            self._verdict(sender, ticket, one_line(error))
            raise error if isinstance(error, AstraFlowError) else WeightError(f"staging: {error}") from error
        receiver._held = (path, ticket.version, ticket.digest, sender.shape)
        staged = self._staged(path, ticket.mode, ticket.changed_elements, len(ticket.links))
        self._verdict(sender, ticket, "")
        return staged


def _file_is_right(path: Path, shape: layout.Layout, digest: str, threads: int) -> bool:
    """The staged file still has the bytes that were verified when it was written."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
            (header_bytes,) = struct.unpack_from("<Q", view)
            with view[8 + header_bytes : 8 + header_bytes + shape.size_bytes] as half:
                return len(half) == shape.size_bytes and layout.digest(shape, half, threads) == digest
    except (OSError, ValueError, struct.error):
        return False
