"""A whole run whose trainer has two ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from system import Stage, one_policy

DEADLINE_S = 180.0
RANKS = ("trainer.backend=fsdp", "trainer.ranks=2", "trainer.checkpoint.every=2")
BATCH, MAX_STALENESS = 16, 2


@pytest.mark.timeout(480)
def test_a_trainer_of_two_ranks_loses_one_is_started_again_with_all_and_drains(stage: Stage, tmp_path: Path) -> None:
    run = stage.run(one_policy(tmp_path), *RANKS, "trainer.max_steps=1000")
    at = run.version("solver", 3, DEADLINE_S).trainers[0].version
    run.kill("rank 1 of trainer-solver")
    run.version("solver", at + 2, DEADLINE_S)
    run.interrupt()  # the run has no end of its own: no kill can come too late on any machine
    assert run.end(DEADLINE_S) == 0, run.text
    run.nothing_left()
    codes = run.exit_codes()["trainer-solver"]
    assert codes == [1, 0]
    assert run.report["drained"]
    assert any("rank 1 of 2 was killed by SIGKILL; the others were ended" in event for event in run.outcome["events"])
    steps = run.report["steps"]
    run.adds_up(steps, BATCH, MAX_STALENESS)
    newest = max((run.run_dir / "checkpoints" / "solver").glob("step-*"))
    assert int(newest.name[5:]) == steps["solver"]
    assert [name for name, *_ in json.loads((newest / "checkpoint.json").read_text())["files"]] == [
        "state-1-of-2.safetensors",
        "state-2-of-2.safetensors",
    ]
