"""The leases of one evaluation against a plain model, and the choice of instances."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.dataflow.eval_book import TRIES, EvalBook, candidates, of_wanted, reach
from astraflow.dataflow.eval_lane import rewards_of
from astraflow.dataflow.pool import Instance, InstanceRecord
from astraflow.protocol import codec
from astraflow.protocol.rollout import Lease, Serving

_spec = importlib.util.spec_from_file_location("dataflow_groups", Path(__file__).with_name("groups.py"))
assert _spec is not None
assert _spec.loader is not None
made: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(made)


ACTIONS = ("take", "full", "score", "late", "die")


def book(count: int, n: int = 2) -> EvalBook:
    leases = {f"e{i}": Lease(lease_id=f"e{i}", attempt=1, task_id=f"t{i}", workflow_id="w", n_samples=n, data={}) for i in range(count)}
    found = EvalBook(leases)
    found.waiting.extend(leases)
    return found


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.sampled_from("ab"), st.integers(0, 6)), max_size=60))
def test_every_task_ends_exactly_once_whatever_happens_to_the_instances(actions: list[tuple[str, str, int]]) -> None:
    b = book(5)
    tries = Counter[str]()  # the model: how often a lease was lost, and where it is
    where: dict[str, str] = dict.fromkeys(b.leases, "waiting")
    for action, name, number in actions:
        mine = [key for key, place in where.items() if place == name]
        if action == "take":
            for lease in b.take(name, number, at_most=3):
                assert where[lease.lease_id] == "waiting"
                assert lease.attempt == tries[lease.lease_id] + 1
                where[lease.lease_id] = name
        elif action == "full":
            b.put_back(name, [*mine[:number], "unknown"])
            where.update(dict.fromkeys(mine[:number], "waiting"))
        elif action == "score" and mine:
            assert b.scored(name, mine[0], tries[mine[0]] + 1, [1.0, 0.0])
            where[mine[0]] = "scored"
        elif action == "late":  # of an earlier attempt, of another instance, of something that is no evaluation
            key = f"e{number}"
            assert not b.scored("other", key, tries[key] + 1, [1.0, 1.0])
            assert not b.scored(name, key, tries[key], [1.0, 1.0])
        elif action == "die":
            assert b.lost(name) == len(mine)
            tries.update(mine)
            where.update({key: "given up" if tries[key] == TRIES else "waiting" for key in mine})
        assert set(b.waiting) == {key for key, place in where.items() if place == "waiting"}
        assert len(b.waiting) == len(set(b.waiting))
        assert b.out == {key: place for key, place in where.items() if place in ("a", "b")}
        assert set(b.scores) == {key for key, place in where.items() if place == "scored"}
        assert b.given_up == {key for key, place in where.items() if place == "given up"}
        assert b.complete == (set(where.values()) <= {"scored", "given up"})


def test_an_instance_takes_whole_leases_that_fit_into_its_free_places_in_order() -> None:
    b = book(4, n=3)
    assert [lease.lease_id for lease in b.take("a", 8, at_most=10)] == ["e0", "e1"]
    assert b.take("a", 2, at_most=10) == []
    b.put_back("a", ["e1"])
    assert [lease.lease_id for lease in b.take("b", 100, at_most=2)] == ["e1", "e2"]
    assert [b.leases[key].attempt for key in ("e0", "e1")] == [1, 1], "a lack of room is no failed attempt"


def instance(name: str, state: Any = "live", slots: int = 8, **serving: Serving) -> Instance:
    record = InstanceRecord(instance_id=name, url="", incarnation="", models=["m", "k"], total_slots=slots)
    return Instance(record, state=state, serving=dict(serving))


def at(version: int, timeline: int = 0, digest: str = "d") -> Serving:
    return Serving(timeline=timeline, version=version, digest=digest)


def test_reach_tells_apart_who_serves_the_weights_who_can_and_who_never_will() -> None:
    wanted = {"m": at(5), "k": at(5)}
    sent = lambda model, want: True  # noqa: E731
    gone = lambda model, want: model != "k"  # noqa: E731
    assert reach(instance("a", m=at(5), k=at(5)), wanted, sent) == "exact"
    assert reach(instance("a", m=at(5), k=at(5)), wanted, gone) == "exact", "whoever has them needs no sender"
    assert reach(instance("a", m=at(5), k=at(4)), wanted, sent) == "can"
    assert reach(instance("a", m=at(5), k=at(4)), wanted, gone) == "no"
    assert reach(instance("a", m=at(5), k=at(6)), wanted, sent) == "no", "it moved on"
    assert reach(instance("a", m=at(5), k=at(3, timeline=1)), wanted, sent) == "no", "of a later timeline"
    assert reach(instance("a", m=at(5), k=at(5, digest="other")), wanted, sent) == "can", "to be loaded again"
    assert reach(instance("a", m=at(5), k=at(5, digest="")), wanted, sent) == "exact", "unverified"
    assert reach(instance("a", "suspect", m=at(5), k=at(5)), wanted, sent) == "no"
    assert reach(instance("a", m=at(5)), wanted, sent) == "can"
    assert reach(instance("a", m=at(5), k=at(5)), wanted | {"x": at(5)}, sent) == "no", "it does not have this model"


def test_who_serves_the_weights_comes_before_who_can_and_a_pinned_one_before_a_free_one() -> None:
    wanted = {"m": at(5)}
    everyone = [instance("a", slots=64, m=at(4)), instance("b", m=at(5)), instance("c", slots=16, m=at(5))]
    everyone.append(instance("d", "draining", m=at(5)))
    order = lambda pins: [c.instance_id for c in candidates(everyone, wanted, pins, lambda m, w: True, 0.0)]  # noqa: E731
    assert order({}) == ["c", "b", "a"]
    assert order({"b": wanted}) == ["b", "c", "a"]
    assert order({"a": wanted}) == ["c", "b", "a"]


def test_a_result_of_other_weights_than_those_asked_for_gives_nothing() -> None:
    lease = Lease(lease_id="g", attempt=1, task_id="t", workflow_id="w", n_samples=2, data={})
    group = made.group([made.trajectory(0, 1.0, (5, 5)), made.trajectory(1, 0.0, (5, 5))])
    assert rewards_of(codec.encode(group), lease, {"m": at(5)}) == [1.0, 0.0]
    assert rewards_of(codec.encode(group), lease, {"m": at(4)}) == []
    assert rewards_of(codec.encode(group), lease, {"m": at(5, timeline=1)}) == []
    assert rewards_of(codec.encode(made.group([made.trajectory(0, 1.0, (5, 6)), made.trajectory(1, 0.0)])), lease, {"m": at(5)}) == []
    assert rewards_of(b"no group", lease, {"m": at(5)}) == []
    assert of_wanted(group, {"k": at(1)}), "weights of a policy that sampled nothing"
    failed = made.group([made.trajectory(0, 1.0, (5, 5)), made.trajectory(1, None, error="timeout")])
    assert rewards_of(codec.encode(failed), lease, {"m": at(5)}) == [1.0, None]
