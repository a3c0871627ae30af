"""Pure core: rollout services and what is leased to whom. Events in, decisions out; `now` is an argument (`fleet` calls).

Suspect and confirm: a failed data-path call makes an instance suspect (no new work); only its own /status clears it or,
after `max_failures` in a row, takes it out. An instance gets its first leases only when it serves the newest weights of all
its models; later it may lag, and the staleness rule absorbs that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from astraflow.protocol.control import InstanceInfo, RegisterRaaS
from astraflow.protocol.rollout import Serving

REPORT_TRUSTED_S = 1.0
InstanceState = Literal["catching_up", "live", "suspect", "draining", "gone"]


class InstanceRecord(msgspec.Struct, kw_only=True):
    """What is persisted of an instance, so that a restarted Dataflow finds it again."""

    instance_id: str
    url: str
    incarnation: str
    models: list[str]
    total_slots: int
    weight: float = 1.0
    tokenizer_hash: dict[str, str] = {}
    template_hash: dict[str, str] = {}


@dataclass
class Held:
    """A lease that runs on an instance."""

    lease_id: str
    attempt: int
    places: int
    since: float
    confirmed: bool = False
    """The instance said `accepted`; before that the submit may have been lost."""


@dataclass
class Instance:
    """One rollout service."""

    record: InstanceRecord
    state: InstanceState = "catching_up"
    was_live: bool = False
    """It has been at the newest weights once since its process started."""
    failures: int = 0
    last_seen: float = 0.0
    reason: str = ""
    serving: dict[str, Serving] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    reported_free: int | None = None
    """Free slots by its own last word …"""
    reported_at: float = 0.0
    since_report: int = 0
    """… and trajectories sent to it afterwards."""
    shutdown_after: bool = False
    sending: set[str] = field(default_factory=set)
    """Leases whose submit call is under way: reconciliation leaves them alone."""

    @property
    def instance_id(self) -> str:
        return self.record.instance_id

    @property
    def places(self) -> int:
        """Trajectories leased to it."""
        return sum(lease.places for lease in self.held.values())

    def free(self, now: float) -> int:
        """Trajectories that it can take now, as far as is known. Its own word counts while it is young: an evaluation's slots
        come free without one, and a lease too many is only refused."""
        free = self.record.total_slots - self.places
        if self.reported_free is not None and now - self.reported_at <= REPORT_TRUSTED_S:
            free = min(free, self.reported_free - self.since_report)
        return max(free, 0)


@dataclass(frozen=True)
class Registered:
    """What a registration means."""

    kind: Literal["new", "same", "replaced"]
    lost: list[Held]
    """Leases of the process that was replaced."""


@dataclass
class RaaSPool:
    """All instances that are not gone."""

    max_failures: int = 2
    instances: dict[str, Instance] = field(default_factory=dict)

    def register(self, message: RegisterRaaS, now: float) -> Registered:
        """An instance joins, repeats itself, or comes back as a new process under its old name."""
        record = InstanceRecord(
            instance_id=message.instance_id,
            url=message.url,
            incarnation=message.incarnation,
            models=message.models,
            total_slots=message.total_slots,
            weight=message.weight,
            tokenizer_hash=message.tokenizer_hash,
            template_hash=message.template_hash,
        )
        old = self.instances.get(message.instance_id)
        if old is not None and old.record.incarnation == message.incarnation:
            old.record, old.last_seen = record, now
            return Registered("same", [])
        self.instances[message.instance_id] = Instance(record, last_seen=now)
        return Registered("replaced", list(old.held.values())) if old is not None else Registered("new", [])

    def restore(self, record: InstanceRecord, now: float) -> Instance:
        """After a Dataflow restart: known, but to be confirmed by its own /status first."""
        instance = Instance(record, state="suspect", last_seen=now, reason="known from before the restart")
        self.instances[record.instance_id] = instance
        return instance

    def suspect(self, instance_id: str, reason: str) -> bool:
        """A data-path call failed. True when this is news (the heartbeat should look at once)."""
        instance = self.instances.get(instance_id)
        if instance is None or instance.state in ("suspect", "gone"):
            return False
        if instance.state != "draining":
            instance.state = "suspect"
        instance.reason = reason
        return True

    def answered(self, instance_id: str, incarnation: str, now: float) -> list[Held]:
        """Its own /status came. Clears suspicion; a new incarnation loses what the old process held (returned)."""
        instance = self.instances[instance_id]
        instance.failures, instance.last_seen = 0, now
        lost: list[Held] = []
        if incarnation and incarnation != instance.record.incarnation:
            instance.record.incarnation = incarnation
            lost, instance.held = list(instance.held.values()), {}
            instance.serving, instance.was_live = {}, False
            instance.state, instance.reason = "catching_up", "came back as a new process"
            instance.reported_free = None
        elif instance.state == "suspect":
            instance.state, instance.reason = ("live" if instance.was_live else "catching_up"), ""
        return lost

    def failed(self, instance_id: str, reason: str) -> bool:
        """Its /status failed. True when it is out now: call `remove`."""
        instance = self.instances[instance_id]
        instance.failures += 1
        instance.reason = reason
        if instance.state in ("live", "catching_up"):
            instance.state = "suspect"
        return instance.failures >= self.max_failures

    def remove(self, instance_id: str) -> list[Held]:
        """Out of the pool; the leases to be issued again are returned."""
        instance = self.instances.pop(instance_id)
        instance.state = "gone"
        return list(instance.held.values())

    def drain(self, instance_id: str, shutdown: bool) -> None:
        """Finish what runs, then leave (`drained` says when)."""
        instance = self.instances[instance_id]
        instance.state, instance.reason, instance.shutdown_after = "draining", "drains", shutdown

    def drained(self) -> list[str]:
        """Draining instances that hold nothing more."""
        return [key for key, instance in self.instances.items() if instance.state == "draining" and not instance.held]

    def served(self, instance_id: str, serving: dict[str, Serving]) -> None:
        """Receipts of a reply."""
        self.instances[instance_id].serving = serving

    def catch_up(self, is_current: Callable[[Instance], bool]) -> list[str]:
        """Instances that reached the newest weights of all their models just now."""
        new = []
        for key, instance in self.instances.items():
            if instance.state == "catching_up" and is_current(instance):
                instance.state, instance.was_live, instance.reason = "live", True, ""
                new.append(key)
        return new

    # --- leases ---------------------------------------------------------------------------------------------------------

    def route(self, places: int, eligible: Callable[[Instance], bool], now: float) -> Instance | None:
        """The live instance with most free slots (weighted) that can take a whole group."""
        fit = [i for i in self.instances.values() if i.state == "live" and i.free(now) >= places and eligible(i)]
        return max(fit, key=lambda i: (i.free(now) * i.record.weight, i.instance_id), default=None)

    def share(self, instance_id: str, places: int, total: int) -> int:
        """Most trajectories that this instance should run of `total` under way: its part by weight among the live ones, in whole
        groups of `places` (at least one). Without it whoever loads a new version first would take all that it lets in.
        """
        live = [i for i in self.instances.values() if i.state == "live" or i.instance_id == instance_id]
        part = self.instances[instance_id].record.weight / sum(i.record.weight for i in live)
        return max(math.ceil(total * part / places), 1) * places

    def assign(self, instance_id: str, lease_id: str, attempt: int, places: int, now: float) -> None:
        """A lease goes to an instance."""
        assert self.holder(lease_id) is None, f"lease {lease_id} runs already"
        instance = self.instances[instance_id]
        instance.held[lease_id] = Held(lease_id, attempt, places, now)
        instance.since_report += places

    def confirm(self, instance_id: str, lease_id: str) -> None:
        """The instance accepted it (or says that it has it)."""
        instance = self.instances.get(instance_id)
        if instance is not None and lease_id in instance.held:
            instance.held[lease_id].confirmed = True

    def holder(self, lease_id: str) -> Instance | None:
        return next((i for i in self.instances.values() if lease_id in i.held), None)

    def release(self, lease_id: str, instance_id: str = "") -> Held | None:
        """The lease no longer runs (its result came, it was refused or cancelled)."""
        instance = self.instances.get(instance_id) if instance_id else self.holder(lease_id)
        return instance.held.pop(lease_id, None) if instance is not None else None

    def reported(self, instance_id: str, free_slots: int, now: float) -> None:
        """Its own word on free slots."""
        instance = self.instances.get(instance_id)
        if instance is not None:
            instance.reported_free, instance.reported_at, instance.since_report = free_slots, now, 0

    def reconcile(self, instance_id: str, held_there: dict[str, int], before: float) -> tuple[list[Held], list[str]]:
        """Compare with what the instance says it holds (lease → attempt), asked after `before`.

        Returns (leases it lost: issue them again, leases it should forget: cancel them). Lost ones are released.
        """
        instance = self.instances[instance_id]
        lost = [
            h
            for h in instance.held.values()
            if h.since < before and h.lease_id not in instance.sending and held_there.get(h.lease_id) != h.attempt
        ]
        for lease in lost:
            del instance.held[lease.lease_id]
        for lease in instance.held.values():
            lease.confirmed = lease.confirmed or held_there.get(lease.lease_id) == lease.attempt
        # an older attempt of a lease that is on its way there is replaced by that, and must not be cancelled together with it
        return lost, [key for key in held_there if key not in instance.held]

    def info(self, now: float) -> list[InstanceInfo]:
        return [
            InstanceInfo(
                instance_id=key,
                url=instance.record.url,
                incarnation=instance.record.incarnation,
                state=instance.state,
                total_slots=instance.record.total_slots,
                free_slots=instance.free(now),
                in_flight=instance.places,
                failures=instance.failures,
                last_seen_s=now - instance.last_seen,
                models=instance.record.models,
                serving=instance.serving,
                reason=instance.reason,
            )
            for key, instance in self.instances.items()
        ]
