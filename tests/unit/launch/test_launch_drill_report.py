"""What a drill's notes come to: sums, what never recovered, and the pace of steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from astraflow.launch.drill import Hit
from astraflow.launch.drill_report import Pace, never_again, paces, steps_of, sums
from astraflow.launch.drill_wire import WireHit


def drop(number: int, at: float, call: str = "/pull", pid: int = 7) -> WireHit:
    return WireHit(at=at, number=number, pid=pid, kind="drop", target="pull", call=call, lost_bytes=100)


def test_hits_are_summed_with_their_recoveries_over_the_lives_of_a_process() -> None:
    noted = [
        drop(1, 10.0),
        drop(2, 10.5),
        WireHit(at=11.0, over=[1, 2]),
        WireHit(at=12.0, number=3, pid=7, kind="delay", target="raas", call="/status", time_s=0.5),
        drop(1, 20.0, pid=8),  # a new life counts from 1
        WireHit(at=23.0, over=[1]),
    ]
    dropped, delayed = sums("dataflow", noted)
    assert (dropped.count, dropped.recovered, dropped.bytes_again) == (3, 3, 300)
    assert (dropped.recovered_mean_s, dropped.recovered_max_s) == (pytest.approx(1.5), 3.0)
    assert (delayed.kind, delayed.count, delayed.delayed_s) == ("delay", 1, 0.5)


def test_a_call_that_never_worked_again_is_told_unless_its_process_was_killed_or_had_no_time() -> None:
    late, patience_s = 71.0, 60.0
    (told,) = never_again("dataflow", [drop(1, 10.0)], [], late, patience_s)
    assert told == "dataflow: after a reply of /pull was dropped none came in 61 s"
    assert never_again("dataflow", [drop(1, 10.0), WireHit(at=10.1, over=[1])], [], late, patience_s) == []
    assert never_again("dataflow", [drop(1, 10.0)], [], 70.0, patience_s) == []
    assert never_again("dataflow", [drop(1, 10.0, call="/shutdown")], [], late, patience_s) == [], "nobody says goodbye twice"
    assert never_again("dataflow", [drop(1, 10.0), drop(1, 40.0, pid=8)], [], late, patience_s) == [], "of another life"
    lives = [drop(1, 5.0), WireHit(at=6.0, over=[1]), drop(1, 10.0, pid=8)]
    assert len(never_again("dataflow", lives, [], late, patience_s)) == 1, "the hit of the same number in an older life is not this one"
    killed = Hit(at=20.0, kind="kill", target="dataflow", process="dataflow", pid=7)
    assert never_again("dataflow", [drop(1, 10.0)], [killed], late, patience_s) == []


def test_steps_are_apart_by_what_was_down_and_the_first_one_is_left_out(tmp_path: Path) -> None:
    steps = [(90.0, "trainer:a", 50.0), (100.0, "trainer:a", 1.0), (111.0, "trainer:a", 9.0), (120.0, "trainer:a", 3.0)]
    rows = [
        {"time": at, "process": process, "step": 1, "values": {"time/step_s": took}}
        for at, process, took in [*steps, (110.0, "dataflow", 5.0)]
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert paces(steps_of(tmp_path / "metrics.jsonl"), [(105.0, 106.0)]) == {"a": Pace(hurt_s=9.0, hurt=1, quiet_s=2.0, quiet=2)}
    assert list(steps_of(tmp_path / "none.jsonl")) == []
