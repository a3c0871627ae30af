"""The two-policy recipe with the scripted engine: to its end, and stopped by Ctrl-C and resumed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from astraflow.protocol.metrics import METRICS, Metric, find, kind_of

sys.path.insert(0, str(Path(__file__).parent))
from scraped import Scraped, checkpoint_now, paused, scrape
from system import BATCH, SCRIPTED, TWO_POLICIES, Run, Stage, version

DEADLINE_S = 120.0
MAX_STALENESS = 2
STEPS = 12
BOTH = {"solver": STEPS, "verifier": STEPS}
ROUNDED_US = 4.0
"""Begin and end of a span are written in whole microseconds."""
TRACKER = "trackers={'flow_tracker:Lines': {}}"
SCRAPED: dict[str, Scraped] = {}
CHECKPOINTS: dict[str, int] = {}
"""Of the run of `ended`, in its middle."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run to its end, watched all the time."""
    stage = Stage(tmp_path_factory.mktemp("ended"))
    try:
        run = stage.run(TWO_POLICIES, *SCRIPTED, f"trainer.max_steps={STEPS}", "trainer.eval_freq=6", TRACKER, "experiment.trace=true")
        with paused(run, 2, DEADLINE_S) as client:
            SCRAPED.update(scrape(client))
            CHECKPOINTS.update(checkpoint_now(run, client, DEADLINE_S))
        assert run.end(DEADLINE_S, watch=True) == 0, run.text
        run.nothing_left()
        yield run
    finally:
        stage.close()


def cli(arguments: list[str]) -> int:
    """Exit code of a command in a process of its own."""
    return subprocess.run([sys.executable, "-m", "astraflow", *arguments], timeout=DEADLINE_S, check=False).returncode


def scalars(directory: Path, tag: str) -> list[Any]:
    """One curve, as TensorBoard itself reads it."""
    events = EventAccumulator(str(directory))
    events.Reload()
    found: list[Any] = events.Scalars(tag)
    return found


def tracked_whole(run: Run, lives: int) -> None:
    """The tracker was told of one run, however often it was opened, and got what metrics.jsonl holds, in its order."""
    told = [json.loads(line) for line in (run.run_dir / "lines.jsonl").read_text().splitlines()]
    opened = [line for line in told if isinstance(line, dict)]
    assert [line["trackers"] for line in opened] == [{}] * lives, "what names code is not told"
    assert len({(line["id"], line["run"]) for line in opened}) == 1
    rows = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    got = [(step, time_s, values) for _, step, time_s, values in (line for line in told if isinstance(line, list))]
    assert got == [(r["step"], r["time"], {n: v for n, v in r["values"].items() if v is not None}) for r in rows]
    assert "not sent" not in run.text


def test_every_process_of_the_recipe_ends_with_0_and_the_books_add_up(ended: Run) -> None:
    assert ended.exit_codes() == {"dataflow": [0], "raas-0": [0], "trainer-solver": [0], "trainer-verifier": [0]}
    ended.adds_up(BOTH, BATCH, MAX_STALENESS)
    report = ended.report
    assert (report["exit_code"], report["failure"], report["drained"]) == (0, "", False)
    assert report["accuracy"]["heldout"]["steps"] == [0, 6, 12], "before, in the middle, and of the last version"
    assert (ended.run_dir / "report.png").is_file()
    for policy in BOTH:
        assert [row["step"] for row in ended.steps(policy)] == list(range(1, STEPS + 1))
        assert (ended.run_dir / "export" / policy / "model.safetensors").is_file()
    assert list((ended.run_dir / "ledger" / "batches").iterdir()) == []


def test_both_policies_are_rewarded_and_moved(ended: Run) -> None:
    for policy in BOTH:
        rows = ended.steps(policy)
        assert any(0 < row["values"]["reward/mean"] < 1 for row in rows)
        assert sum(row["values"]["policy/grad_norm"] > 0 for row in rows) > STEPS / 2


def test_what_an_instance_serves_has_the_digest_that_the_trainer_published(ended: Run) -> None:
    published = ended.books.digests
    assert ended.report["syncs"]["delta"] > 0
    assert ended.report["syncs"]["failures"] == 0
    for policy in BOTH:
        seen = {held: digest for name, timeline, held, digest in ended.served if name == policy and timeline == 0}
        assert seen, policy
        assert seen == {held: published[policy][held] for held in seen}
        assert len(set(seen.values())) == len(seen), "every version has bytes of its own"
    assert {timeline for _, timeline, _, _ in ended.served} == {0}


def test_every_number_of_every_process_is_declared_and_nothing_that_is_always_logged_is_missing(ended: Run) -> None:
    seen: dict[str, set[Metric]] = {}
    for line in (ended.run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        by = kind_of(row["process"])
        for name in row["values"]:
            metric = find(name, by)
            assert metric is not None, f"{row['process']} logs {name!r}, which protocol/metrics.py does not declare"
            assert not metric.own, f"{row['process']} logs {name!r} as if it were a user's own"
            seen.setdefault(by, set()).add(metric)
    for by, found in seen.items():
        always = {metric for metric in METRICS if by in metric.by and not metric.when}
        assert {metric.name for metric in always - found} == set(), by
    assert set(seen) == {"dataflow", "raas", "trainer"}


def test_prometheus_reads_from_every_service_what_its_status_says(ended: Run) -> None:
    assert set(SCRAPED) == {"dataflow", "raas-0", "trainer:solver", "trainer:verifier"}
    for scraped in SCRAPED.values():
        scraped.says_what_status_says()
    flow = SCRAPED["dataflow"].samples
    for policy in BOTH:
        labels = (("model", policy), ("process", "dataflow"))
        trained = SCRAPED["dataflow"].numbers[f"policy/version/{policy}"] * BATCH
        assert flow["astraflow_staleness_trained_count", labels] == trained >= 2 * BATCH
        step = SCRAPED[f"trainer:{policy}"].samples
        assert step["astraflow_time_step_s", (("model", policy), ("process", f"trainer:{policy}"))] > 0


def test_tensorboard_reads_the_curves_of_every_process_apart(ended: Run) -> None:
    steps = {event.step for event in scalars(ended.run_dir / "tensorboard" / "trainer_solver", "time/step_s")}
    assert steps == set(range(1, STEPS + 1))
    rows = {row["step"]: row["values"]["reward/mean"] for row in ended.metrics("dataflow") if row.get("model") == "verifier"
            and "over" not in row}  # fmt: skip
    drawn = {event.step: event.value for event in scalars(ended.run_dir / "tensorboard" / "dataflow" / "verifier", "reward/mean")}
    assert drawn == pytest.approx(rows)


def test_trainers_that_wait_write_the_checkpoint_that_an_operator_asks_for(ended: Run) -> None:
    numbers = SCRAPED["dataflow"].numbers
    for policy, asked in CHECKPOINTS.items():
        assert asked >= numbers[f"policy/version/{policy}"], "a step may have ended meanwhile"
    events = json.loads((ended.run_dir / "observed.json").read_text())["events"]
    assert any("an operator asks for a checkpoint of" in event for event in events) == bool(CHECKPOINTS)


def test_a_tracker_of_ones_own_gets_every_line_of_every_process(ended: Run) -> None:
    tracked_whole(ended, lives=1)


def drawn(run: Run, *options: str) -> tuple[list[dict[str, Any]], list[tuple[dict[str, Any], dict[str, Any]]]]:
    """(spans by begin, each with its `process`; flows as begin and end) of `astraflow trace`, which are valid and nest."""
    out = run.run_dir / "trace.json"
    assert cli(["trace", str(run.run_dir), *options, "--out", str(out)]) == 0
    events = json.loads(out.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    spans = sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"]))
    for event in events:
        assert event["ph"] in "XMsf"
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        event["process"] = names[event["pid"]]
    stacks: dict[tuple[int, int], list[float]] = {}
    for span in spans:
        assert span["ts"] >= 0
        assert span["dur"] > 0
        stack = stacks.setdefault((span["pid"], span["tid"]), [])
        while stack and stack[-1] <= span["ts"] + ROUNDED_US:
            stack.pop()
        assert not stack or span["ts"] + span["dur"] <= stack[-1] + ROUNDED_US, f"{span} sticks out of the one around it"
        stack.append(span["ts"] + span["dur"])
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    return spans, [(event, ends[event["id"]]) for event in events if event["ph"] == "s"]


def test_the_trace_of_a_step_lasts_as_long_as_its_metrics_say(ended: Run) -> None:
    spans, flows = drawn(ended, "--step", "4")
    for policy in BOTH:
        mine = [span for span in spans if span["process"] == f"trainer:{policy}"]
        values = next(row["values"] for row in ended.steps(policy) if row["step"] == 4)
        seconds = {name: sum(span["dur"] for span in mine if span["name"] == name) / 1e6 for name in {span["name"] for span in mine}}
        for name in ("step", "wait", "train", "offload"):
            assert seconds[name] == pytest.approx(values[f"time/{name}_s"], abs=1e-5)
        passes = [sum(span["name"] == name for span in mine) for name in ("forward", "backward")]
        assert passes == [values["perf/micro_batches"]] * 2
        inside = ("plan", "forward", "backward", "update")
        assert sum(seconds.get(name, 0.0) for name in inside) <= seconds["train"] + 1e-4
        assert {"publish", "notify"} <= set(seconds)
        assert any(f["process"] == "dataflow" and t["process"] == f"trainer:{policy}" for f, t in flows)


def test_the_trace_of_a_trajectory_leads_from_its_lease_to_the_version_that_it_made(ended: Run) -> None:
    share = next(s for s in ended.books.shares if s.policy == "solver" and s.state == "trained" and s.version == 3)
    spans, flows = drawn(ended, "--trajectory", f"{share.lease_id}/1")
    solver = [span for span in spans if span["args"].get("model", "solver") == "solver"]
    chain = ("submit", "accept", "lease", "episode", "engine", "outbox", "admit", "queue", "batch", "train", "publish", "notify", "commit")
    made = [span for span in solver if span["args"].get("version", 4) == 4 or span["name"] == "batch"]  # no notice that waited in the step
    begins = [next(span["ts"] for span in made if span["name"] == name) for name in chain]
    assert begins == sorted(begins), dict(zip(chain, begins, strict=True))
    assert next(span["args"]["version"] for span in solver if span["name"] == "batch") == 3
    assert {span["args"]["version"] for span in solver if span["name"] == "publish"} == {4}
    assert {span["args"]["index"] for span in spans if "index" in span["args"]} == {1}
    ways = {(f["process"], t["process"]) for f, t in flows}
    assert ways >= {("dataflow", "raas-0"), ("raas-0", "dataflow"), ("dataflow", "trainer:solver"), ("trainer:solver", "dataflow")}


def test_ctrl_c_drains_and_resume_goes_on_where_it_stopped(stage: Stage) -> None:
    first = stage.run(TWO_POLICIES, *SCRIPTED, "trainer.max_steps=1000", "trainer.eval_freq=0", TRACKER)
    first.until("version 3 of both", lambda status: min(version(status, policy) for policy in BOTH) >= 3, DEADLINE_S)
    first.interrupt()
    assert first.end(DEADLINE_S) == 0, first.text
    first.nothing_left()
    assert first.report["drained"]
    assert all(codes == [0] for codes in first.exit_codes().values())
    stopped = first.report["steps"]
    assert min(stopped.values()) >= 3
    first.adds_up(stopped, BATCH, MAX_STALENESS)

    target = max(stopped.values()) + 4
    second = stage.run(TWO_POLICIES, *SCRIPTED, f"trainer.max_steps={target}", "trainer.eval_freq=0", TRACKER, resume=True)
    assert second.end(DEADLINE_S) == 0, second.text
    second.nothing_left()
    assert all(codes == [0] for codes in second.exit_codes().values())
    assert second.report["run_id"] == first.report["run_id"]
    books = second.adds_up(dict.fromkeys(BOTH, target), BATCH, MAX_STALENESS)
    assert {batch.timeline for batch in books.batches} == {0}, "a drained run lost no step, so nothing was rolled back"
    for policy in BOTH:
        steps = [row["step"] for row in second.steps(policy)]
        assert steps == list(range(1, target + 1)), f"{policy}: every step once, before and after the stop"
    tracked_whole(second, lives=2)
