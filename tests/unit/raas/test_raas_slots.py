"""The slot book: verdicts, free slots, and nothing that runs twice."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from astraflow.protocol.rollout import Lease
from astraflow.raas.slots import Held, SlotBook


def lease(lease_id: str = "a", attempt: int = 1, n: int = 2) -> Lease:
    return Lease(lease_id=lease_id, attempt=attempt, task_id="t", workflow_id="w", n_samples=n, data={})


def test_the_same_lease_twice_is_taken_once() -> None:
    book = SlotBook(8, 8)
    assert [book.offer(lease()).verdict for _ in range(2)] == ["accepted", "duplicate"]
    assert (book.free_slots, book.in_flight) == (6, 2)


def test_a_higher_attempt_supersedes_a_running_one_and_the_old_group_is_not_wanted() -> None:
    book = SlotBook(2, 8)
    book.offer(lease())
    old = book.ticket("a")
    assert book.offer(lease(attempt=2)).verdict == "accepted"
    book.episode_ended(old)
    assert book.in_flight == 2
    assert not book.group_done(old)
    assert book.group_done(book.ticket("a"))
    assert book.offer(lease(attempt=1)).verdict == "duplicate"


def test_over_capacity_is_said_for_slots_and_for_the_outbox() -> None:
    book = SlotBook(4, 2)
    assert book.offer(lease("a", n=3)).verdict == "accepted"
    assert book.offer(lease("b", n=2)).verdict == "over_capacity"
    assert book.offer(lease("b", n=1)).verdict == "accepted"
    for name in "ab":
        assert book.group_done(book.ticket(name))
    assert book.free_slots == 0, "two results wait for their acknowledgement: the outbox is full"
    assert book.offer(lease("c", n=1)).verdict == "over_capacity"
    book.acknowledged("a", 1)
    assert book.free_slots == 4
    assert book.offer(lease("c", n=1)).verdict == "accepted"


def test_a_slot_is_free_as_soon_as_its_episode_ended() -> None:
    book = SlotBook(4, 8)
    book.offer(lease(n=4))
    book.episode_ended(book.ticket("a"))
    assert book.free_slots == 1


def test_an_acknowledged_lease_is_remembered_and_a_cancelled_one_is_not() -> None:
    book = SlotBook(4, 8)
    book.offer(lease("a"))
    book.group_done(book.ticket("a"))
    book.acknowledged("a", 1)
    assert book.offer(lease("a")).verdict == "duplicate"
    book.offer(lease("b"))
    book.forget("b")
    assert book.offer(lease("b")).verdict == "accepted"


def test_a_refusal_names_its_reason_but_a_known_lease_stays_a_duplicate() -> None:
    book = SlotBook(4, 8)
    book.offer(lease("a"))
    assert book.offer(lease("a"), refusal="draining").verdict == "duplicate"
    verdict = book.offer(lease("b"), refusal="draining")
    assert (verdict.verdict, verdict.reason) == ("refused", "draining")
    verdict = book.offer(lease("b", n=5))
    assert verdict.verdict == "refused"
    assert "raas.slots" in verdict.reason


def test_late_reports_of_a_cancelled_lease_change_nothing_for_the_one_that_follows() -> None:
    book = SlotBook(2, 8)
    book.offer(lease())
    old = book.ticket("a")
    book.forget("a")
    book.offer(lease())
    book.episode_ended(old)
    assert book.in_flight == 2
    assert not book.group_done(old)


@given(st.integers(1, 8), st.lists(st.integers(1, 8), max_size=20))
def test_accepted_samples_never_exceed_the_slots(total: int, sizes: list[int]) -> None:
    book = SlotBook(total, 100)
    for number, n in enumerate(sizes):
        book.offer(lease(str(number), n=n))
    assert 0 <= book.in_flight <= total
    assert book.free_slots == total - book.in_flight


@given(room=st.integers(1, 32), n=st.integers(1, 8), later=st.integers(1, 32))
@settings(max_examples=25)
def test_the_limit_settles_at_what_the_engine_holds_and_follows_it(room: int, n: int, later: int) -> None:
    """An engine that decodes `room` requests and queues the rest, and as much work as is let in: the queue empties, the limit stays
    within one group and one step of growth below the room, and both move when the room does."""
    book, number = SlotBook(32, 1000), 0
    for holds in (room, later):
        for look in range(60):
            while book.offer(lease(str(number), n=n)).verdict == "accepted":
                number += 1
            book.adapt(max(0, book.in_flight - holds), min(1.0, book.in_flight / holds) * 0.7)
            if look > 45:
                assert book.in_flight <= max(holds + 1 + holds // 8 + n, n), "at most one growth too far, until the next look"
                assert book.in_flight >= min(holds, 32) - n - holds // 8 - 1
            oldest = book.select()[: max(0, book.in_flight // n - holds // n)]
            for name in oldest:  # what waits inside the engine ends one day
                book.forget(name)


def test_full_key_value_memory_takes_no_more_and_an_idle_instance_always_takes_one_group() -> None:
    book = SlotBook(64, 1000)
    assert book.offer(lease("a", n=8)).verdict == "accepted"
    assert book.offer(lease("b", n=8)).verdict == "accepted"
    book.adapt(0, 0.95)
    assert (book.total_slots, book.free_slots) == (16, 0)
    assert book.offer(lease("c", n=8)).verdict == "over_capacity"
    for _ in range(3):
        book.adapt(12, 0.95)
    for name in "ab":
        book.forget(name)
    assert book.total_slots == 8
    assert book.offer(lease("c", n=8)).verdict == "accepted"
    assert book.offer(lease("d", n=65)).verdict == "refused", "never more than was configured"


def test_what_has_just_arrived_is_not_waiting() -> None:
    book = SlotBook(64, 1000)
    book.offer(lease("a", n=8))
    book.adapt(8, 0.1)
    book.adapt(0, 0.1)
    book.adapt(8, 0.1)
    assert book.total_slots == 64
    book.adapt(8, 0.1)
    assert book.total_slots == 8


class Life(RuleBasedStateMachine):
    """Any order of events keeps the sums right and lets each (lease, attempt) run at most once at a time."""

    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.book = SlotBook(6, 4, remembered=8)
        self.done: set[tuple[str, int]] = set()

    @rule(target=tickets, name=st.sampled_from("abcd"), attempt=st.integers(1, 3), n=st.integers(1, 7))
    def offer(self, name: str, attempt: int, n: int) -> Held | None:
        before = self.book.in_flight
        verdict = self.book.offer(lease(name, attempt, n)).verdict
        if verdict != "accepted":
            assert self.book.in_flight == before
            return None
        assert (name, attempt) not in self.done
        return self.book.ticket(name)

    @rule(held=tickets)
    def episode(self, held: Held | None) -> None:
        if held is not None:
            self.book.episode_ended(held)

    @rule(held=tickets)
    def group(self, held: Held | None) -> None:
        if held is not None:
            self.book.group_done(held)

    @rule(name=st.sampled_from("abcd"), attempt=st.integers(1, 3))
    def acknowledge(self, name: str, attempt: int) -> None:
        if any(h.lease_id == name and h.attempt == attempt and h.state == "done" for h in self.book.listing()):
            self.book.acknowledged(name, attempt)
            self.done.add((name, attempt))

    @rule(name=st.sampled_from("abcd"))
    def cancel(self, name: str) -> None:
        self.book.forget(name)

    @invariant()
    def sums(self) -> None:
        assert 0 <= self.book.in_flight <= 6
        assert len(self.book.listing()) <= 4
        assert 0 <= self.book.free_slots <= 6 - self.book.in_flight


Life.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLife = Life.TestCase
