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
from system import BATCH, SCRIPTED, TWO_POLICIES, Stage, version
from system_kills import Players, chosen, judge

DEADLINE_S = 180.0
MAX_STALENESS = 2
VICTIMS = ("dataflow", "raas-0", "trainer-solver", "sender of trainer-verifier")
STEPS = 16
SEEDS = (3, 10, 11, 14)
"""Dataflow three times, rollout services three times, trainers twice; 14 kills a trainer into its own start."""


@pytest.fixture(scope="module")
def players(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Players]:
    made = Players(tmp_path_factory.mktemp("kills"), chosen(request), at_once=len(SEEDS))
    yield made
    made.close()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kill_seed", SEEDS)
def test_nothing_acknowledged_is_lost_and_nothing_trained_twice_whoever_is_killed(players: Players, kill_seed: int) -> None:
    judge(players.ended(kill_seed))


@pytest.mark.timeout(600)
def test_killed_processes_of_two_policies_come_back_and_the_books_add_up(stage: Stage) -> None:
    rng = random.Random(1)
    order = rng.sample(VICTIMS, len(VICTIMS))
    fast = ("trainer.eval_freq=0", "trainer.checkpoint.every=3", "dataflow.pool.heartbeat_s=1")
    run = stage.run(TWO_POLICIES, *SCRIPTED, f"trainer.max_steps={STEPS}", *fast)
    at = 0
    for victim in order:
        at += rng.randint(1, 3)
        run.until(f"version {at} of both", lambda status, at=at: min(version(status, p) for p in ("solver", "verifier")) >= at, DEADLINE_S)
        run.kill(victim)
    assert run.end(DEADLINE_S) == 0, run.text
    run.nothing_left()
    killed = {name for name in VICTIMS if " of " not in name}
    assert run.exit_codes() == {name: [-9, 0] if name in killed else [0] for name in (*killed, "trainer-verifier")}
    run.adds_up({"solver": STEPS, "verifier": STEPS}, BATCH, MAX_STALENESS)
    events = run.report["events"]
    for name in killed:
        assert any(event.startswith(f"{name} was killed by SIGKILL") for event in events), events
        assert f"{name} was restarted (restart 1)" in events
    assert max(row["values"]["weights/sender_restarts"] for row in run.steps("verifier")) == 1
