"""The pool against a model of its own: instances and leases come, go, answer, fail, drain and are reconciled in any order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from astraflow.dataflow.pool import REPORT_TRUSTED_S, RaaSPool
from astraflow.protocol.control import RegisterRaaS
from astraflow.protocol.rollout import Serving

NAMES = ("a", "b", "c")
SLOTS = 12
NEWEST = Serving(timeline=0, version=1, digest="d1")
OLDER = Serving(timeline=0, version=0, digest="d0")


@dataclass
class Known:
    """What must be true of one instance, told without the pool's code."""

    incarnation: str
    slots: int = SLOTS
    alive: str = "catching_up"
    """`catching_up`, `live`, `suspect` or `draining`."""
    was_live: bool = False
    failures: int = 0
    newest: bool = False
    leases: dict[str, tuple[int, float, int]] = field(default_factory=dict)
    """lease → (places, since, attempt)."""
    word: tuple[int, float] | None = None
    """Free slots by its own last word, and when."""
    sent: int = 0
    """Places sent since."""
    draining: bool = False
    heard: float = -1e9
    """Its last answer on the data path."""


class PoolMachine(RuleBasedStateMachine):
    """`self.known` is the model; every rule moves both and compares what the pool returned."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = RaaSPool(max_failures=2)
        self.known: dict[str, Known] = {}
        self.now = 0.0
        self.lives = 0
        self.number = 0
        self.given_back: Counter[str] = Counter()
        self.given_out: Counter[str] = Counter()

    def _message(self, name: str, incarnation: str) -> RegisterRaaS:
        return RegisterRaaS(instance_id=name, url=f"http://{name}", models=["m"], total_slots=SLOTS, incarnation=incarnation)

    def _take_back(self, lost: Any, name: str) -> None:
        """What the pool gave back is exactly what the instance held."""
        assert {(h.lease_id, h.places, h.attempt) for h in lost} == {(k, v[0], v[2]) for k, v in self.known[name].leases.items()}
        self.given_back.update(h.lease_id for h in lost)
        self.known[name].leases = {}

    def _new_life(self, name: str) -> str:
        self.lives += 1
        return f"{name}{self.lives}"

    @initialize()
    def two(self) -> None:
        for name in NAMES[:2]:
            self.register(name, True)
            self.loads(name)

    @rule(seconds=st.sampled_from([0.1, 0.6, 5.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    # --- joining and leaving ------------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES), new=st.sampled_from([False, False, True]))
    def register(self, name: str, new: bool) -> None:
        before = self.known.get(name)
        incarnation = self._new_life(name) if new or before is None else before.incarnation
        outcome = self.pool.register(self._message(name, incarnation), self.now)
        if before is not None and before.incarnation == incarnation:
            assert (outcome.kind, outcome.lost) == ("same", [])
            before.slots = SLOTS
            return
        assert outcome.kind == ("new" if before is None else "replaced")
        if before is not None:
            self._take_back(outcome.lost, name)
        self.known[name] = Known(incarnation)

    @precondition(lambda self: len(self.known) > 1)
    @rule(data=st.data())
    def restarts_in_place(self, data: st.DataObject) -> None:
        """A new process answers at the old address before it registers."""
        name = data.draw(st.sampled_from(sorted(self.known)))
        incarnation = self._new_life(name)
        self._take_back(self.pool.answered(name, incarnation, self.now), name)
        self.known[name] = Known(incarnation, self.known[name].slots)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), shutdown=st.booleans())
    def drains(self, data: st.DataObject, shutdown: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.known)))
        self.pool.drain(name, shutdown, self.now)
        self.known[name].alive, self.known[name].draining = "draining", True

    @rule()
    def drained_ones_leave(self) -> None:
        for name in self.pool.drained():
            assert self.known[name].alive == "draining"
            assert not self.known[name].leases
            assert self.pool.remove(name) == []
            del self.known[name]

    @precondition(lambda self: len(self.known) > 2)
    @rule(data=st.data())
    def removed(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.known)))
        self._take_back(self.pool.remove(name), name)
        del self.known[name]

    # --- answers and silence ------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def data_path_fails(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.known)))
        self.pool.suspect(name, "failed")
        if self.known[name].alive in ("live", "catching_up"):
            self.known[name].alive = "suspect"

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def data_path_answers(self, data: st.DataObject) -> None:
        """A proof of life that clears nothing."""
        name = data.draw(st.sampled_from(sorted(self.known)))
        assert self.pool.heard(name, self.known[name].incarnation, self.now)
        self.known[name].heard = self.now
        assert not self.pool.heard(name, "a stranger", self.now)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def status_answers(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.known)))
        known = self.known[name]
        assert self.pool.answered(name, known.incarnation, self.now) == []
        known.failures = 0
        if known.alive == "suspect":
            known.alive = "draining" if known.draining else "live" if known.was_live else "catching_up"

    @precondition(lambda self: self.known)
    @rule(data=st.data(), late=st.booleans())
    def status_fails(self, data: st.DataObject, late: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.known)))
        known = self.known[name]
        if late and self.now - known.heard <= self.pool.alive_s:
            assert not self.pool.failed(name, "late", self.now, late=True)
            return
        known.failures += 1
        assert self.pool.failed(name, "failed", self.now, late=late) == (known.failures >= 2)
        if known.alive in ("live", "catching_up"):
            known.alive = "suspect"
        if known.failures >= 2:
            self._take_back(self.pool.remove(name), name)
            del self.known[name]

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def loads(self, name: str = "", data: st.DataObject | None = None) -> None:
        name = name or data.draw(st.sampled_from(sorted(self.known)))  # type: ignore[union-attr]
        known = self.known[name]
        self.pool.served(name, {"m": NEWEST})
        known.newest = True
        ready = {key for key, other in self.known.items() if other.newest and other.alive == "catching_up"}
        assert set(self.pool.catch_up(lambda i: i.serving.get("m") == NEWEST)) == ready
        for key in ready:
            self.known[key].alive, self.known[key].was_live = "live", True

    @precondition(lambda self: self.known)
    @rule(data=st.data(), free=st.integers(0, SLOTS), total=st.sampled_from([0, SLOTS // 3, SLOTS]))
    def says_what_is_free(self, data: st.DataObject, free: int, total: int) -> None:
        """Perhaps also how many it has in all: an engine less, and what runs there is too much for it."""
        name = data.draw(st.sampled_from(sorted(self.known)))
        known = self.known[name]
        self.pool.reported(name, free, self.now, total)
        known.word, known.sent, known.slots = (free, self.now), 0, total or known.slots

    # --- leases -------------------------------------------------------------------------------------------------------------

    def _free(self, known: Known) -> int:
        free = known.slots - sum(lease[0] for lease in known.leases.values())
        if known.word is not None and self.now - known.word[1] <= REPORT_TRUSTED_S:
            free = min(free, known.word[0] - known.sent)
        return max(free, 0)

    @rule(groups=st.lists(st.integers(1, 5), min_size=1, max_size=6), barred=st.sampled_from([(), (), ("a",), ("a", "b")]))
    def work_is_routed(self, groups: list[int], barred: tuple[str, ...]) -> None:
        for places in groups:
            self._route(places, barred)

    def _route(self, places: int, barred: tuple[str, ...]) -> None:
        instance = self.pool.route(places, lambda i: i.instance_id not in barred, self.now)
        able = {
            name
            for name, known in self.known.items()
            if known.alive == "live" and self._free(known) >= places and name not in barred
        }
        if instance is None:
            rest = {name for name in able if self.now < self.pool.instances[name].rests_until}
            assert able == rest, "nobody who may work stays idle"
            return
        assert instance.instance_id in able
        self.number += 1
        lease_id = f"lease-{self.number}"
        self.pool.assign(instance.instance_id, lease_id, 1, places, self.now)
        known = self.known[instance.instance_id]
        known.leases[lease_id] = (places, self.now, 1)
        known.sent += places
        self.given_out[lease_id] += 1

    @precondition(lambda self: any(known.leases for known in self.known.values()))
    @rule(data=st.data(), named=st.booleans())
    def a_result_comes(self, data: st.DataObject, named: bool) -> None:
        name = data.draw(st.sampled_from(sorted(key for key, known in self.known.items() if known.leases)))
        lease_id = data.draw(st.sampled_from(sorted(self.known[name].leases)))
        assert self.pool.holder(lease_id) is self.pool.instances[name]
        held = self.pool.release(lease_id, name if named else "")
        assert held is not None
        assert held.places == self.known[name].leases.pop(lease_id)[0]
        assert self.pool.release(lease_id) is None, "the same result again"
        self.given_back[lease_id] += 1

    @precondition(lambda self: self.known)
    @rule(data=st.data(), ago=st.sampled_from([0.0, 1.0]), stranger=st.booleans())
    def leases_are_compared(self, data: st.DataObject, ago: float, stranger: bool) -> None:
        """It says that it holds some of its leases, perhaps one that is not its own; younger ones may not have reached it."""
        name = data.draw(st.sampled_from(sorted(self.known)))
        known, before = self.known[name], self.now - ago
        there = data.draw(st.sets(st.sampled_from(sorted(known.leases)))) if known.leases else set()
        lost = {key for key, (_, since, _) in known.leases.items() if key not in there and since < before}
        answer = dict.fromkeys(there, 1) | ({"stranger": 1} if stranger else {})
        gone, foreign = self.pool.reconcile(name, answer, before)
        assert {held.lease_id for held in gone} == lost
        assert foreign == (["stranger"] if stranger else [])
        for key in lost:
            del known.leases[key]
            self.given_back[key] += 1

    # --- always -------------------------------------------------------------------------------------------------------------

    @invariant()
    def every_instance_is_what_the_model_says(self) -> None:
        assert set(self.pool.instances) == set(self.known)
        for name, known in self.known.items():
            instance = self.pool.instances[name]
            assert (instance.state, instance.failures) == (known.alive, known.failures)
            assert instance.record.incarnation == known.incarnation
            assert {key: held.places for key, held in instance.held.items()} == {key: lease[0] for key, lease in known.leases.items()}

    @invariant()
    def free_slots_are_never_negative_nor_more_than_all(self) -> None:
        for name, known in self.known.items():
            free = self.pool.instances[name].free(self.now)
            assert 0 <= free <= known.slots
            assert free == self._free(known)

    @invariant()
    def a_lease_is_held_by_one_instance_or_was_given_back_once(self) -> None:
        held = Counter(key for instance in self.pool.instances.values() for key in instance.held)
        assert held + self.given_back == self.given_out
        assert max(self.given_out.values(), default=1) == 1


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
