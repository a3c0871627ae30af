"""The rollout viewer on a real ledger and real records: it finds, filters and exports, and says why something was not trained."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from astraflow.dashboard.index import NAME
from astraflow.dashboard.rollouts import Filter, Rollouts, match
from astraflow.dataflow.journal import LeaseRow
from astraflow.dataflow.ledger import Ledger
from astraflow.dataflow.reasons import REASONS
from astraflow.protocol.errors import UnknownName

_spec = importlib.util.spec_from_file_location("dashboard_rundir_rollouts", Path(__file__).with_name("rundir.py"))
assert _spec is not None
assert _spec.loader is not None
made: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(made)
record, keep = made.record, made.keep


def page(rollouts: Rollouts, **wanted: str) -> dict[str, Any]:
    """A page, once the index is complete."""
    end = time.monotonic() + 60
    while (found := rollouts.page(Filter.of(wanted)))["pending"]:
        assert time.monotonic() < end
    return found


def names(found: dict[str, Any]) -> list[tuple[str, int]]:
    return [(row["lease_id"], row["idx"]) for row in found["rows"]]


def test_every_fate_is_found_by_its_filter_and_told_in_words(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await made.dataflow(tmp_path)
        leases = await bench.fates()
        for number, rewards in enumerate(([0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [None, None])):
            keep(tmp_path, [record(leases[number], index, reward) for index, reward in enumerate(rewards)])
        keep(tmp_path, [record(leases[0], 0, 0.5, attempt=7), record("eval-0001/x", 0, 0.25, workflow="check")])
        rollouts = Rollouts(tmp_path)
        assert page(rollouts)["total"] == 10
        assert names(page(rollouts, state="trained", order="oldest")) == [(leases[0], 0), (leases[0], 1), (leases[1], 0), (leases[1], 1)]
        assert names(page(rollouts, reason="zero_variance", order="oldest")) == [(leases[2], 0), (leases[2], 1)]
        assert names(page(rollouts, reason="unscored", policy="m", order="oldest")) == [(leases[3], 0), (leases[3], 1)]
        assert page(rollouts, reason="zero")["total"] == page(rollouts, reason="unscored", policy="other")["total"] == 0
        assert names(page(rollouts, state="unknown")) == [("eval-0001/x", 0)]
        assert page(rollouts, state="dropped")["total"] == 4
        (equal,) = page(rollouts, lease=leases[2], size="1", order="oldest")["rows"][0]["outcomes"]
        assert (equal["state"], equal["reason"], equal["why"]) == ("dropped", "zero_variance", REASONS["zero_variance"])
        (trained,) = page(rollouts, lease=leases[0], reward_min="0.9")["rows"][0]["outcomes"]
        assert (trained["state"], trained["batch"], trained["group_mean"]) == ("trained", [0, 0], 0.5)
        assert trained["advantage"] == pytest.approx(0.5 / 0.5**0.5)
        (again,) = page(rollouts, reward_min="0.4", reward_max="0.6")["rows"]
        assert again["outcomes"][0]["state"] == "superseded"
        group = rollouts.group(leases[1])
        assert [member["record"]["reward"] for member in group["members"]] == [1.0, 0.0]
        assert page(rollouts)["choices"] == {
            "workflow": ["check", "rlvr"], "instance": ["r"], "policies": ["m"], "reason": ["unscored", "zero_variance"],
        }  # fmt: skip
        lines = [json.loads(line) for line in b"".join(rollouts.export(Filter.of({"state": "trained", "order": "oldest"}))).splitlines()]
        assert [line["lease_id"] for line in lines] == [leases[0], leases[0], leases[1], leases[1]]
        assert {line["outcomes"][0]["state"] for line in lines} == {"trained"}
        await made.leave(bench)

    made.run(scene)


def test_text_is_searched_by_words_and_nothing_that_is_typed_is_an_operator(tmp_path: Path) -> None:
    keep(tmp_path, [record("a", 0, answer="the quick brown fox"), record("a", 1, answer=made.EVIL), record("b", 0, answer='he said "42"')])
    call = {"answer": "größer", "prompt": "only a call", "versions": [3, 5], "new_tokens": 9}
    keep(tmp_path, [record("c", 0, turns=[], calls=[call])], "s")
    rollouts = Rollouts(tmp_path)
    for query, expected in {
        "quick fox": 1, '"quick brown"': 1, '"quick fox"': 0, "bro": 1, "bro ": 0, "alert": 1, "</script>": 1, '"': 4, "NOT fox": 0, "*": 4,
        "fox OR alert": 0, "(": 4, "grösser": 0, "GRÖSS": 0, "größer": 1, "only": 1, '"42': 1, "text:fox": 0,
    }.items():  # fmt: skip
        assert page(rollouts, q=query)["total"] == expected, query
    assert names(page(rollouts, version="4")) == names(page(rollouts, tokens_min="3")) == names(page(rollouts, instance="s")) == [("c", 0)]
    assert page(rollouts, version="2")["total"] == 0
    found = rollouts.one(page(rollouts, q="alert")["rows"][0]["place"])
    assert found["record"]["turns"][1]["content"] == made.EVIL, "text stays as it is; the page sets it as text"
    assert match('a "b c" d') == '"a" "b c" "d"*'
    with pytest.raises(UnknownName, match="no such record"):
        rollouts.one("../config")


def test_the_index_follows_the_files_and_is_made_again_when_it_is_damaged(tmp_path: Path) -> None:
    store = keep(tmp_path, [record("a", index) for index in range(5)], newest=5)
    rollouts = Rollouts(tmp_path)
    assert page(rollouts)["total"] == 5
    store.save({f"r~b~1~{index}": record("b", index, answer="newer") for index in range(2)})
    assert names(page(rollouts, order="oldest")) == [("a", 2), ("a", 3), ("a", 4), ("b", 0), ("b", 1)]
    store.save({"r~b~1~0": record("b", 0, reward=0.125, answer="written again")})
    assert page(rollouts, q="again")["rows"][0]["reward"] == 0.125
    assert page(rollouts, q="newer")["total"] == 1
    (tmp_path / "rollouts" / "r" / "half.json").write_text('{"lease_id": "x"')
    (tmp_path / "rollouts" / "r" / "link.json").symlink_to("/etc/passwd")
    assert page(rollouts)["total"] == 5
    for damage in (b"no database", b""):
        for suffix in ("-wal", "-shm"):
            (tmp_path / f"{NAME}{suffix}").unlink(missing_ok=True)
        (tmp_path / NAME).write_bytes(damage)
        assert page(rollouts)["total"] == 5
    before = page(rollouts)["rows"][0]["place"]
    (tmp_path / "rollouts" / f"{before}.json").unlink()
    with pytest.raises(UnknownName):
        rollouts.one(before)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_only_be_read_is_indexed_elsewhere(tmp_path: Path) -> None:
    keep(tmp_path, [record("a", 0)])
    tmp_path.chmod(0o500)
    rollouts = Rollouts(tmp_path)
    try:
        assert page(rollouts)["total"] == 1
        assert not (tmp_path / NAME).exists()
    finally:
        tmp_path.chmod(0o700)
        rollouts.index.close()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_fifty_thousand_rollouts_stay_fluid(tmp_path: Path) -> None:
    """Every page, filter and search answers in under a second once they are indexed; a page while they are indexed does too."""
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]
    for part in range(50):
        made_now = [
            record(f"l{part:02d}{number:03d}", 0, reward=number % 11 / 10, answer=" ".join([words[number % 10], words[part % 10]] * 50))
            for number in range(1000)
        ]
        keep(tmp_path, made_now)
    ledger = Ledger(tmp_path / "ledger", 2**20)
    leases = [f"l{part:02d}{number:03d}" for part in range(50) for number in range(1000)]
    ledger.issue([LeaseRow(key, f"t {key}", 0, 0, 1, 0, 1, "r", ("m",)) for key in leases], {})
    ledger.abandon(leases[::50], "max_attempts")
    ledger.close()
    rollouts = Rollouts(tmp_path)
    slowest, end = 0.0, time.monotonic() + 600
    while True:
        began = time.monotonic()
        pending = rollouts.page(Filter())["pending"]
        slowest = max(slowest, time.monotonic() - began)
        if not pending:
            break
        assert time.monotonic() < end
    times = {}
    asked = [{}, {"page": "999"}, {"q": "alpha theta"}, {"reward_min": "0.95", "order": "best"}, {"order": "longest", "page": "500"}]
    for wanted in [*asked, {"lease": "l49999"}, {"reason": "max_attempts"}, {"state": "dropped"}, {"state": "in_flight", "page": "900"}]:
        began = time.monotonic()
        found = page(rollouts, **wanted)
        times[str(wanted)] = round(time.monotonic() - began, 3)
        assert found["rows"], wanted
    assert page(rollouts)["total"] == 50_000
    assert page(rollouts, state="dropped")["total"] == 1000
    assert max(times.values()) < 2.0, times
    assert slowest < 5.0, "a page while they are indexed"
