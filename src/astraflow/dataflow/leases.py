"""Pure core: leases that are out, and those to be issued again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from astraflow.dataflow.journal import LeaseRow
from astraflow.dataflow.pool import Held
from astraflow.dataflow.source import Draw


@dataclass
class LeaseBook:
    """Every open lease is on an instance or in `pending`, never both."""

    prefix: str
    """Unique per ledger, so that ids of an earlier run directory never come back."""
    max_attempts: int = 3
    next_number: int = 0
    open: dict[str, LeaseRow] = field(default_factory=dict)
    data: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Task fields of open leases."""
    pending: deque[str] = field(default_factory=deque)
    """To be issued (again), oldest first; bounded by the number of open leases."""

    def new(self, draw: Draw, n_samples: int, seed: int, policies: tuple[str, ...], instance: str) -> LeaseRow:
        """A lease for a drawn task."""
        lease = LeaseRow(
            lease_id=f"{self.prefix}-{self.next_number:07d}",
            task_id=draw.task.task_id,
            task_index=draw.index,
            epoch=draw.epoch,
            n_samples=n_samples,
            seed=seed * 1_000_003 + self.next_number,  # experiments with neighbouring seeds share no lease's seed
            attempt=1,
            instance=instance,
            policies=policies,
        )
        self.next_number += 1
        self.open[lease.lease_id] = lease
        self.data[lease.lease_id] = draw.task.data
        return lease

    def restore(self, lease: LeaseRow, data: dict[str, Any]) -> None:
        """After a restart."""
        self.open[lease.lease_id] = lease
        self.data[lease.lease_id] = data

    def verdict(self, lease_id: str, attempt: int) -> Literal["wanted", "duplicate", "superseded", "foreign"]:
        """What a delivery is: the first result of a lease's present attempt is wanted. `foreign` = never leased for training, e.g. by
        an evaluation."""
        lease = self.open.get(lease_id)
        if lease is None:
            return "duplicate" if lease_id.startswith(f"{self.prefix}-") else "foreign"
        return "wanted" if attempt == lease.attempt else "superseded"

    def lost(self, held: Iterable[Held]) -> list[str]:
        """An instance died or forgot these. They run again with attempt + 1; returns those that had their last attempt."""
        given_up = []
        for item in held:
            lease = self.open.get(item.lease_id)
            if lease is None or lease.attempt != item.attempt:
                continue
            if lease.attempt >= self.max_attempts:
                self.close(item.lease_id)
                given_up.append(item.lease_id)
            else:
                self.open[item.lease_id] = replace(lease, attempt=lease.attempt + 1)
                self.pending.append(item.lease_id)
        return given_up

    def requeue(self, lease_id: str) -> None:
        """It was not accepted: the same attempt goes elsewhere."""
        if lease_id in self.open:
            self.pending.append(lease_id)

    def next_pending(self, instance: str) -> LeaseRow | None:
        """The oldest lease to be issued again, now for this instance."""
        while self.pending:
            lease = self.open.get(self.pending.popleft())
            if lease is not None:
                self.open[lease.lease_id] = replace(lease, instance=instance)
                return self.open[lease.lease_id]
        return None

    def close(self, lease_id: str) -> None:
        """Its result came, or it is given up."""
        self.open.pop(lease_id, None)
        self.data.pop(lease_id, None)
