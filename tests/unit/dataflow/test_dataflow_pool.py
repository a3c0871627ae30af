from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from astraflow.dataflow.leases import LeaseBook
from astraflow.dataflow.pool import InstanceRecord, RaaSPool
from astraflow.dataflow.source import Draw
from astraflow.datasets.api import Task
from astraflow.protocol.control import RegisterRaaS
from astraflow.protocol.rollout import Serving


def register(name: str = "r", slots: int = 16, incarnation: str = "one", weight: float = 1.0) -> RegisterRaaS:
    return RegisterRaaS(instance_id=name, url=f"http://{name}", models=["m"], total_slots=slots, incarnation=incarnation, weight=weight)


def live(*names: str, **options: Any) -> RaaSPool:
    pool = RaaSPool()
    for name in names:
        pool.register(register(name, **options), 0.0)
    pool.catch_up(lambda instance: True)
    return pool


def test_no_work_before_it_serves_the_newest_weights() -> None:
    pool = RaaSPool()
    pool.register(register(), 0.0)
    newest = Serving(timeline=0, version=3, digest="d")

    def is_current(instance: Any) -> bool:
        return bool(instance.serving.get("m") == newest)

    assert pool.catch_up(is_current) == []
    assert pool.route(4, lambda i: True, 0.0) is None
    pool.served("r", {"m": newest})
    assert pool.catch_up(is_current) == ["r"]
    assert pool.route(4, lambda i: True, 0.0) is not None


def test_suspect_gets_no_work_and_only_its_own_status_clears_or_removes_it() -> None:
    pool = live("r")
    assert pool.suspect("r", "pull failed")
    assert not pool.suspect("r", "again"), "only the first is news"
    assert pool.route(4, lambda i: True, 0.0) is None
    pool.answered("r", "one", 1.0)
    assert pool.instances["r"].state == "live"
    assert not pool.failed("r", "refused", 1.5)
    pool.answered("r", "one", 2.0)
    assert not pool.failed("r", "refused", 3.0), "two in a row, not two in all"
    assert pool.failed("r", "refused", 4.0)


def test_a_late_status_does_not_count_against_an_instance_whose_data_path_works() -> None:
    pool = live("r")
    assert pool.heard("r", "one", 100.0)
    for now in (101.0, 108.0, 115.0):
        assert not pool.failed("r", "no answer within 5 s", now, late=True), "a saturated machine answers slowly"
    instance = pool.instances["r"]
    assert (instance.state, instance.failures, instance.late, instance.last_seen) == ("live", 0, 3, 100.0)
    assert not pool.failed("r", "no answer within 5 s", 115.1, late=True), "a long poll and a status call ago: no proof of life any more"
    assert instance.state == "suspect"
    assert pool.failed("r", "no answer within 5 s", 116.0, late=True)


def test_a_refused_connection_counts_whatever_was_heard_before() -> None:
    pool = live("r")
    pool.heard("r", "one", 0.0)
    assert not pool.failed("r", "connection refused", 0.1)
    assert pool.failed("r", "connection refused", 0.2)


def test_an_answer_on_the_data_path_clears_no_suspicion_and_one_of_another_process_is_no_proof() -> None:
    pool = live("r")
    pool.suspect("r", "pull failed")
    assert pool.heard("r", "one", 1.0)
    assert pool.instances["r"].state == "suspect"
    assert not pool.heard("r", "two", 2.0)
    assert pool.instances["r"].last_seen == 1.0
    assert pool.heard("gone", "one", 1.0), "an instance that left meanwhile is nobody's business"


def test_one_suspicion_costs_nothing_and_each_further_one_doubles_the_rest() -> None:
    pool, now = live("r", "other"), 0.0
    rests = []
    for _ in range(9):
        pool.suspect("r", "pull failed")
        pool.answered("r", "one", now)
        rests.append(max(pool.instances["r"].rests_until - now, 0.0))
        now = max(pool.instances["r"].rests_until, now)
    assert rests == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    pool.suspect("r", "pull failed")
    pool.answered("r", "one", now)
    chosen = {pool.route(4, lambda i: True, now).instance_id for _ in range(8)}  # type: ignore[union-attr]
    assert chosen == {"other"}, "no new work while it rests"
    assert pool.share("other", 4, 64, now) == 64, "and nobody waits for its part"
    assert "no new work for 60 s" in pool.info(now)[0].reason
    now = pool.instances["r"].rests_until
    assert {pool.route(4, lambda i: True, now).instance_id for _ in range(8)} == {"r", "other"}  # type: ignore[union-attr]
    pool.suspect("r", "pull failed")
    pool.answered("r", "one", now + 301.0)
    assert pool.instances["r"].suspicions == 1, "forgotten after a calm time"


def test_the_only_instance_works_however_often_it_was_suspected() -> None:
    pool = live("r")
    for _ in range(5):
        pool.suspect("r", "pull failed")
        pool.answered("r", "one", 0.0)
    assert pool.route(4, lambda i: True, 0.0) is not None


def test_a_new_process_under_the_old_name_loses_its_leases_and_must_catch_up() -> None:
    pool = live("r")
    pool.assign("r", "x", 1, 4, 0.0)
    again = pool.register(register(incarnation="one"), 1.0)
    assert (again.kind, again.lost) == ("same", [])
    assert pool.instances["r"].held
    lost = pool.answered("r", "two", 1.0)
    assert [held.lease_id for held in lost] == ["x"]
    assert pool.instances["r"].state == "catching_up"
    pool.assign("r", "y", 1, 4, 1.0)
    replaced = pool.register(register(incarnation="three"), 2.0)
    assert (replaced.kind, [h.lease_id for h in replaced.lost]) == ("replaced", ["y"])


def test_routing_takes_most_free_slots_weighted_and_believes_the_instance() -> None:
    pool = live("a", "b")
    pool.assign("a", "x", 1, 4, 0.0)
    assert pool.route(4, lambda i: True, 0.0).instance_id == "b"  # type: ignore[union-attr]
    pool.reported("b", 2, 0.0)
    assert pool.route(4, lambda i: True, 0.0).instance_id == "a"  # type: ignore[union-attr]
    pool.instances["b"].record.weight = 100.0
    pool.reported("b", 8, 0.0)
    assert pool.route(4, lambda i: True, 0.0).instance_id == "b"  # type: ignore[union-attr]
    assert pool.route(20, lambda i: True, 0.0) is None


def test_when_all_are_free_the_choices_are_in_proportion_to_slots_times_weight() -> None:
    """Whoever is strongest is not always the one: weights 1, 2 and 5 get 1, 2 and 5 of every 8 groups, in any stretch of time."""
    pool = live("a", "b", "c")
    for name, weight in zip("abc", (1.0, 2.0, 5.0), strict=True):
        pool.instances[name].record.weight = weight
    chosen = [pool.route(4, lambda i: True, 0.0).instance_id for _ in range(800)]  # type: ignore[union-attr]
    assert Counter(chosen) == {"a": 100, "b": 200, "c": 500}
    assert all(Counter(chosen[start : start + 8]) == {"a": 1, "b": 2, "c": 5} for start in range(0, 800, 8))
    pool.instances["c"].record.total_slots = 4
    again = Counter(pool.route(4, lambda i: True, 0.0).instance_id for _ in range(680))  # type: ignore[union-attr]
    assert again == {"a": 160, "b": 320, "c": 200}, "16·1 : 16·2 : 4·5"


def test_nobody_saves_up_credit_for_a_time_in_which_it_could_take_nothing() -> None:
    pool = live("a", "b")
    for _ in range(100):
        assert pool.route(4, lambda i: i.instance_id == "a", 0.0) is pool.instances["a"]
    chosen = Counter(pool.route(4, lambda i: True, 0.0).instance_id for _ in range(10))  # type: ignore[union-attr]
    assert chosen == {"a": 5, "b": 5}


def test_no_instance_takes_more_than_its_part_of_what_may_run() -> None:
    pool = live("a", "b", "c")
    assert [pool.share(name, 8, 64, 0.0) for name in "abc"] == [24, 24, 24], "whole groups, rounded up"
    assert pool.share("a", 8, 0, 0.0) == pool.share("a", 8, 8, 0.0) == 8, "one group is always allowed: nobody waits for nothing"
    pool.instances["a"].record.weight = 2.0
    assert [pool.share(name, 8, 64, 0.0) for name in "ab"] == [32, 16]
    pool.instances["b"].state = "suspect"
    assert pool.share("c", 8, 60, 0.0) == 24, "of the live ones only"


def test_an_old_word_on_free_slots_does_not_keep_an_idle_instance_idle() -> None:
    pool = live("r")
    pool.reported("r", 0, 0.0)
    assert pool.route(4, lambda i: True, 0.5) is None
    assert pool.route(4, lambda i: True, 2.0) is not None


def test_reconciliation_finds_what_was_lost_and_what_is_foreign() -> None:
    pool = live("r")
    for name in ("kept", "lost", "older", "young", "sending"):
        pool.assign("r", name, 1, 1, 9.0 if name == "young" else 0.0)
    pool.instances["r"].sending.add("sending")
    lost, foreign = pool.reconcile("r", {"kept": 1, "older": 2, "stranger": 1}, before=5.0)
    assert [held.lease_id for held in lost] == ["lost", "older"]
    assert sorted(foreign) == ["older", "stranger"]
    assert pool.instances["r"].held["kept"].confirmed
    assert set(pool.instances["r"].held) == {"kept", "young", "sending"}


def test_a_drained_instance_leaves_when_it_holds_nothing() -> None:
    pool = live("r")
    pool.assign("r", "x", 1, 4, 0.0)
    pool.drain("r", shutdown=True, now=0.0)
    assert pool.route(4, lambda i: True, 0.0) is None
    assert pool.drained() == []
    pool.instances["r"].unacknowledged = 1
    pool.release("x")
    assert pool.drained() == [], "it keeps its last result until it knows that it arrived"
    pool.instances["r"].unacknowledged = 0
    assert pool.drained() == ["r"]


def test_a_drained_instance_stays_drained_over_suspicion_and_a_restart_of_dataflow_but_not_as_a_new_process() -> None:
    pool = live("r")
    pool.drain("r", shutdown=True, now=0.0)
    assert pool.suspect("r", "pull failed")
    assert not pool.suspect("r", "pull failed"), "only the first is news"
    assert pool.instances["r"].state == "draining"
    assert pool.drained() == [], "whether it lives is for its status to say"
    record = msgspec.msgpack.decode(msgspec.msgpack.encode(pool.instances["r"].record), type=InstanceRecord)
    again = RaaSPool()
    again.restore(record, 0.0)
    assert again.instances["r"].state == "suspect"
    again.answered("r", "one", 1.0)
    assert (again.instances["r"].state, again.instances["r"].record.shutdown_after) == ("draining", True)
    again.answered("r", "two", 2.0)
    assert (again.instances["r"].state, again.instances["r"].record.draining) == ("catching_up", False)


def test_slots_heal_by_the_instances_own_word() -> None:
    pool = live("r")
    pool.assign("r", "x", 1, 4, 0.0)
    assert pool.instances["r"].free(0.0) == 12, "optimistic: nothing was asked"
    pool.reported("r", 8, 0.0)
    pool.assign("r", "y", 1, 4, 0.1)
    assert pool.instances["r"].free(0.2) == 4, "its word, and what was sent since"
    pool.reported("r", 32, 1.0, total_slots=40)
    assert pool.instances["r"].free(1.0) == 32, "it has more slots than when it registered"
    pool.reported("r", 4, 1.0, total_slots=4)
    assert pool.instances["r"].free(1.0) == 0, "an engine less: what runs there is too much for it, and nothing is free"
    pool.reported("r", 32, 1.0, total_slots=40)
    pool.release("x")
    pool.release("y")
    assert pool.instances["r"].free(9.0) == 40


def draw(number: int) -> Draw:
    return Draw(Task(f"t{number}", {"n": number}), number, 0)


def test_leases_of_the_dead_run_again_until_the_last_attempt() -> None:
    pool, book = live("a", "b"), LeaseBook("p", max_attempts=3)
    lease = book.new(draw(0), 4, 0, ("m",), "a")
    for attempt in (1, 2, 3):
        held = _assigned(pool, lease.lease_id, attempt)
        assert book.verdict(lease.lease_id, attempt) == "wanted"
        given_up = book.lost(held)
        assert given_up == ([] if attempt < 3 else [lease.lease_id])
        if attempt < 3:
            assert book.verdict(lease.lease_id, attempt) == "superseded"
            again = book.next_pending("b")
            assert again is not None
            assert again.attempt == attempt + 1
    assert book.verdict(lease.lease_id, 3) == "duplicate"
    assert not book.open


def _assigned(pool: RaaSPool, lease_id: str, attempt: int) -> Any:
    pool.assign("a", lease_id, attempt, 4, 0.0)
    return [pool.release(lease_id)]


@given(st.data())
def test_every_lease_is_on_one_instance_or_pending_or_closed(data: st.DataObject) -> None:
    pool, book = live("a", "b", "c", slots=8), LeaseBook("p", max_attempts=2)
    closed: set[str] = set()
    made = 0
    for _ in range(data.draw(st.integers(0, 50))):
        action = data.draw(st.sampled_from(["issue", "result", "die", "late"]))
        if action == "issue":
            instance = pool.route(4, lambda i: True, 0.0)
            if instance is None:
                continue
            lease = book.next_pending(instance.instance_id)
            if lease is None:
                lease = book.new(draw(made), 4, 0, ("m",), instance.instance_id)
                made += 1
            pool.assign(instance.instance_id, lease.lease_id, lease.attempt, 4, 0.0)
        elif action == "result":
            running = [h for i in pool.instances.values() for h in i.held.values()]
            if running:
                held = data.draw(st.sampled_from(running))
                assert book.verdict(held.lease_id, held.attempt) == "wanted"
                book.close(held.lease_id)
                pool.release(held.lease_id)
                closed.add(held.lease_id)
        elif action == "die":
            name = data.draw(st.sampled_from(["a", "b", "c"]))
            closed.update(book.lost(pool.remove(name)))
            pool.register(register(name, slots=8), 0.0)
            pool.catch_up(lambda instance: True)
        elif closed:
            assert book.verdict(data.draw(st.sampled_from(sorted(closed))), 1) == "duplicate"
    on = [h.lease_id for i in pool.instances.values() for h in i.held.values()]
    assert sorted([*on, *book.pending, *closed]) == sorted(f"p-{n:07d}" for n in range(made))
