"""The sender agent: `python -m astraflow.weights.sender FD`, one process per trainer, started by `control.SenderLink`. No torch.

It serves the halves of the shared memory that it inherits and never writes to them. One asyncio loop:

    control     frames of the manager (FD is a socketpair); its end is the end of this process
    clock       cancels overdue readers, tells the manager about granted claims and statistics
    prepare     per published version, in threads: digest → chunk checksums → delta against the other half
    http        SenderAPI; a request waits for `prepare` at most `delta_wait_s`
    streams     raw bytes (stream.py); nothing that one receiver does or does not do makes another one wait
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from typing import BinaryIO

from astraflow.lib import prometheus
from astraflow.lib.aio import Tasks, deadline
from astraflow.lib.frames import FrameReader, pack
from astraflow.lib.log import setup_logging
from astraflow.lib.prometheus import Exposition
from astraflow.lib.wire import Server, new_identity
from astraflow.protocol import weights as messages
from astraflow.protocol.control import Shutdown
from astraflow.protocol.errors import ConfigError, Conflict, DeadlinePassed, LayoutMismatch, Unavailable
from astraflow.protocol.message import Empty
from astraflow.protocol.metrics import TRAINER
from astraflow.protocol.routes import SenderAPI
from astraflow.weights import codec, layout
from astraflow.weights.buffer import HalfSwitch, Held
from astraflow.weights.frames import (
    Claim,
    Failed,
    FromSender,
    Granted,
    Numbers,
    Publish,
    Ready,
    Setup,
    Stats,
    Stop,
    ToSender,
    summed,
    to_sender,
)
from astraflow.weights.memory import HalfMemory
from astraflow.weights.prepare import Preparer, ReadyChain, Work
from astraflow.weights.stream import MAX_STREAMS, StreamServer
from astraflow.weights.transfers import TransferBook

log = logging.getLogger(__name__)

CLOCK_S = 0.02
STATS_S = 0.2
"""Least time between two reports of statistics to the manager."""
PREPARE_S = 120.0
"""Longest wait of a request for the digest and checksums of a version (they take a second per few GB)."""


class SenderAgent:
    """Everything of one sender process; `run` returns its exit code."""

    def __init__(self, setup: Setup, control: socket.socket):
        self.setup, self.config, self._control = setup, setup.config, control
        self.layout = layout.Layout(tuple(setup.tensors), setup.tied)
        self.memory = HalfMemory(setup.memory_fd, self.layout.size_bytes, writable=False)
        self._files: BinaryIO = os.fdopen(os.dup(setup.memory_fd), "rb", buffering=0)
        halves = [None if h is None else Held(h.version, h.digest) for h in setup.halves]
        self.switch = HalfSwitch(halves, setup.newest)
        self.book = TransferBook(self.switch, self.config.max_transfers)
        self.tasks = Tasks(self._task_failed)
        self.preparer = Preparer(self.config, self.layout, self.memory, self.switch, self.tasks, self.tell, self._grant)
        self.streams = StreamServer(self.book, setup.token, setup.tls, self._source, self.tasks)
        self.ended = asyncio.Event()
        self.exit_code = 0
        self._claim: Claim | None = None
        self._claimed_s = 0.0
        self._numbers: dict[str, float] = {}
        shown = Exposition(TRAINER, {"process": f"trainer:{setup.model_id}", "model": setup.model_id})
        self._outbox: asyncio.Queue[FromSender] = asyncio.Queue(maxsize=1024)  # the manager reads at once; 1024 frames = it hangs
        self._told, self._told_s = Stats({}, {}, {}), 0.0
        self._http = Server(
            "sender",
            SenderAPI,
            {
                "get_version": self.get_version,
                "get_buffer_info": self.get_buffer_info,
                "get_capabilities": self.get_capabilities,
                "register_receiver": self.register_receiver,
                "register_sglang_instance": self.register_receiver,
                "request_transfer": self.request_transfer,
                "transfer_done": self.transfer_done,
                "shutdown": self.shutdown,
            },
            new_identity(setup.run_id, setup.token, setup.tls),
            host=self.config.host,
            port=setup.port,
            max_body_bytes=1 << 20,
            extra_routes=[prometheus.route(lambda: shown.text(self._numbers))],
        )

    async def run(self, frames: FrameReader[ToSender]) -> int:
        """Serve until the manager says stop or is gone."""
        self.tasks.spawn("outbox", self._send_frames())
        try:
            self.streams.start(self.config.host, self.setup.stream_port)
            await self._http.start()
        except ConfigError as error:  # a port is taken
            return await _fail(self._control, error)
        self.tell(Ready(self._http.port, self.streams.port))
        if self.config.delta:
            codec.load_ahead()
        self.tasks.spawn("control", self._read_frames(frames))
        self.tasks.spawn("clock", self._clock())
        # After a restart: first the older half, so that the newest one finds its base.
        for half in (1 - self.setup.newest, self.setup.newest) if self.setup.newest >= 0 else ():
            held = self.switch.halves[half]
            if held is not None:
                self.preparer.begin(half, held.version)
        await self.ended.wait()
        self.streams.stop()
        self.preparer.stop()
        await self._http.stop(deadline_s=1.0)
        await self.tasks.stop(deadline_s=2.0)
        return self.exit_code

    def _task_failed(self, name: str, error: BaseException) -> None:
        if name != "weight stream":  # a stream's own failure is that receiver's business
            self.exit_code = 1
            self.ended.set()

    def _source(self, half: int) -> tuple[BinaryIO, int]:
        return self._files, self.memory.offset(half)

    # ---- the manager ----

    def tell(self, frame: FromSender) -> None:
        """Queue a frame for the manager."""
        self._outbox.put_nowait(frame)

    async def _send_frames(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            frame = await self._outbox.get()
            try:
                await loop.sock_sendall(self._control, pack(frame))
            except OSError:
                self.ended.set()
                return

    async def _read_frames(self, frames: FrameReader[ToSender]) -> None:
        loop = asyncio.get_running_loop()
        data = b""
        while True:
            for frame in frames.feed(data):
                match frame:
                    case Claim():
                        self._claim, self._claimed_s = frame, time.monotonic()
                        self.book.cancelled_for_writer = 0
                        self.switch.claim(frame.half, self._claimed_s, frame.patience_s)
                        self._grant()
                    case Publish():
                        self.switch.publish(frame.half, Held(frame.version))
                        self.preparer.begin(frame.half, frame.version)
                    case Numbers():
                        self._numbers = frame.values
                    case Stop():
                        self.ended.set()
                        return
            try:
                data = await loop.sock_recv(self._control, 1 << 16)
            except OSError:
                data = b""
            if not data:
                log.warning("the trainer is gone")
                self.ended.set()
                return

    async def _clock(self) -> None:
        while True:
            now = time.monotonic()
            overdue = self.switch.overdue(now, self.config.idle_s)
            self.book.end_overdue(overdue)
            self.preparer.hurry(overdue)
            self._grant()
            stats = self._stats()
            if stats != self._told and now - self._told_s >= STATS_S:
                self._told, self._told_s = stats, now
                self.tell(stats)
            await asyncio.sleep(CLOCK_S)

    def _grant(self) -> None:
        """Tell the manager once when nobody is left in the half that it claimed."""
        if self._claim is not None and self.switch.may_write():
            waited_s = time.monotonic() - self._claimed_s
            self.tell(Granted(self._claim.number, self._claim.half, waited_s, self.book.cancelled_for_writer))
            self._claim = None

    def _stats(self) -> Stats:
        return Stats(summed(self.book.counters, self.streams.counters), dict(self.preparer.gauges), dict(self.book.receivers))

    # ---- receivers ----

    def _newest(self) -> Held:
        held = self.switch.halves[self.switch.newest] if self.switch.newest >= 0 else None
        return held or Held(-1)

    async def get_version(self, request: Empty) -> messages.SenderVersion:
        """Newest published version; −1 before the first."""
        held = self._newest()
        return messages.SenderVersion(model_id=self.setup.model_id, version=held.version, digest=held.digest)

    async def get_buffer_info(self, request: Empty) -> messages.BufferInfo:
        """Layout, and what can be pulled."""
        held = self._newest()
        return messages.BufferInfo(
            model_id=self.setup.model_id,
            version=held.version,
            digest=held.digest,
            layout_hash=self.layout.hash,
            size_bytes=self.layout.size_bytes,
            tensors=list(self.layout.tensors),
            tied=dict(self.layout.tied),
            stream_port=self.streams.port,
            available=self.switch.versions(),
            deltas=self.preparer.shelf.pairs(),
        )

    async def get_capabilities(self, request: Empty) -> messages.Capabilities:
        """Modes and codecs."""
        codecs = list(await asyncio.to_thread(codec.available)) if self.config.delta else []
        return messages.Capabilities(modes=["full", "delta"] if codecs else ["full"], codecs=codecs, max_streams=MAX_STREAMS)

    async def register_receiver(self, request: messages.RegisterReceiver) -> messages.RegisterReceiverReply:
        """A receiver says which layout it knows. Raises LayoutMismatch when it is not ours."""
        if request.layout_hash not in ("", self.layout.hash):
            raise LayoutMismatch(f"layout {request.layout_hash[:64]} is not the one published here ({self.layout.hash})")
        self.book.count(request.instance_id[:256], {"registrations": 1.0})
        return messages.RegisterReceiverReply(layout_hash=self.layout.hash, stream_port=self.streams.port, max_streams=MAX_STREAMS)

    async def request_transfer(self, request: messages.TransferRequest) -> messages.TransferTicket:
        """A ticket for one exact version. Raises Conflict for a version (or digest) that neither half has."""
        work = self._find(request)
        await deadline(work.hashed.wait(), PREPARE_S, f"checksums of version {work.version}")
        found, fallback = None, ""
        if request.mode == "delta":
            found, fallback = await self._delta_for(request, work)
        if self._find(request) is not work:  # it may have been claimed while we waited, too: then _find raises
            raise Unavailable(f"version {work.version} was published anew; come again")
        if fallback:
            self.book.count(request.instance_id[:256], {f"fallback: {fallback}": 1.0})
        return self._ticket(request, work, found, fallback)

    def _find(self, request: messages.TransferRequest) -> Work:
        half = self.switch.find(request.version, request.digest)
        if half is None:
            half = self.switch.find(request.version)
            held = None if half is None else self.switch.halves[half]
            if half is None or held is None:
                have = ", ".join(map(str, self.switch.versions())) or "none"
                raise Conflict(f"superseded: version {request.version} is not held any more; have [{have}]")
            if held.digest:  # an unknown one is checked when the digest is there
                raise Conflict(f"version {request.version} was published with digest {held.digest}, not {request.digest[:64]}")
        work = self.preparer.work.get(half)
        if work is None:  # a new life of the sender that answers its first calls
            raise Unavailable(f"version {request.version} is not prepared yet; come again")
        return work

    async def _delta_for(self, request: messages.TransferRequest, work: Work) -> tuple[ReadyChain | None, str]:
        """The kept deltas from exactly the receiver's base, or why there are none."""
        if not self.preparer.learn(request.codecs, work.version):
            return None, "no delta codec in common"
        if self.preparer.periodic(work.version):
            return None, "periodic full sync"
        if self.preparer.crosses_periodic(request.base_version, work.version):
            return None, "a periodic full sync was missed"
        try:
            await deadline(work.delta_ended.wait(), self.config.delta_wait_s, "delta")
        except DeadlinePassed:
            return None, "the delta is not ready yet"
        found = await self.preparer.chain((request.base_version, request.base_digest), (work.version, work.digest))
        if found is not None:
            if strange := sorted(found.chain.codecs - set(request.codecs)):
                return None, f"a delta is coded as {strange[0]}"
            return found, ""
        pairs = self.preparer.shelf.pairs()
        if work.no_delta and all(version != work.version for _, version in pairs):
            return None, work.no_delta
        if any(base == request.base_version for base, _ in pairs):
            return None, "the base's digest is another one"
        return None, "no delta from the version held"

    def _ticket(self, request: messages.TransferRequest, work: Work, found: ReadyChain | None, fallback: str) -> messages.TransferTicket:
        chain = None if found is None else found.chain
        size = self.layout.size_bytes if chain is None else chain.size_bytes
        transfer = self.book.open(request.instance_id[:256], work.version, work.half, size, chain, time.monotonic())
        return messages.TransferTicket(
            transfer_id=transfer.id,
            mode=transfer.mode,
            fallback=fallback,
            version=work.version,
            digest=work.digest,
            base_version=-1 if chain is None else chain.base[0],
            base_digest="" if chain is None else chain.base[1],
            codec="" if chain is None else chain.deltas[-1].codec,
            size_bytes=size,
            chunk_bytes=work.chunk_bytes if found is None else found.chunk_bytes,
            chunk_hashes=work.chunk_hashes if found is None else found.chunk_hashes,
            stream_port=self.streams.port,
            deadline_s=self.config.idle_s,
            changed_elements=-1 if chain is None else chain.changed,
            links=[] if chain is None else chain.links(),
        )

    async def transfer_done(self, request: messages.TransferDone) -> Empty:
        """The receiver's verdict; releases the half."""
        if not request.ok:
            log.warning("%s could not use transfer %s: %s", request.instance_id[:80], request.transfer_id[:40], request.error[:500])
        self.book.done(request.instance_id[:256], request.transfer_id, request.ok, time.monotonic())
        self._grant()
        return Empty()

    async def shutdown(self, request: Shutdown) -> Empty:
        """End now. The manager of a trainer that still runs starts a new one."""
        log.info("asked to end: %s", request.reason[:200])
        self.ended.set()
        return Empty()


def _first_frame(control: socket.socket, frames: FrameReader[ToSender]) -> Setup:
    """Blocking: the manager sends Setup at once. What follows it stays in `frames`."""
    control.settimeout(30.0)
    while True:
        data = control.recv(1 << 16)
        if not data:
            raise Unavailable("the trainer was gone before it said what to serve")
        for frame in frames.feed(data):
            assert isinstance(frame, Setup)
            return frame


async def _fail(control: socket.socket, error: ConfigError) -> int:
    """The trainer's user should read that, not our exit code."""
    log.error("%s", error)
    await asyncio.get_running_loop().sock_sendall(control, pack(Failed(str(error))))
    return 2


async def _main(control: socket.socket) -> int:
    frames = to_sender()
    setup = _first_frame(control, frames)
    setup_logging(f"sender/{setup.model_id}")
    control.setblocking(False)
    try:
        agent = SenderAgent(setup, control)
    except ConfigError as error:  # a host that others can reach, and no token
        return await _fail(control, error)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, agent.ended.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # Ctrl-C is the trainer's: it drains and then stops us
    return await agent.run(frames)


def main() -> int:
    """Entry of the process; its only argument is the inherited descriptor of the control socket."""
    return asyncio.run(_main(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    sys.exit(main())
