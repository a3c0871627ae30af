"""Two hundred versions with three receivers; sender or receivers are killed about every fifth version."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "flow"))
from weights_soak import judge, play

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.mark.parametrize("soak_seed", [1, 2])
def test_every_confirmed_digest_is_the_published_one_whoever_is_killed(tmp_path: Path, soak_seed: int) -> None:
    soak = play(seed=soak_seed, versions=200, run_dir=tmp_path)
    judge(soak)
    print(f"kills {dict(soak.kills)}, {len(soak.pulls)} pulls, {soak.chains} chains")  # noqa: T201
    assert sum(soak.kills.values()) >= 30
    assert soak.kills["sender"] >= 5
    assert soak.chains >= 10
