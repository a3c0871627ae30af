"""The barrier against an independent model: every call in any order, every invariant after each."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from astraflow.dataflow.barrier import KNOWN_PROCESSES, ModelState, VersionBarrier
from astraflow.protocol.control import NotifyVersion, Ready
from astraflow.protocol.errors import Conflict, Replaced

NAMES = ("a", "b", "c")
DEADLINE_S = 10.0


def make(names: tuple[str, ...], lead: int) -> VersionBarrier:
    return VersionBarrier({name: ModelState(model_id=name) for name in names}, lead, DEADLINE_S)


def ready(name: str, version: int, digest: str, process: str) -> Ready:
    message = Ready(model_id=name, train_batch_size=8, sender_endpoint="http://x", version=version, digest=digest)
    message.recovered_version, message.incarnation = version, process
    return message


def same(one: str, other: str) -> bool:
    """The same bytes, as far as is known: of a version that was jumped over nobody ever said a digest."""
    return not one or not other or one == other


@dataclass
class Trainer:
    """What one policy's trainers did, kept without any of the barrier's code: the history of published weights as a list."""

    registered: bool = False
    done: bool = False
    dead: bool = False
    heard: float = 0.0
    process: str = ""
    timeline: int = 0
    history: list[tuple[int, str]] = field(default_factory=list)
    """(publish, digest) of every version on the live timeline, from 0; what a rollback cut off is not in it. Two versions are the
    same weights iff they are the same publish, whatever is known of their bytes."""
    lives: list[list[int]] = field(default_factory=list)
    """Per timeline, the publishes at its end."""
    said: list[tuple[int, str]] = field(default_factory=list)
    """(version, digest) of every /ready of the present process since Dataflow started."""
    replaced: list[str] = field(default_factory=list)

    @property
    def version(self) -> int:
        return len(self.history) - 1

    @property
    def publishes(self) -> list[int]:
        return [publish for publish, _ in self.history]

    def digest(self, version: int) -> str:
        return self.history[version][1]

    @property
    def counts(self) -> bool:
        return self.registered and not self.done and not self.dead


class BarrierMachine(RuleBasedStateMachine):
    """Trainers attach, publish, repeat themselves, crash, come back lower, are replaced, die and end."""

    @initialize(count=st.integers(1, 3), lead=st.integers(0, 2))
    def begin(self, count: int, lead: int) -> None:
        self.lead, self.now, self.serial = lead, 0.0, 0
        self.names = NAMES[:count]
        self.core = make(self.names, lead)
        self.model = {name: Trainer() for name in self.names}
        self.seen: dict[str, list[tuple[int, int]]] = {name: [] for name in self.names}

    def name(self, number: int) -> str:
        return self.names[number % len(self.names)]

    def fresh(self) -> str:
        self.serial += 1
        return f"x{self.serial}"

    def publish_number(self) -> int:
        self.serial += 1
        return self.serial

    def heard(self, trainer: Trainer) -> None:
        trainer.heard, trainer.dead = self.now, False

    @rule(who=st.integers(0, 2), back=st.integers(0, 6), other_bytes=st.booleans(), new_process=st.booleans())
    def attach(self, who: int, back: int, other_bytes: bool, new_process: bool) -> None:
        """/ready at the present version or below, with the same bytes or others, by the same process or another."""
        name = self.name(who)
        trainer = self.model[name]
        start = max(trainer.version - back, 0)
        digest = self.fresh() if other_bytes or not trainer.history else trainer.digest(start)
        if new_process or not trainer.process or len(trainer.said) == KNOWN_PROCESSES:
            trainer.replaced += [trainer.process] if trainer.process else []
            trainer.process, trainer.said = self.fresh(), []
        late = (start, digest) in trainer.said and start < trainer.version
        trainer.said.append((start, digest))
        if late:  # a copy of what it said before it went on: nobody goes back
            outcome = self.core.ready(ready(name, start, digest, trainer.process), self.now)
            assert (outcome.bumped, outcome.fresh, outcome.version, outcome.timeline) == (False, False, trainer.version, trainer.timeline)
            return
        outcome = self.core.ready(ready(name, start, digest, trainer.process), self.now)
        kept = bool(trainer.history) and same(trainer.digest(start), digest)
        bumped = bool(trainer.history) and (start < trainer.version or not kept)
        assert (outcome.bumped, outcome.version) == (bumped, start)
        assert outcome.fresh == (not trainer.registered or trainer.done)
        assert outcome.commit_through is None
        if bumped:
            trainer.lives.append(trainer.publishes)
            trainer.timeline += 1
        trainer.history = [*trainer.history[:start], (trainer.history[start][0] if kept else self.publish_number(), digest)]
        trainer.registered, trainer.done = True, False
        self.heard(trainer)

    @rule(who=st.integers(0, 2), which=st.integers(0, 9))
    def a_replaced_process_attaches(self, who: int, which: int) -> None:
        trainer = self.model[self.name(who)]
        if trainer.replaced:
            process = trainer.replaced[-1 - which % min(len(trainer.replaced), KNOWN_PROCESSES)]
            with pytest.raises(Replaced):
                self.core.ready(ready(self.name(who), max(trainer.version, 0), self.fresh(), process), self.now)

    @rule(who=st.integers(0, 2), step=st.integers(-3, 3), old_line=st.booleans(), wrong=st.booleans(), stranger=st.booleans())
    def publish(self, who: int, step: int, old_line: bool, wrong: bool, stranger: bool) -> None:
        """A notice: the next one, a duplicate, an older one that comes late, one too far ahead; right, of a dead timeline, with
        contradicting bytes, or by a process that was replaced."""
        name = self.name(who)
        trainer = self.model[name]
        version = max(trainer.version + step, 0)
        known = trainer.digest(version) if version <= trainer.version else ""
        digest = self.fresh() if wrong or not known else known
        timeline = trainer.timeline - 1 if old_line else trainer.timeline
        message = NotifyVersion(model_id=name, timeline=timeline, version=version, digest=digest)
        message.incarnation = "stranger" if stranger else trainer.process
        if stranger and trainer.registered:
            self.refused(message, Replaced)
        elif not trainer.registered or old_line or (known and wrong):
            self.refused(message, Conflict)
        else:
            outcome = self.core.notify(message, self.now)
            self.heard(trainer)
            if version <= trainer.version:
                assert outcome.kind == "duplicate"
                return
            assert (outcome.kind, outcome.first, outcome.skipped) == ("new", trainer.version, version - trainer.version - 1)
            trainer.history += [(self.publish_number(), "") for _ in range(outcome.skipped)] + [(self.publish_number(), digest)]

    def refused(self, message: NotifyVersion, kind: type[Conflict]) -> None:
        before = self.core.models[message.model_id].version
        with pytest.raises(kind):
            self.core.notify(message, self.now)
        assert self.core.models[message.model_id].version == before

    @rule(who=st.integers(0, 2), stranger=st.booleans())
    def end(self, who: int, stranger: bool) -> None:
        name = self.name(who)
        trainer = self.model[name]
        if stranger and trainer.registered:
            with pytest.raises(Replaced):
                self.core.finish(name, self.now, "stranger")
        else:
            assert self.core.finish(name, self.now, trainer.process) == (not trainer.done)
            trainer.done = True
            self.heard(trainer)

    @rule(who=st.integers(0, 2))
    def call(self, who: int) -> None:
        """Any call of a trainer that is attached."""
        trainer = self.model[self.name(who)]
        assert self.core.touch(self.name(who), self.now) == trainer.dead
        self.heard(trainer)

    @rule(seconds=st.floats(0.0, 12.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        late = [n for n, t in self.model.items() if t.counts and self.now - t.heard > DEADLINE_S]
        assert self.core.tick(self.now) == late, "each is named once"
        for name in late:
            self.model[name].dead = True

    @rule()
    def dataflow_restarts(self) -> None:
        """The states come back from the ledger; everybody gets the full deadline."""
        old = self.core
        self.core = VersionBarrier(dict(old.models), self.lead, DEADLINE_S)
        self.core.resumed(self.now)
        for trainer in self.model.values():
            if trainer.registered and not trainer.done:
                self.heard(trainer)
            trainer.dead, trainer.said = False, []

    # --- after every call -----------------------------------------------------------------------------------------------

    @invariant()
    def versions_and_minimum(self) -> None:
        for name, trainer in self.model.items():
            state = self.core.models[name]
            assert (state.version, state.timeline) == (max(trainer.version, 0), trainer.timeline)
            assert (state.registered, state.done) == (trainer.registered, trainer.done)
            assert {version: digest for version, digest in state.digests.items() if digest} == {
                version: digest for version, (_, digest) in enumerate(trainer.history) if digest
            }
        live = [trainer.version for trainer in self.model.values() if trainer.counts]
        if live:
            assert self.core.service_version == min(live)
        assert self.core.live() == [name for name, trainer in self.model.items() if trainer.counts]
        assert self.core.all_done == all(trainer.done for trainer in self.model.values())

    @invariant()
    def names_of_batches_only_grow(self) -> None:
        for name in self.names:
            now = (self.core.models[name].timeline, self.core.models[name].version)
            if not self.seen[name] or self.seen[name][-1] != now:
                assert all(earlier < now for earlier in self.seen[name]), "a name is never given twice"
                self.seen[name].append(now)

    @invariant()
    def tokens_of_a_dead_timeline_do_not_pass(self) -> None:
        for name, trainer in self.model.items():
            for line, life in enumerate([*trainer.lives, trainer.publishes]):
                for version in range(len(life)):
                    # on the live timeline iff the live history still has this very publish, and all before it
                    shared = trainer.publishes[: version + 1] == life[: version + 1]
                    assert self.core.on_live_timeline(name, line, version) == shared, (name, line, version)
            assert not self.core.on_live_timeline(name, trainer.timeline + 1, 0)

    @invariant()
    def gates_name_exactly_those_that_are_behind(self) -> None:
        missing = [f"trainer:{n}" for n, t in self.model.items() if not t.registered and not t.done]
        for asker, version in product(self.names, range(4)):
            behind = [f"trainer:{n}" for n, t in self.model.items() if n != asker and t.counts and t.version < version - self.lead]
            edges = self.core.gate(version, asker)
            assert [edge.waits_for for edge in edges] == missing + behind
            for edge in edges[len(missing) :]:
                assert edge.until == self.model[edge.waits_for.removeprefix("trainer:")].heard + DEADLINE_S


TestBarrier = BarrierMachine.TestCase
TestBarrier.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 3), st.integers(0, 2), st.lists(st.integers(0, 2), max_size=40))
def test_max_policy_lead_lets_through_exactly_what_a_brute_force_model_does(count: int, lead: int, order: list[int]) -> None:
    """Trainers ask in any order for their next batch, and step when they get it."""
    core, versions = make(NAMES[:count], lead), [0] * count
    for name in NAMES[:count]:
        core.ready(ready(name, 0, f"{name}0", name), 0.0)
    for number in order:
        me = number % count
        allowed = all(versions[other] >= versions[me] - lead for other in range(count) if other != me)
        assert (core.gate(versions[me], NAMES[me]) == []) == allowed
        if allowed:
            versions[me] += 1
            message = NotifyVersion(model_id=NAMES[me], timeline=0, version=versions[me], digest=f"{NAMES[me]}{versions[me]}")
            core.notify(message, 0.0)
        assert max(versions) - min(versions) <= lead + 1
        assert core.service_version == min(versions)
        assert any(core.gate(versions[i], NAMES[i]) == [] for i in range(count)), "somebody may always go on"


@pytest.mark.parametrize(("count", "lead"), [(2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (3, 2)])
def test_every_reachable_set_of_versions_is_reached_and_no_other(count: int, lead: int) -> None:
    bound = 4
    reached, todo = {(0,) * count}, [(0,) * count]
    while todo:
        versions = todo.pop()
        core = make(NAMES[:count], lead)
        for name, version in zip(NAMES, versions, strict=False):
            core.ready(ready(name, version, f"{name}{version}", name), 0.0)
        for me, version in enumerate(versions):
            after = (*versions[:me], version + 1, *versions[me + 1 :])
            if version < bound and not core.gate(version, NAMES[me]) and after not in reached:
                reached.add(after)
                todo.append(after)
    assert reached == {v for v in product(range(bound + 1), repeat=count) if max(v) - min(v) <= lead + 1}
