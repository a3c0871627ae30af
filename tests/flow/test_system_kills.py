"""kill -9 at moments of progress: what was killed comes back, the run ends with 0, nothing is lost and nothing is trained twice.

Four fixed seeds of the fifty of tests/full, and the two policies with the sender among the victims.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from system import BATCH, SCRIPTED, TWO_POLICIES, Run, Stage, version
from system_kills import Players, chosen, judge

from astraflow.protocol.control import DataflowStatus

DEADLINE_S = 180.0
MAX_STALENESS = 2
VICTIMS = ("dataflow", "raas-0", "trainer-solver", "sender of trainer-verifier")
AFTER = 4
"""Versions after the last kill. One that was killed had made one more at most than Dataflow knew of, so this needs all of them."""
SEEDS = (3, 10, 11, 14)
"""Dataflow three times, rollout services three times, trainers twice; 14 kills a trainer into its own start."""


@pytest.fixture(scope="module")
def players(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Players]:
    made = Players(tmp_path_factory.mktemp("kills"), chosen(request), at_once=len(SEEDS))
    yield made
    made.close()


def both(run: Run, at: int) -> int:
    """Wait until both policies have this version; the one that the slower of them has then."""

    def slower(status: DataflowStatus) -> int:
        return min(version(status, policy) for policy in ("solver", "verifier"))

    return slower(run.until(f"version {at} of both", lambda status: slower(status) >= at, DEADLINE_S))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kill_seed", SEEDS)
def test_nothing_acknowledged_is_lost_and_nothing_trained_twice_whoever_is_killed(players: Players, kill_seed: int) -> None:
    judge(players.ended(kill_seed))


@pytest.mark.timeout(600)
def test_killed_processes_of_two_policies_come_back_and_the_books_add_up(stage: Stage) -> None:
    rng = random.Random(1)
    order = rng.sample(VICTIMS, len(VICTIMS))
    fast = ("trainer.eval_freq=0", "trainer.checkpoint.every=3", "dataflow.pool.heartbeat_s=1")
    run = stage.run(TWO_POLICIES, *SCRIPTED, "trainer.max_steps=1000", *fast)
    at = 0
    for victim in order:
        at = both(run, at + rng.randint(1, 3))
        run.kill(victim)
    both(run, at + AFTER)
    run.interrupt()  # the run has no end of its own: no kill can come too late on any machine
    assert run.end(DEADLINE_S) == 0, run.text
    run.nothing_left()
    killed = {name for name in VICTIMS if " of " not in name}
    assert run.exit_codes() == {name: [-9, 0] if name in killed else [0] for name in (*killed, "trainer-verifier")}
    assert run.report["drained"]
    steps = run.report["steps"]
    assert min(steps.values()) >= at + AFTER
    run.adds_up(steps, BATCH, MAX_STALENESS)
    events = run.report["events"]
    for name in killed:
        assert any(event.startswith(f"{name} was killed by SIGKILL") for event in events), events
        assert f"{name} was restarted (restart 1)" in events
    assert max(row["values"]["weights/sender_restarts"] for row in run.steps("verifier")) == 1
