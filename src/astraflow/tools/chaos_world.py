"""The world of one schedule: it starts processes, kills and stops them, carries their messages, and watches the invariants."""

from __future__ import annotations

import asyncio
import random
import signal
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from astraflow.dataflow.ledger import Ledger, LedgerThread
from astraflow.dataflow.service import AstraFlowService
from astraflow.dataflow.surroundings import Surroundings
from astraflow.lib.wire import Handler, Identity
from astraflow.protocol.control import DataflowStatus
from astraflow.protocol.errors import AstraFlowError, Replaced
from astraflow.protocol.message import Empty
from astraflow.protocol.rollout import Lease
from astraflow.tools.chaos_checks import Checks, at_the_end
from astraflow.tools.chaos_loop import Deadlock, Inline, Process, VirtualLoop
from astraflow.tools.chaos_network import WORLD, Fate, Network, SimClient, SimServer
from astraflow.tools.chaos_raas import SimRaaS
from astraflow.tools.chaos_schedule import MESSAGE_FAULTS, RUN_ID, Blow, Schedule
from astraflow.tools.chaos_trainer import SimTrainer, TrainerBook

DATAFLOW_URL = "http://dataflow:1"
DEADLINE_S = 1200.0
"""Simulated. Every fault is over long before, so a run that is not at its end by then is stuck."""
END_S = 30.0
"""Dataflow is asked to end when the trainers are gone for so long (a supervisor does that)."""


class Violation(Exception):
    """An invariant is broken."""


class SimLedger(Ledger):
    """The ledger of a process that can die in the middle of a transaction."""

    def die_after(self, steps: int) -> None:
        """Interrupt SQLite after so many of its instructions: what is not committed then never happened."""
        left = [steps]

        def tick() -> int:
            left[0] -= 1
            return int(left[0] == 0)

        self._db.set_progress_handler(tick, 1)

    def gone(self) -> None:
        """The process is dead: its files are closed as they are."""
        self.close()


@dataclass
class Instance:
    """A rollout service over its lives."""

    instance_id: str
    slots: int
    lives: int = 0
    moves: int = 0
    process: Process | None = None
    raas: SimRaaS | None = None

    @property
    def url(self) -> str:
        return f"http://{self.instance_id}:{self.moves + 1}"


@dataclass
class World:
    """Everything of one run."""

    schedule: Schedule
    directory: Path
    trace: list[tuple[float, str]] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)
    """Faults that really came, by kind."""
    violation: str = ""
    events: int = 0

    def __post_init__(self) -> None:
        seed = self.schedule.seed
        self.loop = VirtualLoop()
        self.network = Network(self.loop, self)
        self.checks = Checks(self.schedule)
        self.books = {policy: TrainerBook(policy) for policy in self.schedule.policies}
        self.instances = [Instance(f"r{number}", slots) for number, slots in enumerate(self.schedule.slots)]
        self.service: AstraFlowService | None = None
        self._messages, self._times = random.Random(f"messages {seed}"), random.Random(f"times {seed}")
        self._rollouts, self._threads = random.Random(f"rollouts {seed}"), random.Random(f"threads {seed}")
        self._processes: list[Process] = []
        self._pending = list(self.schedule.blows)
        self._dataflow: Process | None = None
        self._ledger: SimLedger | None = None
        self._trainers: dict[str, Process] = {}
        self._lives = 0
        self._cuts: set[str] = set()
        self._message_faults = 0
        self._kill_write: Blow | None = None
        self._over = asyncio.Event()
        self.loop.thread_delay, self.loop.thread_call = self._thread_delay, self._thread_call

    # --- the run --------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until every trainer is done and Dataflow ended. What is broken is in `violation`."""
        try:
            self.loop.run_until_complete(self._main())
        except Deadlock as error:
            self.broken(str(error))
        if not self.violation and self.loop.complaints:
            self.broken(f"an error that nobody took: {self.loop.complaints[0]}")
        if self._ledger is not None and self._dataflow is not None and self._dataflow.alive:
            self._ledger.gone()
        self.loop.dispose(self._processes)
        if not self.violation:
            acknowledged = self.checks.acknowledged
            problem = next(at_the_end(self.directory / "ledger", 1 << 20, self.books, acknowledged), "")
            if problem:
                self.broken(problem)
        self.happened["rollback"] += sum(book.rolled_back for book in self.books.values())
        self.happened["end_of_data"] += any(book.data_ended for book in self.books.values())

    async def _main(self) -> None:
        self._start_dataflow()
        for instance in self.instances:
            self._start_instance(instance)
        for policy in self.schedule.policies:
            self._start_trainer(policy)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self._over.wait()
        except TimeoutError:
            self.broken(f"the run does not end; {self._stuck()}")

    def broken(self, what: str) -> None:
        """The first one counts."""
        if not self.violation:
            self.violation = what
            self.say(f"BROKEN: {what}")
        self._over.set()

    def _complain(self, what: str) -> NoReturn:
        self.broken(what)
        raise Violation(what)

    def say(self, text: str) -> None:
        self.trace.append((self.loop.time(), text))

    def _stuck(self) -> str:
        """Who waits for whom, by Dataflow's own word."""
        endpoint = self.network.endpoints.get(DATAFLOW_URL)
        trainers = ", ".join(f"{m} at {b.now.version if b.now else 'nothing'}" for m, b in self.books.items() if not b.done)
        if endpoint is None:
            return f"Dataflow is down; trainers: {trainers}"
        coroutine: Any = endpoint.handlers["status"](Empty())
        try:
            coroutine.send(None)
        except StopIteration as answer:
            status: DataflowStatus = answer.value
            waits = "; ".join(f"{w.who} waits for {w.waits_for} since {w.since_s:.0f} s: {w.why}" for w in status.waits)
            return f"trainers: {trainers}; {waits}; events: {status.events[-6:]}"
        return trainers

    def process(self, name: str) -> Process:
        process = Process(name, self.loop)
        self._processes.append(process)
        return process

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.loop.call_at(self.loop.time() + delay_s, self._act, action, context=WORLD)

    def _act(self, action: Callable[[], None]) -> None:
        if not self._over.is_set():
            action()

    def identity(self, name: str) -> Identity:
        return Identity(RUN_ID, f"{self._times.getrandbits(48):012x}{name}")

    def client(self, url: str, identity: Identity) -> SimClient:
        return SimClient(self.network, self, self.loop, url, identity)

    # --- dataflow -------------------------------------------------------------------------------------------------------

    def _start_dataflow(self) -> None:
        self._lives += 1
        self._dataflow = process = self.process("dataflow")
        identity = self.identity("d")
        self.checks.new_life()
        self.service = None

        def ledger(directory: Path, segment_bytes: int) -> Ledger:
            self._ledger = SimLedger(directory, segment_bytes)
            return self._ledger

        def listen(name: str, api: type, handlers: Mapping[str, Handler], identity: Identity, **options: object) -> SimServer:
            return SimServer(self.network, DATAFLOW_URL, handlers, identity)

        outside = Surroundings(
            clock=self.loop.time, identity=lambda run_id, token: identity, connect=self.client, listen=listen, ledger=ledger,
            thread=lambda: LedgerThread(Inline()),
        )  # fmt: skip

        async def life() -> int:
            self.service = AstraFlowService(
                self.schedule.process(self.directory), self.schedule.train_tasks(), self.schedule.valid_tasks(), outside
            )
            return await self.service.run()

        task = process.spawn(life(), "dataflow")
        task.add_done_callback(self._dataflow_ended, context=WORLD)

    def _dataflow_ended(self, task: asyncio.Task[int]) -> None:
        process, service = self._dataflow, self.service
        if process is None or not process.alive or self._over.is_set():
            return
        self.network.died(process)
        process.die()
        if task.cancelled() or task.exception() is not None:
            self.broken(f"Dataflow fails: {'cancelled' if task.cancelled() else repr(task.exception())}")
        elif task.result() != 0:
            events = list(service.shelf.events)[-3:] if service is not None else []
            self.broken(f"Dataflow ends with {task.result()}: {events}")
        elif all(book.leaving for book in self.books.values()):
            self.say("the run ends")
            self._over.set()
        elif process.signals.get(-1):
            self.later(0.5, self._start_dataflow)
        else:
            self.broken(f"Dataflow ends, and trainers are not done: {list(service.shelf.events)[-3:] if service is not None else []}")

    def _kill_dataflow(self, pause_s: float) -> None:
        assert self._dataflow is not None
        self.network.died(self._dataflow)
        self._dataflow.die()
        if self._ledger is not None:
            self._ledger.gone()
        self.later(pause_s, self._start_dataflow)

    def _end_dataflow(self) -> None:
        """The trainers are gone for a while: a supervisor asks it to end."""
        if self._dataflow is not None and self._dataflow.alive and signal.SIGTERM in self._dataflow.signals:
            self._dataflow.signals[signal.SIGTERM]()
        if not self._over.is_set():
            self.later(END_S, self._end_dataflow)

    # --- the others -----------------------------------------------------------------------------------------------------

    def _start_instance(self, instance: Instance) -> None:
        instance.lives += 1
        process = instance.process = self.process(instance.instance_id)
        identity = self.identity(instance.instance_id)

        async def life() -> None:
            raas = instance.raas = SimRaaS(
                instance.instance_id, instance.url, identity, self.schedule.policies, instance.slots, self,
                lambda: self.client(DATAFLOW_URL, identity), process.spawn,
            )  # fmt: skip
            await SimServer(self.network, instance.url, raas.handlers(), identity).start()
            process.spawn(raas.register_loop(), "register")
            await raas.ended.wait()
            await asyncio.sleep(0.01)  # the reply of /shutdown

        task = process.spawn(life(), instance.instance_id)
        task.add_done_callback(lambda _: self._instance_ended(instance, process), context=WORLD)

    def _instance_ended(self, instance: Instance, process: Process) -> None:
        if process.alive:
            self.network.died(process)
            process.die()
            if instance.process is process:
                instance.process = None

    def _start_trainer(self, policy: str) -> None:
        book = self.books[policy]
        book.lives += 1
        process = self._trainers[policy] = self.process(f"trainer {policy}")
        identity = self.identity(policy)
        trainer = SimTrainer(book, self.schedule, identity, self.client(DATAFLOW_URL, identity), self.seconds, self._complain)
        task = process.spawn(trainer.run(), f"trainer {policy}")
        task.add_done_callback(lambda ended: self._trainer_ended(ended, policy, process), context=WORLD)

    def _trainer_ended(self, task: asyncio.Task[None], policy: str, process: Process) -> None:
        if process is not self._trainers[policy]:
            self.happened["replaced"] += not task.cancelled() and isinstance(task.exception(), Replaced)
        elif not task.cancelled() and task.exception() is not None:
            self.broken(f"trainer {policy} fails: {task.exception()!r}")
        elif not task.cancelled() and all(book.done for book in self.books.values()):
            self.later(END_S, self._end_dataflow)

    # --- faults of processes --------------------------------------------------------------------------------------------

    def _strike(self, blow: Blow) -> None:
        kind = blow.kind
        if kind.startswith("raas"):
            struck = self._strike_raas(blow)
        elif kind.startswith("trainer"):
            struck = self._strike_trainer(blow)
        else:
            struck = self._strike_dataflow(blow)
        if struck:
            self.happened[kind] += 1
            self.say(f"{kind} {struck} for {blow.pause_s} s")

    def _strike_raas(self, blow: Blow) -> str:
        if blow.kind == "raas_join":
            new = Instance(f"r{len(self.instances)}", 4)
            self.instances.append(new)
            self._start_instance(new)
            return new.instance_id
        alive = [i for i in self.instances if i.process is not None and i.process.alive and i.raas is not None and not i.raas.draining]
        if not alive:
            return ""
        instance = alive[blow.target % len(alive)]
        process, raas = instance.process, instance.raas
        assert process is not None
        assert raas is not None
        if blow.kind == "raas_crash":
            self.network.died(process)
            process.die()
            instance.moves += blow.target % 2
            self.later(blow.pause_s, lambda: self._start_instance(instance))
        elif blow.kind == "raas_hang":
            self._pause(process, blow.pause_s)
        elif blow.kind == "raas_cut":
            self._cuts.add(instance.instance_id)
            self.later(blow.pause_s, lambda: self._cuts.discard(instance.instance_id))
        elif blow.kind == "raas_drain":
            process.spawn(raas.drain(10.0), "drain")
            new = Instance(f"r{len(self.instances)}", instance.slots)
            self.instances.append(new)
            self.later(blow.pause_s, lambda: self._start_instance(new))
        return instance.instance_id

    def _pause(self, process: Process, pause_s: float) -> None:
        process.paused = True
        self.later(pause_s, lambda: self._go_on(process))

    def _back_from_the_dead(self, process: Process, book: TrainerBook, pause_s: float) -> None:
        """It goes on when its successor has attached; before that it would simply be the trainer."""
        process.paused, life = True, book.lives

        def look() -> None:
            if book.attached > life:
                process.go_on()
            else:
                self.later(pause_s, look)

        self.later(pause_s, look)

    def _go_on(self, process: Process) -> None:
        if process is self._dataflow:
            self.checks.quiet_until = self.loop.time() + 4.0
        process.go_on()

    def _strike_trainer(self, blow: Blow) -> str:
        alive = [policy for policy, process in self._trainers.items() if process.alive and not self.books[policy].leaving]
        if not alive:
            return ""
        policy = alive[blow.target % len(alive)]
        if blow.kind == "trainer_hang":
            self._pause(self._trainers[policy], blow.pause_s)
        elif blow.kind == "trainer_zombie":
            if self.books[policy].attached < self.books[policy].lives:
                return ""  # nothing to replace yet
            self._back_from_the_dead(self._trainers[policy], self.books[policy], blow.pause_s)
            self._start_trainer(policy)
        else:
            self._trainers[policy].die()
            self.books[policy].published = {}
            self.later(blow.pause_s, lambda: self._start_trainer(policy))
        return policy

    def _strike_dataflow(self, blow: Blow) -> str:
        process = self._dataflow
        if process is None or not process.alive or self.service is None:
            return ""
        if blow.kind == "dataflow_kill":
            self._kill_dataflow(blow.pause_s)
        elif blow.kind == "dataflow_kill_in_write":
            self._kill_write = blow
        elif blow.kind == "dataflow_hang":
            self._pause(process, blow.pause_s)
            self.checks.quiet_until = self.loop.time() + blow.pause_s + 4.0
        elif signal.SIGTERM in process.signals:
            process.signals[-1] = lambda: None  # marks it as asked to end
            process.signals[signal.SIGTERM]()
        else:
            return ""
        return "dataflow"

    # --- faults of messages and threads, and the watch --------------------------------------------------------------------

    def fate(self, route: str) -> Fate:
        """Of one call."""
        rng, schedule = self._messages, self.schedule
        there, back = 0.0005 + 0.004 * rng.random(), 0.0005 + 0.004 * rng.random()
        if self._message_faults >= schedule.message_faults or rng.random() >= schedule.message_rate:
            return Fate(there=there, back=back)
        self._message_faults += 1
        kind = rng.choice(MESSAGE_FAULTS)
        self.happened[kind] += 1
        self.say(f"{kind}: {route}")
        delay = rng.choice((0.02, 0.3, 2.5))
        if kind == "late":
            return Fate(kind, there + delay, back) if rng.random() < 0.5 else Fate(kind, there, back + delay)
        return Fate(kind, there, back, silent=rng.random() < 0.5, again=delay)

    def cut(self, url: str, caller: str) -> bool:
        return bool(self._cuts) and (caller in self._cuts or url.split("//")[1].split(":")[0] in self._cuts)

    def delivered(self, text: str) -> None:
        """An event: look at everything, then let planned faults come."""
        self.events += 1
        self.say(text)
        self.watch()
        while self._pending and self._pending[0].at_event <= self.events:
            self._strike(self._pending.pop(0))

    def watch(self) -> None:
        service, process = self.service, self._dataflow
        if service is None or process is None or not process.alive or self._over.is_set():
            return
        problem = self.checks.after_event(service, self.loop.time())
        if problem:
            self.broken(problem)

    def _thread_delay(self) -> float:
        draw = self._threads.random()
        return 0.0005 if draw < 0.8 else 0.03 if draw < 0.97 else 0.4

    def _thread_call(self, owner: Process | None, call: Callable[[], Any]) -> Any:
        blow, self._kill_write = self._kill_write, None
        if blow is None or owner is not self._dataflow:
            result = call()
            self.delivered(f"{owner.name if owner else 'nobody'} is done in a thread")
            return result
        moment = self._threads.choice(("before", "inside", "after"))
        self.say(f"dataflow dies {moment} a call in a thread")
        if moment == "inside" and self._ledger is not None:
            self._ledger.die_after(int(2 ** self._threads.uniform(0, 9)))
        if moment != "before":
            try:
                call()
            except (sqlite3.Error, AstraFlowError):
                self.say("inside its transaction")
        self._kill_dataflow(blow.pause_s)
        return None

    # --- what instances ask ---------------------------------------------------------------------------------------------

    def seconds(self, what: str) -> float:
        shortest, longest = {"episode": (0.05, 0.8), "pull": (0.02, 0.5), "step": (0.05, 0.5)}[what]
        slow = 4.0 if self._times.random() < 0.05 else 1.0
        return slow * self._times.uniform(shortest, longest)

    def mishap(self, what: str) -> bool:
        happened = self._rollouts.random() < self.schedule.rollout_rate * (0.3 if what == "group" else 1.0)
        self.happened[f"{what}_fails"] += happened
        return happened

    def number(self, what: str, below: int) -> int:
        return self._rollouts.randrange(below)

    def published(self, sender: str, version: int) -> str | None:
        book = next((book for book in self.books.values() if book.sender == sender), None)
        return book.published.get(version) if book is not None else None

    def accepted(self, instance: SimRaaS, lease: Lease) -> None:
        self.serves(instance)
        if not instance.was_current:
            self.broken(f"{instance.instance_id} got lease {lease.lease_id} before it served the newest weights once")

    def acknowledged(self, lease_id: str, attempt: int, lane: str) -> None:
        row = self.service.shelf.leases.open.get(lease_id) if self.service is not None else None
        superseded = row is not None and row.attempt > attempt  # of no use to anybody, whether or not that is durable yet
        if not lane and not superseded:
            self.checks.acknowledged[lease_id] = max(attempt, self.checks.acknowledged.get(lease_id, 0))

    def serves(self, instance: SimRaaS) -> None:
        service = self.service
        if service is not None and not instance.was_current:
            current = service.shelf.barrier.is_current
            instance.was_current = all(current(policy, instance.serving.get(policy)) for policy in self.schedule.policies)
