"""A long run under faults: `make evidence ARGS=soak`, or `python -m astraflow.tools.soak_evidence [--minutes N]`.

The tiny two-policy job trains for half an hour under `--chaos` with every kind of fault, is then drained by Ctrl-C, and must have
ended with 0 and exact books; the memory of each process must be flat; no process, listening port or name in /dev/shm may be left.
What was measured goes to `evidence/soak.json`, whatever it says.

Flat: resident memory, sampled every two seconds. Of a life that is long enough, the median of its last window is within 10 % of that of
its first window after the warm-up. A life that was ended before (by the drill) may not be above the highest window of the long ones of
its name by more than 10 %; a name without a long life is not judged, and told.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from astraflow.lib.proc import adopt_orphans, descendants
from astraflow.protocol.errors import UserError
from astraflow.raas.staging import staging_path
from astraflow.tools.report import Report
from astraflow.tools.report_evidence import commit, machine, say

RECIPE = "recipes/tiny-two-policies.yaml"
OVERRIDES = (
    "trainer.max_steps=1000000",
    "trainer.eval_freq=400",
    "launch.restart.limit=1000",
    "launch.restart.max_s=2",
    "weights.max_restarts=1000",
)
FAULTS = (
    "kill=raas:0.004,kill=trainer:0.003,kill=dataflow:0.003,kill=sender:0.003,"
    "stop=raas:0.003:3s,stop=trainer:0.002:3s,stop=dataflow:0.002:2s,stop=sender:0.002:2s,"
    "drop=pull:0.05,drop=batch:0.05,drop=notify:0.05,drop=weights:0.02,drop=raas:0.005,delay=weights:200ms"
)
MINUTES = 30.0
SAMPLE_S = 2.0
WARM_UP_S, WINDOW_S = 120.0, 60.0
TOLERANCE = 0.10
END_S = 240.0
"""After Ctrl-C."""
GONE_S = 10.0
"""Children die with their parent; the kernel needs a moment."""
POINTS = 60


@dataclass
class Life:
    """One process."""

    name: str
    pid: int
    at_s: list[float] = field(default_factory=list)
    """Since the start of the run."""
    mib: list[float] = field(default_factory=list)
    """Resident memory."""

    def window(self, begin_s: float, end_s: float) -> float | None:
        """Median within these seconds of its life; None without a sample."""
        found = [mib for at_s, mib in zip(self.at_s, self.mib, strict=True) if begin_s <= at_s - self.at_s[0] <= end_s]
        return statistics.median(found) if found else None

    @property
    def length_s(self) -> float:
        return self.at_s[-1] - self.at_s[0]


class Judged(msgspec.Struct, kw_only=True):
    """The memory of one life."""

    name: str
    pid: int
    begin_s: float
    length_s: float
    first_mib: float | None
    """Median of the first window after the warm-up; None = it did not live so long."""
    last_mib: float
    verdict: str
    """`flat`, `grew`, `shrank`, `within` (short, and no larger than a long one), `larger` (short), `alone` (there is no long one)."""
    curve: list[tuple[float, float]]
    """(seconds into the run, MiB), thinned."""


class Left(msgspec.Struct, kw_only=True):
    """What the run left behind; all must be empty."""

    processes: list[str]
    ports: list[int]
    shm: list[str]


@dataclass
class Watcher:
    """Looks at the descendants of one process."""

    root: int
    began: float = field(default_factory=time.monotonic)
    lives: dict[tuple[int, str], Life] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    """Inode of a listening socket → port."""

    def look(self) -> None:
        """One sample of everybody."""
        at_s = time.monotonic() - self.began
        listening = listening_sockets()
        names: dict[int, str] = {os.getpid(): "soak"}
        for pid in [self.root, *descendants(self.root)]:
            with contextlib.suppress(OSError, ValueError, IndexError):  # it ended meanwhile
                parent, born = stat_of(pid)
                name = names[pid] = label(command_of(pid), names.get(parent, ""))
                mib = resident_mib(pid)
                life = self.lives.setdefault((pid, born), Life(name, pid))
                life.name = name  # a fork has its parent's command line until it becomes what it is
                life.at_s.append(at_s)
                life.mib.append(mib)
                self.ports |= {inode: listening[inode] for inode in sockets_of(pid) if inode in listening}

    def left(self, shared: Sequence[Path]) -> Left:
        """What is still there after the end. `shared`: what rollout services of this run have in /dev/shm, the only names there are."""
        end = time.monotonic() + GONE_S
        while (processes := descendants(os.getpid())) and time.monotonic() < end:
            reap()
            time.sleep(0.1)
        ports = sorted(port for inode, port in listening_sockets().items() if self.ports.get(inode) == port)
        names = [str(path) for path in shared if path.exists()]
        return Left(processes=[" ".join(command_of(pid)) for pid in processes], ports=ports, shm=names)


def judge(lives: Sequence[Life], warm_up_s: float, window_s: float) -> list[Judged]:
    """The memory of every life of at least a window."""
    levels: dict[str, list[float]] = {}
    long: dict[int, float] = {}
    kept = [life for life in lives if life.length_s >= window_s / 2]
    for index, life in enumerate(kept):
        first = life.window(warm_up_s, warm_up_s + window_s)
        if life.length_s >= warm_up_s + 2 * window_s and first is not None:
            long[index] = first
            levels.setdefault(life.name, []).extend([first, _last(life, window_s)])
    found = []
    for index, life in enumerate(kept):
        last, level = _last(life, window_s), max(levels.get(life.name, []), default=None)
        if index in long:
            change = last / long[index] - 1
            verdict = "flat" if abs(change) <= TOLERANCE else "grew" if change > 0 else "shrank"
        elif level is None:
            verdict = "alone"
        else:
            verdict = "within" if last <= level * (1 + TOLERANCE) else "larger"
        found.append(
            Judged(
                name=life.name,
                pid=life.pid,
                begin_s=round(life.at_s[0], 1),
                length_s=round(life.length_s, 1),
                first_mib=long.get(index),
                last_mib=last,
                verdict=verdict,
                curve=thinned(life),
            )
        )
    return found


def _last(life: Life, window_s: float) -> float:
    found = life.window(max(0.0, life.length_s - window_s), life.length_s)
    assert found is not None, "the last sample is in the last window"
    return round(found, 2)


def thinned(life: Life) -> list[tuple[float, float]]:
    """At most so many points, the last one included."""
    step = max(1, -(-len(life.at_s) // POINTS))
    points = [(round(at_s, 1), round(mib, 1)) for at_s, mib in zip(life.at_s, life.mib, strict=True)]
    return points[::-1][::step][::-1]


def label(command: Sequence[str], parent: str) -> str:
    """`dataflow`, `raas-0`, `trainer-solver`; of their children also whose they are."""
    words = list(command)
    for option, role in (("--index", "raas"), ("--policy", "trainer")):
        if role in words and option in words:
            return f"{role}-{words[words.index(option) + 1]}"
    for role in ("dataflow", "run"):
        if role in words:
            return "supervisor" if role == "run" else role
    module = words[words.index("-m") + 1].rpartition(".")[2] if "-m" in words[:-1] else Path(words[0]).name if words else "?"
    return f"{module} of {parent}" if parent else module


def command_of(pid: int) -> list[str]:
    """Empty for one that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").rstrip("\0").split("\0")
    except OSError:
        return []


def stat_of(pid: int) -> tuple[int, str]:
    """(parent, time of birth). Raises OSError for one that is gone."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return int(fields[1]), fields[19]


def resident_mib(pid: int) -> float:
    """Raises OSError or IndexError for one that is gone."""
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def sockets_of(pid: int) -> set[str]:
    """Inodes of its sockets."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            if target.startswith("socket:["):
                found.add(target[8:-1])
    return found


def listening_sockets() -> dict[str, int]:
    """Inode → port of every TCP socket that listens."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    found[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    return found


def reap() -> None:
    """Orphans that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def shown(code: int, report: Report, chaos: Mapping[str, Any], judged: Sequence[Judged], left: Left) -> dict[str, bool]:
    """What the soak must show."""
    return {
        "exit code 0": code == 0,
        "made = trained + dropped + in flight": report.adds_up,
        "everything that was hit recovered, and the books are exact": not chaos["problems"],
        "every kind of process was killed": {hit["target"] for hit in chaos["hits"]} >= {"raas", "trainer", "dataflow", "sender"},
        "memory of every process is flat (10 %)": not any(life.verdict in ("grew", "shrank", "larger") for life in judged),
        "every name has a life that was long enough": not any(life.verdict == "alone" for life in judged),
        "no process is left": not left.processes,
        "no port is left": not left.ports,
        "no name in /dev/shm is left": not left.shm,
    }


def measure(minutes: float, faults: str, scratch: Path) -> tuple[int, Watcher, Left, Path]:
    """Run, watch, drain; (exit code, what was seen, what is left, the run's directory)."""
    run_dir = scratch / "run"
    adopt_orphans()
    calm_s = max(0.1 * minutes * 60, 30.0)
    lasting = f"{faults},for={max(1.0, minutes * 60 - calm_s):.0f}s"
    argv = [sys.executable, "-m", "astraflow", "run", RECIPE, f"experiment.run_dir={run_dir}", *OVERRIDES, "--chaos", lasting]
    with subprocess.Popen(argv, start_new_session=True) as process:
        watcher = Watcher(process.pid)
        try:
            while process.poll() is None and time.monotonic() - watcher.began < minutes * 60:
                watcher.look()
                time.sleep(SAMPLE_S)
            process.send_signal(signal.SIGINT)
            code = process.wait(END_S)
        finally:
            process.kill()
    return code, watcher, watcher.left([staging_path(str(run_dir), "raas-0")]), run_dir


def main(arguments: Sequence[str] = ()) -> int:
    """Exit status 0 when everything that must be shown is."""
    parser = argparse.ArgumentParser(prog="python -m astraflow.tools.soak_evidence", description="A long run under faults.")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="length of the run; the numbers count from 30 on")
    parser.add_argument("--faults", default=FAULTS, help="what --chaos is given; a short run wants more of them")
    parser.add_argument("--out", type=Path, default=Path("evidence") / "soak.json", help="where the numbers go")
    options = parser.parse_args(arguments)
    scale = min(1.0, options.minutes / MINUTES * 3)
    with tempfile.TemporaryDirectory(prefix="astraflow-soak-") as scratch:
        code, watcher, left, run_dir = measure(options.minutes, options.faults, Path(scratch))
        if not (run_dir / "chaos.json").is_file():
            raise UserError(f"soak: the run ended with {code} and made no chaos.json")
        report = msgspec.json.decode((run_dir / "report.json").read_bytes(), type=Report)
        chaos = msgspec.json.decode((run_dir / "chaos.json").read_bytes())
    judged = judge(list(watcher.lives.values()), WARM_UP_S * scale, WINDOW_S * scale)
    shows = shown(code, report, chaos, judged, left)
    kept = {
        "job": "soak",
        "command": "make evidence ARGS=soak",
        "minutes": options.minutes,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": machine(),
        "shows": shows,
        "memory": judged,
        "left": left,
        "chaos": {**chaos, "wires": [{**wire, "hits": []} for wire in chaos["wires"]]},
        "report": {**msgspec.to_builtins(report), "events": report.events[-50:]},
    }
    options.out.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
    for life in judged:
        first = "" if life.first_mib is None else f"{life.first_mib:.0f} → "
        say(f"{life.verdict:<7} {life.name} (pid {life.pid}, {life.length_s:.0f} s): {first}{life.last_mib:.0f} MiB")
    for condition, holds in shows.items():
        say(f"{'ok  ' if holds else 'FAIL'} soak: {condition}")
    return 0 if all(shows.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
