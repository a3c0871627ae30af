"""`astraflow conformance trainer URL`: the tool plays Dataflow at URL; the trainer is started by hand and attaches there.

It is driven through four steps, a dead timeline and the end. Its sender is called as rollout services call it.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import xxhash

from astraflow.lib.wire import new_identity
from astraflow.protocol import weights
from astraflow.protocol.errors import AstraFlowError, ConfigError, Conflict, LayoutMismatch, WeightError
from astraflow.protocol.message import PROTOCOL_VERSION
from astraflow.protocol.routes import DataflowAPI, SenderAPI
from astraflow.tools.conformance import WAIT_S, Failed, Skipped, check, expect, until
from astraflow.tools.conformance_learner import LAST, LOST, TURN, PlayedDataflow
from astraflow.tools.conformance_wire import Host, Peer, WireSuite
from astraflow.weights import layout
from astraflow.weights.config import WeightsConfig
from astraflow.weights.stream import hello_bytes

START_S = 300.0
"""A trainer loads its model, and somebody has to start it."""
STEP_S = 300.0
"""A step of a large model."""
NAMING = {"model_id", "timeline", "version", "digest"}
"""Fields that say which call it is."""
HELLO = weights.RegisterReceiver(instance_id="conformance-probe")


class TrainerSuite(WireSuite):
    """One run with one trainer."""

    def __init__(self, url: str, token: str, config: dict[str, Any]) -> None:
        """Serves at `url` at once. Raises ConfigError when its address cannot be bound."""
        where = urlsplit(url)
        if where.scheme != "http" or not where.hostname or not where.port:
            raise ConfigError(f"url {url!r}: expected http://host:port, the address at which the tool plays Dataflow")
        identity = new_identity((config.get("experiment") or {}).get("run_id", ""), token)
        self.played = PlayedDataflow(config, identity)
        self._host = Host(identity, where.hostname)
        self._host.serve("dataflow", DataflowAPI, self.played.handlers(), where.port)
        super().__init__(Peer(url, token), SenderAPI.get_version, (SenderAPI.register_receiver, HELLO))

    def close(self) -> None:
        self._host.close()
        self.played.close()
        self.peer.close()

    def _clean(self, name: str) -> None:
        found = self.played.wrong[name]
        expect(not found, "; ".join(dict.fromkeys(found[:3])))

    def _reached(self, version: int) -> None:
        until(f"version {version} (the trainer is at {self.played.version})", lambda: self.played.version >= version, STEP_S)

    # --- attaching --------------------------------------------------------------------------------------------------------

    @check("wire.answers", "the trainer attaches by /ready, and the sender that it names answers")
    def answers(self) -> None:
        until(f"/ready at {self.peer.url}", lambda: self.played.ready_message, START_S)
        ready, token = self.played.ready_message, self.peer.token
        assert ready is not None
        expect(ready.train_batch_size > 0, f"train_batch_size {ready.train_batch_size}")
        self.peer.close()
        self.peer = Peer(ready.sender_endpoint, token)
        self._run_id = self.peer.call(SenderAPI.get_version).run_id

    @check("ready.comes_first", "/ready is the first of the trainer's calls", "wire.answers")
    def comes_first(self) -> None:
        expect(self.played.diary[0][0] == "ready", f"/{self.played.diary[0][0]} came first")
        self._clean("ready.comes_first")

    @check("ready.published", "when /ready comes the sender has that version, and it can be pulled", "wire.answers")
    def published(self) -> None:
        self._reached(0)
        ready = self.played.ready_message
        assert ready is not None
        expect(ready.digest, "/ready without a digest: the weights can never be verified")
        until("the pull of the first version", lambda: self.played.staged or self.played.wrong["ready.published"])
        self._clean("ready.published")

    @check("weights.layout", "/get_buffer_info describes every byte: no holes, and the hash of names, shapes and offsets", "wire.answers")
    def layout(self) -> None:
        info = self.peer.call(SenderAPI.get_buffer_info)
        layout.check(info.tensors, info.tied, info.size_bytes, info.layout_hash, WeightsConfig().max_model_bytes)
        expect(info.version in info.available, f"version {info.version} is the newest, and available are {info.available}")
        wanted = self.played.ready_message
        assert wanted is not None
        expect(info.model_id == wanted.model_id, f"the sender serves {info.model_id!r}, the trainer trains {wanted.model_id!r}")
        reply = self.peer.call(SenderAPI.register_receiver, HELLO)
        expect((reply.layout_hash, reply.stream_port) == (info.layout_hash, info.stream_port), "/register_receiver says something else")

    # --- steps ------------------------------------------------------------------------------------------------------------

    @check("calls.retried", "what is answered by 503 is called again: /ready, /batch, /notify_version", "wire.answers")
    def retried(self) -> None:
        self._reached(2)
        for name in LOST:
            calls = [message for kind, message in self.played.diary if kind == name]
            fields = set(type(calls[0]).__struct_fields__) & NAMING
            again = len(calls) > 1 and all(getattr(calls[1], field) == getattr(calls[0], field) for field in fields)
            expect(again, f"/{name} was not called again with the same words")

    @check("batch.names", "every /batch names the live timeline and the version held; `wait` is asked again", "calls.retried")
    def names(self) -> None:
        self._clean("batch.names")

    @check("notify.order", "each version is announced once, one after the other, and only after its batch", "calls.retried")
    def order(self) -> None:
        self._clean("notify.order")

    @check("notify.data_there", "when a notice comes the sender has that version: pulled in full, every digest is right", "calls.retried")
    def data_there(self) -> None:
        self._clean("notify.data_there")

    @check("weights.changed", "training changes the weights that are published", "notify.data_there")
    def changed(self) -> None:
        self._reached(TURN)
        expect(len(set(self.played.digests.values())) > 1, f"all of versions {sorted(self.played.digests)} have the same digest")

    @check("weights.delta", "a receiver of the version before gets a delta, which leads to the published bytes", "weights.changed")
    def delta(self) -> None:
        offered = self.peer.call(SenderAPI.get_capabilities)
        if "delta" not in offered.modes:
            raise Skipped("the sender offers no deltas")
        later = [staged for staged in self.played.staged if staged.version > 0]
        ways = [staged for staged in later if staged.mode == "delta"]
        expect(ways, f"deltas are offered and none came: {', '.join(sorted({staged.fallback for staged in later if staged.fallback}))}")

    @check("weights.refuses", "what the sender does not hold is refused: versions, digests, layouts, transfers", "wire.answers")
    def refuses(self) -> None:
        info = self.peer.call(SenderAPI.get_buffer_info)
        for what, version, digest in (("a version that is not there", info.version + 50, ""), ("another digest", info.version, "ab" * 16)):
            request = weights.TransferRequest(instance_id="conformance-probe", version=version, digest=digest)
            self.peer.refusal(what, SenderAPI.request_transfer, request, Conflict, WeightError)
        strange = weights.RegisterReceiver(instance_id="conformance-probe", layout_hash=xxhash.xxh3_128_hexdigest(b"another"))
        self.peer.refusal("another layout", SenderAPI.register_receiver, strange, LayoutMismatch, Conflict)
        expect(not self._stream(info.stream_port, "no-such-transfer", 64), "bytes came for a transfer that nobody was given")

    @check("weights.never_torn", "a transfer that later versions overtake gives its own bytes or breaks off", "weights.changed")
    def never_torn(self) -> None:
        ticket = self.played.slow
        assert ticket is not None
        length = min(ticket.chunk_bytes, ticket.size_bytes)
        found = self._stream(ticket.stream_port, ticket.transfer_id, length)
        whole = len(found) < length or xxhash.xxh3_64_intdigest(found) == ticket.chunk_hashes[0]
        expect(whole, "the ticket of version 1 gave the bytes of a later version")

    def _stream(self, port: int, transfer_id: str, length: int) -> bytes:
        """What a stream gives from the start of a transfer, until it is closed or `length` bytes have come."""
        hello = weights.StreamHello(
            protocol_version=PROTOCOL_VERSION, token=self.peer.token, transfer_id=transfer_id, offset=0, length=length
        )
        found = bytearray()
        with socket.create_connection((urlsplit(self.peer.url).hostname or "", port), timeout=WAIT_S) as connection:
            connection.sendall(hello_bytes(hello))
            with suppress(ConnectionResetError):
                while len(found) < length and (data := connection.recv(length - len(found))):
                    found += data
        return bytes(found)

    # --- the timeline, the end --------------------------------------------------------------------------------------------

    @check("ready.again", "`stale_timeline` makes it attach again at the version it holds, and use the new timeline", "notify.order")
    def again(self) -> None:
        self._reached(LAST)
        self._clean("ready.again")
        self._clean("batch.names")
        self._clean("notify.order")
        self._clean("notify.data_there")

    @check("shutdown.stays", "after `end_of_data` comes /shutdown; the sender stays until the run has ended", "ready.again")
    def stays(self) -> None:
        until("a second /shutdown, after the first was told that the run goes on", lambda: self.played.ended, STEP_S)
        calls = [message for kind, message in self.played.diary if kind == "shutdown"]
        ready = self.played.ready_message
        assert ready is not None
        said = getattr(calls[0], "model_id", "")
        expect(said == ready.model_id, f"/shutdown names {said!r}, not {ready.model_id!r}")
        expect(self.played.sender_stayed, "the sender was gone while the run went on")

    @check("shutdown.ends", "when the run has ended the sender ends", "shutdown.stays")
    def ends(self) -> None:
        until("the end of the sender", self._gone)

    def _gone(self) -> bool:
        try:
            return self.peer.gone(SenderAPI.get_version)
        except AstraFlowError as error:
            raise Failed(f"the sender answers with an error: {error}") from None
