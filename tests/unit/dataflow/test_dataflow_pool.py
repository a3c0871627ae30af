from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from astraflow.dataflow.leases import LeaseBook
from astraflow.dataflow.pool import RaaSPool
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
    assert not pool.failed("r", "timeout")
    pool.answered("r", "one", 2.0)
    assert not pool.failed("r", "timeout"), "two in a row, not two in all"
    assert pool.failed("r", "timeout")


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


def test_no_instance_takes_more_than_its_part_of_what_may_run() -> None:
    pool = live("a", "b", "c")
    assert [pool.share(name, 8, 64) for name in "abc"] == [24, 24, 24], "whole groups, rounded up"
    assert pool.share("a", 8, 0) == pool.share("a", 8, 8) == 8, "one group is always allowed: nobody waits for nothing"
    pool.instances["a"].record.weight = 2.0
    assert [pool.share(name, 8, 64) for name in "ab"] == [32, 16]
    pool.instances["b"].state = "suspect"
    assert pool.share("c", 8, 60) == 24, "of the live ones only"


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
    pool.drain("r", shutdown=True)
    assert pool.route(4, lambda i: True, 0.0) is None
    assert pool.drained() == []
    pool.release("x")
    assert pool.drained() == ["r"]


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
