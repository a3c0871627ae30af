"""What is found out before anything starts: models that cannot be read, workflows that refuse their options."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from astraflow.config.experiment import load_experiment
from astraflow.launch.preflight import broken, check_model, preflight
from astraflow.protocol.errors import ConfigError
from astraflow.weights.config import ModelConfig

TINY = Path(__file__).parents[3] / "assets" / "tiny" / "solver"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    target = tmp_path / "model"
    shutil.copytree(TINY, target)
    return target


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("config.json", Path.unlink, "has no config.json"),
    ("config.json", lambda path: path.write_text("{"), "config.json cannot be read"),
    ("config.json", lambda path: path.write_text("[]"), "expected an object"),
    ("tokenizer.json", Path.unlink, "tokenizer.json does not exist"),
    ("tokenizer.json", lambda path: path.write_text("{"), "tokenizer.json"),
    ("model.safetensors", Path.unlink, "has no *.safetensors"),
    ("model.safetensors", cut, "its header tells of"),
    ("model.safetensors", lambda path: path.write_bytes(b""), "0 bytes and no header"),
    ("model.safetensors", lambda path: path.write_bytes(b"\xff" * 64), "64 bytes and no header"),
    ("model.safetensors", lambda path: path.write_bytes(b"\x08" + b"\0" * 7 + b"not json"), "its header is damaged"),
    ("model.safetensors", lambda path: path.write_bytes(b"\x08" + b"\0" * 7 + b'{"a": 1}'), "its header is damaged"),
]


@pytest.mark.parametrize(("name", "damage", "said"), DAMAGES)
def test_a_damaged_model_directory_names_field_and_file(model: Path, name: str, damage: Callable[[Path], object], said: str) -> None:
    damage(model / name)
    with pytest.raises(ConfigError) as caught:
        check_model("models.default", ModelConfig(path=str(model)))
    assert str(caught.value).startswith("models.default.path: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_whole_model_passes_and_a_tokenizer_of_its_own_is_named(model: Path, tmp_path: Path) -> None:
    assert broken(model / "model.safetensors") == ""
    (model / "tokenizer.json").unlink()
    assert check_model("models.a", ModelConfig(path=str(model), tokenizer_path=str(TINY))).vocab_size > 0
    with pytest.raises(ConfigError, match=r"^models\.a\.tokenizer_path: "):
        check_model("models.a", ModelConfig(path=str(TINY), tokenizer_path=str(tmp_path)))


def test_every_recipe_that_needs_no_download_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TINY.parents[2])
    resolved = load_experiment(["recipes/tiny-two-policies.yaml"])
    preflight(resolved, resolved.experiment.models)


def test_a_workflow_of_two_policies_refuses_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TINY.parents[2])
    resolved = load_experiment(["recipes/tiny-two-policies.yaml"], ["workflow.policies=[solver]"])
    with pytest.raises(ConfigError, match=r"^workflow\.policies: \['solver'\], expected \[solver, verifier\]"):
        preflight(resolved, resolved.experiment.models)
