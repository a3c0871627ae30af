"""A whole run on this machine: starts the planned processes, keeps them up, ends them, and tells how they ended.

One loop in the main thread does what `plan.RunBook` decides; `watch.Watch` looks at the services from a thread of its own.
Children die with this process (the kernel sees to it), each is ended by its own id, and nothing is left running on return.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

import msgspec

from astraflow.launch.plan import ProcessSpec, Restart, RunBook, Terminate
from astraflow.launch.rundir import write_json
from astraflow.launch.watch import Observed, Watch
from astraflow.lib.log import ERROR_MARK
from astraflow.lib.proc import Child
from astraflow.protocol.errors import Unavailable
from astraflow.raas.staging import sweep

LOOP_S = 0.1
"""How soon the end of a process is noticed."""
TAIL_BYTES = 16_384
LOGGED_ERROR = re.compile(r"^\S+ \S+ (?:ERROR|CRITICAL) +\S+ [\w.]+: (.*)$")
"""An error in a process's log (the format of lib/log.py)."""

Show = Callable[[RunBook, Observed, float], None]
"""Called about ten times a second with the book, the last observation and the run's age in seconds."""


class Drill(Protocol):
    """What hurts a run on purpose (launch/drill.py)."""

    def step(self, now: float, children: Mapping[str, Child], book: RunBook, observed: Observed) -> None:
        """About ten times a second."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


class Outcome(msgspec.Struct, kw_only=True):
    """How a run ended; `<run_dir>/outcome.json`."""

    exit_code: int
    failure: str
    """Empty = it did not fail."""
    drained: bool
    wall_s: float
    processes: dict[str, dict[str, Any]]
    """Name → state, restarts, exit codes of every life, last one last."""
    events: list[str]
    """What the supervisor saw, oldest first."""


class Interrupts:
    """SIGINT, SIGTERM and SIGHUP of the supervisor while the block runs: counted until `wait_for_report`, after which the first one is
    answered by a line and the next one interrupts."""

    def __init__(self) -> None:
        self.count = 0
        """Those that nobody has acted upon yet."""
        self._before: dict[int, Any] = {}
        self._say: Callable[[], None] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait_for_report(self, say: Callable[[], None]) -> None:
        """The processes have ended; `say` tells that only the report is still to come."""
        self._say = say

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._say is None:
            self.count += 1
            return
        signal.signal(number, signal.default_int_handler)
        self._say()


class LocalRun:
    """The supervisor."""

    def __init__(
        self,
        specs: list[ProcessSpec],
        book: RunBook,
        watch: Watch,
        run_dir: Path,
        show: Show,
        interrupts: Interrupts | None = None,
        drill: Drill | None = None,
    ) -> None:
        """`interrupts`: those of a caller that has more to do than this run; its own ones otherwise."""
        self._specs = {spec.name: spec for spec in specs}
        self._book, self._watch, self._run_dir, self._show, self._drill = book, watch, run_dir, show, drill
        self._children: dict[str, Child] = {}
        self._log_start: dict[str, int] = {}
        self._restart_at: dict[str, float] = {}
        self._kill_at: dict[str, float] = {}
        self._interrupts = interrupts or Interrupts()
        self._own = interrupts is None
        self._began = time.monotonic()

    def run(self) -> Outcome:
        """Until every process has ended. SIGINT and SIGTERM drain; a second one stops. Never leaves a child behind."""
        signals: AbstractContextManager[object] = self._interrupts if self._own else nullcontext()
        with signals:
            self._watch.start()
            try:
                for name in self._specs:
                    self._start(name)
                while self._book.phase != "over":
                    self._step()
                    time.sleep(LOOP_S)
            finally:
                self._end_all()
                for spec in self._specs.values():
                    if spec.role == "raas":
                        sweep(self._run_dir, spec.name)
                observed = self._watch.close()
                if self._drill is not None:
                    self._drill.close()
        outcome = self._outcome()
        write_json(self._run_dir / "outcome.json", outcome)
        self._show(self._book, observed, outcome.wall_s)
        return outcome

    def _step(self) -> None:
        now = time.monotonic()
        for name, child in list(self._children.items()):
            code = child.poll()
            if code is not None:
                del self._children[name]
                self._kill_at.pop(name, None)
                message = error_line(tail(self.log_path(name), self._log_start[name])) if code > 0 else ""
                self._carry_out(self._book.exited(name, code, now, message))
        while self._interrupts.count:
            self._interrupts.count -= 1
            self._carry_out(self._book.interrupted(now))
        self._carry_out(self._book.tick(now))
        for name, at in list(self._restart_at.items()):
            if not self._book.processes[name].alive:
                del self._restart_at[name]
            elif now >= at:
                del self._restart_at[name]
                self._book.restarted(name)
                self._start(name)
        for name, at in list(self._kill_at.items()):
            if now >= at and name in self._children:
                del self._kill_at[name]
                self._book.events.append(f"{name} did not end after a terminate signal and was killed")
                self._children[name].signal(signal.SIGKILL)
        observed = self._watch.observed()
        if self._drill is not None:
            self._drill.step(now, self._children, self._book, observed)
        self._show(self._book, observed, now - self._began)

    def _carry_out(self, decisions: list[Restart | Terminate]) -> None:
        for decision in decisions:
            if isinstance(decision, Restart):
                self._restart_at[decision.name] = decision.at
                continue
            for name in decision.names:
                self._kill_at[name] = min(decision.kill_at, self._kill_at.get(name, decision.kill_at))
                if name in self._children:
                    self._children[name].signal(signal.SIGTERM)

    def _start(self, name: str) -> None:
        spec, log = self._specs[name], self.log_path(name)
        self._log_start[name] = log.stat().st_size if log.exists() else 0
        try:
            self._children[name] = Child(spec.argv, env={**os.environ, **spec.env}, log_path=log, name=name)
        except Unavailable as error:
            self._carry_out(self._book.exited(name, 127, time.monotonic(), str(error)))

    def log_path(self, name: str) -> Path:
        """Standard output and error of a process, over all its lives."""
        return self._run_dir / "logs" / f"{name}.log"

    def _end_all(self) -> None:
        """Only needed when the loop above was left by an exception."""
        for child in self._children.values():
            child.signal(signal.SIGTERM)
        for name, child in list(self._children.items()):
            self._book.processes[name].exit_codes.append(child.terminate(5.0))
        self._children.clear()

    def _outcome(self) -> Outcome:
        return Outcome(
            exit_code=self._book.exit_code(),
            failure=self._book.failure,
            drained=self._book.drained,
            wall_s=time.monotonic() - self._began,
            processes={
                name: {"state": process.state, "restarts": process.restarts, "exit_codes": process.exit_codes}
                for name, process in self._book.processes.items()
            },
            events=self._book.events,
        )


def error_line(lines: list[str]) -> str:
    """The last line that a child wrote as its error, or its last line of all; empty when it wrote none."""
    for line in reversed(lines):
        if line.startswith(ERROR_MARK):
            return line.removeprefix(ERROR_MARK)
        if logged := LOGGED_ERROR.match(line):
            return logged[1]
    return lines[-1] if lines else ""


def tail(path: Path, start: int = 0, limit: int = 200) -> list[str]:
    """The last lines of a log after byte `start` (where this life of the process began), without empty ones."""
    try:
        with path.open("rb") as file:
            file.seek(max(start, path.stat().st_size - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-limit:]
