"""Runs that have too little data: a small set is used up in order, a set that teaches nothing ends the run with a reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from system import Stage, one_policy

DEADLINE_S = 120.0


def test_a_set_smaller_than_a_batch_gives_one_update_and_a_clean_end(stage: Stage) -> None:
    """Case G25, `small`: 5 tasks × 8 samples, a batch of 64, one epoch."""
    data = ("train_dataset.options.n=5", "train_dataset.repeat=1", "trainer.train_batch_size=64")
    run = stage.run(one_policy(stage.directory), *data)
    assert run.end(DEADLINE_S) == 0, run.text
    run.nothing_left()
    assert set(map(tuple, run.exit_codes().values())) == {(0,)}
    books = run.books
    books.check({"solver": 1}, max_staleness=2)
    assert (books.made, books.trained, books.dropped, books.in_flight) == (40, 40, 0, 0)
    assert run.report["steps"] == {"solver": 1}


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("dataflow.policies.filter=filter_zero_adv", "raas.engine.options={correct: 0, correct_per_version: 0}"), "zero_variance"),
        (("plugins=[system_workflow]", "workflow.workflow=gives_nothing"), "unscored"),
    ],
    ids=["all rewards equal (G24 c)", "the workflow returns None (G24 b)"],
)
def test_a_run_that_gets_nothing_to_train_on_says_why_and_fails(stage: Stage, overrides: tuple[str, ...], reason: str) -> None:
    run = stage.run(one_policy(stage.directory), *overrides, "dataflow.buffer.max_rejected_groups=12")
    assert run.end(DEADLINE_S) == 1, run.text
    run.nothing_left()
    assert run.exit_codes()["trainer-solver"] == [3], "starved, and not started again"
    report, books = run.report, run.books
    assert "12" in report["failure"] or "groups in a row were rejected" in report["failure"]
    assert reason in report["failure"]
    assert f"FAILED: {report['failure']}" in run.text
    assert books.trained == 0
    assert books.made == books.dropped + books.in_flight
    assert books.dropped >= 12 * 8
    assert report["rollouts"]["made"] == books.made
    assert len({share.lease_id for share in books.shares}) >= 12, "prompts were drawn until the limit"
