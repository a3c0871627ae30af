"""Checkpoints and schedules."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from astraflow.protocol.errors import ConfigError
from astraflow.trainer.backends.base import TrainState, learning_rate
from astraflow.trainer.checkpoint import Checkpoints
from astraflow.trainer.config import CheckpointConfig, OptimizerConfig


def state_of(value: float) -> TrainState:
    return TrainState(
        {"a": torch.full((3, 2), value), "n": torch.arange(4), "e": torch.zeros(0, dtype=torch.bfloat16)}, {"position": int(value)}
    )


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), "run")
    checkpoints.save(7, state_of(2.5), {"window": [0.5]})
    checkpoints.wait()
    assert checkpoints.durable == 7
    again = Checkpoints(tmp_path, CheckpointConfig(), "run")
    found = again.newest()
    assert found is not None
    assert (found.version, found.loop, found.backend) == (7, {"window": [0.5]}, {"position": 2})
    into = state_of(0.0).tensors | {"n": torch.zeros(4, dtype=torch.int64)}
    again.fill(found, into)
    assert torch.equal(into["a"], state_of(2.5).tensors["a"])
    assert torch.equal(into["n"], torch.arange(4))


def test_the_state_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), "run")
    checkpoints.save(1, state_of(1), {})
    checkpoints.wait()
    found = checkpoints.newest()
    assert found is not None
    with pytest.raises(ConfigError, match=r"a is \(3, 2\), the model has \(7,\)"):
        checkpoints.fill(found, {"a": torch.zeros(7)})
    with pytest.raises(ConfigError, match="b is nothing, the model has"):
        checkpoints.fill(found, {"b": torch.zeros(7)})


def test_only_the_newest_are_kept_and_a_dead_timeline_leaves_nothing_behind(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=2), "run")
    for version in (1, 2, 3, 4):
        checkpoints.save(version, state_of(float(version)), {})
    checkpoints.wait()
    assert checkpoints.complete() == [3, 4]
    checkpoints.save(2, state_of(9), {})  # rolled back: 3 and 4 belong to a dead timeline
    checkpoints.wait()
    assert checkpoints.complete() == [2]


def test_an_unfinished_checkpoint_is_not_there_and_is_cleaned_up(tmp_path: Path) -> None:
    unfinished = tmp_path / ".step-00000009.1.tmp"
    unfinished.mkdir()
    (unfinished / "state-1-of-1.safetensors").write_bytes(b"half")
    (tmp_path / "step-00000008").mkdir()  # no checkpoint.json
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), "run")
    assert checkpoints.newest() is None
    assert checkpoints.durable == -1
    checkpoints.save(1, state_of(1), {})
    checkpoints.wait()
    assert not unfinished.exists()


def test_a_failed_write_is_not_silent_and_does_not_move_the_durable_version(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory", encoding="utf-8")
    checkpoints = Checkpoints(tmp_path / "file", CheckpointConfig(), "run")
    checkpoints.save(3, state_of(3), {})
    with pytest.raises(OSError, match="file"):
        checkpoints.wait()
    assert checkpoints.durable == -1
    checkpoints.wait()  # reported once


def test_resume_false_ignores_other_runs_but_not_a_restart_of_this_one(tmp_path: Path) -> None:
    old = Checkpoints(tmp_path, CheckpointConfig(), "old-run")
    old.save(5, state_of(5), {})
    old.wait()
    fresh = CheckpointConfig(resume=False)
    assert Checkpoints(tmp_path, fresh, "new-run").newest() is None
    assert Checkpoints(tmp_path, fresh, "old-run").newest() is not None
    assert Checkpoints(tmp_path, CheckpointConfig(), "new-run").newest() is not None


def test_another_format_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), "run")
    checkpoints.save(1, state_of(1), {})
    checkpoints.wait()
    path = tmp_path / "step-00000001" / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"format": 99}), encoding="utf-8")
    with pytest.raises(ConfigError, match="format 99"):
        checkpoints.newest()


def test_the_rate_is_a_function_of_the_position_so_resuming_cannot_advance_it(case: Callable[[str], dict[str, Any]]) -> None:
    recorded = case("G32")
    given, expected = recorded["input"], recorded["expected"]["values"]
    schedule = given["schedule"]
    config = OptimizerConfig(lr=schedule["peak"], schedule="cosine", warmup_steps=schedule["warmup"])
    assert learning_rate(config, 5, schedule["total"]) == pytest.approx(expected["lr_at_5"], rel=1e-4)
    assert learning_rate(config, 40, schedule["total"]) == pytest.approx(expected["lr_at_40_before"], rel=1e-4)
    assert learning_rate(config, 41, schedule["total"]) == pytest.approx(expected["lr_at_41"], rel=1e-4)
    second = given["second"]
    config = OptimizerConfig(lr=1.0, schedule="cosine", warmup_steps=second["warmup"])
    assert learning_rate(config, second["query_step"], second["total"]) == pytest.approx(expected["second_lr_fraction_at_198"], rel=1e-4)


def test_schedules_begin_above_zero_and_end_at_their_floor() -> None:
    for shape in ("constant", "linear", "cosine"):
        config = OptimizerConfig(lr=2.0, schedule=shape, warmup_steps=4, min_lr_fraction=0.1)
        rates = [learning_rate(config, k, 20) for k in range(1, 30)]
        assert rates[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
        assert rates[19] == pytest.approx(2.0 if shape == "constant" else 0.2)
        assert rates[-1] == rates[19]


@pytest.mark.parametrize("harm", ["flip", "cut", "lengthen", "no tensors", "torn json", "json of a list"])
def test_a_damaged_checkpoint_is_passed_over_and_never_trained_on(tmp_path: Path, harm: str) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=2), "run")
    for version in (1, 2):
        checkpoints.save(version, state_of(float(version)), {})
    checkpoints.wait()
    damage(tmp_path / "step-00000002", harm)
    again = Checkpoints(tmp_path, CheckpointConfig(), "run")
    found = again.newest()
    assert found is not None
    assert (found.version, again.durable) == (1, 1)
    into = state_of(0.0).tensors
    again.fill(found, into)
    assert torch.equal(into["a"], state_of(1.0).tensors["a"])
    damage(tmp_path / "step-00000001", harm)
    with pytest.raises(ConfigError, match=r"step-00000002: damaged checkpoint: .*no other is whole"):
        Checkpoints(tmp_path, CheckpointConfig(), "run").newest()


def damage(path: Path, harm: str) -> None:
    tensors, plain = path / "state-1-of-1.safetensors", path / "checkpoint.json"
    data = tensors.read_bytes()
    if harm == "flip":
        tensors.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    elif harm == "cut":
        tensors.write_bytes(data[: len(data) // 2])
    elif harm == "lengthen":
        tensors.write_bytes(data + b"\0")
    elif harm == "no tensors":
        tensors.unlink()
    else:
        plain.write_text("[]" if harm == "json of a list" else plain.read_text()[:-20])
