"""The Dataflow that `astraflow conformance trainer` plays: it hands out batches by name, loses replies, and looks at the weights
behind every notice before it answers it.

    version 0        the first answer to each of /ready, /batch and /notify_version is lost; then one `wait`
    version TURN     the timeline dies: `stale_timeline`
    version LAST     `end_of_data`; the first /shutdown is told that the run goes on
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from astraflow.dataflow.admission import examine
from astraflow.dataflow.collate import Item, collate
from astraflow.lib.wire import Handler, Identity
from astraflow.protocol import control, rollout
from astraflow.protocol.batch import Batch, BatchReply, BatchRequest
from astraflow.protocol.codec import encode
from astraflow.protocol.errors import AstraFlowError, Conflict, Unavailable
from astraflow.protocol.message import Empty, Message
from astraflow.protocol.routes import DataflowAPI, SenderAPI, table
from astraflow.protocol.weights import TransferRequest, TransferTicket
from astraflow.tools.conformance_pool import make_group
from astraflow.tools.conformance_wire import Peer
from astraflow.weights.config import WeightsConfig
from astraflow.weights.receiver import Staged, WeightReceiver

TURN, LAST = 3, 4
TIMELINE = 5
"""Not 0, so that a trainer that does not listen is found out."""
PULL_S = 120.0
LOST = ("ready", "batch", "notify_version")


class PlayedDataflow:
    """What the trainer did is in `diary`; what was wrong with it in `wrong`, by the name of the check that tells it."""

    def __init__(self, config: dict[str, Any], identity: Identity) -> None:
        self._config, self._identity = config, identity
        self.diary: list[tuple[str, Message]] = []
        self.wrong: defaultdict[str, list[str]] = defaultdict(list)
        self.ready_message: control.Ready | None = None
        """The newest one."""
        self.version, self.timeline = -1, TIMELINE
        self.digests: dict[int, str] = {}
        self.staged: list[Staged] = []
        """What was pulled, in order: the first in full, later ones by delta where there is one, and version 1 in full as well."""
        self.slow: TransferTicket | None = None
        """Of version 1 in full; its bytes are fetched when later versions have come."""
        self.given = -1
        """Version whose batch was handed out last."""
        self.ended = False
        """The trainer was told that the run has ended."""
        self.said_goodbye = 0
        self.sender_stayed: bool | None = None
        self._lost: set[str] = set()
        self._waited = self._stale = self._turned = False
        self._directory = tempfile.TemporaryDirectory()
        self._receivers: dict[bool, WeightReceiver] = {}

    def handlers(self) -> dict[str, Handler]:
        """Route name → handler."""
        return {name: self._handler(name) for name in table(DataflowAPI)}

    def _handler(self, name: str) -> Handler:
        answer: Callable[[Any], Any] = getattr(self, f"_on_{name}", self._on_other)

        async def handle(message: Any) -> Any:
            if name in (*LOST, "shutdown"):
                self.diary.append((name, message))
            if name in LOST and name not in self._lost:
                self._lost.add(name)
                if name == "notify_version":
                    await answer(message)  # it was heard; only the answer is lost
                raise Unavailable("this answer was lost on its way")
            return await answer(message)

        return handle

    async def _on_other(self, message: Any) -> Any:
        raise Conflict("not part of this test")

    async def _on_config(self, message: Empty) -> control.ConfigReply:
        return control.ConfigReply(config=self._config)

    async def _on_eval_results(self, message: control.EvalResultsRequest) -> control.EvalResults:
        return control.EvalResults(results=[], next=0, running=[])

    async def _on_status(self, message: Empty) -> control.DataflowStatus:
        counts = control.LedgerCounts(made=0, trained=0, dropped={}, in_flight={})
        return control.DataflowStatus(
            state="ready", uptime_s=0.0, service_version=max(self.version, 0), started=True, trainers=[], instances=[], queues={},
            ledger=counts, waits=[],
        )  # fmt: skip

    # --- attaching --------------------------------------------------------------------------------------------------------

    async def _on_ready(self, message: control.Ready) -> control.ReadyReply:
        first = self.ready_message is None
        if first:
            self.version = message.version if message.recovered_version is None else message.recovered_version
            self.digests[self.version] = message.digest
        elif self._stale and not self._turned:
            self._turned, self.timeline = True, self.timeline + 1
            found = (message.version, message.recovered_version, message.digest)
            wanted = (self.version, self.version, self.digests[self.version])
            if found != wanted:
                self.wrong["ready.again"].append(f"/ready says (version, recovered_version, digest) {found}, held was {wanted}")
        self.ready_message = message
        if first:
            await asyncio.to_thread(self._probe, "ready.published", self.version, message.digest)
        return control.ReadyReply(timeline=self.timeline, version=self.version)

    def _probe(self, name: str, version: int, digest: str) -> None:
        """Pull what was announced, now: the trainer waits for the answer."""
        assert self.ready_message is not None
        endpoint = self.ready_message.sender_endpoint
        peer = Peer(endpoint, self._identity.token)
        try:
            newest = peer.call(SenderAPI.get_version)
            if (newest.version, newest.digest) != (version, digest):
                found = f"version {newest.version} with digest {newest.digest}"
                self.wrong[name].append(f"version {version} with digest {digest} was announced while the sender had {found}")
            for full in (False, True) if version == 1 else (False,):
                pull = self._receiver(full).pull(endpoint, version, digest, full=full, deadline_s=PULL_S)
                self.staged.append(pull)
            if version == 1:
                request = TransferRequest(instance_id="conformance-slow", version=version, digest=digest)
                self.slow = peer.call(SenderAPI.request_transfer, request)
        except (AstraFlowError, OSError, ValueError) as error:
            self.wrong[name].append(f"version {version} was announced and cannot be pulled: {error}")
        finally:
            peer.close()

    def _receiver(self, full: bool) -> WeightReceiver:
        """One that takes deltas and one that does not."""
        if full not in self._receivers:
            assert self.ready_message is not None
            room = Path(self._directory.name) / str(full)
            room.mkdir()
            name = f"conformance-{'full' if full else 'delta'}"
            config = WeightsConfig(delta=not full, attempts=2, io_timeout_s=10.0)
            self._receivers[full] = WeightReceiver(self.ready_message.model_id, name, room, config, self._identity)
        return self._receivers[full]

    # --- batches ----------------------------------------------------------------------------------------------------------

    async def _on_batch(self, message: BatchRequest) -> BatchReply:
        if self.ready_message is None:
            self.wrong["ready.comes_first"].append("/batch before /ready")
            raise Conflict("/batch before /ready")
        name, wanted = (message.timeline, message.version), (self.timeline, self.version)
        if name != wanted:
            self.wrong["batch.names"].append(f"asked for (timeline, version) {name}, live is {wanted}")
            if message.timeline != self.timeline:
                return BatchReply(kind="stale_timeline", reason=f"live is timeline {self.timeline}")
            raise Conflict(f"the trainer is at version {self.version}")
        if not self._waited:
            self._waited = True
            return BatchReply(kind="wait", reason="groups: none are there yet")
        if self.version >= TURN and not self._stale:
            self._stale = True
            return BatchReply(kind="stale_timeline", reason="the timeline has died: call /ready again")
        if self._stale and not self._turned:
            self.wrong["ready.again"].append("asked for a batch again instead of attaching again")
            return BatchReply(kind="stale_timeline", reason="the timeline has died: call /ready again")
        if self.version >= LAST:
            return BatchReply(kind="end_of_data", reason="every task was used")
        self.given = self.version
        return BatchReply(kind="batch", batch=await asyncio.to_thread(self._make_batch))

    def _make_batch(self) -> Batch:
        """Groups in which every other trajectory is right; the same name gives the same bytes."""
        assert self.ready_message is not None
        model, size = self.ready_message.model_id, self.ready_message.train_batch_size
        n = next((n for n in (4, 2) if size % n == 0), size)
        serving = rollout.Serving(timeline=self.timeline, version=self.version, digest="")
        items = []
        for index in range(size // n):
            name = f"conformance-{self.timeline}-{self.version}-{index}"
            lease = rollout.Lease(lease_id=name, task_id=f"task-{index}", workflow_id="w", n_samples=n, data={})
            data = encode(make_group(lease, [model], {model: serving}))
            (share,) = examine(data, name, 1, n, [model], []).shares
            assert share.stats is not None
            items.append(Item(data, share.stats, False))
        return collate(items, model, self.timeline, self.version)

    # --- notices ----------------------------------------------------------------------------------------------------------

    async def _on_notify_version(self, message: control.NotifyVersion) -> control.NotifyVersionReply:
        if message.timeline != self.timeline:
            self.wrong["notify.order"].append(f"a notice of timeline {message.timeline}, live is {self.timeline}")
            raise Conflict(f"timeline {message.timeline} is dead, live is {self.timeline}")
        if message.version == self.version + 1:
            if self.given != self.version:
                self.wrong["notify.order"].append(f"version {message.version} was announced without a batch of version {self.version}")
            self.digests[message.version] = message.digest
            await asyncio.to_thread(self._probe, "notify.data_there", message.version, message.digest)
            self.version = message.version
        elif message.version > self.version:
            self.wrong["notify.order"].append(f"version {message.version} was announced after version {self.version}")
        elif message.digest != self.digests.get(message.version, message.digest):
            self.wrong["notify.order"].append(f"version {message.version} was announced with two digests")
        return control.NotifyVersionReply(service_version=self.version, trained=0)

    async def _on_shutdown(self, message: control.Shutdown) -> control.ShutdownReply:
        self.said_goodbye += 1
        if self.said_goodbye == 1:
            return control.ShutdownReply(run_ended=False, waits_for=["another-policy"])
        if self.sender_stayed is None:
            self.sender_stayed = await asyncio.to_thread(self._sender_answers)
        self.ended = True
        return control.ShutdownReply(run_ended=True)

    def _sender_answers(self) -> bool:
        assert self.ready_message is not None
        peer = Peer(self.ready_message.sender_endpoint, self._identity.token)
        try:
            peer.call(SenderAPI.get_version)
        except AstraFlowError:
            return False
        finally:
            peer.close()
        return True

    def close(self) -> None:
        """Remove what was pulled."""
        for receiver in self._receivers.values():
            receiver.close()
        self._directory.cleanup()
