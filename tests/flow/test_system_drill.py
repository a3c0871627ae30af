"""`astraflow run --chaos`: a real run under real faults ends in order, its books add up, and the report says what was hit and recovered."""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from system import Run, Stage, one_policy, version

from astraflow.dataflow.logbook import Logbook

DEADLINE_S = 180.0


def chaos(run: Run) -> dict[str, Any]:
    found = json.loads((run.run_dir / "chaos.json").read_text())
    assert isinstance(found, dict)
    return found


def judge(run: Run) -> dict[str, Any]:
    """What must hold after any drill that was passed."""
    assert run.end(DEADLINE_S) == 0, run.text
    run.nothing_left()
    assert run.report["adds_up"]
    found = chaos(run)
    books = run.books
    assert found["problems"] == []
    assert found["rows"] == {"made": books.made, "trained": books.trained, "dropped": books.dropped, "in_flight": books.in_flight}
    assert books.made == books.trained + books.dropped + books.in_flight
    for hit in found["hits"]:
        assert (hit["recovered_s"] or 0.0) > 0 or hit["cut_short"] == "the run ended", hit
    for name, codes in run.exit_codes().items():
        kills = [hit for hit in found["hits"] if hit["process"] == name and hit["kind"] == "kill"]
        open_still = [hit for hit in kills if hit["recovered_s"] is None]  # the run may end before it came back
        assert codes in ([-9] * len(kills) + [0], *([[-9] * len(kills)] if open_still else [])), (name, codes, found["hits"])
    assert f"drill {found['text']} (seed {found['seed']}): passed" in run.text
    return found


@pytest.mark.timeout(240)
def test_killed_services_and_lost_replies_are_told_with_their_recovery(stage: Stage) -> None:
    overrides = ("trainer.max_steps=1000", "dataflow.pool.heartbeat_s=1", "launch.poll_s=0.1")
    run = stage.run(one_policy(stage.directory), *overrides, "--chaos", "kill=raas:0.3,drop=pull:0.2,seed=3")
    back = run.until("a recovery", lambda status: "drill: raas-0 recovered" in run.text, DEADLINE_S)
    run.version("solver", max(version(back, "solver") + 1, 3), DEADLINE_S)
    run.interrupt()
    found = judge(run)
    kills = [hit for hit in found["hits"] if hit["kind"] == "kill"]
    assert kills[0]["process"] == "raas-0"
    assert kills[0]["recovered_s"] > 0
    assert kills[0]["sign"].startswith("is live and holds")
    assert kills[0]["bytes_again"] > 0, "a new process fetched its weights in full"
    assert f"killed raas-0 (pid {kills[0]['pid']}): after " in run.text
    (dropped,) = found["wires"]
    assert (dropped["kind"], dropped["target"], dropped["process"]) == ("drop", "pull", "dataflow")
    assert dropped["count"] >= dropped["recovered"] > 0
    assert dropped["bytes_again"] > 0
    assert dropped["count"] == len(dropped["hits"])
    for spoil, told in (
        ("UPDATE shares SET live = live + 1 WHERE lease_id = (SELECT MIN(lease_id) FROM shares)", "made "),
        ("UPDATE leases SET n_samples = n_samples + 1", "but leases are of"),
        ("UPDATE batches SET version = version + 9999 WHERE state = 'trained' AND version = 1", "trained batches from version 0 to"),
        ("UPDATE batches SET fresh = (SELECT fresh FROM batches WHERE version = 0) WHERE version = 1", "are in two trained batches"),
        ("UPDATE shares SET state = 'dropped', reason = ''", "without a reason"),
    ):
        spoilt = stage.directory / "spoilt"
        shutil.rmtree(spoilt, ignore_errors=True)
        shutil.copytree(run.run_dir / "ledger", spoilt / "ledger")
        with sqlite3.connect(spoilt / "ledger" / "ledger.sqlite") as database:
            database.execute(spoil)
        database.close()
        with Logbook(spoilt) as log:
            assert any(told in fault for fault in log.faults()), (spoil, log.faults())
