"""What evidence must show, on reports written by hand."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from astraflow.tools.report import Curve, Report, Syncs
from astraflow.tools.report_evidence import JOBS, main, mean_over_seeds


def report(before: float, after: float, reward: float = 0.9, code: int = 0) -> Report:
    return Report(
        run_id="r",
        exit_code=code,
        failure="",
        drained=False,
        wall_s=100.0,
        steps={"default": 30},
        rollouts={"made": 1, "trained": 1, "dropped": 0, "in_flight": 0, "replayed": 0},
        dropped={},
        adds_up=True,
        syncs=Syncs(),
        staleness={"default": {0: 1, 2: 1}},
        wait_share={},
        reward={"default": Curve(steps=[1], values=[reward])},
        evals=[],
        accuracy={"heldout": Curve(steps=[0, 30], values=[before, after])},
        processes={"dataflow": {"exit_codes": [code]}},
        events=[],
    )


@pytest.mark.parametrize(
    ("job", "made", "fails"),
    [
        ("quickstart-seed0", report(0.2, 0.6), set()),
        ("quickstart-seed0", report(0.3, 0.6), {"held-out accuracy before <= .25"}),
        ("quickstart-seed0", report(0.2, 0.5), {"held-out accuracy after >= .55"}),
        ("quickstart-seed0", report(0.2, 0.6, reward=0.8), {"mean training reward of the last five steps >= .85"}),
        ("quickstart-seed0", report(0.2, 0.6, code=1), {"every process ended with 0"}),
        ("quickstart-shuffled", report(0.2, 0.35), set()),
        ("quickstart-shuffled", report(0.2, 0.4), {"held-out accuracy within +.15 of before"}),
    ],
)
def test_a_job_shows_exactly_what_its_report_shows(job: str, made: Report, fails: set[str]) -> None:
    assert {condition for condition, holds in JOBS[job].conditions.items() if not holds(made)} == fails


@pytest.mark.parametrize(("verifier", "holds"), [(0.6, True), (0.5, False), (0.4, False)])
def test_rewards_rise_only_when_those_of_every_policy_do(verifier: float, holds: bool) -> None:
    noise = [0.02 * (-1) ** step for step in range(20)]
    curves = {
        policy: Curve(steps=list(range(1, 41)), values=[start + n for n in noise] + [end + n for n in noise])
        for policy, start, end in (("solver", 0.4, 0.5), ("verifier", 0.5, verifier))
    }
    made = msgspec.structs.replace(report(0.2, 0.6), reward=curves)
    assert {condition for condition, ok in JOBS["two-policies-seed1"].conditions.items() if not ok(made)} == (
        set() if holds else {"every policy's reward over the last 20 steps is > 2 standard errors above the first 20's"}
    )


def test_the_mean_is_over_all_seeds_or_not_at_all(tmp_path: Path) -> None:
    for seed, after in enumerate((0.6, 0.7)):
        (tmp_path / f"quickstart-seed{seed}.json").write_bytes(msgspec.json.encode({"job": "x", "report": report(0.2, after)}))
    assert mean_over_seeds(tmp_path) is None
    (tmp_path / "quickstart-seed2.json").write_bytes(msgspec.json.encode({"job": "x", "report": report(0.2, 0.8)}))
    assert mean_over_seeds(tmp_path) == pytest.approx(0.7)


def test_an_unknown_job_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quickstart-seed9"]) == 2
    assert "known: quickstart-seed0" in capsys.readouterr().err
