"""The lease book and the task source against independent models."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from astraflow.dataflow.leases import LeaseBook
from astraflow.dataflow.pool import Held
from astraflow.dataflow.source import FORCED_AFTER, TaskSource
from astraflow.datasets.api import Task

TASKS = [Task(f"t{i}", {"i": i}) for i in range(7)]


class LeaseModel(RuleBasedStateMachine):
    """Instances work, forget, refuse and die; the process is killed; every lease ends exactly once."""

    @initialize(max_attempts=st.integers(1, 4))
    def begin(self, max_attempts: int) -> None:
        self.max_attempts = max_attempts
        self.book = LeaseBook("run", max_attempts)
        self.source = TaskSource(TASKS, seed=1)
        self.out: dict[str, tuple[int, str]] = {}
        """Lease → (attempt, instance) of those on an instance."""
        self.waiting: list[tuple[str, int]] = []
        """(lease, attempt) to be issued again, oldest first."""
        self.ended: dict[str, str] = {}
        self.issued: Counter[str] = Counter()
        self.earlier: set[str] = set()
        """Ids that earlier lives of the process gave."""

    def live(self) -> set[str]:
        return set(self.out) | {lease_id for lease_id, _ in self.waiting}

    @rule(instance=st.sampled_from("ab"))
    def submit(self, instance: str) -> None:
        """What is to be issued again goes first, then a new task."""
        lease = self.book.next_pending(instance)
        if self.waiting:
            assert lease is not None
            assert (lease.lease_id, lease.attempt) == self.waiting.pop(0), "oldest first"
        else:
            assert lease is None
            draw = self.source.draw(lambda task_id, number: True)
            assert draw is not None
            lease = self.book.new(draw, 4, 9, ("m",), instance)
            assert lease.lease_id not in self.ended, "an id is never given twice"
            assert lease.lease_id not in self.live()
            assert lease.attempt == 1
            assert self.book.data[lease.lease_id] == draw.task.data
        assert lease.instance == instance
        self.issued[lease.lease_id] += 1
        self.out[lease.lease_id] = (lease.attempt, instance)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.out)))
        attempt, _ = self.out.pop(lease_id)
        assert self.book.verdict(lease_id, attempt) == "wanted"
        if attempt > 1:
            assert self.book.verdict(lease_id, attempt - 1) == "superseded"
        self.book.close(lease_id)
        self.ended[lease_id] = "delivered"
        assert self.book.verdict(lease_id, attempt) == "duplicate"

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        """Not accepted: the same attempt goes elsewhere."""
        lease_id = data.draw(st.sampled_from(sorted(self.out)))
        attempt, _ = self.out.pop(lease_id)
        self.book.requeue(lease_id)
        self.waiting.append((lease_id, attempt))

    @rule(instance=st.sampled_from("ab"), twice=st.booleans())
    def die(self, instance: str, twice: bool) -> None:
        held = [Held(lease_id, attempt, 4, 0.0) for lease_id, (attempt, where) in self.out.items() if where == instance]
        given_up = self.book.lost(held)
        if twice:
            assert self.book.lost(held) == [], "an instance that leaves twice leaves once"
        assert given_up == [h.lease_id for h in held if h.attempt == self.max_attempts]
        for item in held:
            del self.out[item.lease_id]
            if item.attempt < self.max_attempts:
                self.waiting.append((item.lease_id, item.attempt + 1))
            else:
                self.ended[item.lease_id] = "max_attempts"

    @rule()
    def kill(self) -> None:
        """The process is killed: the ledger gives back open leases; those of unknown instances are to be issued again."""
        rows, number = list(self.book.open.values()), self.book.next_number
        self.earlier |= set(self.ended) | self.live()
        self.book = LeaseBook("run", self.max_attempts)
        self.book.next_number = number
        for row in rows:
            self.book.restore(row, TASKS[row.task_index].data)
        for lease_id, _ in self.waiting:
            self.book.requeue(lease_id)

    @rule()
    def begin_another_run(self) -> None:
        """Another run directory, another prefix: its ids are none of ours (fault 21)."""
        other = LeaseBook("run2", self.max_attempts)
        draw = TaskSource(TASKS, seed=1).draw(lambda task_id, number: True)
        assert draw is not None
        assert other.new(draw, 4, 9, ("m",), "a").lease_id not in self.live() | set(self.ended)

    @invariant()
    def every_open_lease_is_out_or_waiting(self) -> None:
        if not hasattr(self, "book"):
            return
        assert set(self.book.open) == set(self.book.data) == self.live()
        assert not set(self.out) & {lease_id for lease_id, _ in self.waiting}
        pending = [key for key in self.book.pending if key in self.book.open]
        assert pending == [lease_id for lease_id, _ in self.waiting]
        assert len(set(pending)) == len(pending)
        for lease_id, lease in self.book.open.items():
            assert 1 <= lease.attempt <= self.max_attempts
            if lease_id in self.out:
                assert (lease.attempt, lease.instance) == self.out[lease_id]
        assert self.book.next_number == len(self.live()) + len(self.ended)
        seeds = [lease.seed for lease in self.book.open.values()]
        assert len(set(seeds)) == len(seeds)


class SourceModel(RuleBasedStateMachine):
    """Draws against a list of all epochs' tasks, with refusals and restarts."""

    @initialize(size=st.integers(1, 7), epochs=st.one_of(st.none(), st.integers(1, 4)), shuffle=st.booleans())
    def begin(self, size: int, epochs: int | None, shuffle: bool) -> None:
        self.size, self.epochs, self.shuffle = size, epochs, shuffle
        self.source = self.make()
        self.looked: list[str] = []
        """Every task that was handed out or refused, in order."""
        self.taken: Counter[str] = Counter()

    def make(self) -> TaskSource:
        return TaskSource(TASKS[: self.size], seed=3, shuffle=self.shuffle, epochs=self.epochs)

    @rule(wanted=st.integers(0, 12))
    def draw(self, wanted: int) -> None:
        """The curators want the task after `wanted` refusals."""
        refusals = 0

        def wants(task_id: str, number: int) -> bool:
            nonlocal refusals
            assert number == len(self.looked), "chance counts the tasks that were looked at"
            self.looked.append(task_id)
            refusals += 1
            return refusals > wanted

        drawn = self.source.draw(wants)
        if drawn is None:
            assert self.epochs is not None
            assert self.source.exhausted
            assert len(self.looked) == self.epochs * self.size
            return
        assert drawn.task.task_id == self.looked[-1]
        assert drawn.epoch == (len(self.looked) - 1) // self.size
        self.taken[drawn.task.task_id] += 1

    @rule()
    def kill(self) -> None:
        state = self.source.state
        self.source = self.make()
        self.source.state = state

    @invariant()
    def every_epoch_looks_at_every_task_once(self) -> None:
        if not hasattr(self, "source"):
            return
        for start in range(0, len(self.looked) - self.size + 1, self.size):
            assert sorted(self.looked[start : start + self.size]) == sorted(task.task_id for task in TASKS[: self.size])
        counts = Counter(self.looked)
        assert max(counts.values(), default=0) - min((counts[t.task_id] for t in TASKS[: self.size]), default=0) <= 1
        state = self.source.state
        assert state.drawn == self.taken.total()
        assert state.drawn + state.skipped == len(self.looked)
        assert state.epoch * self.size + state.position == len(self.looked)
        assert state.refused_in_row < FORCED_AFTER


TestLeaseModel = LeaseModel.TestCase
TestLeaseModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSourceModel = SourceModel.TestCase
TestSourceModel.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
