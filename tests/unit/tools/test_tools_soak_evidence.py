"""What counts as flat memory, on curves written by hand."""

from __future__ import annotations

import pytest

from astraflow.tools.soak_evidence import POINTS, Life, judge, label, thinned


def life(name: str, mib: list[float], begin_s: float = 0.0) -> Life:
    return Life(name, 1, [begin_s + 10.0 * index for index in range(len(mib))], mib)


def verdicts(*lives: Life) -> list[str]:
    return [judged.verdict for judged in judge(lives, warm_up_s=100.0, window_s=50.0)]


LONG = [*range(10, 110, 10), *([100.0] * 20)]


@pytest.mark.parametrize(("last", "verdict"), [(100.0, "flat"), (109.0, "flat"), (112.0, "grew"), (91.0, "flat"), (80.0, "shrank")])
def test_the_last_window_is_compared_with_the_first_one_after_the_warm_up(last: float, verdict: str) -> None:
    assert verdicts(life("raas-0", [*LONG, *([last] * 6)])) == [verdict]


def test_one_high_sample_is_no_growth() -> None:
    assert verdicts(life("raas-0", [*LONG, 100.0, 900.0, 100.0, 100.0, 100.0])) == ["flat"]


def test_a_killed_life_is_compared_with_the_long_ones_of_its_name() -> None:
    small, large = life("raas-0", [90.0] * 10, 400.0), life("raas-0", [120.0] * 10, 600.0)
    assert verdicts(life("raas-0", LONG), small, large) == ["flat", "within", "larger"]
    assert verdicts(life("raas-0", LONG), life("trainer-a", [90.0] * 10)) == ["flat", "alone"]
    assert verdicts(life("raas-0", LONG), life("cc of raas-0", [90.0])) == ["flat"], "what lives for a moment is not judged"


def test_curves_keep_their_last_point() -> None:
    points = thinned(life("raas-0", [float(index) for index in range(1000)]))
    assert POINTS // 2 < len(points) <= POINTS
    assert points[-1] == (9990.0, 999.0)


def test_processes_are_named_by_what_they_are_and_whose() -> None:
    assert label(["python", "-m", "astraflow", "raas", "--config", "c", "--index", "0"], "supervisor") == "raas-0"
    drilled = ["python", "-m", "astraflow.launch.drill_wire", "{}", "hits", "trainer", "--config", "c", "--policy", "a"]
    assert label(drilled, "supervisor") == "trainer-a"
    assert label(["python", "-m", "astraflow.weights.sender", "7"], "trainer-a") == "sender of trainer-a"
    assert label(["python", "-m", "astraflow", "run", "r.yaml"], "soak") == "supervisor"
