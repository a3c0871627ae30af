"""Slot book: which leases an instance holds and how many trajectories it can still take. Pure: no clock, no tasks.

A slot is one running episode. A lease takes n_samples slots at once and gives each back when that episode ends; its group
takes one place of the outbox from its acceptance until Dataflow acknowledged it, so the outbox can never overflow.
How many slots there are follows what the engines can hold (`adapt`): work that waits inside an engine would be older when its turn
comes, and could have run elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from astraflow.protocol.rollout import HeldLease, Lease, LeaseVerdict

KV_FULL, KV_ROOMY = 0.9, 0.8
"""Shares of an engine's key-value memory: above the first no more work, below the second it may be a little more."""
GROWTH = 8
"""The limit grows by 1/8 at a time, and falls at once: too much work costs more than a moment of too little."""
REMEMBERED = 8192
"""Acknowledged leases whose id is kept so that a late copy of their submit does not run again; far above what is in flight."""


@dataclass
class Held:
    """One lease between its acceptance and its acknowledgement."""

    lease: Lease
    lane: str
    running: int
    """Episodes without a result."""
    state: Literal["running", "done"] = "running"


class SlotBook:
    """Leases in, verdicts out."""

    def __init__(self, total_slots: int, outbox_groups: int, remembered: int = REMEMBERED) -> None:
        self.most_slots = total_slots
        """`raas.slots`: the limit never exceeds it."""
        self.outbox_groups = outbox_groups
        self._limit = total_slots
        self._largest = 1
        """Samples of the largest lease that was offered: one group always fits into an idle instance."""
        self._waited = 0
        self._held: dict[str, Held] = {}
        self._finished: OrderedDict[str, int] = OrderedDict()
        self._remembered = remembered

    @property
    def total_slots(self) -> int:
        """Episodes that may run at once, by the engines' last word."""
        return max(self._limit, self._largest)

    def adapt(self, queued: int, kv_use: float) -> None:
        """A look at the engines: requests that wait inside them, and the used share of the fullest one's key-value memory.

        What waits at one look only has just arrived. The limit grows only while it is what holds work back.
        """
        waits, self._waited = min(queued, self._waited), queued
        if waits or kv_use > KV_FULL:
            self._limit = max(1, min(self._limit, self.in_flight) - waits)
        elif not queued and kv_use < KV_ROOMY and self.total_slots - self.in_flight < self._largest:
            self._limit = min(self.most_slots, self.total_slots + max(1, self._limit // GROWTH))

    @property
    def in_flight(self) -> int:
        """Episodes that run."""
        return sum(held.running for held in self._held.values())

    @property
    def free_slots(self) -> int:
        """Trajectories that can be taken now; 0 while the outbox is full, whatever the engine could do."""
        return 0 if len(self._held) >= self.outbox_groups else max(0, self.total_slots - self.in_flight)

    def offer(self, lease: Lease, lane: str = "", refusal: str = "") -> LeaseVerdict:
        """Take the lease if it is new, wanted (`refusal` is empty) and fits.

        What is held stays a duplicate even when new work is refused: otherwise it would run a second time elsewhere.
        Taking a higher attempt forgets the lower one (the caller stops its tasks).
        """
        held = self._held.get(lease.lease_id)
        known = held.lease.attempt if held else self._finished.get(lease.lease_id, 0)
        if lease.attempt <= known:
            return _verdict(lease, "duplicate", "" if lease.attempt == known else f"attempt {known} is known")
        if refusal:
            return _verdict(lease, "refused", refusal)
        if not 1 <= lease.n_samples <= self.most_slots:
            return _verdict(lease, "refused", f"n_samples {lease.n_samples}: must be 1 … {self.most_slots} (raas.slots)")
        self._largest = max(self._largest, lease.n_samples)
        freed = held.running if held else 0
        if lease.n_samples > self.total_slots - self.in_flight + freed:
            return _verdict(lease, "over_capacity", f"{lease.n_samples} samples, {self.free_slots} free slots")
        if len(self._held) - bool(held) >= self.outbox_groups:
            return _verdict(lease, "over_capacity", f"{len(self._held)} results are waiting to be acknowledged")
        self._held[lease.lease_id] = Held(lease, lane, lease.n_samples)
        self._finished.pop(lease.lease_id, None)
        return _verdict(lease, "accepted")

    def ticket(self, lease_id: str) -> Held:
        """The entry of a lease that was just accepted; its tasks report with it, so that those of a forgotten one change nothing."""
        return self._held[lease_id]

    def episode_ended(self, held: Held) -> None:
        """One episode gives its slot back."""
        held.running = max(0, held.running - 1)

    def group_done(self, held: Held) -> bool:
        """The group goes to the outbox, once. False when the lease was cancelled or superseded meanwhile: nobody wants the group."""
        if self._held.get(held.lease.lease_id) is not held or held.state == "done":
            return False
        held.state, held.running = "done", 0
        return True

    def acknowledged(self, lease_id: str, attempt: int) -> None:
        """Dataflow made the result durable: forget it, but not its id."""
        held = self._held.get(lease_id)
        if held is not None and held.lease.attempt == attempt:
            del self._held[lease_id]
            self._finished[lease_id] = attempt
            while len(self._finished) > self._remembered:
                self._finished.popitem(last=False)

    def forget(self, lease_id: str) -> Held | None:
        """Cancel: as if the lease had never come, so that Dataflow may issue the same attempt again."""
        return self._held.pop(lease_id, None)

    def select(self, *, lane: str | None = None, workflow_ids: set[str] | None = None, running_only: bool = False) -> list[str]:
        """Lease ids by lane (None = all lanes) and workflow, oldest first."""
        return [
            lease_id
            for lease_id, held in self._held.items()
            if (lane is None or held.lane == lane)
            and (workflow_ids is None or held.lease.workflow_id in workflow_ids)
            and not (running_only and held.state == "done")
        ]

    def listing(self) -> list[HeldLease]:
        """For `/leases`."""
        return [
            HeldLease(lease_id=lease_id, attempt=held.lease.attempt, state=held.state, lane=held.lane)
            for lease_id, held in self._held.items()
        ]


def _verdict(lease: Lease, verdict: Literal["accepted", "duplicate", "over_capacity", "refused"], reason: str = "") -> LeaseVerdict:
    return LeaseVerdict(lease_id=lease.lease_id, verdict=verdict, reason=reason)
