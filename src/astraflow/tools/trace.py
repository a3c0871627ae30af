"""`astraflow trace`: the spans of a run (lib/trace.py) as a Chrome trace, for ui.perfetto.dev or chrome://tracing.

    dataflow   submit ─┐               ┌> admit ─> batch ─┐                          commit
    raas-0             └> accept, lease┘                  │            ┌> transfer, load
                          └ episode ─ engine, reward, …   │            │
    trainer:m                                             └> step ─> publish ─> notify
Arrows lead from process to process. Clocks: every process writes its own wall clock. The spans of a call on both of its sides bound the
difference to Dataflow's: what answered a call did so between its begin and its end. One constant per process is added, 0 when that is
within the bounds (one machine); `otherData.clocks` of the result tells constant and bounds.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from astraflow.lib.jsonl import read_jsonl
from astraflow.lib.trace import DIRECTORY
from astraflow.protocol.errors import UserError

DATAFLOW, TRAINER = "dataflow", "trainer:"
LOOP, WEIGHTS = "loop", "weights"


@dataclass
class Span:
    """One line, in Dataflow's time once `align` was called."""

    process: str
    name: str
    begin: float
    end: float
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def leases(self) -> list[str]:
        one = self.about.get("lease")
        return [one] if one is not None else list(self.about.get("leases", ()))

    @property
    def row(self) -> tuple[str, str]:
        """(kind of row, whose): where it is drawn. Spans of one owner nest; owners of one kind share rows when they do not overlap."""
        about = self.about
        if "index" in about:
            return "trajectory", f"{about['lease']}.{about['attempt']}/{about['index']}"
        if self.name in ("accept", "lease", "outbox"):
            return "group", f"{about['lease']}.{about['attempt']}"
        if self.name == "queue":
            return "queue", f"{about['lease']} {about['model']}"
        if self.process.startswith(TRAINER):
            return LOOP, ""
        fixed = WEIGHTS if self.name in ("transfer", "load") else self.name
        return f"{fixed} {about.get('model') or about.get('instance', '')}".strip(), ""


def read(run_dir: Path) -> list[Span]:
    """All spans, by begin. Raises UserError when the run wrote none."""
    spans = []
    for path in sorted((run_dir / DIRECTORY).glob("*.jsonl")):
        process = path.stem
        for line in read_jsonl(path):
            if "name" not in line:
                process = str(line.get("process", process))
                continue
            spans.append(Span(process, str(line.pop("name")), float(line.pop("begin")), float(line.pop("end")), line))
    if not spans:
        raise UserError(f"{run_dir}: no spans in {DIRECTORY}/; they are written with experiment.trace=true")
    return sorted(spans, key=lambda span: (span.begin, -span.end))


# --- clocks ---------------------------------------------------------------------------------------------------------------


def bounds(spans: list[Span]) -> dict[str, tuple[float, float]]:
    """Process → (least, most) seconds that may be added to its times: every answer lies within its call."""
    calls = {(span.about["instance"], lease): span for span in spans if span.name == "submit" for lease in span.leases}
    of_version: dict[tuple[str, str, int], Span] = {}
    for span in spans:  # the first of each: a notice may be told again
        if "version" in span.about:
            of_version.setdefault((span.name, span.about["model"], span.about["version"]), span)
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        if span.name == "accept" and (call := calls.get((span.process, span.about["lease"]))) is not None:
            found[span.process].append((call.begin - span.begin, call.end - span.begin))
    for (name, model, version), span in of_version.items():
        other, shift = {"wait": ("batch", 1), "notify": ("commit", 0)}.get(name, ("", 0))
        if (inner := of_version.get((other, model, version - shift))) is not None:
            found[span.process].append((inner.end - span.end, inner.begin - span.begin))
    return {process: (max(low for low, _ in pairs), min(high for _, high in pairs)) for process, pairs in found.items()}


def align(spans: list[Span]) -> dict[str, dict[str, float]]:
    """Add each process's constant; what was added, and its bounds. Nothing is added where no constant fits (a clock that was set)."""
    clocks = {}
    for process, (low, high) in bounds(spans).items():
        added = 0.0 if low <= 0.0 <= high or low > high else (low + high) / 2
        clocks[process] = {"added_s": round(added, 6), "least_s": round(low, 6), "most_s": round(high, 6)}
        for span in spans if added else ():
            if span.process == process:
                span.begin, span.end = span.begin + added, span.end + added
    return clocks


# --- what is shown --------------------------------------------------------------------------------------------------------


def of_step(spans: list[Span], step: int) -> list[Span]:
    """All that made version `step`: the batches that it was trained on, its steps, and where it went. Raises UserError."""
    steps = [span for span in spans if span.name == "step" and span.about["version"] == step]
    if not steps:
        known = sorted({span.about["version"] for span in spans if span.name == "step"})
        raise UserError(f"--step {step}: no such step in the trace; there are {f'{known[0]} … {known[-1]}' if known else 'none'}")
    models = {span.about["model"] for span in steps}
    chosen = []
    for span in spans:
        model, version = span.about.get("model"), span.about.get("version")
        wanted = step - 1 if span.name == "batch" else step
        inside = any(s.process == span.process and s.begin <= span.begin and span.end <= s.end for s in steps)
        if (model in models and version == wanted) or inside:
            chosen.append(span)
    return chosen


def of_trajectory(spans: list[Span], name: str) -> list[Span]:
    """The life of one lease (`LEASE`) or of one of its trajectories (`LEASE/INDEX`). Raises UserError."""
    lease, _, index = name.partition("/")
    mine = [span for span in spans if lease in span.leases and ("index" not in span.about or index in ("", str(span.about["index"])))]
    if not any(span.name == "lease" for span in mine) or (index and not any("index" in span.about for span in mine)):
        known = [span.about["lease"] for span in spans if span.name == "lease"][-3:]
        raise UserError(f"--trajectory {name}: it is not in the trace; expected LEASE or LEASE/INDEX, e.g. {', '.join(known) or '–'}")
    served = {(span.about["model"], span.about["version"] + 1) for span in mine if span.name == "batch"}
    steps = [span for span in spans if span.name == "step" and (span.about["model"], span.about["version"]) in served]
    for span in spans:
        inside = any(step.process == span.process and step.begin <= span.begin and span.end <= step.end for step in steps)
        if inside or (span.name != "batch" and (span.about.get("model"), span.about.get("version")) in served):
            mine.append(span)
    return mine


def waits(spans: list[Span]) -> Iterator[Span]:
    """What follows from several spans: a group waits in its outbox until it is fetched, and in the queue until it is served."""
    made = {span.about["lease"]: span for span in spans if span.name == "lease"}
    admitted = {lease: span for span in spans if span.name == "admit" for lease in span.leases}
    for span in spans:
        for lease in span.leases:
            if span.name == "delivered" and (before := made.pop(lease, None)) is not None and before.process == span.process:
                yield Span(span.process, "outbox", before.end, span.begin, {"lease": lease, "attempt": before.about["attempt"]})
            elif span.name == "batch" and (before := admitted.get(lease)) is not None:
                begin = min(before.end, span.begin)  # a group is queued before its admission is answered
                yield Span(span.process, "queue", begin, span.begin, {"lease": lease, "model": span.about["model"]})


# --- the file -------------------------------------------------------------------------------------------------------------


def arrows(spans: list[Span]) -> Iterator[tuple[str, Span, Span]]:
    """(label, from, to) between processes."""
    by_lease: dict[tuple[str, str], list[Span]] = defaultdict(list)
    by_version: dict[tuple[str, str, int], list[Span]] = defaultdict(list)
    for span in spans:
        for lease in span.leases:
            by_lease[span.name, lease].append(span)
        if "version" in span.about:
            by_version[span.name, span.about["model"], span.about["version"]].append(span)
    for (name, lease), ends in by_lease.items():
        source = {"accept": "submit", "admit": "lease"}.get(name)
        for before, after in itertools.product(by_lease.get((source, lease), ()) if source else (), ends):
            if name == "admit" or before.about["instance"] == after.process:
                yield lease, before, after
    for (name, model, version), ends in by_version.items():
        source, earlier = {"step": ("batch", 1), "commit": ("notify", 0), "transfer": ("publish", 0)}.get(name, (None, 0))
        for before, after in itertools.product(by_version.get((source, model, version - earlier), ()) if source else (), ends):
            yield f"{model} v{version}", before, after


def chrome(spans: list[Span], clocks: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The trace event format: complete events, names of processes and rows, and flows."""
    spans = sorted(spans, key=lambda span: (span.begin, -span.end))
    zero = spans[0].begin
    order = sorted({span.process for span in spans}, key=lambda name: (name != DATAFLOW, name.startswith(TRAINER), name))
    pids = {process: number for number, process in enumerate(order, start=1)}
    events: list[dict[str, Any]] = [_named("process_name", pid, 0, process) for process, pid in pids.items()]
    drawn, names = rows(spans)
    events += [_named("thread_name", pids[process], tid, name) for (process, tid), name in names.items()]

    def place(span: Span) -> dict[str, int]:
        return {"pid": pids[span.process], "tid": drawn[span.process, *span.row]}

    def at(seconds: float) -> float:
        return round((seconds - zero) * 1e6, 1)

    for span in spans:
        length = max(round((span.end - span.begin) * 1e6, 1), 1.0)  # one that takes no time could not be seen, nor hold an arrow
        events.append({"name": span.name, "cat": "span", "ph": "X", "ts": at(span.begin), "dur": length, **place(span), "args": span.about})
    for number, (label, before, after) in enumerate(arrows(spans), start=1):
        flow = {"name": label, "cat": "flow", "id": number}
        events.append({**flow, "ph": "s", "ts": at(before.begin), **place(before)})
        events.append({**flow, "ph": "f", "bp": "e", "ts": at(max(after.begin, before.begin)), **place(after)})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"zero_unix_s": zero, "clocks": clocks}}


def rows(spans: list[Span]) -> tuple[dict[tuple[str, str, str], int], dict[tuple[str, int], str]]:
    """(process, *row) → number of the row that it is drawn on, and (process, number) → its name."""
    reach: dict[tuple[str, str, str], tuple[float, float]] = {}
    for span in spans:
        begin, end = reach.get((span.process, *span.row), (span.begin, span.end))
        reach[span.process, *span.row] = min(begin, span.begin), max(end, span.end)
    drawn: dict[tuple[str, str, str], int] = {}
    names: dict[tuple[str, int], str] = {}
    free: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
    for (process, kind, owner), (begin, end) in sorted(reach.items(), key=lambda item: item[1]):
        lanes = free[process, kind]
        lane = next((place for place, (until, _) in enumerate(lanes) if until < begin), None)
        if lane is None:
            number = 1 + sum(1 for known, _ in names if known == process)
            lane = len(lanes)
            lanes.append((end, number))
            names[process, number] = f"{kind} {lane + 1}" if owner else kind
        lanes[lane] = end, lanes[lane][1]
        drawn[process, kind, owner] = lanes[lane][1]
    return drawn, names


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def write(run_dir: Path, out: Path, step: int | None = None, trajectory: str = "") -> str:
    """Write the trace of a step, of a trajectory, or of everything; one line that says what is in it. Raises UserError."""
    if step is not None and trajectory:
        raise UserError("trace: give --step or --trajectory, not both")
    spans = read(run_dir)
    clocks = align(spans)
    if step is not None:
        spans = of_step(spans, step)
    elif trajectory:
        spans = of_trajectory(spans, trajectory)
    made = chrome([*spans, *waits(spans)], clocks)
    out.write_text(json.dumps(made, ensure_ascii=False), encoding="utf-8")
    length = max(span.end for span in spans) - min(span.begin for span in spans)
    return f"{out}: {len(spans)} spans over {length:.2f} s; open it in ui.perfetto.dev or chrome://tracing"
