"""Three steps on real GSM8K rows with SmolLM2-135M-Instruct and math_verify in worker processes: everything adds up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "flow"))
from system import Stage

pytestmark = [pytest.mark.full, pytest.mark.timeout(480)]
STEPS, BATCH = 3, 16
LIMIT_S = 360.0


def test_three_steps_of_gsm8k_end_with_0_and_add_up(stage: Stage) -> None:
    run = stage.run("recipes/gsm8k-smollm2.yaml", f"trainer.max_steps={STEPS}")
    assert run.end(LIMIT_S) == 0, run.text
    run.nothing_left()
    assert run.exit_codes() == {"dataflow": [0], "raas-0": [0], "raas-1": [0], "trainer-default": [0]}
    books, report = run.books, run.report
    books.check({"default": STEPS}, max_staleness=2)
    rows = report["rollouts"]
    assert report["adds_up"]
    assert (rows["made"], rows["trained"], rows["dropped"], rows["in_flight"]) == (
        books.made, books.trained, books.dropped, books.in_flight,
    )  # fmt: skip
    unscored = sum(share.lost for share in books.shares if share.state == "trained")
    assert books.trained + unscored == STEPS * BATCH, "whole groups fill a batch; unscored members are counted, not trained"
    assert [row["step"] for row in run.steps("default")] == [1, 2, 3]
    assert sorted(books.digests["default"]) == [0, 1, 2, 3], "every version was published, also when its rewards were all equal"
