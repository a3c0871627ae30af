"""The quick start with a trainer of two ranks: it learns as it does with one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "flow"))
from system import Stage

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]
STEPS, BATCH = 32, 64
LIMIT_S = 1400.0


def test_a_quick_start_with_two_ranks_learns_like_one(stage: Stage) -> None:
    """One rank (evidence/quickstart-seed0.json): reward .09 over the first five steps, .78 over steps 28 to 32."""
    overrides = ("trainer.backend=fsdp", "trainer.ranks=2", f"trainer.max_steps={STEPS}", "trainer.eval_freq=0")
    run = stage.run("recipes/quickstart.yaml", *overrides)
    assert run.end(LIMIT_S) == 0, run.text
    run.adds_up({"default": STEPS}, BATCH, max_staleness=2)
    steps = [row["values"] for row in run.steps("default")]
    rewards = [step["reward/mean"] for step in steps]
    assert sum(rewards[:5]) / 5 < 0.3
    assert sum(rewards[-5:]) / 5 > 0.55
    assert steps[0]["mismatch/log_ratio_max"] < 1e-3, "lag 0: the words that were published are those that were computed on"
    assert steps[0]["policy/clip_frac"] == 0
