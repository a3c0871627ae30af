"""Pure core: the leases of one evaluation, and which instances may run them. Events in, decisions out; `now` is an argument.

    waiting ─ take ─> out on an instance ─ scored ─> done
                      out ─ refused for lack of room ─> waiting (the same attempt)
                      out ─ its instance is lost ─> waiting (attempt + 1), after the last attempt given up: missing

Nothing of this touches the training queue: leases, results and counts are the evaluation's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from astraflow.dataflow.barrier import same_digest
from astraflow.dataflow.pool import Instance
from astraflow.protocol.rollout import Group, Lease, Serving

TRIES = 3
"""Instances that one lease may lose before its samples count as missing."""
Wanted = dict[str, Serving]
"""Model → weights that are to be evaluated."""


@dataclass
class EvalBook:
    """Every lease is in exactly one of `waiting`, `out`, `scores` and `given_up`."""

    leases: dict[str, Lease]
    """By id, with the attempt that runs or comes next."""
    waiting: deque[str] = field(default_factory=deque)
    out: dict[str, str] = field(default_factory=dict)
    """Lease → instance."""
    scores: dict[str, list[float | None]] = field(default_factory=dict)
    """Lease → reward per sample; None = failed or unscored."""
    given_up: set[str] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        return len(self.scores) + len(self.given_up) == len(self.leases)

    def on(self, instance_id: str) -> list[str]:
        """Leases that run there."""
        return [key for key, holder in self.out.items() if holder == instance_id]

    def take(self, instance_id: str, places: int, at_most: int) -> list[Lease]:
        """Leases for an instance that has room for `places` trajectories, oldest first."""
        taken: list[Lease] = []
        while self.waiting and len(taken) < at_most:
            lease = self.leases[self.waiting[0]]
            if lease.n_samples > places:
                break
            places -= lease.n_samples
            self.out[self.waiting.popleft()] = instance_id
            taken.append(lease)
        return taken

    def put_back(self, instance_id: str, lease_ids: Iterable[str]) -> None:
        """They did not begin there for lack of room: the same attempts are next."""
        mine = [key for key in lease_ids if self.out.get(key) == instance_id]
        for key in reversed(mine):
            del self.out[key]
            self.waiting.appendleft(key)

    def scored(self, instance_id: str, lease_id: str, attempt: int, rewards: list[float | None]) -> bool:
        """A result came. False = nobody waits for it: not of this evaluation, of an earlier attempt, or of another instance."""
        if self.out.get(lease_id) != instance_id or self.leases[lease_id].attempt != attempt:
            return False
        del self.out[lease_id]
        self.scores[lease_id] = rewards
        return True

    def lost(self, instance_id: str) -> int:
        """The instance is out of this evaluation. Its leases run elsewhere, unless that was their last try. Returns how many."""
        mine = self.on(instance_id)
        for key in mine:
            del self.out[key]
            lease = self.leases[key]
            if lease.attempt >= TRIES:
                self.given_up.add(key)
            else:
                self.leases[key] = msgspec.structs.replace(lease, attempt=lease.attempt + 1)
                self.waiting.append(key)
        return len(mine)


def fits(serving: Serving | None, want: Serving) -> bool:
    """An instance serves exactly these weights, as far as digests are known."""
    return (
        serving is not None
        and (serving.timeline, serving.version) == (want.timeline, want.version)
        and same_digest(serving.digest, want.digest)
    )


def exact(instance: Instance, wanted: Mapping[str, Serving]) -> bool:
    """Its receipts name the wanted weights of every model."""
    return all(fits(instance.serving.get(model_id), want) for model_id, want in wanted.items())


def reach(instance: Instance, wanted: Mapping[str, Serving], still_sent: Callable[[str, Serving], bool]) -> Literal["exact", "can", "no"]:
    """Whether an instance serves the wanted weights, can still be brought to them, or never will."""
    if instance.state not in ("live", "catching_up") or any(model_id not in instance.record.models for model_id in wanted):
        return "no"
    if exact(instance, wanted):
        return "exact"
    for model_id, want in wanted.items():
        serving = instance.serving.get(model_id)
        if fits(serving, want):
            continue
        ahead = serving is not None and (serving.timeline, serving.version) > (want.timeline, want.version)
        if ahead or not still_sent(model_id, want):
            return "no"
    return "can"


@dataclass(frozen=True)
class Candidate:
    instance_id: str
    exact: bool
    rank: tuple[int, int, str]
    """Better ones are greater: it serves the weights, they are held back there already, free places."""


def candidates(
    instances: Iterable[Instance],
    wanted: Mapping[str, Serving],
    pins: Mapping[str, Mapping[str, Serving]],
    still_sent: Callable[[str, Serving], bool],
    now: float,
) -> list[Candidate]:
    """Instances that serve the wanted weights or can still get there, best first."""
    found = []
    for instance in instances:
        verdict = reach(instance, wanted, still_sent)
        if verdict != "no":
            name, here = instance.instance_id, verdict == "exact"
            rank = (2 * here + (pins.get(name) == wanted), instance.free(now), name)
            found.append(Candidate(name, here, rank))
    return sorted(found, key=lambda candidate: candidate.rank, reverse=True)


def of_wanted(group: Group, wanted: Mapping[str, Serving]) -> bool:
    """Every token that a policy sampled comes from the wanted weights."""
    return all(
        (span.timeline, span.min, span.max) == (want.timeline, want.version, want.version)
        for policy, span in group.versions.items()
        if (want := wanted.get(policy)) is not None
    )


def words(versions: Mapping[str, Serving]) -> str:
    return ", ".join(f"{model_id} {serving.version}" for model_id, serving in sorted(versions.items()))
