"""A run in which nothing moves any more ends by itself, with exit code 3 and the name of who is stuck."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from astraflow.dataflow.stall import StallReport

sys.path.insert(0, str(Path(__file__).parent))
from system import ROOT, one_policy
from system import Stage as Runs

_spec = importlib.util.spec_from_file_location("peers_stall", Path(__file__).with_name("peers.py"))
assert _spec is not None
assert _spec.loader is not None
peers: Any = importlib.util.module_from_spec(_spec)
sys.modules["peers_stall"] = peers
_spec.loader.exec_module(peers)

DEADLINE_S = 90.0
STUCK = "raas.engine.options={stuck_requests: [" + ", ".join(map(str, range(512))) + "]}"
"""No request is ever answered."""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Any]:
    with peers.staged(tmp_path) as made:
        yield made


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    made = Runs(tmp_path)
    yield made
    made.close()


def report_of(run_dir: Path) -> StallReport:
    return msgspec.json.decode((run_dir / "stall.json").read_bytes(), type=StallReport)


def test_an_instance_that_takes_leases_and_never_answers_is_named_and_told_to_end(stage: Any) -> None:
    """The limit counts from a restart at which everything is in its place, so that the speed of the machine plays no part."""
    stage.dataflow()
    raas = stage.raas("r0", "--delay", "100000")
    trainer = peers.Trainer(stage.url)
    trainer.ready()
    taken = lambda: [i for i in trainer.status().instances if i.in_flight == 16]  # noqa: E731
    peers.until(taken, DEADLINE_S, "leases on the instance")
    peers.until(lambda: any("6 leases" in e.why or "leases run there" in e.why for e in trainer.status().waits), DEADLINE_S, "the wait")
    dataflow = stage.children["dataflow"]
    dataflow.terminate()
    assert dataflow.wait(DEADLINE_S) == 0, "drained: the run can go on"
    assert not (Path(stage.process.run_dir) / "stall.json").exists()
    stage.process.dataflow.stall_s = 3.0
    dataflow = stage.dataflow()
    assert dataflow.wait(DEADLINE_S) == 3
    report = report_of(Path(stage.process.run_dir))
    assert ("groups", "raas:r0") in [(edge.who, edge.waits_for) for edge in report.roots]
    assert all(edge.waits_for == "raas:r0" or edge.who == "batch:default" for edge in report.roots), report.roots
    assert report.status.instances[0].in_flight == 16
    assert report.status.ledger.in_flight["leased"] == 16
    assert report.idle_s >= 3.0
    assert raas.wait(DEADLINE_S) == 0, "it was told"


def test_a_stalled_run_ends_with_3_and_nobody_is_started_again(runs: Runs) -> None:
    """However fast this machine is, three seconds without a move come soon: before the trainer is up, or after."""
    run = runs.run(one_policy(runs.directory), STUCK, "dataflow.stall_s=3", "launch.end_s=2")
    assert run.end(DEADLINE_S) == 3, run.text
    run.nothing_left()
    outcome = run.outcome
    assert outcome["failure"].startswith("stalled: nothing moved for "), outcome
    assert outcome["failure"] in run.text.replace("\n", " ")
    assert run.exit_codes()["dataflow"] == [3]
    assert all(process["restarts"] == 0 for process in outcome["processes"].values())
    report = report_of(run.run_dir)
    assert report.summary == outcome["failure"]
    assert report.roots


@pytest.mark.full
def test_a_stuck_engine_stalls_the_whole_system_and_the_report_names_its_instance(runs: Runs) -> None:
    run = runs.run(one_policy(runs.directory), STUCK, "dataflow.stall_s=25")
    assert run.end(DEADLINE_S * 2) == 3, run.text
    run.nothing_left()
    assert run.exit_codes() == {"dataflow": [3], "raas-0": [0], "trainer-solver": [3]}
    report = report_of(run.run_dir)
    assert ("groups", "raas:raas-0") in [(edge.who, edge.waits_for) for edge in report.roots]
    assert run.report["exit_code"] == 3
    assert any("raas:raas-0" in line for line in run.report["stuck"])
    assert "stuck  " in run.text
    argv = [sys.executable, "-m", "astraflow", "explain", str(run.run_dir), "--json"]
    answer = json.loads(subprocess.run(argv, capture_output=True, check=True, cwd=ROOT, timeout=DEADLINE_S).stdout)
    assert answer["counts"]["in_flight"]["leased"] == answer["counts"]["made"] > 0
    assert answer["groups"] == []


@pytest.mark.full
def test_a_slow_run_that_moves_does_not_stall(stage: Any) -> None:
    """Rollouts take 4 s each on an instance with room for two groups: far longer in all than the limit, which never passes."""
    stage.process.dataflow.stall_s = 15.0
    dataflow = stage.dataflow()
    stage.raas("r0", "--delay", "4", "--slots", "8")
    trainer = peers.Trainer(stage.url)
    trainer.ready()
    for _ in range(6):
        trainer.step()
    assert dataflow.poll() is None
    assert trainer.status().uptime_s > 15.0
    trainer.shutdown()
    assert dataflow.wait(DEADLINE_S) == 0
