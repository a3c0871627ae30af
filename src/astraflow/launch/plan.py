"""Which processes a run has and what happens when one ends. Pure: no clock, no processes; events in, decisions out.

    state of a process     running ─ exit 0 ──────────────────────> done
                           running ─ other exit ─> pausing ─> running     (restarts left)
                           running ─ exit 2 or 3 (a mistake; stalled, starved), or no restarts left ─> failed: the run ends
    phase of the run       up ─ trainers done ─> leaving ─ Dataflow done, or its deadline passed ─> ending ─ all done ─> over
                           up ─ Dataflow done ─> ending       (the only way when the trainers are started elsewhere)
                           up ─ Ctrl-C ─> draining ─ trainers done ─> leaving
                           up | draining | leaving ─ Dataflow stalled ─> ending, as a failure
                           up | draining | leaving ─ a process failed, Ctrl-C again, or the drain's deadline ─> stopping ─ all done ─> over
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from astraflow.config.experiment import Experiment
from astraflow.config.sections import LaunchConfig
from astraflow.dataflow.stall import WORD
from astraflow.lib.proc import RestartBook, RestartPolicy, describe_exit

Role = Literal["dataflow", "raas", "trainer"]
USER_ERROR, STALLED = 2, 3
"""Exit status of a process that met a mistake of the user, and of a Dataflow in which nothing moves any more (also of a trainer
that was told so, or whose data gives no batch): starting it again would not help."""


@dataclass(frozen=True)
class ProcessSpec:
    """One process to keep up."""

    name: str
    """`dataflow`, `raas-0`, `trainer-default`; also the name of its log."""
    role: Role
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Added to the supervisor's own environment."""


def plan(experiment: Experiment, config_file: str, python: str, cores: int, dataflow_options: Sequence[str] = ()) -> list[ProcessSpec]:
    """The processes of a run on one machine, in the order in which they are started (any order would do)."""

    def spec(name: str, role: Role, threads: int, *arguments: str) -> ProcessSpec:
        argv = (python, "-m", "astraflow", role, "--config", config_file, *arguments)
        return ProcessSpec(name, role, argv, thread_env(threads))

    specs = [spec("dataflow", "dataflow", 1, *dataflow_options)]
    specs += [spec(f"raas-{index}", "raas", 1, "--index", str(index)) for index in range(experiment.launch.raas)]
    for policy, trainer in experiment.trainer.items() if experiment.launch.trainers else ():
        specs.append(spec(f"trainer-{policy}", "trainer", trainer.threads or cores, "--policy", policy))
    return specs


def thread_env(threads: int) -> dict[str, str]:
    """Environment that keeps numeric libraries to this many threads (torch is told by its own room as well)."""
    count = str(threads)
    return {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


@dataclass
class ProcessState:
    """What the book knows of one process."""

    spec: ProcessSpec
    state: Literal["running", "pausing", "done", "failed", "ended"] = "running"
    """`ended` = it ended because the run is stopping."""
    restarts: int = 0
    exit_codes: list[int] = field(default_factory=list)
    called_off: bool = False
    """It died and was about to come back when the run ended in order: nothing of a rollout service was needed any more."""

    @property
    def alive(self) -> bool:
        return self.state in ("running", "pausing")


@dataclass(frozen=True)
class Restart:
    name: str
    at: float
    """Clock time of the restart."""


@dataclass(frozen=True)
class Terminate:
    """Ask these processes to end (SIGTERM); they are killed at `kill_at`."""

    names: tuple[str, ...]
    kill_at: float
    why: str


Decision = Restart | Terminate
Phase = Literal["up", "draining", "leaving", "ending", "stopping", "over"]
AT_ONCE_S = 1.0
"""After a second Ctrl-C: time until what is left is killed."""
LEAVE_S = 5.0
"""After the last drained trainer: time for Dataflow to end by itself, as it does when every trainer said goodbye. One that was
interrupted before it had attached says nothing."""


class RunBook:
    """Phase of the run and states of its processes; every method takes `now` in seconds of one monotonic clock."""

    def __init__(self, specs: Sequence[ProcessSpec], launch: LaunchConfig) -> None:
        config = launch.restart
        policy = RestartPolicy(limit=config.limit, window_s=config.window_s, first_s=config.first_s, max_s=config.max_s)
        self.processes = {spec.name: ProcessState(spec) for spec in specs}
        self._deaths = {spec.name: RestartBook(policy) for spec in specs}
        self._launch = launch
        self.phase: Phase = "up"
        self.failure = ""
        """Why the run failed; empty = it did not."""
        self.drained = False
        """Ctrl-C ended it, in order."""
        self.events: list[str] = []
        self._deadline: float | None = None
        self._interrupted_at_end = False
        self._asked: set[str] = set()
        """Processes that were told to end; for them SIGTERM is an end in order."""

    def exited(self, name: str, code: int, now: float, message: str = "") -> list[Decision]:
        """A process ended with `code` (negative = signal). `message` is its last error line, if it has one."""
        process = self.processes[name]
        process.exit_codes.append(code)
        if self.phase in ("ending", "stopping"):
            process.state = "done" if code == 0 else "ended"
            if self._is_stall(process, code) and message:
                self.failure = message  # it names who is stuck, whoever ended first
            if self.phase == "ending" and code > 0:  # e.g. a starved trainer that outlived Dataflow: its verdict is the run's
                self.failure = self.failure or message or f"{name} {describe_exit(code)}"
            return self._next_phase(now)
        if code == 0:
            process.state = "done"
            return self._next_phase(now)
        ended = f"{name} {describe_exit(code)}" + (f": {message}" if message else "")
        self.events.append(ended)
        if code == STALLED and process.spec.role == "trainer" and message.startswith(WORD):
            process.state = "ended"  # Dataflow told it so and is about to end with the same verdict
            return self._next_phase(now)
        if self._is_stall(process, code):
            return self._stalled(process, message or ended, now)
        if code in (USER_ERROR, STALLED):
            return self._fail(name, message or ended, now)
        if self.phase in ("draining", "leaving") and process.spec.role != "dataflow":
            process.state = "ended"  # a run that is to end does not need it back; Dataflow is needed by the trainers that still save
            return self._next_phase(now)
        restart_at = self._deaths[name].died(now)
        if restart_at is None:
            return self._fail(name, f"{ended}; it was restarted {self._launch.restart.limit} times already", now)
        process.state = "pausing"
        return [Restart(name, restart_at)]

    def restarts_left(self, name: str, now: float) -> int:
        """How often a process could die now and come back."""
        return self._deaths[name].left(now)

    def restarted(self, name: str) -> None:
        """The restart that was decided on has been done."""
        process = self.processes[name]
        process.state, process.restarts = "running", process.restarts + 1
        self.events.append(f"{name} was restarted (restart {process.restarts})")

    def interrupted(self, now: float) -> list[Decision]:
        """Ctrl-C or SIGTERM. The first one drains, the second one stops everything."""
        if self.phase == "up":
            self.phase, self.drained = "draining", True
            self._deadline = now + self._launch.drain_s
            self.events.append("interrupted: trainers finish their step, save and leave")
            waiting = [name for name, process in self.processes.items() if process.state == "pausing" and process.spec.role != "dataflow"]
            for name in waiting:
                self._call_off(self.processes[name])
            return [self._end(self._running("trainer"), now + self._launch.drain_s, "drain"), *self._next_phase(now)]
        if self.phase in ("leaving", "ending") and not self._interrupted_at_end:
            self._interrupted_at_end = True  # it ends anyhow; a second one is meant
        elif self.phase in ("draining", "leaving", "ending"):
            self.drained = False
            return self._stop("interrupted twice", now, min(self._launch.term_s, AT_ONCE_S))
        return []

    def tick(self, now: float) -> list[Decision]:
        """Deadlines of the phases."""
        if self._deadline is None or now < self._deadline:
            return []
        self._deadline = None
        if self.phase == "draining":
            self.drained = False
            return self._stop(f"drain: not done within launch.drain_s = {self._launch.drain_s:g} s", now)
        self._no_more_restarts()
        late = self._running()
        if self.phase == "leaving":
            self.phase = "ending"
            if not late:
                return self._next_phase(now)
            return [self._end(late, now + self._launch.term_s, "the trainers are gone")]
        if self.phase == "ending" and late:
            self.events.append(f"{', '.join(late)} did not end without being asked")
            return [self._end(late, now + self._launch.term_s, "end of the run")]
        return []

    def exit_code(self) -> int:
        """0 only when it trained to the end or was drained in order, and every process ended with 0; 3 when it stalled."""
        if any(self._is_stall(process, code) for process in self.processes.values() for code in process.exit_codes[-1:]):
            return STALLED
        if self.failure:
            return 1 if not self.user_error else USER_ERROR
        last = {name: process.exit_codes[-1] if process.exit_codes else 0 for name, process in self.processes.items()}
        orderly = all(
            code == 0 or self.processes[name].called_off or (code == -signal.SIGTERM and self.drained and name in self._asked)
            for name, code in last.items()
        )
        return 0 if self.phase == "over" and orderly else 1

    @property
    def user_error(self) -> bool:
        """The run failed because of a mistake of the user."""
        return any(process.state == "failed" and process.exit_codes[-1] == USER_ERROR for process in self.processes.values())

    def _is_stall(self, process: ProcessState, code: int) -> bool:
        """The verdict on the whole run is Dataflow's; a starved trainer says 3 about itself."""
        return process.spec.role == "dataflow" and code == STALLED

    def _running(self, *roles: Role) -> tuple[str, ...]:
        return tuple(name for name, p in self.processes.items() if p.state == "running" and (not roles or p.spec.role in roles))

    def _next_phase(self, now: float) -> list[Decision]:
        trainers = any(p.alive for p in self.processes.values() if p.spec.role == "trainer")
        if self.phase in ("up", "draining", "leaving") and not self._dataflow_alive():
            # in order when the trainers are done; trainers without a Dataflow could only wait for their own deadlines
            # after an orderly end an instance that joined too late to be told may be there still; it is asked soon
            orderly = not trainers and all(p.state == "done" for p in self.processes.values() if p.spec.role == "dataflow")
            self.phase, self._deadline = "ending", now + (min(LEAVE_S, self._launch.end_s) if orderly else self._launch.end_s)
            self._no_more_restarts()
        elif not trainers and (self.phase == "draining" or (self.phase == "up" and self._launch.trainers)):
            self.phase, self._deadline = "leaving", now + (LEAVE_S if self.drained else self._launch.end_s)
        elif self.phase == "ending" and not trainers and self._deadline is not None:
            self._deadline = min(self._deadline, now + LEAVE_S)  # Dataflow said goodbye before the last trainer ended: the same as above
        if self.phase in ("ending", "stopping") and not any(p.alive for p in self.processes.values()):
            self.phase, self._deadline = "over", None
        return []

    def _no_more_restarts(self) -> None:
        for process in self.processes.values():
            if process.state == "pausing":
                self._call_off(process)

    def _call_off(self, process: ProcessState) -> None:
        """Its restart. A trainer that does not come back has not saved, and Dataflow not said goodbye: those are no orderly ends."""
        process.state, process.called_off = "ended", process.spec.role == "raas"

    def _end(self, names: tuple[str, ...], kill_at: float, why: str) -> Terminate:
        self._asked.update(names)
        return Terminate(names, kill_at, why)

    def _dataflow_alive(self) -> bool:
        return any(p.alive for p in self.processes.values() if p.spec.role == "dataflow")

    def _fail(self, name: str, why: str, now: float) -> list[Decision]:
        self.processes[name].state = "failed"
        self.drained = False
        return self._stop(why, now)

    def _stalled(self, process: ProcessState, why: str, now: float) -> list[Decision]:
        """Dataflow has told the others; they get the time to end in order that they have at the end of any run."""
        process.state, self.drained, self.failure = "failed", False, why
        self.phase, self._deadline = "ending", now + self._launch.end_s
        self._no_more_restarts()
        return self._next_phase(now)

    def _stop(self, why: str, now: float, term_s: float | None = None) -> list[Decision]:
        self.failure = self.failure or why
        self.phase, self._deadline = "stopping", None
        self._no_more_restarts()
        running = self._running()
        self._next_phase(now)
        patience_s = self._launch.term_s if term_s is None else term_s
        return [self._end(running, now + patience_s, why)] if running else []
