"""The quick start under fire: an instance joins, then a rollout service, Dataflow and the trainer are killed one after the other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "flow"))
from system import Run, Stage, instance, version

from astraflow.protocol.control import DataflowStatus

pytestmark = [pytest.mark.full, pytest.mark.timeout(480)]
STEPS, BATCH = 20, 64
LIMIT_S = 360.0
GUEST = "third"


def joined(run: Run, stage: Stage) -> tuple[int, int]:
    """Start a third instance; the trainer's version just before and just after it got its first work."""
    url = (run.run_dir / "dataflow.url").read_text().strip()
    process = stage.astraflow("raas", "--join", url, "--name", GUEST)
    versions: list[int] = []

    def has_work(status: DataflowStatus) -> bool:
        assert process.poll() is None, "the guest ended"
        found = instance(status, GUEST)
        working = found is not None and found.in_flight > 0
        versions.append(version(status, "default"))
        return working

    run.until("work for the guest", has_work, LIMIT_S)
    return versions[-2], versions[-1]


def is_back(victim: str, then: DataflowStatus, now: DataflowStatus) -> bool:
    """A killed process lives again and its peers know."""
    if victim == "dataflow":
        return now.incarnation != then.incarnation
    if victim == "raas-1":
        before, found = instance(then, victim), instance(now, victim)
        assert before is not None
        return found is not None and found.state == "live" and found.incarnation != before.incarnation
    attached = [sum("trainer default" in event for event in status.events) for status in (then, now)]
    return attached[1] > attached[0]


def test_a_quick_start_grows_loses_each_of_its_processes_and_ends(stage: Stage) -> None:
    overrides = (f"trainer.max_steps={STEPS}", "trainer.checkpoint.every=3", "trainer.eval_freq=0", "dataflow.pool.heartbeat_s=5")
    run = stage.run("recipes/quickstart.yaml", *overrides)
    run.version("default", 2, LIMIT_S)
    work = joined(run, stage)
    after = work[1]

    for victim, steps_later in (("raas-1", 1), ("dataflow", 2), ("trainer-default", 2)):
        after += steps_later
        reached = run.version("default", after, LIMIT_S)
        run.kill(victim)
        run.until(f"{victim} to be back", lambda status, reached=reached, victim=victim: is_back(victim, reached, status), LIMIT_S)
    assert run.end(LIMIT_S) == 0, run.text
    run.nothing_left()

    assert run.exit_codes() == {"dataflow": [-9, 0], "raas-0": [0], "raas-1": [-9, 0], "trainer-default": [-9, 0]}
    books = run.adds_up({"default": STEPS}, BATCH, max_staleness=2)
    events = "\n".join(run.report["events"])
    for victim in ("raas-1", "dataflow", "trainer-default"):
        assert f"{victim} was killed by SIGKILL" in events
        assert f"{victim} was restarted (restart 1)" in events
    assert f"instance {GUEST} joined" in events

    first = next(share for share in books.shares if share.instance == GUEST and share.attempt == 1 and share.stats is not None)
    assert first.stats is not None
    assert work[0] <= first.stats.min_version <= work[1], "the guest's first work was done with the weights that were current"
    assert first.stats.min_version > 0
    assert [guest.wait(30) for guest in stage.others] == [0], "the guest ended with the run"
