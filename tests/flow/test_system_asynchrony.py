"""Generation and training overlap, within max_staleness; with max_staleness 0 they take turns."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from system import Run, Stage, one_policy

DEADLINE_S = 120.0
BATCH, STEPS = 16, 8
SCHEDULE = (
    "trainer.backend=system_backend:ScheduledBackend",
    "raas.engine.options={token_s: 0.02, load_s: 0.01}",
    f"trainer.max_steps={STEPS}",
)


def finished_within_steps(run: Run) -> list[int]:
    """Per trainer step, how many rollouts ended while it computed (its record is written when a rollout ends)."""
    ended = [path.stat().st_mtime for path in (run.run_dir / "rollouts").rglob("*.json")]
    assert ended
    spans = [(row["values"]["schedule/begin"], row["values"]["schedule/end"]) for row in run.steps("solver")]
    assert len(spans) == STEPS
    return [sum(begin < at < end for at in ended) for begin, end in spans]


def test_rollouts_end_while_the_trainer_computes_and_none_is_too_old(stage: Stage) -> None:
    run = stage.run(one_policy(stage.directory), *SCHEDULE, "dataflow.buffer.max_staleness=2")
    assert run.end(DEADLINE_S) == 0, run.text
    books = run.adds_up({"solver": STEPS}, BATCH, max_staleness=2)
    within = finished_within_steps(run)
    assert sum(count > 0 for count in within) >= 2, within  # nearly all of them, unless the machine is slow
    assert max(books.staleness("solver")) >= 1, "batches of earlier versions were trained on"


def test_with_max_staleness_0_the_job_ends_and_nothing_is_generated_while_the_trainer_computes(stage: Stage) -> None:
    """What is sampled during a step is sampled by the version before it: it would be trained stale, dropped, or left over as such."""
    run = stage.run(one_policy(stage.directory), *SCHEDULE, "dataflow.buffer.max_staleness=0")
    assert run.end(DEADLINE_S) == 0, run.text
    books = run.adds_up({"solver": STEPS}, BATCH, max_staleness=0)
    assert books.staleness("solver") == {0: STEPS * BATCH}
    assert books.dropped == 0
    left = [share.stats.min_version for share in books.shares if share.state not in ("trained", "dropped") and share.stats is not None]
    assert left == [STEPS] * len(left)
