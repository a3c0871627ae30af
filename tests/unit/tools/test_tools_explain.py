"""`astraflow explain`: one reason per group and per lost trajectory, read without touching the run, with counts that add up."""

from __future__ import annotations

import importlib.util
import io
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from astraflow import cli
from astraflow.dataflow.reasons import REASONS, describe
from astraflow.protocol.errors import ConfigError
from astraflow.tools.explain import Explanation, Query, explain, show

_spec = importlib.util.spec_from_file_location("dataflow_bench_explain", Path(__file__).parents[1] / "dataflow" / "bench.py")
assert _spec is not None
assert _spec.loader is not None
_bench: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_bench)
Bench, run = _bench.Bench, _bench.run


async def made(run_dir: Path) -> Any:
    """A ledger with a group of each fate, still open: two trained, one of equal rewards, one unscored, one with a failed member that
    is queued, one stale, and leases that run."""
    bench = await Bench(run_dir, change=lambda p: setattr(p.dataflow.policies, "filter", "filter_zero_adv")).start()
    leases = await bench.fates()
    bench.shelf.process.group_relative["m"] = False
    bench.shelf.process.dataflow.policies.filter = "keep_all"
    bench.service.intake._filters = []
    await bench.deliver(leases[4], [0.5, None])
    bench.shelf.process.dataflow.buffer.max_staleness = 0
    await bench.deliver(leases[5], [0.0, 1.0])
    return bench, leases


def text(answer: Explanation) -> str:
    out = io.StringIO()
    show(answer, Console(file=out, width=200, soft_wrap=True))
    return out.getvalue()


def test_every_group_has_one_reason_and_the_counts_are_those_of_the_ledger(tmp_path: Path) -> None:
    async def scene() -> None:
        bench, leases = await made(tmp_path)
        answer = explain(tmp_path, Query())
        assert answer.counts == bench.shelf.ledger.snapshot, "read while Dataflow has it open"
        assert {reason.reason: reason.rows for reason in answer.reasons} == answer.counts.dropped
        assert sum(reason.rows for reason in answer.reasons) == sum(answer.counts.dropped.values())
        found = {group.lease_id: group for group in answer.groups}
        assert set(found) == {leases[2], leases[3], leases[4], leases[5]}
        equal = found[leases[2]]
        assert (equal.state, equal.reason, equal.why) == ("dropped", "zero_variance", REASONS["zero_variance"])
        assert (equal.reward_mean, equal.spread, equal.versions, equal.tokens_mean) == (1.0, 0.0, (0, 0), 2.0)
        assert (equal.instance, equal.attempts, equal.batch, equal.members) == ("r", 1, None, [0, 1])
        assert (found[leases[3]].reason, found[leases[3]].lost, found[leases[3]].reward_mean) == (
            "unscored", {0: "unscored", 1: "unscored"}, None,
        )  # fmt: skip
        assert (found[leases[4]].state, found[leases[4]].reason, found[leases[4]].lost) == ("buffered", "", {1: "unscored"})
        assert found[leases[5]].reason == "stale"
        bench.close()

    run(scene)


def test_tasks_leases_reasons_and_policies_choose_and_the_limit_says_how_many_more(tmp_path: Path) -> None:
    async def scene() -> None:
        bench, leases = await made(tmp_path)
        (trained,) = explain(tmp_path, Query(lease=leases[0])).groups
        assert (trained.state, trained.reason, trained.batch) == ("trained", "", (0, 0))
        (same,) = explain(tmp_path, Query(task=trained.task_id)).groups
        assert same == trained
        assert [group.lease_id for group in explain(tmp_path, Query(reason="zero_variance")).groups] == [leases[2]]
        assert [group.lease_id for group in explain(tmp_path, Query(reason="unscored")).groups] == [leases[4], leases[3]], "newest first"
        assert explain(tmp_path, Query(reason="zero")).groups == []
        assert [group.lease_id for group in explain(tmp_path, Query(reason="stale", policy="m")).groups] == [leases[5]]
        some = explain(tmp_path, Query(limit=1))
        assert ([group.lease_id for group in some.groups], some.more) == ([leases[5]], 3)
        assert "… and 3 more (--limit)" in text(some)
        bench.close()

    run(scene)


def test_a_policy_that_the_ledger_does_not_know_is_a_mistake_and_not_an_empty_answer(tmp_path: Path) -> None:
    async def scene() -> None:
        bench, _ = await made(tmp_path)
        with pytest.raises(ConfigError, match="--policy: 'n' is not in this ledger; known: m"):
            explain(tmp_path, Query(policy="n"))
        bench.close()

    run(scene)


def test_failures_are_found_by_the_beginning_of_their_reason(tmp_path: Path) -> None:
    async def scene() -> None:
        bench = await Bench(tmp_path).start()
        lease, *_ = await bench.lease()
        members = [_bench.made.trajectory(0, 1.0), _bench.made.trajectory(1, None, error="timeout")]
        group = _bench.made.group(members, lease, task_id=bench.shelf.leases.open[lease].task_id)
        delivery = _bench.Delivery(delivery_id="d", lease_id=lease, attempt=1, group=msgspec.Raw(_bench.codec.encode(group)))
        await bench.service.intake.take("r", [delivery])
        for reason in ("error:reward.timeout", "error:reward", "error"):
            (found,) = explain(tmp_path, Query(reason=reason)).groups
            assert (found.reason, found.lost) == ("too_few_scored", {1: "error:reward.timeout"})
        assert explain(tmp_path, Query(reason="error:tool")).groups == []
        shown = text(explain(tmp_path, Query()))
        assert "trajectory 1: error:reward.timeout\n" in shown
        assert describe("error:reward.timeout") in shown
        bench.close()

    run(scene)


def test_the_text_says_the_equation_the_reasons_and_the_groups(tmp_path: Path) -> None:
    async def scene() -> None:
        bench, leases = await made(tmp_path)
        shown = text(explain(tmp_path, Query()))
        counts = bench.shelf.ledger.snapshot
        dropped, flying = sum(counts.dropped.values()), sum(counts.in_flight.values())
        assert f"made {counts.made} = trained 4 + dropped {dropped} + in flight {flying}  (adds up)" in shown
        assert REASONS["zero_variance"] in shown
        assert f"{leases[2]}  " in shown
        assert "reward 1.000 ± 0.000  v0  2 × 2.0 tokens  on r, attempt 1" in shown
        bench.close()
        assert text(explain(tmp_path, Query())) == shown, "the same after the end"

    run(scene)


def test_the_verb_prints_json_and_a_wrong_directory_is_a_mistake_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scene() -> None:
        bench, _ = await made(tmp_path / "run")
        bench.close()

    run(scene)
    monkeypatch.setattr(sys, "argv", ["astraflow", "explain", str(tmp_path / "run"), "--reason", "stale", "--json"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0
    answer = msgspec.json.decode(capsys.readouterr().out, type=Explanation)
    assert {group.reason for group in answer.groups} == {"stale"}
    assert answer == explain(tmp_path / "run", Query(reason="stale"))
    monkeypatch.setattr(sys, "argv", ["astraflow", "explain", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert "not the directory of a run" in capsys.readouterr().err


def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "ledger.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(ConfigError, match="cannot be read"):
        explain(tmp_path, Query())
