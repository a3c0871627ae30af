"""Pure core: the queues of one model. Whole groups in, whole groups out; no payloads, no I/O, no clock.

A group is kept iff `version − min_version ≤ max_staleness` (inclusive; version 0 counts), asked again when it is served.
Only expired groups are evicted; a full queue refuses, and the caller holds back (numerics 18).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from astraflow.dataflow.config import BufferConfig
from astraflow.dataflow.policies import ORDERS, SELECTIONS


@dataclass(frozen=True)
class Entry:
    """One (group, policy) that waits to be trained on; its payload lies in the ledger."""

    lease_id: str
    arrival: int
    """Order of admission; unique in the run."""
    places: int
    """n_samples, whatever is scored: the group's share of a batch and of the pace (numerics 6)."""
    rows: int
    """Scored trajectories."""
    timeline: int
    min_version: int
    max_version: int
    spread: float = 0.0
    """Standard deviation of the shaped values; a priority for replay."""
    mean: float = 0.0
    """Mean of the shaped values."""
    all_equal: bool = False
    loss_tokens: int = 0


def fresh_enough(version: int, min_version: int, max_staleness: int | None) -> bool:
    """The staleness rule (numerics 5)."""
    return max_staleness is None or version - min_version <= max_staleness


def pace_room(max_staleness: int, batch: int, version: int, v_start: int, accepted: int, in_flight: int) -> int:
    """Trajectories that may still be admitted (numerics 6): (max_staleness + 1 + v − v_start) · B − accepted − in flight."""
    return (max_staleness + 1 + version - v_start) * batch - accepted - in_flight


@dataclass
class Pace:
    """Places taken since the (re)start of one model's trainer."""

    v_start: int = 0
    accepted: int = 0
    """Trajectories of groups admitted since then and not given back."""

    def give_back(self, places: int) -> None:
        """A filtered, failed or expired group leaves."""
        self.accepted -= places


@dataclass
class RolloutBuffer:
    """Fresh queue and replay queue of one model."""

    model_id: str
    config: BufferConfig
    seed: int = 0
    pace: Pace = field(default_factory=Pace)
    _fresh: dict[str, Entry] = field(default_factory=dict)
    _replay: dict[str, Entry] = field(default_factory=dict)
    _fallen: list[str] = field(default_factory=list)
    """Left the replay queue since `fallen` was last called."""

    def __len__(self) -> int:
        return len(self._fresh)

    @property
    def places(self) -> int:
        """Trajectory places that queued groups take."""
        return sum(entry.places for entry in self._fresh.values())

    @property
    def trajectories(self) -> int:
        """Scored trajectories in the fresh queue."""
        return sum(entry.rows for entry in self._fresh.values())

    @property
    def replay_groups(self) -> int:
        return len(self._replay)

    @property
    def replay_ids(self) -> set[str]:
        """Leases whose payload the replay queue still needs."""
        return set(self._replay)

    def entries(self) -> list[Entry]:
        """The fresh queue in serving order."""
        return sorted(self._fresh.values(), key=ORDERS.get(self.config.order))

    def add(self, entry: Entry) -> bool:
        """Admit a group. False = full of groups that are still fresh (nothing is evicted for it). The same group twice is a bug."""
        assert entry.lease_id not in self._fresh, f"group {entry.lease_id} is queued already"
        if len(self._fresh) >= self.config.max_groups:
            return False
        self._fresh[entry.lease_id] = entry
        return True

    def expire_replay(self, version: int) -> None:
        """Let go of what may no longer be replayed at this version."""
        limit = self.config.replay.max_staleness
        self.forget_replay(lambda e: not fresh_enough(version, e.min_version, limit))

    def split(self, batch_places: int, n_samples: int) -> tuple[int, int]:
        """(fresh groups, most replayed groups) of a full batch: replay takes floor(B · ratio / group rows) whole groups."""
        groups = max(batch_places // n_samples, 1)
        replayed = min(int(batch_places * self.config.replay.ratio / n_samples), groups - 1, len(self._replay))
        return groups - replayed, replayed

    def take(self, groups: int, replayed: int, version: int) -> tuple[list[Entry], list[Entry]]:
        """Remove up to `groups` fresh groups in order, and choose up to `replayed` others (which stay) for this version's batch.

        The choice depends on seed and version only, so that it is the same after a restart. No group is in a batch twice.
        """
        fresh = self.entries()[:groups]
        for entry in fresh:
            del self._fresh[entry.lease_id]
        taken = {entry.lease_id for entry in fresh}
        pool = sorted((e for e in self._replay.values() if e.lease_id not in taken), key=lambda e: e.arrival)
        rng = random.Random(f"{self.seed}:{self.model_id}:{version}")
        chosen = SELECTIONS.get(self.config.replay.selection)(pool, min(replayed, len(pool)), rng) if replayed and pool else []
        return fresh, [pool[i] for i in chosen]

    def put_back(self, entries: Iterable[Entry]) -> None:
        """Undo `take`: the batch was not made. Bounds do not apply, the places were theirs."""
        for entry in entries:
            self._fresh[entry.lease_id] = entry

    def discard(self, predicate: Callable[[Entry], bool]) -> list[Entry]:
        """Remove and return the fresh groups that match; the caller says why they are dropped, and gives places back."""
        gone = [entry for entry in self._fresh.values() if predicate(entry)]
        for entry in gone:
            del self._fresh[entry.lease_id]
        return gone

    def remember(self, entries: Iterable[Entry]) -> None:
        """Trained groups become replayable."""
        if self.config.replay.ratio > 0:
            for entry in entries:
                self._replay[entry.lease_id] = entry
            while len(self._replay) > self.config.replay.size:
                oldest = min(self._replay.values(), key=lambda e: e.arrival)
                del self._replay[oldest.lease_id]
                self._fallen.append(oldest.lease_id)

    def fallen(self) -> list[str]:
        """Leases that left the replay queue since the last call, and did not come back."""
        fallen, self._fallen = [lease_id for lease_id in self._fallen if lease_id not in self._replay], []
        return fallen

    def forget_replay(self, predicate: Callable[[Entry], bool]) -> None:
        """Remove matching groups from the replay queue."""
        for entry in [entry for entry in self._replay.values() if predicate(entry)]:
            del self._replay[entry.lease_id]
            self._fallen.append(entry.lease_id)

    def room(self, batch_places: int, n_samples: int, version: int, in_flight: int, lag: int = 0) -> int:
        """Trajectories that may be admitted now, on an instance that serves weights `lag` versions old. With `drop`, or without a
        staleness limit, the buffer's bound is the limit."""
        bound = self.config.max_groups * n_samples - self.places - in_flight
        if self.config.treatment == "drop" or self.config.max_staleness is None:
            return bound
        ahead = self.config.max_staleness if self.config.lookahead is None else min(self.config.lookahead, self.config.max_staleness)
        ahead -= lag
        paced = pace_room(ahead, batch_places, version, self.pace.v_start, self.pace.accepted, in_flight)
        if self.config.replay.ratio > 0 and self._replay:
            # replayed groups count as accepted when served, so only the look-ahead shrinks to the fresh share of a batch
            groups, _ = self.split(batch_places, n_samples)
            paced -= max(ahead + 1, 0) * (batch_places - groups * n_samples)
        return min(bound, paced)
