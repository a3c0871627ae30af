"""The two-policy recipe with the scripted engine: to its end, and stopped by Ctrl-C and resumed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from system import BATCH, SCRIPTED, TWO_POLICIES, Run, Stage, version

DEADLINE_S = 120.0
MAX_STALENESS = 2
STEPS = 12
BOTH = {"solver": STEPS, "verifier": STEPS}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run to its end, watched all the time."""
    stage = Stage(tmp_path_factory.mktemp("ended"))
    try:
        run = stage.run(TWO_POLICIES, *SCRIPTED, f"trainer.max_steps={STEPS}", "trainer.eval_freq=6")
        assert run.end(DEADLINE_S, watch=True) == 0, run.text
        run.nothing_left()
        yield run
    finally:
        stage.close()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.close()


def test_every_process_of_the_recipe_ends_with_0_and_the_books_add_up(ended: Run) -> None:
    assert ended.exit_codes() == {"dataflow": [0], "raas-0": [0], "trainer-solver": [0], "trainer-verifier": [0]}
    ended.adds_up(BOTH, BATCH, MAX_STALENESS)
    report = ended.report
    assert (report["exit_code"], report["failure"], report["drained"]) == (0, "", False)
    assert report["accuracy"]["heldout"]["steps"] == [0, 6, 12], "before, in the middle, and of the last version"
    assert (ended.run_dir / "report.png").is_file()
    for policy in BOTH:
        assert [row["step"] for row in ended.steps(policy)] == list(range(1, STEPS + 1))
        assert (ended.run_dir / "export" / policy / "model.safetensors").is_file()
    assert list((ended.run_dir / "ledger" / "batches").iterdir()) == []


def test_both_policies_are_rewarded_and_moved(ended: Run) -> None:
    for policy in BOTH:
        rows = ended.steps(policy)
        assert any(0 < row["values"]["reward/mean"] < 1 for row in rows)
        assert sum(row["values"]["policy/grad_norm"] > 0 for row in rows) > STEPS / 2


def test_what_an_instance_serves_has_the_digest_that_the_trainer_published(ended: Run) -> None:
    published = ended.books.digests
    assert ended.report["syncs"]["delta"] > 0
    assert ended.report["syncs"]["failures"] == 0
    for policy in BOTH:
        seen = {held: digest for name, timeline, held, digest in ended.served if name == policy and timeline == 0}
        assert seen, policy
        assert seen == {held: published[policy][held] for held in seen}
        assert len(set(seen.values())) == len(seen), "every version has bytes of its own"
    assert {timeline for _, timeline, _, _ in ended.served} == {0}


def test_ctrl_c_drains_and_resume_goes_on_where_it_stopped(stage: Stage) -> None:
    first = stage.run(TWO_POLICIES, *SCRIPTED, "trainer.max_steps=1000", "trainer.eval_freq=0")
    first.until("version 3 of both", lambda status: min(version(status, policy) for policy in BOTH) >= 3, DEADLINE_S)
    first.interrupt()
    assert first.end(DEADLINE_S) == 0, first.text
    first.nothing_left()
    assert first.report["drained"]
    assert all(codes == [0] for codes in first.exit_codes().values())
    stopped = first.report["steps"]
    assert min(stopped.values()) >= 3
    first.adds_up(stopped, BATCH, MAX_STALENESS)

    target = max(stopped.values()) + 4
    second = stage.run(TWO_POLICIES, *SCRIPTED, f"trainer.max_steps={target}", "trainer.eval_freq=0", resume=True)
    assert second.end(DEADLINE_S) == 0, second.text
    second.nothing_left()
    assert all(codes == [0] for codes in second.exit_codes().values())
    assert second.report["run_id"] == first.report["run_id"]
    books = second.adds_up(dict.fromkeys(BOTH, target), BATCH, MAX_STALENESS)
    assert {batch.timeline for batch in books.batches} == {0}, "a drained run lost no step, so nothing was rolled back"
    for policy in BOTH:
        steps = [row["step"] for row in second.steps(policy)]
        assert steps == list(range(1, target + 1)), f"{policy}: every step once, before and after the stop"
