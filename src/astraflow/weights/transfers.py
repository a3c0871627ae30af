"""Open transfers of a sender: who fetches what, from where, and how a transfer ends.

A transfer from a half is a reader of that half (`HalfSwitch`) from its ticket until the receiver's verdict: bytes that `sendfile`
queued are references to the half's pages, so only the receiver knows when they are no longer needed.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field

from astraflow.protocol.errors import BadMessage, Conflict, Unavailable
from astraflow.protocol.weights import TransferMode
from astraflow.weights.buffer import NEITHER, HalfSwitch
from astraflow.weights.chain import Chain
from astraflow.weights.frames import summed

MAX_RECEIVERS = 4096
"""Receivers with counters of their own; instances beyond that are counted together."""


@dataclass(eq=False)
class Transfer:
    """One ticket."""

    id: str
    instance_id: str
    version: int
    half: int
    """The half that is read; NEITHER for deltas."""
    chain: Chain | None
    """Encoded deltas; None for a full transfer."""
    size_bytes: int
    opened_s: float
    sent_bytes: int = 0
    streams: set[asyncio.Task[None]] = field(default_factory=set)
    ended: str = ""
    """Why no further stream may begin; empty while open."""

    @property
    def mode(self) -> TransferMode:
        return "full" if self.chain is None else "delta"


class TransferBook:
    """All open transfers of one sender; used from its event loop only. Times are given as arguments."""

    def __init__(self, switch: HalfSwitch, most: int):
        self._switch, self._most = switch, most
        self._open: dict[str, Transfer] = {}
        self.counters: dict[str, float] = {}
        self.receivers: dict[str, dict[str, float]] = {}
        self.cancelled_for_writer = 0
        """Transfers that were in the way of the present claim."""

    def __len__(self) -> int:
        return len(self._open)

    def open(self, instance_id: str, version: int, half: int, size_bytes: int, chain: Chain | None, now: float) -> Transfer:
        """A new transfer, of a half or of a chain of deltas. An older one of the same receiver ends: it has started over.

        Raises Unavailable when there are too many.
        """
        for old in [t for t in self._open.values() if t.instance_id == instance_id]:
            self.end(old, "the receiver asked anew")
        if len(self._open) >= self._most:
            raise Unavailable(f"{len(self._open)} transfers are open; come again")
        source = half if chain is None else NEITHER
        transfer = Transfer(secrets.token_hex(16), instance_id, version, source, chain, size_bytes, now)
        self._open[transfer.id] = transfer
        self._switch.enter(transfer.id, source, now)
        return transfer

    def for_stream(self, transfer_id: str, offset: int, length: int, most_streams: int, stream: asyncio.Task[None] | None) -> Transfer:
        """The transfer that a stream may read. `stream`: its task, which may have read other ranges of it before.

        Raises Conflict for an unknown or ended one, BadMessage for a range outside of it.
        """
        transfer = self._open.get(transfer_id)
        if transfer is None or transfer.ended:
            raise Conflict(f"transfer {transfer_id[:40]!r} {transfer.ended if transfer else 'is not known'}")
        if offset < 0 or length <= 0 or offset + length > transfer.size_bytes:
            raise BadMessage(f"range {offset}+{length} of a transfer of {transfer.size_bytes} bytes")
        if stream not in transfer.streams and len(transfer.streams) >= most_streams:
            raise Conflict(f"{len(transfer.streams)} streams on one transfer")
        return transfer

    def progress(self, transfer: Transfer, sent_bytes: int, now: float) -> None:
        """Bytes left for the receiver."""
        transfer.sent_bytes += sent_bytes
        self._switch.progress(transfer.id, now)

    def stream_ended(self, transfer: Transfer, task: asyncio.Task[None]) -> None:
        """A stream let go of the transfer's bytes."""
        transfer.streams.discard(task)
        self._let_go(transfer)

    def done(self, instance_id: str, transfer_id: str, ok: bool, now: float) -> None:
        """The receiver's verdict. Raises Conflict for a transfer that is not (or no longer) open for this receiver."""
        transfer = self._open.get(transfer_id)
        if transfer is None or transfer.ended or transfer.instance_id != instance_id:
            raise Conflict(f"transfer {transfer_id[:40]!r} of {instance_id[:80]!r} is not open")
        kind = transfer.mode if ok else "failed"
        values = {f"{kind}_transfers": 1.0, f"{kind}_bytes": float(transfer.size_bytes), f"{kind}_s": now - transfer.opened_s}
        if ok and transfer.chain is not None and len(transfer.chain.deltas) > 1:
            values |= {"chain_transfers": 1.0, "chain_links": float(len(transfer.chain.deltas))}
        self.count(instance_id, values)
        self.end(transfer, "is done", counted=True)

    def end(self, transfer: Transfer, why: str, counted: bool = False) -> None:
        """No new streams; running ones are cut; the half is released when the last one has let go."""
        if transfer.ended:
            return
        transfer.ended = why
        if not counted:
            self.count(transfer.instance_id, {"cancelled_transfers": 1.0})
            if transfer.half == self._switch.claimed != NEITHER:
                self.cancelled_for_writer += 1
        for task in transfer.streams:
            task.cancel()
        self._let_go(transfer)

    def end_overdue(self, names: list[str]) -> None:
        """Cancel the transfers among these readers."""
        for name in names:
            if (transfer := self._open.get(name)) is not None:
                self.end(transfer, "was cancelled: no progress, or its half is needed")

    def _let_go(self, transfer: Transfer) -> None:
        if transfer.ended and not transfer.streams:
            self._open.pop(transfer.id, None)
            self._switch.leave(transfer.id)

    def count(self, instance_id: str, values: dict[str, float]) -> None:
        """Add to the totals and to this receiver's own counters."""
        key = instance_id if instance_id in self.receivers or len(self.receivers) < MAX_RECEIVERS else "others"
        self.counters = summed(self.counters, values)
        self.receivers[key] = summed(self.receivers.get(key, {}), values)
