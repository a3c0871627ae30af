"""The doctor: every mistake that it knows, made on purpose, is named with what to do; a sound configuration is all OK."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from astraflow.config.experiment import Resolved, load_experiment
from astraflow.lib.wire import new_identity
from astraflow.protocol.errors import ConfigError
from astraflow.tools import doctor
from astraflow.tools.doctor import Line, as_json, endpoint_rate, enough, examine, exit_code
from astraflow.weights.config import WeightsConfig
from astraflow.weights.manager import WeightManager

ROOT = Path(__file__).parents[3]
TINY = ROOT / "assets" / "tiny" / "solver"
WAIT_S = 60.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    target = tmp_path / "model"
    shutil.copytree(TINY, target)
    return target


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bandwidth is a number here; the real one has its own test and its own tool."""
    asked: list[int] = []

    def rate(probe_bytes: int) -> float:
        asked.append(probe_bytes)
        return 2e6

    monkeypatch.setattr(doctor, "loopback_rate", rate)
    return asked


def resolved(tmp_path: Path, model: Path, *overrides: str) -> Resolved:
    base = [f"models.default.path={model}", f"experiment.run_dir={tmp_path / 'run'}", *overrides]
    return load_experiment([ROOT / "recipes" / "quickstart.yaml"], base)


def lines(tmp_path: Path, model: Path, *overrides: str) -> dict[str, Line]:
    experiment = resolved(tmp_path, model, *overrides)
    found = list(examine(experiment, experiment.experiment.models, lambda: None))
    assert all(line.todo or line.finding == "OK" or line.check.startswith(("launch", "weights", "chat")) for line in found), found
    return {line.check: line for line in found}


def test_a_sound_configuration_is_ok_in_every_line(tmp_path: Path, model: Path, measured: list[int]) -> None:
    found = lines(tmp_path, model)
    assert {line.finding for line in found.values()} == {"OK"}, found
    assert set(found) == {
        "configuration", "special ids default", "chat template default", "tokenizer default", "engine default", "trainer default",
        "dtype default", "launch.dataflow_port", "weights.port", "weights.stream_port", "shared memory", "memory", "disk", "bandwidth",
        "sync default",
    }  # fmt: skip
    assert measured == [doctor.PROBE_BYTES]
    assert "full 0.9 MB in 0.4" in found["sync default"].found, "0.9 MB at the 2 MB/s that were measured"
    assert exit_code(found.values()) == 0
    assert as_json(found.values())[0] == {"finding": "OK", "check": "configuration", "found": found["configuration"].found, "todo": ""}


def rewrite(name: str, **values: Any) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        path = model / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def without_a_tensor(model: Path) -> None:
    words = load_file(model / "model.safetensors")
    del words["model.layers.2.mlp.up_proj.weight"]
    save_file(words, model / "model.safetensors")


def other_shape(model: Path) -> None:
    words = load_file(model / "model.safetensors")
    words["model.norm.weight"] = words["model.norm.weight"][:-1].clone()
    save_file(words, model / "model.safetensors")


def open_template(model: Path) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    (model / "chat_template.jinja").write_text(template)


def other_prompt(model: Path) -> None:
    path = model / "chat_template.jinja"
    path.write_text("{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}now you{% endif %}")


def no_ends(model: Path) -> None:
    (model / "generation_config.json").unlink()
    for name, keys in (("config.json", ["eos_token_id"]), ("tokenizer_config.json", ["eos_token"])):
        path = model / name
        path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key not in keys}))


@pytest.mark.parametrize(
    ("damage", "check", "finding", "said"),
    [
        (rewrite("config.json", vocab_size=50), "vocabulary default", "FAIL", "the model has 50"),
        (no_ends, "special ids default", "FAIL", "no end-of-sequence id"),
        (open_template, "chat template default", "WARN", "closes with"),
        (other_prompt, "chat template default", "WARN", "does not begin as its generation prompt"),
        (without_a_tensor, "engine default", "FAIL", "model.layers.2.mlp.up_proj.weight"),
        (without_a_tensor, "trainer default", "FAIL", "model.layers.2.mlp.up_proj.weight"),
        (other_shape, "engine default", "FAIL", "model.norm.weight has shape"),
        (other_shape, "trainer default", "FAIL", "first model.norm.weight"),
        (rewrite("config.json", model_type="abacus"), "engine default", "WARN", "computed by transformers, slowly"),
        (rewrite("config.json", model_type="abacus"), "trainer default", "FAIL", "transformers does not know the model"),
    ],
)
def test_a_model_that_does_not_fit_is_named(tmp_path: Path, model: Path, damage: Any, check: str, finding: str, said: str) -> None:
    damage(model)
    line = lines(tmp_path, model)[check]
    assert line.finding == finding, line
    assert said in line.found


def test_a_tokenizer_of_another_model_is_found_out(tmp_path: Path, model: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    rewrite("generation_config.json", eos_token_id=[5])(model)
    rewrite("config.json", eos_token_id=5)(other)
    (other / "generation_config.json").unlink()
    path = other / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    a, b = vocabulary["a"], vocabulary["e"]
    vocabulary["a"], vocabulary["e"] = b, a
    path.write_text(json.dumps(content))
    found = lines(tmp_path, model, f"models.default.tokenizer_path={other}")
    assert found["tokenizer default"].finding == "FAIL"
    assert "different tokens" in found["tokenizer default"].todo
    rewrite("generation_config.json", eos_token_id=[7])(model)
    assert lines(tmp_path, model, f"models.default.tokenizer_path={other}")["special ids default"].finding == "FAIL"


def test_ports_in_use_and_dtypes_that_disagree_are_named(tmp_path: Path, model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = lines(tmp_path, model, f"launch.dataflow_port={port}", f"weights.stream_port={port}", "raas.engine.dtype=bfloat16")
    for field in ("launch.dataflow_port", "weights.stream_port"):
        assert (found[field].finding, str(port) in found[field].found) == ("FAIL", True), found[field]
    assert found["weights.port"].finding == "OK"
    assert found["dtype default"].finding == "WARN"
    assert "disagree at lag 0" in found["dtype default"].todo
    assert exit_code(found.values()) == 1


def test_what_does_not_fit_fails_and_a_tight_fit_is_a_warning(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [enough("x", "y", needed, 100, "z").finding for needed in (80, 81, 100, 101)] == ["OK", "WARN", "WARN", "FAIL"]
    monkeypatch.setattr(doctor, "free_bytes", lambda path: 1000)
    monkeypatch.setattr(doctor, "available_bytes", lambda: 1000)
    monkeypatch.setattr(doctor, "SLOW_SYNC_S", 0.1)
    found = lines(tmp_path, model)
    assert [found[check].finding for check in ("shared memory", "memory", "disk", "sync default")] == ["FAIL", "FAIL", "FAIL", "WARN"]
    monkeypatch.setattr(doctor, "SHM", tmp_path / "none")
    assert "which is a disk" in lines(tmp_path, model)["shared memory"].found


def test_a_configuration_that_preflight_refuses_ends_there(tmp_path: Path, model: Path) -> None:
    def refuse() -> None:
        raise ConfigError("workflow.options.x: unknown")

    experiment = resolved(tmp_path, model)
    (only,) = examine(experiment, experiment.experiment.models, refuse)
    assert (only.finding, only.found) == ("FAIL", "workflow.options.x: unknown")


def test_the_way_to_a_running_sender_is_measured_with_a_real_pull(tmp_path: Path, model: Path) -> None:
    experiment = resolved(tmp_path, model)
    manager = WeightManager("default", WeightsConfig(streams=2), new_identity("test"), tmp_path)
    try:
        manager.offload(load_file(TINY / "model.safetensors").items(), 0)
        manager.published(0, WAIT_S)
        assert endpoint_rate(manager.endpoint, experiment.experiment) > 1e4
        endpoint = manager.endpoint
    finally:
        manager.close()
    found = {line.check: line for line in doctor.sync_time(experiment.experiment, {"default": 10}, endpoint, 1)}
    assert found["bandwidth"].finding == "FAIL"
    assert set(found) == {"bandwidth"}
    assert [line.finding for line in doctor.sync_time(experiment.experiment, {"default": 10}, "", 1)] == ["OK", "OK"]
