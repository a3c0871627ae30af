"""Spans of several clocks become one picture."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from astraflow.lib.trace import Trace
from astraflow.protocol.errors import UserError
from astraflow.tools.trace import align, read, rows, write

FAST_S = 5.0
"""What the clock of raas-0 is ahead."""


def lines(run_dir: Path, process: str, ahead: float, *spans: tuple[str, float, float, dict[str, Any]]) -> None:
    (run_dir / "trace").mkdir(exist_ok=True)
    text = [{"process": process}] + [{"name": n, "begin": b + ahead, "end": e + ahead, **about} for n, b, e, about in spans]
    (run_dir / "trace" / f"{process.replace(':', '_')}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in text))


def made(run_dir: Path) -> None:
    """Two groups on a machine whose clock is ahead, trained by one step."""
    lines(
        run_dir, "dataflow", 0.0,
        ("submit", 100.0, 100.2, {"instance": "raas-0", "leases": ["a-1", "a-2"]}),
        ("admit", 103.1, 103.2, {"instance": "raas-0", "leases": ["a-1", "a-2"]}),
        ("batch", 103.4, 103.5, {"model": "m", "version": 0, "leases": ["a-1", "a-2"]}),
        ("commit", 106.05, 106.1, {"model": "m", "version": 1}),
        ("commit", 120.05, 120.1, {"model": "m", "version": 1}),  # of a notice that was told again
    )  # fmt: skip
    one = {"lease": "a-1", "attempt": 1}
    lines(
        run_dir, "raas-0", FAST_S,
        ("accept", 100.1, 100.1, one), ("accept", 100.11, 100.11, one | {"lease": "a-2"}),
        ("lease", 100.3, 103.0, one), ("lease", 100.3, 102.0, one | {"lease": "a-2"}),  # begun when the call was over
        ("episode", 100.3, 103.0, one | {"index": 0}), ("engine", 100.3, 102.0, one | {"index": 0}),
        ("reward", 102.1, 102.9, one | {"index": 0}), ("delivered", 103.05, 103.05, {"leases": ["a-1", "a-2"]}),
        ("transfer", 106.2, 106.4, {"model": "m", "version": 1}), ("load", 106.4, 106.5, {"model": "m", "version": 1}),
    )  # fmt: skip
    step = {"model": "m", "version": 1}
    lines(
        run_dir, "trainer:m", 0.0,
        ("step", 103.0, 105.9, step), ("wait", 103.0, 103.6, step), ("train", 103.6, 105.8, step), ("forward", 104.0, 105.0, {"nodes": 3}),
        ("offload", 105.8, 105.9, step), ("publish", 105.9, 106.0, step), ("notify", 106.0, 106.15, step),
        ("notify", 120.0, 120.15, step),
    )  # fmt: skip


def test_a_clock_that_is_ahead_is_set_back_within_what_the_calls_allow(tmp_path: Path) -> None:
    made(tmp_path)
    spans = read(tmp_path)
    clocks = align(spans)
    assert clocks["trainer:m"] == pytest.approx({"added_s": 0.0, "least_s": -0.05, "most_s": 0.05}, abs=1e-5)
    assert clocks["raas-0"]["added_s"] == pytest.approx(-FAST_S, abs=0.11)
    assert clocks["raas-0"]["least_s"] <= -FAST_S <= clocks["raas-0"]["most_s"]
    submit, accept = (next(span for span in spans if span.name == name) for name in ("submit", "accept"))
    assert submit.begin <= accept.begin <= submit.end


def test_a_trajectory_is_drawn_from_its_lease_to_the_weights_that_it_made(tmp_path: Path) -> None:
    made(tmp_path)
    said = write(tmp_path, tmp_path / "t.json", trajectory="a-1/0")
    assert said.startswith(f"{tmp_path / 't.json'}: 21 spans over ")
    found = json.loads((tmp_path / "t.json").read_text())
    names = {event["pid"]: event["args"]["name"] for event in found["traceEvents"] if event["name"] == "process_name"}
    drawn = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert {(names[event["pid"]], event["name"]) for event in drawn} >= {
        ("dataflow", "submit"), ("raas-0", "lease"), ("raas-0", "episode"), ("raas-0", "engine"), ("raas-0", "reward"),
        ("raas-0", "outbox"), ("dataflow", "admit"), ("dataflow", "queue"), ("dataflow", "batch"), ("trainer:m", "step"),
        ("trainer:m", "forward"), ("trainer:m", "publish"), ("dataflow", "commit"), ("raas-0", "transfer"), ("raas-0", "load"),
    }  # fmt: skip
    assert sum(event["name"] == "lease" for event in drawn) == 1, "the other group is not part of it"
    flows: dict[int, list[dict[str, Any]]] = {}
    for event in found["traceEvents"]:
        if event["ph"] in ("s", "f"):
            flows.setdefault(event["id"], []).append(event)
    ways = {(names[start["pid"]], names[end["pid"]]) for start, end in flows.values()}
    both = {("dataflow", "raas-0"), ("dataflow", "trainer:m")}
    assert ways == both | {(there, here) for here, there in both} | {("trainer:m", "raas-0")}
    assert all(start["ts"] <= end["ts"] for start, end in flows.values())


def test_groups_that_run_at_once_have_rows_of_their_own_and_later_ones_share_them(tmp_path: Path) -> None:
    lines(tmp_path, "raas-0", 0.0, *[("lease", t, t + 1.5, {"lease": f"a-{t}", "attempt": 1}) for t in range(6)])
    drawn, names = rows(read(tmp_path))
    assert set(names.values()) == {"group 1", "group 2"}
    assert len(set(drawn.values())) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"step": 7}, r"--step 7: no such step in the trace; there are 1 … 1"),
        ({"trajectory": "a-9"}, r"--trajectory a-9: it is not in the trace; expected LEASE or LEASE/INDEX, e.g. a-1, a-2"),
        ({"trajectory": "a-1/5"}, r"--trajectory a-1/5: it is not in the trace"),
        ({"step": 1, "trajectory": "a-1"}, "give --step or --trajectory, not both"),
    ],
)
def test_what_is_not_there_is_one_line(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    made(tmp_path)
    with pytest.raises(UserError, match=said):
        write(tmp_path, tmp_path / "t.json", **options)


def test_a_run_without_spans_says_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"they are written with experiment\.trace=true"):
        write(tmp_path, tmp_path / "t.json")


def test_a_process_writes_spans_only_when_it_was_told_to(tmp_path: Path) -> None:
    trace = Trace()
    with trace.span("never"):
        trace.add("never", time.monotonic())
    assert not (tmp_path / "trace").exists()
    before = time.time()
    trace.open(tmp_path, "trainer:m")
    with pytest.raises(ValueError, match="inside"), trace.span("block", rows=3):
        raise ValueError("inside")
    trace.add("moment", time.monotonic())
    first, second = read(tmp_path)
    assert (first.process, first.name, first.about) == ("trainer:m", "block", {"rows": 3})
    assert before - 1 <= first.begin <= first.end <= second.begin <= time.time() + 1
