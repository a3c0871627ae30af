"""Every recipe of the paper's experiments takes two steps with the layer that makes it a laptop's."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "flow"))
from system import ROOT, Stage

from astraflow.config.experiment import load_experiment
from astraflow.rewards import REWARDS

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
DEADLINE_S = 840.0
COMMAND = re.compile(r"^#.* astraflow run ((?:recipes/\S+ ?)+)", re.MULTILINE)
ALL = {files.strip() for path in (ROOT / "recipes").glob("*.yaml") for files in COMMAND.findall(path.read_text())}
LAPTOP = sorted(files for files in ALL if files.endswith("-cpu.yaml"))


@pytest.mark.parametrize("files", LAPTOP)
def test_a_recipe_takes_two_steps_on_a_laptop(stage: Stage, files: str) -> None:
    first, *layers = shlex.split(files)
    experiment = load_experiment([ROOT / file for file in (first, *layers)]).experiment
    if experiment.workflow.reward not in REWARDS:
        pytest.skip(f"reward {experiment.workflow.reward!r} is not registered")
    run = stage.run(first, *layers)
    assert run.end(DEADLINE_S) == 0, run.text
    run.nothing_left()
    (batch,) = {trainer.train_batch_size for trainer in experiment.trainer.values()}
    run.adds_up(dict.fromkeys(experiment.models, 2), batch, experiment.dataflow.buffer.max_staleness or 0)
    for policy in experiment.models:
        assert [row["step"] for row in run.steps(policy)] == [1, 2]
