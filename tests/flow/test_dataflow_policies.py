"""Data policies in a real Dataflow process that is killed in between."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from astraflow.dataflow.source import FORCED_AFTER

_spec = importlib.util.spec_from_file_location("peers", Path(__file__).with_name("peers.py"))
assert _spec is not None
assert _spec.loader is not None
peers: Any = importlib.util.module_from_spec(_spec)
sys.modules["peers"] = peers
_spec.loader.exec_module(peers)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Any]:
    with peers.staged(tmp_path) as made:
        yield made


def test_a_run_whose_every_prompt_is_solved_goes_on_by_force_over_a_kill_and_its_log_can_be_replayed(stage: Any, tmp_path: Path) -> None:
    stage.process.dataflow.policies.curator = {"name": "filter_solved", "correct_threshold": 0.0}  # whatever is scored is right
    stage.dataflow(n_tasks=12)
    stage.raas("r0")
    trainer = peers.Trainer(stage.url)
    trainer.ready()
    while not (before := trainer.status()).metrics["rollout/curator_forced"]:
        assert trainer.version < 60, "each of 12 prompts was measured long ago"
        trainer.step()
    stage.kill("dataflow")
    stage.dataflow(n_tasks=12)
    for _ in range(4):
        trainer.step()
    steps = trainer.version
    after = trainer.status()
    forced, skipped = after.metrics["rollout/curator_forced"], after.metrics["rollout/curator_skipped"]
    assert forced >= before.metrics["rollout/curator_forced"]
    assert skipped >= FORCED_AFTER * forced
    assert len(set(trainer.seen)) == len(trainer.seen) == steps * 8
    answer = tmp_path / "replay.json"
    command = [sys.executable, "-m", "astraflow", "replay", stage.process.run_dir, "--filter", "filter_zero_adv", "--json", str(answer)]
    subprocess.run(command, check=True, timeout=60, stdout=subprocess.DEVNULL)
    real, other = json.loads(answer.read_text())["outcomes"]
    assert (real["policy"], real["kept"]["groups"]) == ("default", steps * 2)
    assert other["seen"]["groups"] == real["seen"]["groups"] == other["kept"]["groups"], "random rewards differ"
    trainer.shutdown()
    assert stage.children["dataflow"].wait(10) == 0
