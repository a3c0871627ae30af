"""The report of a run is made from its directory alone, and its sums are checked."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from astraflow.dataflow.stall import make_report
from astraflow.launch.local import Outcome
from astraflow.launch.watch import Observed
from astraflow.lib.metrics import Metrics
from astraflow.protocol.batch import WaitEdge
from astraflow.protocol.control import Availability, DataflowStatus, EngineStatus, EvalResult, LedgerCounts, RaaSStatus, TrainerInfo
from astraflow.protocol.errors import ConfigError
from astraflow.protocol.rollout import Serving
from astraflow.tools import report


def status(trained: int = 120) -> DataflowStatus:
    return DataflowStatus(
        run_id="r-1",
        state="ready",
        uptime_s=10,
        service_version=3,
        started=True,
        trainers=[TrainerInfo(model_id="default", timeline=0, version=3, digest="", checkpoint_version=3, state="done", last_seen_s=0)],
        instances=[],
        queues={},
        ledger=LedgerCounts(made=150, trained=trained, dropped={"stale": 16, "error": 4}, in_flight={"leased": 10}),
        waits=[],
        staleness={"default": {0: 40, 1: 60, 2: 20}},
    )


def instance(incarnation: str, full: int, delta: int) -> RaaSStatus:
    return RaaSStatus(
        incarnation=incarnation,
        instance_id="raas-0",
        state="idle",
        availability=Availability(total_slots=8, free_slots=8, in_flight=0, outbox=0),
        models=["default"],
        serving={"default": Serving(timeline=0, version=3, digest="d")},
        engines={"default": EngineStatus(kind="embedded", state="ready", restarts=1 if incarnation == "a" else 2)},
        workflows=[],
        metrics={
            "weights/syncs_full": full,
            "weights/bytes_full": full * 1e6,
            "weights/syncs_delta": delta,
            "weights/bytes_delta": delta * 1e4,
        },
    )


def evaluation(version: int, value: float) -> EvalResult:
    return EvalResult(
        eval_id=f"e{version}",
        dataset="heldout",
        versions={"default": Serving(timeline=0, version=version, digest="")},
        n_tasks=20,
        n_samples=1,
        missing=0,
        metrics={"avg@1": value, "pass@8": None},
        duration_s=1.0,
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    observed = Observed(
        status=status(),
        instances={"raas-0": instance("b", 1, 2)},
        past_lives=[instance("a", 1, 0)],
        evals=[evaluation(0, 0.2)],
        events=["raas-0 joined"],
    )
    (tmp_path / "observed.json").write_bytes(msgspec.json.encode(observed))
    processes = {"trainer-default": {"state": "done", "restarts": 1, "exit_codes": [-9, 0]}}
    events = ["trainer-default was killed by SIGKILL"]
    outcome = Outcome(exit_code=0, failure="", drained=False, wall_s=12.5, processes=processes, events=events)
    (tmp_path / "outcome.json").write_bytes(msgspec.json.encode(outcome))
    metrics = Metrics(tmp_path, "trainer:default", tensorboard=False)
    metrics.log(1, {"reward/mean": 0.1, "time/wait_s": 50.0, "time/step_s": 51.0, "rollout/rows": 8, "policy/effective_rows": 8})
    metrics.log(2, {"reward/mean": 0.9, "rollout/rows": 8, "policy/effective_rows": 4, "time/wait_s": 1.0, "time/step_s": 4.0})
    metrics.log(2, {"reward/mean": 0.2, "time/wait_s": 1.0, "time/step_s": 4.0})
    metrics.log(3, {"reward/mean": 0.3, "eval/heldout/avg@1": 0.7})
    metrics.close()
    Metrics(tmp_path, "raas-0", tensorboard=False).log(3, {"reward/mean": 9.0})
    return tmp_path


def test_the_numbers_come_from_the_files(run_dir: Path) -> None:
    made = report.build(run_dir)
    assert made.rollouts == {"made": 150, "trained": 120, "dropped": 20, "in_flight": 10, "replayed": 0}
    assert made.adds_up
    assert (made.syncs.full, made.syncs.full_bytes, made.syncs.delta, made.syncs.delta_bytes) == (2, 2_000_000, 2, 20_000)
    assert made.staleness == {"default": {0: 40, 1: 60, 2: 20}}
    assert made.reward["default"] == report.Curve(steps=[1, 2, 3], values=[0.1, 0.2, 0.3])
    assert made.accuracy["heldout"] == report.Curve(steps=[0, 3], values=[0.2, 0.7])
    assert made.wait_share == {"default": 0.25}
    assert made.effective == {"default": 0.75}


def test_restarts_of_the_services_children_are_counted_too(run_dir: Path) -> None:
    assert report.build(run_dir).restarts == {"trainer-default": 1, "engine raas-0/default": 3}
    row = {"time": 1.0, "process": "trainer:default", "step": 3, "values": {"weights/sender_restarts": 2.0}}
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    assert report.build(run_dir).restarts["sender-default"] == 2


def test_the_table_says_what_a_user_wants_to_know(run_dir: Path) -> None:
    shown = io.StringIO()
    report.write(run_dir, Console(file=shown, width=200, soft_wrap=True))
    text = shown.getvalue()
    for part in (
        "trained, after 12 s",
        "made 150 = trained 120 + dropped 20 + in flight 10  (adds up)",
        "error 4  stale 16",
        "75% of the trained rows carried a gradient",
        "1.25 rollouts per trained one",
        "v0 0.200  v3 0.700",
        "full 2 (2.0 MB)  delta 2 (20.0 kB)",
        "0: 40  1: 60  2: 20",
        "25% of its time",
        "trainer-default -9 0",
        "trainer-default was killed by SIGKILL",
        "raas-0 joined",
    ):
        assert part in text
    assert json.loads((run_dir / "report.json").read_text())["rollouts"]["made"] == 150
    assert (run_dir / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_sum_that_does_not_add_up_is_shouted(run_dir: Path) -> None:
    (run_dir / "observed.json").write_bytes(msgspec.json.encode(Observed(status=status(trained=119))))
    made = report.build(run_dir)
    assert not made.adds_up
    assert any("DOES NOT ADD UP" in text for _, text in report.lines(made))


def test_a_torn_line_of_a_killed_process_costs_its_numbers_only(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(b'{"time": 1, "process": "trainer:defa{"time": 2}\n{"half')
    assert report.build(run_dir).reward["default"].values == [0.1, 0.2, 0.3]


def test_a_failed_run_is_reported_as_failed(run_dir: Path) -> None:
    outcome = Outcome(exit_code=1, failure="dataflow was killed by SIGKILL", drained=False, wall_s=3.0, processes={}, events=[])
    (run_dir / "outcome.json").write_bytes(msgspec.json.encode(outcome))
    assert report.verdict(report.build(run_dir)) == "FAILED: dataflow was killed by SIGKILL"


def test_a_ledger_that_cannot_be_read_costs_its_numbers_and_not_the_report(run_dir: Path) -> None:
    (run_dir / "ledger").mkdir()
    (run_dir / "ledger" / "ledger.sqlite").write_bytes(b"no database at all" * 400)
    assert report.started(run_dir)
    made = report.write(run_dir, Console(file=(out := io.StringIO()), width=200))
    assert made.rollouts["trained"] == 120, "as Dataflow told it last"
    assert "ledger.sqlite' cannot be read: file is not a database; rollouts are told as they were last seen" in out.getvalue()
    assert json.loads((run_dir / "report.json").read_text())["events"][-1].endswith("last seen")


def test_a_run_without_rollouts_has_nothing_to_report(tmp_path: Path) -> None:
    (tmp_path / "observed.json").write_bytes(msgspec.json.encode(Observed()))
    assert not report.started(tmp_path)
    made = report.build(tmp_path)
    report.draw(made, tmp_path / "empty.png")
    assert made.adds_up


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no observed\.json"):
        report.build(tmp_path)


def test_a_stalled_run_says_who_was_stuck_first_of_all(run_dir: Path) -> None:
    now = status()
    now.waits = [WaitEdge(who="groups", waits_for="raas:raas-0", why="6 leases run there", since_s=31)]
    stalled = make_report(now, 31.0, 30.0)
    (run_dir / "stall.json").write_bytes(msgspec.json.encode(stalled))
    outcome = Outcome(exit_code=3, failure=stalled.summary, drained=False, wall_s=90.0, processes={}, events=[])
    (run_dir / "outcome.json").write_bytes(msgspec.json.encode(outcome))
    out = io.StringIO()
    report.show(report.build(run_dir), Console(file=out, width=200, soft_wrap=True))
    assert "r-1: FAILED: stalled: nothing moved for 31 s; groups waits for raas:raas-0 since 31 s: 6 leases run there" in out.getvalue()
    assert "stuck                  groups waits for raas:raas-0 since 31 s: 6 leases run there\n" in out.getvalue()


def test_the_flow_of_groups_is_two_rows_that_can_be_compared() -> None:
    flow = {
        "rollout/tokens_mean_generated": 30.25, "reward/mean_generated": 0.5, "rollout/groups_generated": 12.0,
        "rollout/tokens_mean_trained": 12.5, "reward/mean_trained": 0.75, "rollout/groups_trained": 4.0,
        "rollout/groups_per_trained_group": 3.0, "rollout/effective_groups": 4.0,
    }  # fmt: skip
    assert report.flow_lines("m", flow) == [
        ("generated m", "12 groups, 30.2 tokens and reward 0.500 per rollout"),
        ("trained on m", "4 groups, 12.5 tokens and reward 0.750 per rollout"),
        ("", "3.00 groups for each one trained on; 4 had different rewards"),
    ]
    assert report.flow_lines("m", {"rollout/groups_generated": 3.0, "rollout/groups_trained": 0.0}) == []
