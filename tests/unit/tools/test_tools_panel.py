"""What a run shows: lines where there is no terminal, a panel where there is one; the same facts in both."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from astraflow.protocol.batch import WaitEdge
from astraflow.protocol.control import DataflowStatus, Drop, EvalResult, InstanceInfo, LedgerCounts, QueueInfo, TrainerInfo
from astraflow.protocol.rollout import Serving
from astraflow.tools.panel import Panel, ProcessRow, View, clock, eta_s, plain_line, status_view


def status(version: int, *, started: bool = True) -> DataflowStatus:
    trainer = TrainerInfo(model_id="default", timeline=0, version=version, digest="", checkpoint_version=-1, state="live", last_seen_s=0)
    return DataflowStatus(
        run_id="r",
        state="ready",
        uptime_s=5,
        service_version=version,
        started=started,
        trainers=[trainer],
        instances=[],
        queues={"default": QueueInfo(fresh_groups=3, fresh_trajectories=24, replay_groups=0, held_groups=1, served=0)},
        ledger=LedgerCounts(made=64, trained=32, dropped={"stale": 8}, in_flight={"leased": 24}),
        waits=[WaitEdge(who="trainer:default", waits_for="groups", why="batch 4", since_s=7)],
        rates={"tokens_per_s": 170.4},
        steps={"default": {"reward/mean": 0.5}},
    )


def view(version: int, age_s: float, *, started: bool = True, events: list[str] | None = None) -> View:
    rows = [ProcessRow("dataflow", "running"), ProcessRow("raas-0", "running"), ProcessRow("trainer-default", "running", 1, (-9,))]
    return View("up", age_s, rows, status(version, started=started), events=events or [])


def shown(*views: View, terminal: bool = False) -> str:
    out = io.StringIO()
    with Panel("quickstart", {"default": 40}, Console(file=out, width=160, force_terminal=terminal)) as panel:
        for one in views:
            panel.show(one)
    return out.getvalue()


def test_without_a_terminal_every_step_is_one_line() -> None:
    text = shown(view(1, 10.0), view(1, 10.1), view(2, 20.0, events=["raas-0 was killed by SIGKILL"]))
    lines = text.splitlines()
    assert len(lines) == 3
    assert "default v1/40 reward 0.500" in lines[0]
    assert "made 64 = trained 32 + dropped 8 + in flight 24   170 tokens/s" in lines[0]
    assert lines[1] == "0:20  raas-0 was killed by SIGKILL"
    assert "v2/40" in lines[2]


def test_before_the_start_the_line_says_who_waits_for_whom() -> None:
    line = plain_line(view(0, 3.0, started=False), {"default": 40}, {})
    assert "trainer-default:running" in line
    assert "trainer:default for groups (batch 4) since 7 s" in line


def test_a_terminal_gets_a_panel_with_stages_versions_queue_and_time_left() -> None:
    text = shown(view(0, 20.0), view(10, 70.0), terminal=True)
    for part in ("quickstart", "trainer-default", "live", "v10", "3 groups", "170 tokens/s", "about 2:30 left"):
        assert part in text


def test_an_evaluation_is_said_once_with_its_version() -> None:
    result = EvalResult(
        eval_id="e",
        dataset="heldout",
        versions={"default": Serving(timeline=0, version=15, digest="")},
        n_tasks=20,
        n_samples=1,
        missing=2,
        metrics={"avg@1": 0.45, "pass@8": None},
        duration_s=1,
    )
    one = View("up", 30.0, [], status(15), evals=[result])
    assert shown(one, one).count("heldout at v15: avg@1 0.450 (20 tasks × 1, 2 missing)") == 1


def test_the_time_left_is_that_of_the_slowest_policy() -> None:
    assert eta_s(view(10, 70.0), {"default": 40}, {"default": (20.0, 0)}) == 150.0
    assert eta_s(view(15, 70.0), {"default": 40}, {"default": (20.0, 5)}) == 125.0  # after a resume
    assert eta_s(view(1, 50.0), {"default": 40}, {"default": (20.0, 0)}) == 0.0
    assert (clock(187), clock(3661)) == ("3:07", "1:01:01")


def test_a_long_silence_without_a_terminal_says_the_queue_and_who_waits_for_whom() -> None:
    lines = shown(view(1, 10.0), view(1, 39.0), view(1, 40.0), view(1, 69.0), view(1, 70.0), view(2, 71.0)).splitlines()
    assert len(lines) == 4
    assert all("default 3 groups queued  waiting: trainer:default for groups (batch 4) since 7 s" in line for line in lines[1:3])
    assert not any("waiting" in line for line in (lines[0], lines[3]))


def test_status_shows_everything_on_one_page() -> None:
    now = status(3)
    now.instances = [
        InstanceInfo(
            instance_id="raas-0", url="http://r:1", incarnation="i", state="suspect", total_slots=8, free_slots=4, in_flight=4, failures=1,
            last_seen_s=12, models=["default"], serving={"default": Serving(timeline=0, version=2, digest="")}, reason="pull: refused",
        )
    ]  # fmt: skip
    now.waits = [
        WaitEdge(who="groups", waits_for="raas:raas-0", why="6 leases run there", since_s=31, deadline_s=569),
        WaitEdge(who="trainer:default", waits_for="groups", why="batch 4", since_s=7, deadline_s=3500),
        WaitEdge(who="dataflow:submit", waits_for="raas", why="a moment", since_s=0.2),
    ]
    now.idle_s, now.stall_s = 31.0, 3600.0
    now.steps["default"]["time/step_s"] = 2.0
    now.recent_drops = [Drop(lease_id="l-7", task_id="t7", policy="default", reason="stale")]
    out = io.StringIO()
    Console(file=out, width=160).print(status_view(now, {"default": 40}))
    text = out.getvalue()
    for part in (
        "about 1:14 left",
        "nothing moved for 31 s, stalled at 3600 s",
        "default  3        40  live",
        "raas-0           suspect  default v2  4/8   12 s ago  http://r:1  pull: refused",
        "dropped: stale 8",
        "newest drop: l-7 t7 default: stale",
        "waiting: groups for raas:raas-0 (6 leases run there) since 31 s, 569 s left",
        "waiting: trainer:default for groups (batch 4) since 7 s\n",
    ):
        assert part in re.sub(" +\n", "\n", text), text
    assert "a moment" not in text
    assert text.index("raas:raas-0") < text.index("batch 4"), "longest first"


def test_without_an_instance_or_a_plan_status_says_so() -> None:
    out = io.StringIO()
    Console(file=out, width=160).print(status_view(status(3), {}))
    assert "no rollout service is registered" in out.getvalue()
    assert "left" not in out.getvalue()


def test_a_reader_that_leaves_does_not_end_the_run() -> None:
    """`astraflow run … | tee log` and Ctrl-C: the reader is gone first, the drain goes on."""
    code = (
        "import sys, test_tools_panel as t; from astraflow.tools.panel import Panel\n"
        "with Panel('quickstart', {'default': 40}) as panel:\n"
        "    for step in range(3): panel.show(t.view(step, 20.0 * step, events=['x' * 70_000] * (step + 1)))\n"
        "sys.stdout.flush(); print('to nowhere'); sys.exit(7)"
    )
    ours, theirs = os.pipe()
    os.close(ours)
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, stdout=theirs, stderr=subprocess.PIPE, timeout=60, check=False, cwd=Path(__file__).parent)
    os.close(theirs)
    assert done.returncode == 7, done.stderr.decode()
