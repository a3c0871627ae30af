"""Every kind of fault on the two-policy job for three minutes, and the soak in small."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "flow"))
from system import ROOT, SCRIPTED, TWO_POLICIES, Stage
from test_system_drill import judge

MINUTES = 3
FAULTS = (
    "kill=raas:0.02,kill=trainer:0.01,kill=dataflow:0.01,kill=sender:0.01,"
    "stop=raas:0.01:2s,stop=trainer:0.01:2s,stop=dataflow:0.01:2s,stop=sender:0.01:2s,"
    "drop=pull:0.05,drop=batch:0.05,drop=notify:0.1,drop=raas:0.02,drop=weights:0.1,delay=weights:300ms,delay=raas:20ms,seed=5,"
    f"for={MINUTES}m"
)


def settled(text: str) -> bool:
    """Whatever was hit has recovered, as the panel tells it."""
    return text.count(") is killed") + text.count(") is stopped for ") == text.count(" recovered after ")


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_drill_with_every_kind_of_fault_is_passed(stage: Stage) -> None:
    patient = ("launch.restart.limit=100", "launch.restart.max_s=1", "weights.max_restarts=100", "dataflow.pool.heartbeat_s=1")
    run = stage.run(TWO_POLICIES, *SCRIPTED, *patient, "trainer.max_steps=100000", "trainer.eval_freq=50", "--chaos", FAULTS)
    began = time.monotonic()
    calm = run.until("the end of all faults", lambda status: time.monotonic() - began > MINUTES * 60 and settled(run.text), 600.0)
    at = {trainer.model_id: trainer.version for trainer in calm.trainers}
    run.until("progress of both", lambda status: all(t.version > at[t.model_id] for t in status.trainers), 180.0)
    run.interrupt()
    found = judge(run)
    assert {hit["target"] for hit in found["hits"]} == {"raas", "trainer", "dataflow", "sender"}
    assert {hit["kind"] for hit in found["hits"]} == {"kill", "stop"}
    wires = {(wire["kind"], wire["target"]) for wire in found["wires"]}
    assert wires >= {("drop", wire) for wire in ("pull", "batch", "notify", "raas", "weights")} | {("delay", "weights"), ("delay", "raas")}
    assert all(hit["recovered_s"] is not None for hit in found["hits"])


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_soak_measures_what_it_is_asked_to_show(tmp_path: Path) -> None:
    """Two minutes say nothing about growth; all else must hold."""
    argv = [sys.executable, "-m", "astraflow.tools.soak_evidence", "--minutes", "2", "--out", str(tmp_path / "soak.json")]
    code = subprocess.run(argv, cwd=ROOT, check=False).returncode
    found = json.loads((tmp_path / "soak.json").read_text())
    failed = {condition for condition, holds in found["shows"].items() if not holds}
    unsaid = {condition for condition in failed if "memory" in condition or "every " in condition}
    assert failed == unsaid, (failed, found["left"], found["chaos"])
    assert code == (1 if failed else 0)
    assert {life["name"] for life in found["memory"]} >= {"supervisor", "dataflow", "raas-0", "trainer-solver", "sender of trainer-solver"}
