"""Settings of the trainer."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from astraflow.trainer.config import PPOConfig, TrainEngineConfig


def test_the_settings_are_read_without_torch() -> None:
    code = "import sys, astraflow.trainer.config as c; c.TrainEngineConfig(); assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_only_kl_terms_need_a_reference() -> None:
    assert not PPOConfig().needs_reference
    assert PPOConfig(kl_loss=0.1).needs_reference
    assert PPOConfig(kl_reward=0.1).needs_reference


def test_the_quick_start_section_is_valid_and_optimizer_steps_are_counted() -> None:
    section = {
        "backend": "local",
        "train_batch_size": 64,
        "max_steps": 40,
        "eval_freq": 15,
        "stop": {"metric": "reward/mean", "window": 5, "at_least": 0.9, "not_before": 30},
        "algorithm": {"advantage": "grpo", "loss": "ppo", "tis_c": 2.0, "clip_low": 0.2, "clip_high": 0.2},
        "optimizer": {"lr": 1e-5, "warmup_steps": 5},
    }
    assert msgspec.convert(section, TrainEngineConfig).optimizer_steps == 1
    assert msgspec.convert(section | {"minibatches": 2, "epochs": 3}, TrainEngineConfig).optimizer_steps == 6


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"train_batch_sise": 4}, "train_batch_sise"),
        ({"algorithm": {"kl_loss_kind": "k1"}}, "k2 or k3"),
        ({"algorithm": {"dual_clip": 0.5}}, "dual_clip"),
        ({"optimizer": {"lr": "abc"}}, "optimizer.lr"),
        ({"max_steps": 0}, "max_steps"),
        ({"checkpoint": {"keep": 0}}, "keep"),
        ({"packing": {"attention": "flash"}}, "attention"),
        ({"stop": {"window": 3}}, "at_least"),
        ({"ranks": 2}, "ranks is 2, but backend local is one process; expected 1, or backend fsdp"),
        (
            {"backend": "fsdp", "ranks": 6, "parallel": {"tensor": 2, "context": 2}},
            r"ranks is 6, expected a multiple of parallel.replicate · context · tensor = 4",
        ),
    ],
)
def test_mistakes_in_the_section_name_the_field(section: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(section, TrainEngineConfig)
