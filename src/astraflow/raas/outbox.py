"""Outbox: finished groups until Dataflow acknowledges them. Pure; bounded by the slot book, which reserves a place per lease.

Every pull gets the oldest unacknowledged deliveries again, under the same ids: a lost reply loses nothing, and a puller that
kept a reply without acknowledging it sees copies that it knows by their id.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from astraflow.protocol.rollout import Delivery


@dataclass(frozen=True)
class Parcel:
    delivery: Delivery
    lane: str
    timelines: dict[str, int]
    """Oldest timeline per policy; a rollback drops what a dead timeline produced."""


class Outbox:
    """Deliveries by id, in the order in which they were finished."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        """Part of the process's incarnation: a restarted instance never reuses an id that Dataflow may still acknowledge."""
        self._count = 0
        self._parcels: dict[str, Parcel] = {}

    def __len__(self) -> int:
        return len(self._parcels)

    def put(self, lease_id: str, attempt: int, group: bytes, timelines: dict[str, int], lane: str = "") -> str:
        """Add an encoded group; returns its delivery id."""
        self._count += 1
        delivery_id = f"{self._prefix}-{self._count}"
        delivery = Delivery(delivery_id=delivery_id, lease_id=lease_id, attempt=attempt, group=msgspec.Raw(group))
        self._parcels[delivery_id] = Parcel(delivery, lane, dict(timelines))
        return delivery_id

    def pull(self, lane: str, max_items: int) -> tuple[list[Delivery], int]:
        """The oldest deliveries of a lane, and how many more wait there."""
        mine = [parcel.delivery for parcel in self._parcels.values() if parcel.lane == lane]
        return mine[: max(0, max_items)], max(0, len(mine) - max(0, max_items))

    def acknowledge(self, delivery_ids: list[str]) -> list[Delivery]:
        """Forget these; unknown ids are fine (an acknowledgement may come twice). Returns what was forgotten now."""
        return [self._parcels.pop(delivery_id).delivery for delivery_id in delivery_ids if delivery_id in self._parcels]

    def drop_leases(self, lease_ids: set[str]) -> int:
        """Forget the results of cancelled leases."""
        gone = [key for key, parcel in self._parcels.items() if parcel.delivery.lease_id in lease_ids]
        for key in gone:
            del self._parcels[key]
        return len(gone)

    def of_dead_timeline(self, policy: str, timeline: int) -> list[str]:
        """Leases of training results that hold tokens which `policy` sampled on a timeline older than this one."""
        return [
            parcel.delivery.lease_id
            for parcel in self._parcels.values()
            if not parcel.lane and parcel.timelines.get(policy, timeline) < timeline
        ]
