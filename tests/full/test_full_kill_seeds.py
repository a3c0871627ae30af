"""Fifty seeded runs with kill -9 on Dataflow, rollout services or the trainer, scripted engine.

One seed alone: `pytest "tests/full/test_full_kill_seeds.py::test_nothing_acknowledged_is_lost_and_nothing_trained_twice[7]"`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "flow"))
from system_kills import SERVES_AGAIN_S, Players, chosen, judge, plan

SEEDS = range(1, 51)
pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def players(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Players]:
    made = Players(tmp_path_factory.mktemp("kills"), chosen(request), at_once=2)
    yield made
    made.close()


@pytest.mark.parametrize("kill_seed", SEEDS)
def test_nothing_acknowledged_is_lost_and_nothing_trained_twice(players: Players, kill_seed: int) -> None:
    ended = players.ended(kill_seed)
    judge(ended)
    assert all(seconds < SERVES_AGAIN_S for seconds in ended.serves_again_s), ended.serves_again_s


def test_the_seeds_kill_every_kind_of_process_early_and_late() -> None:
    kills = [kill for seed in SEEDS for kill in plan(seed).kills]
    assert {kill.victim.split("-")[0] for kill in kills} == {"dataflow", "raas", "trainer"}
    assert {kill.when for kill in kills} == {"leased", "acknowledged", "begun", "reborn"}
    assert len(kills) >= 75


def test_nearly_all_of_the_planned_kills_found_their_victim(players: Players, request: pytest.FixtureRequest) -> None:
    """A run can end before a late moment comes; then that kill is left out."""
    seeds = chosen(request)
    planned = sum(len(plan(seed).kills) for seed in seeds)
    killed = sum(len(players.ended(seed).killed) for seed in seeds)
    restarts = sum(len(players.ended(seed).serves_again_s) for seed in seeds)
    print(f"{killed} of {planned} kills; {restarts} restarts of Dataflow")  # noqa: T201
    assert killed >= 0.9 * planned
