from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.dataflow.journal import BatchRow, LeaseRow, Pick, Result, Settled, ShareResult
from astraflow.dataflow.ledger import Ledger
from astraflow.dataflow.policies.base import GroupStats
from astraflow.protocol.errors import AstraFlowError


def stats(rows: int = 4, version: int = 0) -> GroupStats:
    values = {i: float(i) for i in range(rows)}
    return GroupStats(
        task_id="t", n_samples=4, values=values, shaped=values, mean=0.0, std=1.0, all_equal=False,
        timeline=0, min_version=version, max_version=version, loss_tokens=9,
    )  # fmt: skip


def lease(number: int, policies: tuple[str, ...] = ("m",)) -> LeaseRow:
    return LeaseRow(f"g{number:03d}", "t", 0, 0, 4, 0, 1, "r", policies)


def result(number: int, *, lost: int = 0, state: str = "buffered", reason: str = "", policies: tuple[str, ...] = ("m",)) -> Result:
    gone = dict.fromkeys(range(lost), "unscored")
    shares = [ShareResult(p, state, reason, stats(4 - lost), gone, number + 1) for p in policies]  # type: ignore[arg-type]
    return Result(f"g{number:03d}", 1, b"payload-%d" % number, shares)


def batch(version: int, *numbers: int, timeline: int = 0, replayed: tuple[int, ...] = ()) -> BatchRow:
    return BatchRow(
        policy="m", timeline=timeline, version=version, fresh=[Pick(f"g{n:03d}") for n in numbers], replayed=[f"g{n:03d}" for n in replayed]
    )


def opened(path: Path, segment_bytes: int = 1 << 20) -> Ledger:
    return Ledger(path / "ledger", segment_bytes)


def test_rows_live_from_lease_to_trained_and_add_up(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    ledger.issue([lease(n) for n in range(4)], {"source": b"1"})
    assert ledger.snapshot.in_flight["leased"] == 16
    ledger.record([result(0), result(1, lost=1), result(2, state="dropped", reason="zero_variance")])
    assert ledger.snapshot.dropped == {"unscored": 1, "zero_variance": 4}
    ledger.serve(batch(0, 0, 1), b"bytes")
    assert ledger.batch_bytes("m", 0, 0) == b"bytes"
    assert ledger.snapshot.in_flight == {"leased": 4, "rolled": 0, "buffered": 0, "served": 7}
    assert ledger.commit("m", 0, 0, 1, -1, set(), {}) == 7
    assert ledger.commit("m", 0, 0, 1, -1, set(), {}) == 0, "a duplicate notice trains nothing"
    assert ledger.batch_bytes("m", 0, 0) is None
    ledger.abandon(["g003"], "max_attempts")
    counts = ledger.check()
    assert (counts.made, counts.trained) == (16, 7)
    assert counts.dropped == {"max_attempts": 4, "unscored": 1, "zero_variance": 4}


def test_a_reopened_ledger_finds_everything_that_was_committed(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    ledger.issue([lease(n) for n in range(4)], {"ledger_id": b"abc"})
    ledger.record([result(0), result(1), result(2, state="rolled")])
    ledger.serve(batch(0, 0), b"same bytes")
    before = ledger.snapshot
    again = opened(tmp_path)  # as after kill -9: nothing was closed
    found = again.recover()
    assert again.snapshot == before
    assert [row.lease_id for row in found.leases] == ["g003"]
    assert {(s.lease_id, s.state) for s in found.shares} == {("g000", "served"), ("g001", "buffered"), ("g002", "rolled")}
    assert again.batch_bytes("m", 0, 0) == b"same bytes"
    assert [again.payload(f"g00{n}") for n in range(3)] == [b"payload-0", b"payload-1", b"payload-2"]
    assert found.meta == {"ledger_id": b"abc"}
    assert found.arrivals == 3


def test_rows_trained_after_the_checkpoint_open_again_and_final_ones_do_not(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    ledger.issue([lease(n) for n in range(4)], {})
    ledger.record([result(n) for n in range(4)])
    for version in range(3):
        ledger.serve(batch(version, version), b"x")
        ledger.commit("m", 0, version, version + 1, 1, set(), {})
    ledger.serve(batch(3, 3), b"x")
    back = ledger.rollback("m", 1, {})
    assert [share.lease_id for share in back] == ["g001", "g002", "g003"], "batch 0 made version 1, which the checkpoint holds"
    assert ledger.snapshot.trained == 4
    assert ledger.snapshot.in_flight["buffered"] == 12
    ledger.serve(batch(1, 1, timeline=1), b"y")
    assert ledger.commit("m", 1, 1, 2, 2, set(), {}) == 4
    ledger.check()
    assert ledger.rollback("m", 1, {}) == [], "final is final"


def test_segments_are_deleted_when_all_their_rows_are_final(tmp_path: Path) -> None:
    ledger = opened(tmp_path, segment_bytes=1)  # a file per payload
    files = tmp_path / "ledger" / "segments"
    ledger.issue([lease(n) for n in range(4)], {})
    ledger.record([result(n) for n in range(3)])
    ledger.record([result(3, state="dropped", reason="reward_band")])
    assert len(list(files.iterdir())) == 3, "a rejected group is not stored"
    ledger.serve(batch(0, 0, 1), b"x")
    ledger.commit("m", 0, 0, 1, 0, set(), {})
    assert len(list(files.iterdir())) == 3, "trained, but in no checkpoint"
    ledger.commit("m", 0, 1, 1, 1, set(), {})
    assert len(list(files.iterdir())) == 1
    ledger.settle([Settled("g002", "m", "dropped", "stale")])
    assert len(list(files.iterdir())) == 1, "the file that is written to stays"
    ledger.issue([lease(4)], {})
    ledger.record([result(4)])
    assert len(list(files.iterdir())) == 1
    assert ledger.payload("g004") == b"payload-4"


def test_replayed_groups_keep_their_payload_and_are_counted_apart(tmp_path: Path) -> None:
    ledger = opened(tmp_path, segment_bytes=1)
    ledger.issue([lease(n) for n in range(2)], {})
    ledger.record([result(n) for n in range(2)])
    ledger.serve(batch(0, 0), b"x")
    ledger.commit("m", 0, 0, 1, 1, {"g000"}, {})
    ledger.serve(batch(1, 1, replayed=(0,)), b"x")
    ledger.commit("m", 0, 1, 2, 2, {"g000"}, {})
    assert ledger.payload("g000") == b"payload-0"
    assert (ledger.snapshot.trained, ledger.snapshot.replayed) == (8, 4)
    assert [share.lease_id for share in opened(tmp_path).recover().shares] == ["g000"]
    ledger.forget("m", ["g000"])
    assert "g000" not in ledger.places
    ledger.check()


def test_a_damaged_payload_is_an_error_and_never_training_data(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    ledger.issue([lease(0)], {})
    ledger.record([result(0)])
    path = next((tmp_path / "ledger" / "segments").iterdir())
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(AstraFlowError, match="damaged"):
        ledger.payload("g000")


def test_policies_share_a_payload_until_the_last_of_them_is_done(tmp_path: Path) -> None:
    ledger = opened(tmp_path, segment_bytes=1)
    ledger.issue([lease(0, ("m", "n"))], {})
    ledger.record([result(0, policies=("m", "n"))])
    ledger.settle([Settled("g000", "n", "dropped", "stale")])
    assert ledger.payload("g000")
    ledger.serve(batch(0, 0), b"x")
    ledger.commit("m", 0, 0, 1, 1, set(), {})
    assert "g000" not in ledger.places
    assert ledger.check().made == 8


def test_gaps_are_told_from_the_rows_that_were_trained(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    ledger.issue([lease(n) for n in range(2)], {})
    ledger.record([result(0), result(1, lost=2)])
    ledger.serve(batch(0, 0), b"x")
    ledger.commit("m", 0, 0, 1, -1, set(), {})
    ledger.serve(batch(1, 1), b"x")
    ledger.commit("m", 0, 1, 2, -1, set(), {})
    assert ledger.staleness("m") == {0: 4, 1: 2}


@settings(max_examples=25, deadline=None)
@given(actions=st.lists(st.sampled_from(["issue", "roll", "drop", "hold", "settle", "serve", "commit", "rollback", "kill"]), max_size=40))
def test_conservation_under_any_order_of_events_and_kills(tmp_path_factory: pytest.TempPathFactory, actions: list[str]) -> None:
    path = tmp_path_factory.mktemp("ledger")
    ledger = opened(path, segment_bytes=40)
    number, version, timeline, served = 0, 0, 0, False
    for action in actions:
        found = ledger.recover() if action == "kill" else None
        open_leases = [f"g{n:03d}" for n in range(number)]
        rows = {s.lease_id: s.state for s in ledger._shares("s.stats IS NOT NULL", ())}
        fresh = [key for key in open_leases if key not in rows]
        buffered = [key for key, state in rows.items() if state == "buffered"]
        held = [key for key, state in rows.items() if state == "rolled"]
        if action == "issue":
            ledger.issue([lease(number)], {})
            number += 1
        elif action in ("roll", "drop", "hold") and fresh:
            state = {"roll": "buffered", "drop": "dropped", "hold": "rolled"}[action]
            reason = "reward_band" if action == "drop" else ""
            ledger.record([result(int(fresh[0][1:]), lost=number % 3, state=state, reason=reason)])
        elif action == "settle" and (held or buffered):
            key = (held or buffered)[0]
            ledger.settle([Settled(key, "m", "buffered")] if held else [Settled(key, "m", "dropped", "stale")])
        elif action == "serve" and buffered and not served:
            ledger.serve(batch(version, int(buffered[0][1:]), timeline=timeline), b"x")
            served = True
        elif action == "commit" and served:
            ledger.commit("m", timeline, version, version + 1, version - 1, set(), {})
            version, served = version + 1, False
        elif action == "rollback":
            version, timeline, served = max(version - 1, 0), timeline + 1, False
            ledger.rollback("m", version, {})
        elif found is not None:
            ledger = opened(path, segment_bytes=40)
            ledger.recover()
        counts = ledger.check()
        assert counts.made == 4 * number
    for key, state in {s.lease_id: s.state for s in ledger._shares("s.final=0 AND s.stats IS NOT NULL", ())}.items():
        assert ledger.payload(key) == b"payload-%d" % int(key[1:]), state
