"""The outbox: nothing is lost before it is acknowledged, nothing is invented after."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from astraflow.raas.outbox import Outbox


def test_a_lost_reply_is_delivered_again_under_the_same_id() -> None:
    box = Outbox("x")
    first = box.put("a", 1, b"\xa1a", {})
    box.put("b", 1, b"\xa1b", {})
    for _ in range(2):
        deliveries, waiting = box.pull("", 1)
        assert [d.delivery_id for d in deliveries] == [first]
        assert waiting == 1
    assert [d.lease_id for d in box.acknowledge([first, first, "x-99"])] == ["a"]
    assert [d.lease_id for d in box.pull("", 64)[0]] == ["b"]


def test_lanes_do_not_see_each_other() -> None:
    box = Outbox("x")
    box.put("a", 1, b"\xc0", {}, lane="eval")
    assert box.pull("", 8) == ([], 0)
    assert [d.lease_id for d in box.pull("eval", 8)[0]] == ["a"]


def test_a_rollback_finds_what_a_dead_timeline_produced() -> None:
    box = Outbox("x")
    box.put("old", 1, b"\xc0", {"p": 1, "q": 0})
    box.put("new", 1, b"\xc0", {"p": 2})
    box.put("other", 1, b"\xc0", {"q": 0})
    box.put("evaluation", 1, b"\xc0", {"p": 1}, lane="e")
    assert box.of_dead_timeline("p", 2) == ["old"]
    assert box.drop_leases({"old"}) == 1
    assert len(box) == 3, "an evaluation keeps its results, as it keeps its running work"


@given(st.lists(st.tuples(st.sampled_from(["put", "pull", "ack"]), st.integers(0, 9)), max_size=60))
def test_every_group_is_delivered_until_it_is_acknowledged_and_never_after(events: list[tuple[str, int]]) -> None:
    box = Outbox("x")
    waiting: list[str] = []
    seen: list[str] = []
    for number, (kind, value) in enumerate(events):
        if kind == "put":
            waiting.append(box.put(str(number), 1, b"\xc0", {}))
        elif kind == "pull":
            deliveries, more = box.pull("", value)
            assert [d.delivery_id for d in deliveries] == waiting[:value]
            assert more == max(0, len(waiting) - value)
            seen += [d.delivery_id for d in deliveries]
        elif waiting:
            gone = waiting.pop(value % len(waiting))
            box.acknowledge([gone])
        assert len(box) == len(waiting)
    assert len({*waiting}) == len(waiting)
