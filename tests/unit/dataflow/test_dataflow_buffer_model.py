"""The buffer against a model that keeps every trajectory in a plain list and sorts it each time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from astraflow.dataflow.buffer import Entry, RolloutBuffer, Taken, fresh_enough
from astraflow.dataflow.config import BufferConfig, ReplayConfig


@dataclass
class Group:
    """What the model knows."""

    lease_id: str
    arrival: int
    version: int
    spread: float
    scored: list[int]
    queued: list[int] = field(default_factory=list)

    def entry(self, unit: str, n: int) -> Entry:
        rows = len(self.scored)
        places = rows if unit == "sequences" else n
        return Entry(
            self.lease_id, self.arrival, places, rows, 0, self.version, self.version, spread=self.spread, scored=tuple(self.scored)
        )


class BufferModel(RuleBasedStateMachine):
    """No group is lost or appears twice, in any order of events."""

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.n = data.draw(st.integers(1, 4))
        self.unit = data.draw(st.sampled_from(["groups", "sequences"]))
        self.order = data.draw(st.sampled_from(["edf", "fifo"]))
        self.limit = data.draw(st.sampled_from([None, 0, 1, 3]))
        self.replay_limit = data.draw(st.sampled_from([None, 1, 4]))
        self.selection = data.draw(st.sampled_from(["latest", "uniform", "prioritised"]))
        replay = ReplayConfig(
            ratio=data.draw(st.sampled_from([0.0, 0.3, 0.6, 0.9])), size=data.draw(st.integers(0, 6)), selection=self.selection,
            max_staleness=self.replay_limit,
        )  # fmt: skip
        self.config = BufferConfig(
            unit=self.unit, order=self.order, max_staleness=self.limit, max_groups=data.draw(st.integers(1, 10)), replay=replay
        )
        self.buffer = RolloutBuffer("m", self.config, seed=3)
        self.groups: dict[str, Group] = {}
        self.replayable: dict[str, Group] = {}
        self.batches: list[tuple[int, Taken]] = []
        self.version, self.arrivals = 0, 0

    # --- the model's own view -------------------------------------------------------------------------------------------

    def queue(self) -> list[tuple[str, int]]:
        found = [(group, index) for group in self.groups.values() for index in group.queued]
        found.sort(key=lambda item: ((item[0].version if self.order == "edf" else 0), item[0].arrival, item[1]))
        return [(group.lease_id, index) for group, index in found]

    def remove(self, rows: list[tuple[str, int]]) -> None:
        for lease_id, index in rows:
            self.groups[lease_id].queued.remove(index)

    @staticmethod
    def rows(entries: list[Entry]) -> list[tuple[str, int]]:
        return [(entry.lease_id, index) for entry in entries for index in entry.members]

    def replayed_of(self, batch: int) -> int:
        most = max(batch // self.n, 1) - (self.unit == "groups")
        return min(int(batch * self.config.replay.ratio / self.n), most, len(self.replayable))

    # --- events ---------------------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        scored = sorted(data.draw(st.sets(st.integers(0, self.n - 1), min_size=1, max_size=self.n)))
        version = data.draw(st.integers(max(self.version - 2, 0), self.version))
        group = Group(f"g{self.arrivals}", self.arrivals, version, data.draw(st.sampled_from([0.0, 0.25, 0.5])), scored)
        self.arrivals += 1
        queued_groups = sum(bool(g.queued) for g in self.groups.values())
        added = self.buffer.add(group.entry(self.unit, self.n))
        assert added == (queued_groups < self.config.max_groups), "full, and nothing is evicted for it"
        if added:
            group.queued = list(scored)
            self.groups[group.lease_id] = group

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        batch = data.draw(st.integers(1, 4)) * self.n if self.unit == "groups" else data.draw(st.integers(1, 12))
        last = data.draw(st.booleans())
        before, queued = self.buffer.entries(), self.queue()
        count = self.replayed_of(batch)
        taken = self.buffer.take(batch, self.n, self.version, last=last)
        again = [self.replayable[e.lease_id] for e in taken.replayed] if taken else []
        if self.unit == "sequences":
            if taken is None:
                assert not queued or (not last and len(queued) <= batch - count)
                return
            need = batch - sum(len(group.scored) for group in again)
            expected = queued[:need]
            assert last or len(expected) == need
        else:
            leases = list(dict.fromkeys(lease_id for lease_id, _ in queued))
            need = max(batch // self.n, 1) - count
            if taken is None:
                assert len(leases) < need
                assert not (last and leases)
                return
            expected = [row for row in queued if row[0] in leases[:need]]
        assert self.rows(taken.fresh) == expected
        assert len(again) == count == len({group.lease_id for group in again}), "whole groups, none twice"
        assert not {e.lease_id for e in taken.fresh} & {e.lease_id for e in taken.replayed}, "no duplicate in a batch"
        assert all(e.members == tuple(self.replayable[e.lease_id].scored) for e in taken.replayed)
        self.right_choice(again, count)
        self.buffer.put_back(taken)
        assert self.buffer.entries() == before, "as if nothing had been taken"
        assert self.buffer.take(batch, self.n, self.version, last=last) == taken, "the choice is the same again"
        if data.draw(st.booleans()):
            self.buffer.put_back(taken)
            return
        self.remove(expected)
        self.batches.append((self.version, taken))
        self.buffer.remember(taken.fresh)
        if self.config.replay.ratio > 0:
            for lease_id in {e.lease_id for e in taken.fresh}:
                if not self.groups[lease_id].queued:
                    self.replayable[lease_id] = self.groups[lease_id]
            while len(self.replayable) > self.config.replay.size:
                del self.replayable[min(self.replayable, key=lambda key: self.replayable[key].arrival)]
        self.version += 1

    def right_choice(self, again: list[Group], count: int) -> None:
        pool = list(self.replayable.values())
        if self.selection == "latest":
            newest = sorted(pool, key=lambda g: -g.arrival)[:count]
            assert {g.lease_id for g in again} == {g.lease_id for g in newest}
        elif self.selection == "prioritised":
            assert sorted(g.spread for g in again) == sorted(sorted((g.spread for g in pool), reverse=True)[:count])

    @rule()
    def expire(self) -> None:
        stale = lambda e: "" if fresh_enough(self.version, e.min_version, self.limit) else "stale"  # noqa: E731
        gone = self.buffer.expire(stale)
        assert {reason for _, reason in gone} <= {"stale"}
        expected = [row for row in self.queue() if self.limit is not None and self.version - self.groups[row[0]].version > self.limit]
        assert sorted(self.rows([entry for entry, _ in gone])) == sorted(expected)
        self.remove(expected)
        for lease_id, _ in expected:
            self.groups[lease_id].scored = []  # what is dropped never completes

    @precondition(lambda self: self.queue())
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted({row[0] for row in self.queue()})))
        gone = self.rows(self.buffer.discard(lambda e: e.lease_id == lease_id))
        assert sorted(gone) == sorted(row for row in self.queue() if row[0] == lease_id)
        self.remove(gone)
        self.groups[lease_id].scored = []

    @rule()
    def expire_replay(self) -> None:
        self.buffer.expire_replay(self.version)
        if self.replay_limit is not None:
            self.replayable = {k: g for k, g in self.replayable.items() if self.version - g.version <= self.replay_limit}

    @precondition(lambda self: self.batches)
    @rule()
    def roll_back(self) -> None:
        """The trainer is back before its last batch."""
        self.version, taken = self.batches.pop()
        back = {e.lease_id for e in taken.fresh}
        self.buffer.forget_replay(lambda e: e.lease_id in back)
        self.replayable = {k: g for k, g in self.replayable.items() if k not in back}
        for entry in taken.fresh:
            group = self.groups[entry.lease_id]
            if group.scored and self.buffer.add(entry):
                group.queued = sorted([*group.queued, *entry.members])
            else:
                group.scored = []
        self.batches = [(v, t) for v, t in self.batches if v < self.version]

    @rule()
    def restart(self) -> None:
        """A new process finds the queue in the ledger, in no particular order."""
        entries = self.buffer.entries()
        random.Random(self.arrivals).shuffle(entries)
        self.buffer = RolloutBuffer("m", self.config, seed=3)
        for entry in entries:
            self.buffer.restore(entry)
        self.buffer.remember(group.entry(self.unit, self.n) for group in self.replayable.values())
        self.buffer.fallen()

    # --- always ---------------------------------------------------------------------------------------------------------

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "buffer"):
            return
        entries = self.buffer.entries()
        assert self.rows(entries) == self.queue(), "nothing lost, nothing twice, in order"
        assert self.buffer.trajectories == len(self.queue()) == sum(e.rows for e in entries)
        assert self.buffer.places == sum(e.places for e in entries)
        assert len(self.buffer) == len({e.lease_id for e in entries})
        assert self.buffer.replay_ids == set(self.replayable)
        assert self.buffer.replay_groups == len(self.replayable)
        fallen = self.buffer.fallen()
        assert not set(fallen) & self.buffer.replay_ids
        assert not self.buffer.fallen()


TestBufferModel = BufferModel.TestCase
TestBufferModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=30), st.sampled_from(["edf", "fifo"]), st.integers(1, 9)
)
def test_batches_of_sequences_are_the_sorted_trajectories_cut_every_b(groups: list[tuple[int, int]], order: str, batch: int) -> None:
    buffer = RolloutBuffer("m", BufferConfig(unit="sequences", order=order, max_staleness=None))  # type: ignore[arg-type]
    rows = []
    for number, (version, size) in enumerate(groups):
        assert buffer.add(Entry(f"g{number}", number, size, size, 0, version, version, scored=tuple(range(size))))
        rows += [((version if order == "edf" else 0), number, index) for index in range(size)]
    served = []
    while (taken := buffer.take(batch, 4, 0, last=True)) is not None:
        served.append([(int(e.lease_id[1:]), index) for e in taken.fresh for index in e.members])
    rows.sort()
    expected = [[(number, index) for _, number, index in rows[i : i + batch]] for i in range(0, len(rows), batch)]
    assert served == expected
    assert (len(buffer), buffer.trajectories, buffer.places) == (0, 0, 0)


def test_the_parts_of_a_group_add_up_to_its_tokens_and_know_the_last_of_them() -> None:
    whole = Entry("g", 7, 5, 5, 0, 1, 2, group_tokens=103, scored=(0, 2, 3, 5, 6))
    head, rest = whole.cut(2)
    middle, tail = rest.cut(1)
    assert [part.members for part in (head, middle, tail)] == [(0, 2), (3,), (5, 6)]
    assert [part.key for part in (head, middle, tail)] == [("g", 0), ("g", 3), ("g", 5)]
    assert sum(part.loss_tokens for part in (head, middle, tail)) == whole.loss_tokens == 103
    assert [part.completes for part in (head, middle, tail)] == [False, False, True]
    assert tail.whole() == whole


@pytest.mark.parametrize("order", ["edf", "fifo"])
def test_work_per_group_does_not_grow_with_the_queue(order: str) -> None:
    """Counted in calls of the order's key, not in time."""
    buffer = RolloutBuffer("m", BufferConfig(order=order, max_staleness=None, max_groups=10**6))  # type: ignore[arg-type]
    calls = 0
    rank = buffer._fresh.rank

    def counted(entry: Entry) -> tuple[int, ...]:
        nonlocal calls
        calls += 1
        return rank(entry)

    buffer._fresh.rank = counted
    for number in range(4000):
        assert buffer.add(Entry(f"g{number}", number, 4, 4, 0, number % 7, number % 7))
    assert calls == 4000
    for version in range(400):
        buffer.expire(lambda e: "")
        assert buffer.take(32, 4, version) is not None
        assert (buffer.places, len(buffer)) == (16000 - 32 * (version + 1), 4000 - 8 * (version + 1))
    assert calls <= 4000 + 2 * 400 * 8 + 4000
