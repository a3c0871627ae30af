"""What a drill did and what it cost: lines for the terminal and `RUN_DIR/chaos.json`, from the files of the run's directory.

    chaos/processes.json     kills and stops, and the sign that ended each           (drill.py)
    chaos/wire-NAME.jsonl    drops and delays of one process, as it suffered them    (drill_wire.py)
    ledger/, metrics.jsonl   the books, and the steps of the trainers
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from astraflow.dataflow.logbook import Logbook
from astraflow.launch.drill import PROCESSES, Drilled, Hit
from astraflow.launch.drill_spec import EVERY, STREAM, WIRES
from astraflow.launch.drill_wire import WireHit
from astraflow.launch.rundir import write_json
from astraflow.lib.jsonl import BadRow, read_jsonl
from astraflow.protocol.errors import ConfigError
from astraflow.protocol.routes import RaaSAPI

DIRECTORY, REPORT = "chaos", "chaos.json"
PATIENCE_S, PATIENCE_STEPS = 60.0, 3
"""What was hit longer ago than this and so many of the longest steps when the run ended, and had shown no sign, never recovered."""
KEPT = 500
"""Hits of one fault on a wire that are kept one by one; all are counted."""
ONCE = {EVERY, RaaSAPI.eval_pull.path}
REPEATED = {call for callers in WIRES.values() for calls in callers.values() for call in calls} - ONCE
"""Calls that come again and again, so that they must work again. The others (of an evaluation, a farewell) may have no next one."""
STEP = "time/step_s"


class WireSum(msgspec.Struct, kw_only=True):
    """All hits of one fault on one process's wires."""

    kind: str
    target: str
    process: str
    count: int = 0
    recovered: int = 0
    recovered_mean_s: float = 0.0
    recovered_max_s: float = 0.0
    bytes_again: int = 0
    """Of dropped replies; a cut stream goes on where it stopped."""
    delayed_s: float = 0.0
    hits: list[WireHit] = []
    """The first ones."""


class Pace(msgspec.Struct, kw_only=True):
    """Median seconds of a trainer's steps while something was down, and of its others."""

    hurt_s: float | None
    hurt: int
    quiet_s: float | None
    quiet: int


class ChaosReport(msgspec.Struct, kw_only=True):
    """`chaos.json`."""

    text: str
    seed: int
    began: float
    """Unix time."""
    hits: list[Hit]
    """Kills and stops, oldest first."""
    wires: list[WireSum]
    spared: dict[str, int]
    """Process → kills that were drawn and not done, because nobody would have started it again."""
    leases: int
    leases_again: int
    """How often a lease ran again."""
    rows: dict[str, int]
    """made, trained, dropped, in_flight."""
    paces: dict[str, Pace]
    problems: list[str]
    """What never recovered, and what is wrong in the books; empty = the drill was passed."""


def prepare(run_dir: Path) -> Path:
    """The directory for what is noted, empty."""
    directory = run_dir / DIRECTORY
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    return directory


def write(run_dir: Path, say: Callable[[str], None]) -> bool:
    """Write chaos.json and say what is in it; whether the drill was passed."""
    report = build(run_dir)
    write_json(run_dir / REPORT, report)
    for line in lines(report):
        say(line)
    return not report.problems


def build(run_dir: Path) -> ChaosReport:
    """Of a run that has ended."""
    drilled = msgspec.json.decode((run_dir / DIRECTORY / PROCESSES).read_bytes(), type=Drilled)
    ended = max([drilled.began, *(hit.at + (hit.recovered_s or hit.open_s) for hit in drilled.hits)])
    wires: list[WireSum] = []
    steps = list(steps_of(run_dir / "metrics.jsonl"))
    patience_s = PATIENCE_S + PATIENCE_STEPS * max((took for _, _, took in steps), default=0.0)
    problems = [
        f"{hit.process} was {_done(hit)} {_after(hit, drilled)} into the run and never recovered ({hit.open_s:.0f} s)"
        for hit in drilled.hits
        if hit.recovered_s is None and hit.open_s > patience_s
    ]
    for file in sorted((run_dir / DIRECTORY).glob("wire-*.jsonl")):
        process = file.stem.removeprefix("wire-")
        noted = [msgspec.convert(row, WireHit) for row in _rows(file)]
        wires += sums(process, noted)
        problems += never_again(process, noted, drilled.hits, max([ended, *(note.at for note in noted)]), patience_s)
    found = ChaosReport(
        text=drilled.text,
        seed=drilled.seed,
        began=drilled.began,
        hits=drilled.hits,
        wires=wires,
        spared=drilled.spared,
        leases=0,
        leases_again=0,
        rows={},
        paces=paces(steps, [(hit.at, hit.at + (hit.recovered_s or hit.open_s)) for hit in drilled.hits]),
        problems=problems,
    )
    try:
        with Logbook(run_dir) as log:
            found.leases, found.leases_again = log.attempts()
            counts = log.counts()
            problems += log.faults()
    except ConfigError as error:
        problems.append(str(error))
        return found
    in_flight, dropped = sum(counts.in_flight.values()), sum(counts.dropped.values())
    found.rows = {"made": counts.made, "trained": counts.trained, "dropped": dropped, "in_flight": in_flight}
    return found


def sums(process: str, noted: Sequence[WireHit]) -> list[WireSum]:
    """Per fault."""
    found: dict[tuple[str, str], WireSum] = {}
    hits: dict[int, tuple[WireHit, WireSum]] = {}
    waits: dict[int, list[float]] = {}
    for note in noted:
        if not note.over:
            one = found.setdefault((note.kind, note.target), WireSum(kind=note.kind, target=note.target, process=process))
            one.count += 1
            one.delayed_s += note.time_s
            one.bytes_again += note.lost_bytes if note.call != STREAM else 0
            if len(one.hits) < KEPT:
                one.hits.append(note)
            hits[note.number] = (note, one)  # numbers begin anew in each life; those of an older one are over with it
            continue
        for hit, one in (hits.pop(number) for number in note.over if number in hits):
            waits.setdefault(id(one), []).append(note.at - hit.at)
    for one in found.values():
        took = waits.get(id(one), [])
        one.recovered = len(took)
        one.recovered_mean_s, one.recovered_max_s = (statistics.fmean(took), max(took)) if took else (0.0, 0.0)
    return list(found.values())


def never_again(process: str, noted: Sequence[WireHit], hits: Iterable[Hit], ended: float, patience_s: float) -> list[str]:
    """Calls that come again and again, and did not after they were hit, although their process had the time."""
    life = next((note.pid for note in reversed(noted) if note.pid), 0)
    noted = noted[next((index for index, note in enumerate(noted) if note.pid == life), 0) :]  # older lives have the same numbers
    over = {number for note in noted for number in note.over}
    killed = max((hit.at for hit in hits if hit.process == process and hit.kind == "kill"), default=0.0)
    return [
        f"{process}: after a reply of {hit.call} was dropped none came in {ended - hit.at:.0f} s"
        for hit in noted
        if hit.kind == "drop" and hit.call in REPEATED and hit.number not in over
        and hit.at > killed and ended - hit.at > patience_s
    ][:3]  # fmt: skip


def steps_of(metrics: Path) -> Iterator[tuple[str, float, float]]:
    """(policy, end in unix time, seconds) of each step of the trainers. The first one waits for the start and is left out."""
    begun: set[str] = set()
    for row in _rows(metrics):
        kind, _, policy = str(row["process"]).partition(":")
        took = row["values"].get(STEP) if kind == "trainer" else None
        if took is not None:
            if policy in begun:
                yield policy, row["time"], took
            begun.add(policy)


def paces(steps: Iterable[tuple[str, float, float]], windows: Sequence[tuple[float, float]]) -> dict[str, Pace]:
    """Policy → its steps that overlap one of these times, against the others."""
    found: dict[str, list[tuple[bool, float]]] = {}
    for policy, end, took in steps:
        hurt = any(end - took < over and begin < end for begin, over in windows)
        found.setdefault(policy, []).append((hurt, took))
    return {policy: _pace(sides) for policy, sides in sorted(found.items())}


def _pace(steps: Sequence[tuple[bool, float]]) -> Pace:
    hurt, quiet = ([took for flag, took in steps if flag is wanted] for wanted in (True, False))
    medians = [statistics.median(times) if times else None for times in (hurt, quiet)]
    return Pace(hurt_s=medians[0], hurt=len(hurt), quiet_s=medians[1], quiet=len(quiet))


def lines(report: ChaosReport) -> Iterator[str]:
    """For the terminal."""
    yield f"\ndrill {report.text} (seed {report.seed}): {'NOT PASSED' if report.problems else 'passed'}"
    for hit in report.hits:
        yield f"{hit.at - report.began:7.1f} s  {_done(hit)} {hit.process} (pid {hit.pid}): {_ended(hit)}{_cost(hit)}"
    for wire in report.wires:
        yield _wire(wire)
    for process, count in report.spared.items():
        yield f"           spared {process}: {count} kills after which nobody would have started it again"
    for policy, pace in report.paces.items():
        sides = [(pace.hurt_s, pace.hurt, "while something was down"), (pace.quiet_s, pace.quiet, "otherwise")]
        told = ", ".join(f"{took:.2f} s {when} ({count} steps)" for took, count, when in sides if took is not None)
        yield f"           a step of {policy} took {told}"
    yield f"           {report.leases_again} times a lease ran again, of {report.leases} leases"
    if report.rows:
        yield "           made {made} = trained {trained} + dropped {dropped} + in flight {in_flight}".format(**report.rows)
    for problem in report.problems:
        yield f"PROBLEM    {problem}"


def _wire(wire: WireSum) -> str:
    head = f"           {wire.kind} {wire.target} of {wire.process}: {wire.count} times"
    if wire.kind == "delay":
        return f"{head}, {wire.delayed_s:.1f} s in all"
    again = f", {wire.bytes_again} bytes sent again" if wire.bytes_again else ""
    if not wire.recovered:
        return head + again
    took = f"worked again after {wire.recovered_mean_s:.2f} s on average, {wire.recovered_max_s:.2f} s at most"
    return f"{head}{again}; {took}"


def _done(hit: Hit) -> str:
    return "killed" if hit.kind == "kill" else f"stopped for {hit.time_s:g} s"


def _after(hit: Hit, drilled: Drilled) -> str:
    return f"{hit.at - drilled.began:.0f} s"


def _ended(hit: Hit) -> str:
    if hit.recovered_s is not None:
        return f"after {hit.recovered_s:.1f} s {hit.told}"
    return f"{hit.cut_short} {hit.open_s:.1f} s later"


def _cost(hit: Hit) -> str:
    told = []
    if hit.kind == "kill" and hit.rows_there:
        told.append(f"{hit.rows_there} trajectories ran there")
    if hit.versions_again > 0:
        told.append(f"{hit.versions_again} versions were trained again")
    if hit.bytes_again:
        told.append(f"{hit.bytes_again} bytes of weights again")
    return f"; {', '.join(told)}" if told else ""


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of a file; a torn one costs what comes after it."""
    try:
        yield from read_jsonl(path) if path.is_file() else ()
    except BadRow:
        return
