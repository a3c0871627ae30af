"""Pure core: rollout services and what is leased to whom. Events in, decisions out; `now` is an argument (`fleet` calls).

Suspect and confirm: a failed data-path call makes an instance suspect (no new work); only its own /status clears it or,
after `max_failures` in a row, takes it out. A /status that is merely late does not count against an instance whose data path
works: a saturated machine answers slowly. One that is suspected again and again gets new work only after a pause that doubles
each time. An instance gets its first leases only when it serves the newest weights of all its models; later it may lag, and the
staleness rule absorbs that.
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
FLAP_FIRST_S, FLAP_MAX_S = 1.0, 60.0
"""Pause without new work after the second suspicion in a row, doubled with each further one, and the longest."""
CALM_S = 300.0
"""After this time without a suspicion the earlier ones are forgotten."""
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
    region: str = ""
    draining: bool = False
    """It was told to leave; a restarted Dataflow must not give it work again."""
    shutdown_after: bool = False
    """… and is asked to end when it has left."""


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
    """Consecutive /status calls that failed."""
    late: int = 0
    """Consecutive /status calls without an answer in time, while its data path worked."""
    last_seen: float = 0.0
    heard_at: float = -math.inf
    """Its last answer on the data path."""
    doubted: bool = False
    """A data-path call failed since its last /status."""
    suspicions: int = 0
    """Times that it was suspect and cleared again without a calm time in between."""
    cleared_at: float = -math.inf
    rests_until: float = -math.inf
    """No new work before."""
    credit: float = 0.0
    """Routing: what it is owed of earlier choices."""
    reason: str = ""
    serving: dict[str, Serving] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    reported_free: int | None = None
    """Free slots by its own last word …"""
    reported_at: float = 0.0
    since_report: int = 0
    """… and trajectories sent to it afterwards."""
    drains_since: float = math.inf
    unacknowledged: int = 0
    """Deliveries taken whose acknowledgement has not arrived there."""
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
    alive_s: float = 15.0
    """An answer on the data path proves that it lives for this long: a long poll, and the time of a /status call."""
    drain_s: float = 630.0
    """A drain that takes longer is over: a lease's deadline, and the time to hand its result over."""
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
            region=message.region,
        )
        old = self.instances.get(message.instance_id)
        if old is not None and old.record.incarnation == message.incarnation:
            old.record, old.last_seen = record, now
            return Registered("same", [])
        self.instances[message.instance_id] = Instance(record, last_seen=now)
        return Registered("replaced", list(old.held.values())) if old is not None else Registered("new", [])

    def others_at(self, url: str, instance_id: str) -> list[str]:
        """Other instances with this address: a process that listens there now has taken the place of theirs."""
        return [key for key, other in self.instances.items() if key != instance_id and other.record.url.rstrip("/") == url.rstrip("/")]

    def restore(self, record: InstanceRecord, now: float) -> Instance:
        """After a Dataflow restart: known, but to be confirmed by its own /status first."""
        instance = Instance(record, state="suspect", last_seen=now, reason="known from before the restart")
        self.instances[record.instance_id] = instance
        return instance

    def suspect(self, instance_id: str, reason: str) -> bool:
        """A data-path call failed. True when this is news (its /status should be asked at once)."""
        instance = self.instances.get(instance_id)
        if instance is None or instance.state in ("suspect", "gone") or instance.doubted:
            return False
        if instance.state != "draining":
            instance.state = "suspect"
        instance.doubted, instance.reason = True, reason
        return True

    def heard(self, instance_id: str, incarnation: str, now: float) -> bool:
        """It answered on the data path: a proof of life, though it clears nothing. False when it was another process that
        answered (who registered is gone, then)."""
        instance = self.instances.get(instance_id)
        if instance is None:
            return True
        if incarnation and instance.record.incarnation and incarnation != instance.record.incarnation:
            return False
        instance.last_seen = instance.heard_at = now
        return True

    def answered(self, instance_id: str, incarnation: str, now: float) -> list[Held]:
        """Its own /status came. Clears suspicion; a new incarnation loses what the old process held (returned)."""
        instance = self.instances[instance_id]
        instance.failures, instance.late, instance.last_seen, instance.doubted = 0, 0, now, False
        lost: list[Held] = []
        if incarnation and incarnation != instance.record.incarnation:
            instance.record.incarnation, instance.record.draining, instance.record.shutdown_after = incarnation, False, False
            lost, instance.held = list(instance.held.values()), {}
            instance.serving, instance.was_live, instance.unacknowledged = {}, False, 0
            instance.state, instance.reason = "catching_up", "came back as a new process"
            instance.reported_free, instance.heard_at = None, -math.inf
        elif instance.state == "suspect":
            instance.state, instance.reason = ("live" if instance.was_live else "catching_up"), ""
            if instance.record.draining:
                self.drain(instance_id, instance.record.shutdown_after, now)
            elif instance.was_live:
                self._rest(instance, now)
        return lost

    def _rest(self, instance: Instance, now: float) -> None:
        """A pause for one that is suspected again and again; the first suspicion costs nothing."""
        calm = now - instance.cleared_at > CALM_S
        instance.suspicions = 1 if calm else instance.suspicions + 1
        instance.cleared_at = now
        if instance.suspicions > 1:
            pause = min(FLAP_FIRST_S * 2.0 ** (instance.suspicions - 2), FLAP_MAX_S)
            instance.rests_until = now + pause
            instance.reason = f"suspected {instance.suspicions} times: no new work for {pause:g} s"

    def failed(self, instance_id: str, reason: str, now: float, *, late: bool = False) -> bool:
        """Its /status failed. True when it is out now: call `remove`. `late` = no answer in time, which is no failure as long as
        its data path works."""
        instance = self.instances[instance_id]
        if late and now - instance.heard_at <= self.alive_s:
            instance.late += 1
            return False
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

    def drain(self, instance_id: str, shutdown: bool, now: float) -> None:
        """Finish what runs, then leave (`drained` and `overdue` say when)."""
        instance = self.instances[instance_id]
        instance.state, instance.reason = "draining", "drains"
        instance.record.draining, instance.record.shutdown_after = True, shutdown
        instance.drains_since = min(instance.drains_since, now)

    def drained(self) -> list[str]:
        """Draining instances that hold nothing more and know that their last results arrived."""
        return [
            key for key, i in self.instances.items() if i.state == "draining" and not i.held and not i.unacknowledged and not i.doubted
        ]

    def overdue(self, instance_id: str, now: float) -> bool:
        """Its drain has taken too long: what it still holds runs elsewhere."""
        instance = self.instances[instance_id]
        return instance.state == "draining" and now - instance.drains_since > self.drain_s

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

    def awake(self, now: float) -> list[Instance]:
        """Live ones that do not pause after repeated suspicion; when all pause, none does: slow work is better than none."""
        live = [i for i in self.instances.values() if i.state == "live"]
        return [i for i in live if now >= i.rests_until] or live

    def route(self, places: int, eligible: Callable[[Instance], bool], now: float) -> Instance | None:
        """The instance for a group of this many trajectories: the live one with most free slots (weighted) gets most.

        Each choice gives every instance that could take the group credit for its free slots times its weight, and the one with
        most credit pays for it. So the shares of many choices are in proportion, and a fast but busy instance is not starved
        by an idle one; nobody saves up credit for a time in which it could take nothing.
        """
        fit = [i for i in self.awake(now) if i.free(now) >= places and eligible(i)]
        if not fit:
            return None
        strength = {i.instance_id: i.free(now) * i.record.weight for i in fit}
        for instance in fit:
            instance.credit += strength[instance.instance_id]
        chosen = max(fit, key=lambda i: (i.credit, i.instance_id))
        chosen.credit -= sum(strength.values())
        return chosen

    def share(self, instance_id: str, places: int, total: int, now: float) -> int:
        """Most trajectories that this instance should run of `total` under way: its part by weight among the live ones, in whole
        groups of `places` (at least one). Without it whoever loads a new version first would take all that it lets in.
        """
        others = sum(i.record.weight for i in self.awake(now) if i.instance_id != instance_id)
        mine = self.instances[instance_id].record.weight
        part = mine / (mine + others)
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

    def reported(self, instance_id: str, free_slots: int, now: float, total_slots: int = 0) -> None:
        """Its own word on free slots, and on all of them where a reply names them."""
        instance = self.instances.get(instance_id)
        if instance is not None:
            instance.reported_free, instance.reported_at, instance.since_report = free_slots, now, 0
            instance.record.total_slots = total_slots or instance.record.total_slots

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
                region=instance.record.region,
            )
            for key, instance in self.instances.items()
        ]
