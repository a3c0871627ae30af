from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from astraflow.dataflow.buffer import Entry, RolloutBuffer, Taken, fresh_enough, pace_room
from astraflow.dataflow.config import BufferConfig, ReplayConfig


def entry(number: int, version: int = 0, places: int = 4, rows: int = 4, spread: float = 0.0) -> Entry:
    return Entry(f"g{number}", number, places, rows, 0, version, version, spread=spread)


def expire(buffer: RolloutBuffer, version: int) -> list[Entry]:
    stale = lambda e: "" if fresh_enough(version, e.min_version, buffer.config.max_staleness) else "stale"  # noqa: E731
    return [entry for entry, _ in buffer.expire(stale)]


def taken(buffer: RolloutBuffer, batch: int, version: int, n: int = 4, *, last: bool = False) -> Taken:
    found = buffer.take(batch, n, version, last=last)
    assert found is not None
    return found


def test_staleness_is_inclusive_and_version_zero_counts() -> None:
    assert fresh_enough(2, 0, 2)
    assert not fresh_enough(3, 0, 2)
    assert fresh_enough(1000, 0, None)
    assert fresh_enough(5, 5, 0)


def test_edf_orders_by_version_then_arrival_and_fifo_by_arrival() -> None:
    versions = [3, 1, 2, 1]
    for order, expected in (("edf", ["g1", "g3", "g2", "g0"]), ("fifo", ["g0", "g1", "g2", "g3"])):
        buffer = RolloutBuffer("m", BufferConfig(max_staleness=None, order=order))  # type: ignore[arg-type]
        for number, version in enumerate(versions):
            assert buffer.add(entry(number, version))
        assert [e.lease_id for e in taken(buffer, 16, 3).fresh] == expected


def test_a_full_queue_refuses_and_evicts_nothing_that_is_fresh() -> None:
    buffer = RolloutBuffer("m", BufferConfig(max_groups=2, max_staleness=1))
    assert buffer.add(entry(0))
    assert buffer.add(entry(1, 1))
    assert not buffer.add(entry(2, 1))
    assert [e.lease_id for e in expire(buffer, 2)] == ["g0"]
    assert buffer.add(entry(3, 2))


def test_capacity_after_resume_is_counted_from_the_resume(case: Any) -> None:
    given_, expected = case("G21")["input"], case("G21")["expected"]["values"]
    version = given_["recovered_version"]
    rooms = [pace_room(given_["max_staleness"], given_["batch_size"], version, version, 0, running) for running in given_["running"]]
    assert rooms == expected["capacity"]
    assert pace_room(given_["max_staleness"], given_["batch_size"], 0, 0, 0, 0) == expected["fresh_start_version_0"]
    buffer = RolloutBuffer("m", BufferConfig(max_staleness=given_["max_staleness"]))
    buffer.pace.v_start = version
    assert buffer.room(given_["batch_size"], 1, version, 0) == expected["capacity"][0]


def test_a_shorter_lookahead_admits_fewer_batches_but_never_more_than_the_staleness_limit_allows() -> None:
    rooms = [RolloutBuffer("m", BufferConfig(max_staleness=2, lookahead=ahead)).room(16, 4, 0, 0) for ahead in (None, 0, 1, 2, 9)]
    assert rooms == [48, 16, 32, 48, 48]


def test_with_drop_or_without_a_limit_the_bound_takes_the_place_of_pace() -> None:
    for config in (BufferConfig(treatment="drop", max_groups=10), BufferConfig(max_staleness=None, max_groups=10)):
        assert RolloutBuffer("m", config).room(8, 4, 0, 4) == 36


def test_replay_mixes_whole_groups_without_a_duplicate_and_repeats_its_choice() -> None:
    config = BufferConfig(max_staleness=None, replay=ReplayConfig(ratio=0.5, size=3, selection="uniform", max_staleness=None))

    def filled() -> RolloutBuffer:
        buffer = RolloutBuffer("m", config, seed=7)
        buffer.remember([entry(n) for n in range(4)])
        assert buffer.fallen() == ["g0"]
        for number in range(10, 14):
            buffer.add(entry(number, 5))
        return buffer

    buffer = filled()
    assert buffer.split(16, 4) == (2, 2)
    first, second = taken(buffer, 16, 5), taken(filled(), 16, 5)
    ids = [e.lease_id for e in first.fresh + first.replayed]
    assert len(set(ids)) == 4
    assert ids == [e.lease_id for e in second.fresh + second.replayed]
    assert buffer.replay_groups == 3


def test_replay_has_its_own_staleness_limit_and_names_what_it_lets_go() -> None:
    buffer = RolloutBuffer("m", BufferConfig(replay=ReplayConfig(ratio=0.5, max_staleness=1)))
    buffer.remember([entry(1, 0), entry(2, 3)])
    buffer.expire_replay(3)
    assert buffer.replay_ids == {"g2"}
    assert buffer.fallen() == ["g1"]


def test_what_left_the_replay_queue_and_came_back_is_not_let_go() -> None:
    buffer = RolloutBuffer("m", BufferConfig(replay=ReplayConfig(ratio=0.5)))
    buffer.remember([entry(1), entry(2)])
    buffer.forget_replay(lambda e: True)
    buffer.remember([entry(1)])
    assert buffer.fallen() == ["g2"]


def test_prioritised_replay_takes_the_largest_spread() -> None:
    config = BufferConfig(replay=ReplayConfig(ratio=0.5, selection="prioritised", max_staleness=None))
    buffer = RolloutBuffer("m", config)
    buffer.remember([entry(1, spread=0.1), entry(2, spread=0.5), entry(3, spread=0.3)])
    for number in (10, 11):
        buffer.add(entry(number))
    assert [e.lease_id for e in taken(buffer, 16, 0).replayed] == ["g2", "g3"]


@given(st.data())
def test_every_group_is_queued_served_expired_or_refused_exactly_once(data: st.DataObject) -> None:
    limit = data.draw(st.one_of(st.none(), st.integers(0, 3)))
    bound = data.draw(st.integers(1, 8))
    buffer = RolloutBuffer("m", BufferConfig(max_staleness=limit, max_groups=bound))
    version, number = 0, 0
    made: set[str] = set()
    ended: list[str] = []
    for action in data.draw(st.lists(st.sampled_from(["add", "take", "version"]), max_size=60)):
        if action == "add":
            made.add(f"g{number}")
            if not buffer.add(entry(number, data.draw(st.integers(0, version)))):
                assert len(buffer) == bound
                ended.append(f"g{number}")
            number += 1
        elif action == "take":
            ended += [e.lease_id for e in expire(buffer, version)]
            found = buffer.take(4 * data.draw(st.integers(1, 4)), 4, version, last=True)
            if found is None:
                assert not len(buffer)
                continue
            assert all(fresh_enough(version, e.min_version, limit) for e in found.fresh), "nothing stale is served"
            keys = [(e.min_version, e.arrival) for e in found.fresh]
            assert keys == sorted(keys)
            assert all(keys[-1] <= (e.min_version, e.arrival) for e in buffer.entries()) if keys else True
            if data.draw(st.booleans()):
                buffer.put_back(found)
            else:
                ended += [e.lease_id for e in found.fresh]
        else:
            version += 1
        assert len(buffer) <= bound
    left = [e.lease_id for e in buffer.entries()]
    assert sorted(ended + left) == sorted(made)


@given(st.integers(0, 4), st.integers(1, 6), st.lists(st.sampled_from(["lease", "result", "filtered", "train"]), max_size=120))
def test_pace_never_lets_a_group_become_stale(max_staleness: int, groups: int, actions: list[str]) -> None:
    """Generated at the version of its lease, served in order, no group is older than max_staleness when it is served."""
    n, batch = 4, 4 * groups
    buffer = RolloutBuffer("m", BufferConfig(max_staleness=max_staleness))
    version, number = 0, 0
    flight: list[int] = []
    for action in actions:
        if action == "lease" and buffer.room(batch, n, version, len(flight) * n) >= n:
            flight.append(version)
        elif action == "result" and flight:
            buffer.pace.accepted += n
            assert buffer.add(entry(number, flight.pop(0)))
            number += 1
        elif action == "filtered" and flight:
            flight.pop(0)
        elif action == "train" and len(buffer) >= groups:
            assert not expire(buffer, version)
            taken(buffer, batch, version)
            version += 1
        assert len(flight) + len(buffer) <= (max_staleness + 1) * groups


@given(st.data())
def test_an_instance_within_the_lookahead_can_always_fill_the_batch_that_the_trainer_waits_for(data: st.DataObject) -> None:
    """However old its weights are within the limit (an evaluation pins it), and however much is replayed: no dead end."""
    n, groups, version = 4, data.draw(st.integers(1, 6)), data.draw(st.integers(0, 50))
    limit, lookahead = data.draw(st.integers(0, 4)), data.draw(st.one_of(st.none(), st.integers(0, 4)))
    ratio = data.draw(st.sampled_from([0.0, 0.3, 0.5, 0.9]))
    config = BufferConfig(max_staleness=limit, lookahead=lookahead, replay=ReplayConfig(ratio=ratio, max_staleness=None))
    buffer = RolloutBuffer("m", config)
    if version:
        buffer.remember([entry(1000 + i) for i in range(data.draw(st.integers(0, 8)))])
    needed, _ = buffer.split(groups * n, n)
    queued = data.draw(st.integers(0, needed - 1))
    flight = data.draw(st.integers(0, needed - 1 - queued))
    for number in range(queued):
        assert buffer.add(entry(number, version))
    buffer.pace.accepted = version * groups * n + queued * n  # batches 0 … version − 1, replayed groups included
    lag = data.draw(st.integers(0, min(limit, version, limit if lookahead is None else lookahead)))
    assert buffer.room(groups * n, n, version, flight * n, lag) >= (needed - queued - flight) * n
