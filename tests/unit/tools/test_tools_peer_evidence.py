"""Numbers of the comparison with TRL and of the study of lags, from runs that are not made here."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pytest

from astraflow.protocol.errors import UserError
from astraflow.tools import peer_evidence
from astraflow.tools.peer_evidence import Curve, ratios, read
from astraflow.tools.staleness_evidence import LAGS, LOSSES, MUTANT, Measured, cells, interval, measure, shown, table


def test_a_reward_is_reached_at_the_end_of_the_step_that_completes_the_window() -> None:
    rewards = [0.1, 0.8, 0.85, 0.9, 0.8, 0.9, 0.9]
    curve = Curve(side="trl", seed=0, reward=rewards, end_s=[10.0 * n for n in range(1, 8)])
    assert curve.reached_s == 60.0
    assert curve.samples_per_s == pytest.approx(64 * 7 / 70)
    assert Curve(side="trl", seed=0, reward=[0.9] * 4, end_s=[1, 2, 3, 4]).reached_s is None
    others = [Curve(side="astraflow", seed=0, reward=rewards, end_s=[2.0 * n for n in range(1, 8)])]
    assert ratios([curve, *others]) == {"e2e_over_trl": 5.0, "samples_over_trl": pytest.approx(5.0)}


def test_a_curve_is_read_from_the_metrics_of_a_run(tmp_path: Path) -> None:
    rows = [
        {"time": 100.0, "process": "dataflow", "step": 1, "values": {"buffer/fresh": 1}},
        {"time": 107.0, "process": "trainer:default", "step": 1, "values": {"time/step_s": 5.0, "reward/mean": 0.2}},
        {"time": 111.0, "process": "trainer:default", "step": 2, "values": {"time/step_s": 4.0, "reward/mean": 0.4}},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    curve = read(tmp_path, 3)
    assert (curve.seed, curve.reward, curve.end_s) == (3, [0.2, 0.4], [5.0, 9.0])


def test_curves_of_an_earlier_call_are_kept_and_ratios_need_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_evidence, "OUT", tmp_path / "e2e.json")
    assert peer_evidence.measured_before(peer_evidence.OUT) == []
    fast = Curve(side="astraflow", seed=0, reward=[0.9] * 5, end_s=[1.0, 2.0, 3.0, 4.0, 5.0], commit="a")
    slow = Curve(side="trl", seed=0, reward=[0.9] * 5, end_s=[10.0, 20.0, 30.0, 40.0, 50.0], commit="b")
    assert list(peer_evidence.keep([fast]).values()) == [False, False, True]
    assert list(peer_evidence.keep([fast, slow]).values()) == [False, True, True], "two more seeds are wanted"
    assert peer_evidence.measured_before(peer_evidence.OUT) == [fast, slow]
    others = [Curve(side=side, seed=seed, reward=[0.9] * 5, end_s=[1.0] * 5) for side in ("astraflow", "trl") for seed in (1, 2)]
    assert peer_evidence.keep([fast, slow, *others])["both sides have the seeds (0, 1, 2)"]


def test_without_an_interpreter_with_trl_the_job_says_how_to_get_one() -> None:
    with pytest.raises(UserError, match="TRL_PYTHON is not set"):
        peer_evidence.main({})


def test_intervals_are_students() -> None:
    mean, half = interval([1.0, 2.0, 4.0])
    assert mean == pytest.approx(7 / 3)
    assert half == pytest.approx(4.303 * statistics.stdev([1, 2, 4]) / math.sqrt(3))
    assert math.isnan(interval([1.0])[1])


def test_a_mutant_is_told_apart_by_its_intervals() -> None:
    def runs(loss: str, reward: float, ess: float, log_ratio: float) -> list[Measured]:
        return [
            Measured(
                loss=loss, lag=LAGS[-1], seed=seed, reward=[reward + e] * 30, clipped=0.1, ess=ess + e, log_ratio=log_ratio + e
            )
            for seed, e in enumerate((-0.01, 0.0, 0.01))
        ]

    found = cells([*runs("tis", 0.7, 0.3, 1.0), *runs(MUTANT, 0.5, 0.98, 2.0)])
    assert all(shown(found).values())
    assert not any(shown(cells([*runs("tis", 0.7, 0.98, 2.0), *runs(MUTANT, 0.7, 0.98, 2.0)])).values())
    assert table(found).splitlines()[2].startswith("| tis | 32 | 0.700 ± ")


def test_samples_of_a_lag_come_from_the_weights_of_so_many_versions_ago() -> None:
    fresh, stale, mutant = measure("tis", 0, 0, 4), measure("tis", 3, 0, 4), measure(MUTANT, 3, 0, 4)
    assert fresh.log_ratio < 1e-5
    assert stale.log_ratio > 1e-3
    assert stale.ess < mutant.ess, "the mutant is not told"
    assert mutant.log_ratio > 1e-3
    assert set(LOSSES) == {"clip", "tis", "decoupled", "m2po", "cispo"}
