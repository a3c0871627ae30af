"""The half switch, driven by events and a made-up clock."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from astraflow.weights.buffer import HalfSwitch, Held


class Switching(RuleBasedStateMachine):
    """A writer, readers that come, get on, stall and leave, or are cancelled and start again, and a clock."""

    def __init__(self) -> None:
        super().__init__()
        self.switch = HalfSwitch()
        self.now = 0.0
        self.version = 0
        self.count = 0
        self.contents: list[int | None] = [None, None]  # what the bytes of each half really are; None = being written
        self.reading: dict[str, tuple[int, int]] = {}  # reader → (half, version it believes to read)
        self.writing = -1
        self.patience_ends = 0.0
        self.cancelled: list[str] = []

    @rule(patience=st.floats(0, 5))
    @precondition(lambda self: self.writing < 0)
    def claim(self, patience: float) -> None:
        self.switch.claim(self.switch.target(), self.now, patience)
        self.patience_ends = self.now + patience
        if self.switch.may_write():
            self.writing = self.switch.claimed
            self.contents[self.writing] = None

    @rule()
    @precondition(lambda self: self.writing < 0 and self.switch.may_write())
    def granted_later(self) -> None:
        self.writing = self.switch.claimed
        self.contents[self.writing] = None

    @rule()
    @precondition(lambda self: self.writing >= 0)
    def publish(self) -> None:
        self.contents[self.writing] = self.version
        self.switch.publish(self.writing, Held(self.version))
        self.switch.name(self.writing, f"d{self.version}")
        self.writing = -1
        self.version += 1

    @rule(back=st.integers(0, 3))
    def enter(self, back: int) -> None:
        version = self.version - 1 - back
        half = self.switch.find(version, f"d{version}")
        if half is None:
            assert back > 0 or self.version == 0, "the newest version is always to be had"
            return
        self.count += 1
        self.reading[f"r{self.count}"] = (half, version)
        self.switch.enter(f"r{self.count}", half, self.now)

    @rule(seconds=st.floats(0, 3))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def some_reader_gets_on(self) -> None:
        if self.reading:
            self.switch.progress(next(iter(self.reading)), self.now)

    @rule()
    def some_reader_leaves(self) -> None:
        if self.reading:
            name = next(iter(self.reading))
            del self.reading[name]
            self.switch.leave(name)

    @rule()
    def cancel_the_overdue(self) -> None:
        late = self.switch.claimed >= 0 and self.now >= self.patience_ends
        for name in self.switch.overdue(self.now, 10.0):
            del self.reading[name]
            self.switch.leave(name)
            self.cancelled.append(name)
        assert not late or self.switch.may_write(), "no reader holds a writer up beyond its patience"

    @rule()
    @precondition(lambda self: self.cancelled and self.version)
    def one_that_was_cancelled_starts_again(self) -> None:
        half = self.switch.find(self.version - 1)
        assert half is not None, "the newest version is always to be had"
        name = self.cancelled.pop()
        self.reading[name] = (half, self.version - 1)
        self.switch.enter(name, half, self.now)

    @invariant()
    def nobody_reads_what_is_written(self) -> None:
        for half, version in self.reading.values():
            assert self.contents[half] == version

    @invariant()
    def newest_is_served(self) -> None:
        assert self.switch.versions()[:1] == ([self.version - 1] if self.version else [])


TestSwitching = Switching.TestCase
TestSwitching.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_both_versions_serve_until_the_older_half_is_claimed() -> None:
    switch = HalfSwitch()
    for version in range(3):
        switch.claim(switch.target(), 0.0, 1.0)
        switch.publish(switch.claimed, Held(version))
    assert switch.versions() == [2, 1]
    switch.claim(switch.target(), 0.0, 1.0)
    assert switch.versions() == [2]
    assert switch.find(1) is None


def test_a_slow_reader_is_named_only_when_patience_ends() -> None:
    switch = HalfSwitch([Held(1, "a"), Held(2, "b")], newest=1)
    switch.enter("slow", 0, 0.0)
    switch.enter("other half", 1, 0.0)
    switch.claim(0, 1.0, patience_s=5.0)
    assert not switch.may_write()
    assert switch.overdue(5.9, 100) == []
    assert switch.overdue(6.0, 100) == ["slow"]
    assert not switch.may_write()
    switch.leave("slow")
    assert switch.may_write()
    assert switch.overdue(50.0, 100) == []


def test_a_silent_reader_is_named_without_any_writer() -> None:
    switch = HalfSwitch([Held(1), None], newest=0)
    switch.enter("a", 0, 0.0)
    switch.enter("b", 0, 0.0)
    switch.progress("b", 8.0)
    assert switch.overdue(10.0, 10.0) == ["a"]


def test_the_newest_half_cannot_be_claimed_and_an_ungranted_claim_cannot_publish() -> None:
    switch = HalfSwitch([Held(1), Held(2)], newest=1)
    with pytest.raises(AssertionError):
        switch.claim(1, 0.0, 1.0)
    switch.enter("r", 0, 0.0)
    switch.claim(0, 0.0, 1.0)
    with pytest.raises(AssertionError):
        switch.publish(0, Held(3))


def test_a_version_number_that_came_back_is_told_apart_by_its_digest() -> None:
    switch = HalfSwitch([Held(3, "old"), Held(3, "new")], newest=1)
    assert switch.find(3) == 1
    assert switch.find(3, "old") == 0
    assert switch.find(3, "x") is None
