"""Kills and stops the processes of a run by plan, and watches for the first sign that each is back at work.

`Driller.step` is called by the supervisor about ten times a second with what it knows. A process is hit only while it serves and only
while its supervisor would start it again (`launch.restart`, of a sender `weights.max_restarts`); a hit is over before the next one:

    victim    serves ─ drawn ─> hit ─ first sign ─> serves

    sign      raas       another process of that name is live and holds a lease (stopped: it answered since, and holds one)
              trainer    a version more than the first one that was seen after it
              dataflow   another process answers and hands out work (stopped: it answered since)
              sender     a rollout service serves a version that was published after it
What is drawn are seconds of service between hits, so that a seed gives the same plan however fast the machine is.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from astraflow.config.experiment import Experiment
from astraflow.launch.drill_spec import Drill, Fault
from astraflow.launch.drill_wire import faulty
from astraflow.launch.plan import ProcessSpec, RunBook
from astraflow.launch.rundir import write_json
from astraflow.launch.watch import Observed
from astraflow.lib.proc import Child, RestartBook, RestartPolicy, descendants
from astraflow.protocol.control import DataflowStatus, InstanceInfo, RaaSStatus, TrainerInfo

PROCESSES = "processes.json"
SENDER = b"astraflow.weights.sender"


class Hit(msgspec.Struct, kw_only=True):
    """One kill or stop."""

    at: float
    """Unix time."""
    kind: str
    target: str
    process: str
    """`raas-0`, `sender-solver`."""
    pid: int
    time_s: float = 0.0
    """Of a stop."""
    recovered_s: float | None = None
    """Until the first sign; None = there was none."""
    sign: str = ""
    """What was seen."""
    cut_short: str = ""
    """Why there could be no sign any more."""
    open_s: float = 0.0
    """Without a sign: from the hit to the end of the run."""
    rows_there: int = 0
    """raas: trajectories that it was generating, which run again after a kill."""
    versions_again: int = 0
    """trainer: versions behind its newest one that it went on from."""
    bytes_again: int = 0
    """raas: weights that the new process had to fetch in full."""

    @property
    def told(self) -> str:
        """The sign as a sentence."""
        return self.sign if self.target == "sender" else f"it {self.sign}"


class Drilled(msgspec.Struct, kw_only=True):
    """`RUN_DIR/chaos/processes.json`."""

    text: str
    seed: int
    began: float
    """Unix time."""
    hits: list[Hit]
    spared: dict[str, int]
    """Process → kills that were drawn and not done, because nobody would have started it again."""


@dataclass(frozen=True)
class Moment:
    """What is known now."""

    now: float
    """Monotonic clock."""
    answered_at: float
    """When Dataflow's last answer came."""
    status: DataflowStatus | None
    instances: Mapping[str, RaaSStatus]
    restarts: Mapping[str, int]

    def instance(self, name: str) -> InstanceInfo | None:
        return next((i for i in self.status.instances if i.instance_id == name), None) if self.status else None

    def trainer(self, policy: str) -> TrainerInfo | None:
        return next((t for t in self.status.trainers if t.model_id == policy), None) if self.status else None


@dataclass
class _Plan:
    """Draws of one fault for one process."""

    fault: Fault
    draws: random.Random
    due_s: float = 0.0
    """Seconds of service at which the next hit comes."""

    def __post_init__(self) -> None:
        self.draw()

    def draw(self) -> None:
        self.due_s += self.draws.expovariate(-math.log1p(-self.fault.chance))


@dataclass
class Victim:
    """One process that may be hit."""

    name: str
    kind: str
    plans: list[_Plan]
    served_s: float = 0.0
    hit: Hit | None = None
    hit_at: float = 0.0
    """Monotonic; of a stop its end, once it goes on."""
    stopped: bool = False
    killed: Hit | None = None
    """raas: until it is known what that cost in weights."""
    incarnation: str = ""
    restarts: int = 0
    newest: int = 0
    """Version of a trainer when it was hit."""
    first: tuple[int, int] | None = None
    """(timeline, version) in the first answer after it."""
    deaths: RestartBook | None = None
    """Of a sender."""

    @property
    def owner(self) -> str:
        """The supervisor's child that it is, or that it is a child of."""
        return f"trainer-{self.policy}" if self.kind == "sender" else self.name

    @property
    def policy(self) -> str:
        return self.name.partition("-")[2]

    def serves(self, seen: Moment) -> bool:
        """It did its work when it was last seen."""
        if self.kind == "raas":
            return (found := seen.instance(self.name)) is not None and found.state == "live"
        if self.kind == "dataflow":
            return seen.status is not None and seen.status.started
        trainer = seen.trainer(self.policy)
        return trainer is not None and trainer.state in ("live", "late") and bool(trainer.sender_endpoint)

    def sign(self, seen: Moment) -> str:
        """What shows that it works again; empty = nothing yet."""
        back = seen.restarts.get(self.name, 0) > self.restarts
        if seen.status is None or seen.answered_at <= self.hit_at or self.stopped:
            return ""
        kill = self.hit is not None and self.hit.kind == "kill"
        if self.kind == "dataflow":
            there = seen.status.started and (not kill or seen.status.incarnation != self.incarnation)
            return f"answers{' as a new process' if kill else ''} and hands out work" if there else ""
        if self.kind == "raas":
            return self._works(seen, kill)
        trainer = seen.trainer(self.policy)
        if trainer is None or (kill and self.kind == "trainer" and not back):
            return ""
        if trainer.state == "done":
            return "is done" if self.kind == "trainer" else "its trainer is done"
        return self._published(trainer) if self.kind == "trainer" else self._sent(seen, trainer)

    def _works(self, seen: Moment, kill: bool) -> str:
        found = seen.instance(self.name)
        if found is None or found.state != "live" or found.in_flight == 0:
            return ""
        if kill and found.incarnation == self.incarnation:
            return ""
        if not kill and found.last_seen_s >= seen.answered_at - self.hit_at:
            return ""
        return f"is live and holds {found.in_flight} trajectories"

    def note_fetched(self, seen: Moment) -> None:
        """What the process that came back had to fetch; its own status may tell it only after the first sign."""
        life = seen.instances.get(self.name)
        if self.killed is not None and life is not None and life.incarnation != self.incarnation:
            self.killed.bytes_again = int(life.metrics.get("weights/bytes_full", 0))
            self.killed = None if self.killed.bytes_again else self.killed

    def _published(self, trainer: TrainerInfo) -> str:
        now = (trainer.timeline, trainer.version)
        if self.first is None or (now[0] >= self.first[0] and now[1] < self.first[1]):
            self.first = now  # where it goes on from may be an older version
            if self.hit is not None:
                self.hit.versions_again = max(self.hit.versions_again, self.newest - now[1])
        return f"published version {now[1]}" if now[1] > self.first[1] else ""

    def _sent(self, seen: Moment, trainer: TrainerInfo) -> str:
        if self.first is None:
            self.first = (trainer.timeline, trainer.version)
        for instance in seen.status.instances if seen.status else ():
            held = instance.serving.get(self.policy)
            if held is not None and (held.timeline, held.version) > self.first:
                return f"{instance.instance_id} serves version {held.version}"
        return ""


@dataclass
class Driller:
    """Of one run."""

    drill: Drill
    directory: Path
    """For what is noted."""
    victims: list[Victim]
    hits: list[Hit] = field(default_factory=list)
    spared: dict[str, int] = field(default_factory=dict)
    clock: Callable[[], float] = time.time
    began: float = field(default_factory=time.time)
    _last: float | None = None

    def faulty(self, specs: Sequence[ProcessSpec]) -> list[ProcessSpec]:
        """The processes, with the faults of their wires."""
        return [faulty(spec, self.drill, self.directory, self.began) for spec in specs]

    def step(self, now: float, children: Mapping[str, Child], book: RunBook, observed: Observed) -> None:
        """Close hits that are over, go on with stopped processes, and hit whoever's time has come."""
        restarts = {name: process.restarts for name, process in book.processes.items()}
        seen = Moment(now, now - observed.status_age_s, observed.status, observed.instances, restarts)
        hitting = book.phase == "up" and not observed.error and self.clock() - self.began <= self.drill.for_s
        passed_s, self._last = now - (self._last if self._last is not None else now), now
        for victim in self.victims:
            self._wake(victim, now, book.phase != "up")
            victim.note_fetched(seen)
            if victim.hit is not None:
                self._look(victim, seen, book)
            elif hitting and victim.owner in children and victim.serves(seen):
                victim.served_s += passed_s
                self._draw(victim, seen, children[victim.owner], book)

    def close(self) -> None:
        """The run is over: nobody stays stopped, and what was done is written down."""
        for victim in self.victims:
            self._wake(victim, self._last or 0.0, over=True)
            if victim.hit is not None:
                victim.hit.open_s, victim.hit.cut_short = self.clock() - victim.hit.at, "the run ended"
        drilled = Drilled(text=self.drill.text, seed=self.drill.seed, began=self.began, hits=self.hits, spared=self.spared)
        write_json(self.directory / PROCESSES, drilled)

    def _draw(self, victim: Victim, seen: Moment, child: Child, book: RunBook) -> None:
        for plan in victim.plans:
            if victim.served_s < plan.due_s:
                continue
            plan.draw()
            pid = child.pid if victim.kind != "sender" else sender_of(child.pid)
            left = victim.deaths.left(seen.now) if victim.deaths is not None else book.restarts_left(victim.owner, seen.now)
            if plan.fault.kind == "kill" and left == 0:
                self.spared[victim.name] = self.spared.get(victim.name, 0) + 1
            elif pid:
                self._strike(victim, plan.fault, seen, pid, book)
                return

    def _strike(self, victim: Victim, fault: Fault, seen: Moment, pid: int, book: RunBook) -> None:
        hit = Hit(at=self.clock(), kind=fault.kind, target=fault.target, process=victim.name, pid=pid, time_s=fault.time_s)
        if not _signal(pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP):
            return  # it ended by itself
        victim.hit, victim.hit_at, victim.stopped, victim.first = hit, seen.now, fault.kind == "stop", None
        victim.restarts = seen.restarts.get(victim.name, 0)
        if victim.deaths is not None and fault.kind == "kill":
            victim.deaths.died(seen.now)
        self.hits.append(hit)
        assert seen.status is not None, "nobody is hit before Dataflow has answered"
        if (instance := seen.instance(victim.name)) is not None:
            hit.rows_there, victim.incarnation = instance.in_flight, instance.incarnation
            victim.killed = hit if fault.kind == "kill" else None
        elif victim.kind == "dataflow":
            victim.incarnation = seen.status.incarnation
        elif (trainer := seen.trainer(victim.policy)) is not None and victim.kind == "trainer":
            victim.newest = trainer.version
        book.events.append(f"drill: {victim.name} (pid {pid}) is {'killed' if fault.kind == 'kill' else f'stopped for {fault.time_s:g} s'}")

    def _look(self, victim: Victim, seen: Moment, book: RunBook) -> None:
        assert victim.hit is not None
        sign = victim.sign(seen)
        if sign:
            victim.hit.recovered_s, victim.hit.sign = self.clock() - victim.hit.at, sign
            book.events.append(f"drill: {victim.name} recovered after {victim.hit.recovered_s:.1f} s: {victim.hit.told}")
            victim.hit = None

    def _wake(self, victim: Victim, now: float, over: bool) -> None:
        """The end of a stop."""
        if victim.stopped and victim.hit is not None and (over or now >= victim.hit_at + victim.hit.time_s):
            _signal(victim.hit.pid, signal.SIGCONT)
            victim.stopped, victim.hit_at = False, now


def driller(drill: Drill, specs: Sequence[ProcessSpec], experiment: Experiment, directory: Path) -> Driller:
    """For the processes of a run. Each process has draws of its own, so that one's luck is not another's."""
    weights = experiment.weights
    patience = RestartPolicy(limit=weights.max_restarts, window_s=weights.restart_window_s)
    victims = []
    names: list[tuple[str, str]] = [(spec.name, spec.role) for spec in specs]
    names += [(spec.name.replace("trainer", "sender", 1), "sender") for spec in specs if spec.role == "trainer"]
    for name, kind in names:
        plans = [_Plan(fault, random.Random(f"{drill.seed} {fault.kind} {name}")) for fault in drill.of_processes(kind)]
        if plans:
            victims.append(Victim(name, kind, plans, deaths=RestartBook(patience) if kind == "sender" else None))
    return Driller(drill, directory, victims)


def sender_of(trainer: int) -> int:
    """The sender agent below a trainer; 0 when there is none now."""
    for pid in descendants(trainer):
        with contextlib.suppress(OSError):
            if SENDER in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                return pid
    return 0


def _signal(pid: int, number: int) -> bool:
    """To its group: every process that is hit leads one. False when it has ended."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return False
    return True
