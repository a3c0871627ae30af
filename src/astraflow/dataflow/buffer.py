"""Pure core: the queues of one model. Groups in, batches out; no payloads, no I/O, no clock.

A group is kept iff `version − min_version ≤ max_staleness` (inclusive; version 0 counts), asked again when it is served.
Only expired groups are evicted; a full queue refuses, and the caller holds back (numerics 18). With `unit: sequences` a batch
ends after exactly B trajectories: the group at its end is cut, and its rest stays in the queue as an entry of its own.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from astraflow.dataflow.config import BufferConfig
from astraflow.dataflow.policies import ORDERS, SELECTIONS
from astraflow.dataflow.policies.base import GroupStats

Key = tuple[str, int]
"""(lease, part)"""
Rank = tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """One (group, policy), or a part of one, that waits to be trained on; its payload lies in the ledger."""

    lease_id: str
    arrival: int
    """Order of admission; unique in the run, shared by the parts of a group."""
    places: int
    """Its share of a batch and of the pace (numerics 6): n_samples of a whole group, whatever is scored; in sequences its rows."""
    rows: int
    """Scored trajectories."""
    timeline: int
    min_version: int
    max_version: int
    spread: float = 0.0
    """Standard deviation of the shaped values; a priority for replay."""
    mean: float = 0.0
    """Mean of the shaped values."""
    raw_mean: float = 0.0
    """Mean of the raw values."""
    all_equal: bool = False
    group_tokens: int = 0
    """Own sampled tokens of the whole group."""
    scored: tuple[int, ...] = ()
    """Scored trajectories of the whole group, ascending. Empty: this group is never cut."""
    start: int = 0
    """This entry is scored[start : start + rows]."""

    @property
    def part(self) -> int:
        """0, or the first trajectory of a rest."""
        return self.scored[self.start] if self.start else 0

    @property
    def key(self) -> Key:
        return (self.lease_id, self.part)

    @property
    def members(self) -> tuple[int, ...]:
        """Trajectories of this entry."""
        return self.scored[self.start : self.start + self.rows]

    @property
    def completes(self) -> bool:
        """Nothing of its group comes after it: parts are served in order, so once it is trained all of them are."""
        return not self.scored or self.start + self.rows == len(self.scored)

    @property
    def loss_tokens(self) -> int:
        """Own sampled tokens; a part has its share by count, and the parts add up."""
        if not self.scored:
            return self.group_tokens
        before, upto = self.start, self.start + self.rows
        return self.group_tokens * upto // len(self.scored) - self.group_tokens * before // len(self.scored)

    def whole(self) -> Entry:
        """The group that this is a part of."""
        if not self.scored or self.rows == len(self.scored):
            return self
        return replace(self, start=0, rows=len(self.scored), places=len(self.scored))

    def cut(self, rows: int) -> tuple[Entry, Entry]:
        """Its first `rows` trajectories, and the rest."""
        assert 0 < rows < self.rows, f"{rows} of {self}"
        assert self.scored, f"{self} does not know its trajectories"
        left = self.rows - rows
        return replace(self, rows=rows, places=rows), replace(self, start=self.start + rows, rows=left, places=left)


def make_entry(
    lease_id: str, arrival: int, stats: GroupStats, unit: Literal["groups", "sequences"], members: tuple[int, ...] = ()
) -> Entry:
    """The queue's view of a share, or of the part of it that has these members (empty = all that are scored)."""
    scored = tuple(sorted(stats.values))
    rows = len(members) or len(scored)
    return Entry(
        lease_id=lease_id,
        arrival=arrival,
        places=rows if unit == "sequences" else stats.n_samples,
        rows=rows,
        timeline=stats.timeline,
        min_version=stats.min_version,
        max_version=stats.max_version,
        spread=stats.std,
        mean=stats.mean,
        raw_mean=sum(stats.values.values()) / max(stats.size, 1),
        all_equal=stats.all_equal,
        group_tokens=stats.loss_tokens,
        scored=scored,
        start=scored.index(members[0]) if members else 0,
    )


@dataclass(frozen=True)
class Taken:
    """What a batch holds."""

    fresh: list[Entry]
    """In order."""
    replayed: list[Entry]
    rest: Entry | None = None
    """What is left in the queue of the last of `fresh`."""


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
class Queue:
    """Entries in serving order. Every call costs O(log n) per entry that it moves; sums are kept, not counted."""

    rank: Callable[[Entry], Rank]
    entries: dict[Key, Entry] = field(default_factory=dict)
    places: int = 0
    rows: int = 0
    groups: Counter[str] = field(default_factory=Counter)
    """Lease → its entries here."""
    _heap: list[tuple[Rank, Key]] = field(default_factory=list)
    """With entries that left meanwhile; they are skipped when they come up."""
    _spans: dict[tuple[int, int, int], dict[Key, Entry]] = field(default_factory=dict)
    """(timeline, min_version, max_version) → entries: what expires, expires together."""

    def push(self, entry: Entry) -> None:
        assert entry.key not in self.entries, f"group {entry.key} is queued already"
        self.entries[entry.key] = entry
        self.places += entry.places
        self.rows += entry.rows
        self.groups[entry.lease_id] += 1
        self._spans.setdefault(_span(entry), {})[entry.key] = entry
        heapq.heappush(self._heap, (self._key(entry), entry.key))
        if len(self._heap) > 2 * len(self.entries) + 64:
            self._heap = [(self._key(entry), key) for key, entry in self.entries.items()]
            heapq.heapify(self._heap)

    def first(self) -> Entry:
        """Next in order; there is one."""
        while True:
            rank, key = self._heap[0]
            entry = self.entries.get(key)
            if entry is not None and self._key(entry) == rank:
                return entry
            heapq.heappop(self._heap)

    def remove(self, entry: Entry) -> None:
        del self.entries[entry.key]
        self.places -= entry.places
        self.rows -= entry.rows
        self.groups[entry.lease_id] -= 1
        if not self.groups[entry.lease_id]:
            del self.groups[entry.lease_id]
        span = self._spans[_span(entry)]
        del span[entry.key]
        if not span:
            del self._spans[_span(entry)]

    def expire(self, reason: Callable[[Entry], str]) -> list[tuple[Entry, str]]:
        """Remove the entries of every span for whose first one there is a reason."""
        gone = []
        for entries in self._spans.values():
            if why := reason(next(iter(entries.values()))):
                gone += [(entry, why) for entry in entries.values()]
        for entry, _ in gone:
            self.remove(entry)
        return gone

    def _key(self, entry: Entry) -> Rank:
        return (*self.rank(entry), entry.start)


def _span(entry: Entry) -> tuple[int, int, int]:
    return (entry.timeline, entry.min_version, entry.max_version)


class RolloutBuffer:
    """Fresh queue and replay queue of one model."""

    def __init__(self, model_id: str, config: BufferConfig, seed: int = 0) -> None:
        self.model_id, self.config, self.seed = model_id, config, seed
        self.pace = Pace()
        self._fresh = Queue(ORDERS.get(config.order))
        self._replay: dict[str, Entry] = {}
        self._oldest: list[tuple[int, str]] = []
        """Replay queue as a heap by arrival, with leases that left meanwhile."""
        self._fewest: int | None = None
        """Rows of the smallest replayable group; None = not known."""
        self._fallen: list[str] = []
        """Left the replay queue since `fallen` was last called."""

    def __len__(self) -> int:
        """Groups in the fresh queue."""
        return len(self._fresh.groups)

    @property
    def places(self) -> int:
        """Trajectory places that queued groups take."""
        return self._fresh.places

    @property
    def trajectories(self) -> int:
        """Scored trajectories in the fresh queue."""
        return self._fresh.rows

    @property
    def replay_groups(self) -> int:
        return len(self._replay)

    @property
    def replay_ids(self) -> set[str]:
        """Leases whose payload the replay queue still needs."""
        return set(self._replay)

    def entries(self) -> list[Entry]:
        """The fresh queue in serving order."""
        return sorted(self._fresh.entries.values(), key=self._fresh._key)

    # --- in and out -----------------------------------------------------------------------------------------------------

    def add(self, entry: Entry) -> bool:
        """Admit a group. False = full of groups that are still fresh (nothing is evicted for it). The same group twice is a bug."""
        if len(self) >= self.config.max_groups and entry.lease_id not in self._fresh.groups:
            return False
        self.restore(entry)
        return True

    def restore(self, entry: Entry) -> None:
        """It was admitted before; bounds do not apply, the places are its own. What is queued is not replayed."""
        self._fresh.push(entry)
        if entry.lease_id in self._replay:
            self._forget(entry.lease_id)

    def take(self, batch: int, n_samples: int, version: int, *, last: bool = False) -> Taken | None:
        """Remove a batch of B trajectories' worth in order, and choose replayed groups (which stay) for this version's batch. None
        when there is not enough; with `last` (no more will come) a smaller batch is made of what there is."""
        groups, replayed = self.split(batch, n_samples)
        again = self._choose(replayed, version)
        if self.config.unit == "sequences":
            need, there = batch - sum(entry.rows for entry in again), self.trajectories
        else:
            need, there = groups, len(self)
        if there < need and not (last and there):
            return None
        return self._take_rows(need, again) if self.config.unit == "sequences" else self._take_groups(need, again)

    def put_back(self, taken: Taken) -> None:
        """Undo `take`, before anything else was removed: the batch was not made."""
        fresh = list(taken.fresh)
        if taken.rest is not None:
            self._fresh.remove(self._fresh.entries[taken.rest.key])
            head = fresh.pop()
            fresh.append(replace(head, rows=head.rows + taken.rest.rows, places=head.places + taken.rest.places))
        for entry in fresh:
            self._fresh.push(entry)

    def discard(self, predicate: Callable[[Entry], bool]) -> list[Entry]:
        """Remove and return the fresh entries that match; the caller says why they are dropped, and gives places back."""
        gone = [entry for entry in self._fresh.entries.values() if predicate(entry)]
        for entry in gone:
            self._fresh.remove(entry)
        return gone

    def expire(self, reason: Callable[[Entry], str]) -> list[tuple[Entry, str]]:
        """Remove what `reason` finds unservable, with the reason. It depends on versions and timeline only, and is asked once for
        all entries that have them in common."""
        return self._fresh.expire(reason)

    def _take_groups(self, groups: int, again: list[Entry]) -> Taken:
        fresh: list[Entry] = []
        leases: set[str] = set()
        while self._fresh.entries:
            entry = self._fresh.first()
            if len(leases) == groups and entry.lease_id not in leases:
                break
            self._fresh.remove(entry)
            fresh.append(entry)
            leases.add(entry.lease_id)
        return Taken(fresh, again)

    def _take_rows(self, rows: int, again: list[Entry]) -> Taken:
        fresh: list[Entry] = []
        while rows and self._fresh.entries:
            entry = self._fresh.first()
            self._fresh.remove(entry)
            if entry.rows > rows:
                entry, rest = entry.cut(rows)
                self._fresh.push(rest)
                return Taken([*fresh, entry], again, rest)
            fresh.append(entry)
            rows -= entry.rows
        return Taken(fresh, again)

    # --- replay ---------------------------------------------------------------------------------------------------------

    def split(self, batch: int, n_samples: int) -> tuple[int, int]:
        """(fresh groups, most replayed groups) of a full batch: replay takes floor(B · ratio / group rows) whole groups."""
        groups = max(batch // n_samples, 1)
        most = groups - 1 if self.config.unit == "groups" else groups
        replayed = min(int(batch * self.config.replay.ratio / n_samples), most, len(self._replay))
        return groups - replayed, replayed

    def _choose(self, count: int, version: int) -> list[Entry]:
        """The choice depends on seed and version only, so that it is the same after a restart."""
        if not count:
            return []
        pool = sorted(self._replay.values(), key=lambda e: e.arrival)
        rng = random.Random(f"{self.seed}:{self.model_id}:{version}")
        return [pool[i] for i in SELECTIONS.get(self.config.replay.selection)(pool, count, rng)]

    def remember(self, entries: Iterable[Entry]) -> None:
        """Trained groups become replayable: whole ones, and split ones once their last part is trained."""
        if self.config.replay.ratio <= 0:
            return
        for entry in entries:
            if entry.completes and entry.lease_id not in self._fresh.groups:
                self._replay[entry.lease_id] = entry.whole()
                heapq.heappush(self._oldest, (entry.arrival, entry.lease_id))
        if len(self._oldest) > 2 * len(self._replay) + 64:
            self._oldest = sorted((entry.arrival, lease_id) for lease_id, entry in self._replay.items())
        while len(self._replay) > self.config.replay.size:
            arrival, lease_id = heapq.heappop(self._oldest)
            if lease_id in self._replay and self._replay[lease_id].arrival == arrival:
                self._forget(lease_id)
        self._fewest = None

    def fallen(self) -> list[str]:
        """Leases that left the replay queue since the last call, and did not come back."""
        fallen, self._fallen = [lease_id for lease_id in self._fallen if lease_id not in self._replay], []
        return fallen

    def forget_replay(self, predicate: Callable[[Entry], bool]) -> None:
        """Remove matching groups from the replay queue."""
        for entry in [entry for entry in self._replay.values() if predicate(entry)]:
            self._forget(entry.lease_id)

    def expire_replay(self, version: int) -> None:
        """Let go of what may no longer be replayed at this version."""
        limit = self.config.replay.max_staleness
        self.forget_replay(lambda e: not fresh_enough(version, e.min_version, limit))

    def _forget(self, lease_id: str) -> None:
        del self._replay[lease_id]
        self._fallen.append(lease_id)
        self._fewest = None

    # --- room -----------------------------------------------------------------------------------------------------------

    def room(self, batch: int, n_samples: int, version: int, in_flight: int, lag: int = 0, held: int = 0) -> int:
        """Trajectories that may be admitted now, on an instance that serves weights `lag` versions old. With `drop`, or without a
        staleness limit, the buffer's bound is the limit; `held` groups, which wait for their receipt, will need a place in it."""
        bound = (self.config.max_groups - len(self) - held) * n_samples - in_flight
        if self.config.treatment == "drop" or self.config.max_staleness is None:
            return bound
        ahead = self.config.max_staleness if self.config.lookahead is None else min(self.config.lookahead, self.config.max_staleness)
        ahead -= lag
        paced = pace_room(ahead, batch, version, self.pace.v_start, self.pace.accepted, in_flight)
        # replayed groups count as accepted when served, so only the look-ahead shrinks to the fresh share of a batch
        surely = self._surely_replayed(batch, n_samples)
        paced -= max(ahead + 1, 0) * surely
        if self.config.unit == "sequences" and 0 < paced < n_samples and self.trajectories + in_flight < batch - surely:
            paced = n_samples  # the batch that is waited for ends inside this group; its rest is for the next one
        return min(bound, paced)

    def _surely_replayed(self, batch: int, n_samples: int) -> int:
        """Trajectories of a batch that replay fills, whatever it chooses."""
        groups, replayed = self.split(batch, n_samples)
        if not replayed:
            return 0
        if self.config.unit == "groups":
            return batch - groups * n_samples
        if self._fewest is None:
            self._fewest = min(entry.rows for entry in self._replay.values())
        return replayed * self._fewest

    def progress(self, batch: int, n_samples: int) -> str:
        """How much of a batch is there, for people."""
        if self.config.unit == "sequences":
            return f"{self.trajectories} of {batch - self._surely_replayed(batch, n_samples)} trajectories"
        return f"{len(self)} of {self.split(batch, n_samples)[0]} groups"
