"""The two-policy recipe with its real engine: both policies learn, over a stop by Ctrl-C and a resume in the middle."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "flow"))
from system import TWO_POLICIES, Run, Stage, version

pytestmark = [pytest.mark.full, pytest.mark.timeout(420)]
POLICIES = ("solver", "verifier")
STEPS, BATCH, K = 120, 64, 20
"""As in the recipe: within 30 steps the gain of one seed in two is no larger than the noise of single steps."""
LIMIT_S = 240.0
OVERRIDES = (f"trainer.max_steps={STEPS}", "trainer.eval_freq=60")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.close()


def above_its_start(run: Run, policy: str) -> tuple[float, float]:
    """(mean of the last K steps' rewards − mean of the first K, standard error of that difference from the steps' own spread)."""
    rewards = run.report["reward"][policy]["values"]
    assert len(rewards) == STEPS
    first, last = rewards[:K], rewards[-K:]
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / K)
    return statistics.mean(last) - statistics.mean(first), error


def test_both_policies_get_better_over_a_stop_and_a_resume(stage: Stage) -> None:
    began = time.monotonic()
    first = stage.run(TWO_POLICIES, *OVERRIDES)
    middle = STEPS // 2
    first.until(f"version {middle} of both", lambda status: min(version(status, policy) for policy in POLICIES) >= middle, LIMIT_S)
    first.interrupt()
    assert first.end(LIMIT_S) == 0, first.text
    first.nothing_left()
    stopped = first.report["steps"]
    assert all(middle <= step < STEPS for step in stopped.values())
    first.adds_up(stopped, BATCH, max_staleness=2)

    second = stage.run(TWO_POLICIES, *OVERRIDES, resume=True)
    assert second.end(LIMIT_S) == 0, second.text
    took = time.monotonic() - began
    second.nothing_left()
    second.adds_up(dict.fromkeys(POLICIES, STEPS), BATCH, max_staleness=2)
    assert all(codes == [0] for codes in second.exit_codes().values())
    for policy in POLICIES:
        gain, error = above_its_start(second, policy)
        assert gain > 2 * error, f"{policy}: {gain:+.3f} with a standard error of {error:.3f}"
    assert took < LIMIT_S, f"{took:.0f} s"
