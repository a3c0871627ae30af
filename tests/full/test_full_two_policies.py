"""The two-policy recipe with its real engine: both policies learn, though one trainer is killed and all is stopped and resumed."""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "flow"))
from system import TWO_POLICIES, Run, Stage, version

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
POLICIES = ("solver", "verifier")
STEPS, BATCH, K = 120, 64, 20
"""As in the recipe: within 30 steps the gain of one seed in two is no larger than the noise of single steps."""
LIMIT_S = 900.0
"""Of each wait, on a slow and loaded machine."""
OVERRIDES = (f"trainer.max_steps={STEPS}", "trainer.eval_freq=60")
KILL_AT, MIDDLE = 28, 60
"""The first is no version of a checkpoint: the trainer that is killed there has steps to take again."""


def above_its_start(run: Run, policy: str) -> tuple[float, float]:
    """(mean of the last K steps' rewards − mean of the first K, standard error of that difference from the steps' own spread)."""
    rewards = run.report["reward"][policy]["values"]
    assert len(rewards) == STEPS
    first, last = rewards[:K], rewards[-K:]
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / K)
    return statistics.mean(last) - statistics.mean(first), error


def both_at(run: Run, at: int) -> None:
    run.until(f"version {at} of both", lambda status: min(version(status, policy) for policy in POLICIES) >= at, LIMIT_S)


def test_both_policies_get_better_over_a_killed_trainer_a_stop_and_a_resume(stage: Stage) -> None:
    first = stage.run(TWO_POLICIES, *OVERRIDES)
    both_at(first, KILL_AT)
    first.kill("trainer-solver")
    both_at(first, MIDDLE)
    first.interrupt()
    assert first.end(LIMIT_S) == 0, first.text
    first.nothing_left()
    stopped = first.report["steps"]
    assert all(MIDDLE <= step < STEPS for step in stopped.values())
    first.adds_up(stopped, BATCH, max_staleness=2)
    assert {name: codes for name, codes in first.exit_codes().items() if codes != [0]} == {"trainer-solver": [-9, 0]}
    events = first.report["events"]
    assert any(event.startswith("trainer-solver was killed by SIGKILL") for event in events), events
    assert "trainer-solver was restarted (restart 1)" in events

    second = stage.run(TWO_POLICIES, *OVERRIDES, resume=True)
    assert second.end(LIMIT_S) == 0, second.text
    second.nothing_left()
    second.adds_up(dict.fromkeys(POLICIES, STEPS), BATCH, max_staleness=2)
    assert all(codes == [0] for codes in second.exit_codes().values())
    for policy in POLICIES:
        gain, error = above_its_start(second, policy)
        assert gain > 2 * error, f"{policy}: {gain:+.3f} with a standard error of {error:.3f}"
