"""One evaluation from its turn to its results. Every wait has a deadline and is shown in /status.

    pinned       one instance at the wanted weights holds newer ones back; training leases go on
    synchronous  submission is held ─ every live model reaches the version ─ engines are reset ─ every instance is brought to exactly
                 that set of weights ─ all of them evaluate in parallel ─ submission goes on, whatever happened

In both, an instance that fails gives its tasks back, and what is not back in the end is missing: counted, wrong, and said so.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from astraflow.dataflow.eval_book import TRIES, Candidate, EvalBook, Wanted, candidates, words
from astraflow.dataflow.eval_lane import EvalLane, reset
from astraflow.dataflow.fleet import RaaSFleet
from astraflow.dataflow.scores import eval_metrics
from astraflow.dataflow.shelf import Shelf
from astraflow.datasets.api import Task
from astraflow.protocol.control import EvalResult
from astraflow.protocol.errors import AstraFlowError
from astraflow.protocol.rollout import Lease, Serving

LOOK_S = 0.25


class EvalJob(msgspec.Struct, kw_only=True):
    """Persisted until its results are."""

    eval_id: str
    wanted: Wanted
    why: str
    step: int = -1
    """Version that every model should be at; −1 = the present ones."""


@dataclass(frozen=True)
class EvalSet:
    """One valid data set."""

    name: str
    tasks: Sequence[Task]
    n_samples: int
    workflow_id: str
    max_prompt_tokens: int | None


class Pins:
    """Which instances hold newer weights back for an evaluation, and which weights can still be had."""

    def __init__(self, shelf: Shelf, fleet: RaaSFleet) -> None:
        self._shelf, self._fleet = shelf, fleet

    def set(self, pins: dict[str, Wanted]) -> None:
        """Instance → weights that it shall serve; the others go on to newer ones."""
        if pins != self._fleet.pins:
            self._fleet.pins = pins
            self._fleet.announce()

    def all(self, wanted: Wanted) -> None:
        """Every instance, those too that join later (this is called again then)."""
        self.set(dict.fromkeys(self._shelf.pool.instances, wanted))

    def best(self, wanted: Wanted) -> None:
        """The one instance that will be used."""
        found = self.candidates(wanted)
        if found:
            self.set({found[0].instance_id: wanted})

    def candidates(self, wanted: Wanted) -> list[Candidate]:
        """Usable instances that serve these weights or can still be brought to them, best first."""
        return candidates(self._shelf.pool.instances.values(), wanted, self._fleet.pins, self._still_sent, self._shelf.clock())

    def _still_sent(self, model_id: str, want: Serving) -> bool:
        """The sender keeps the newest version and, unless it was started since, the one before it."""
        state = self._shelf.barrier.models[model_id]
        return want.timeline == state.timeline and want.version >= max(state.version - 1, state.sent_from)

    @property
    def usable(self) -> list[str]:
        """Instances that answer and stay."""
        return [key for key, instance in self._shelf.pool.instances.items() if instance.state in ("live", "catching_up")]

    def reached(self, step: int) -> Wanted:
        """Published weights of this step, of the models that have got there; of those that will not (done, dead) the last ones."""
        found: Wanted = {}
        live = self._shelf.barrier.live()
        for model_id in self._shelf.process.policies:
            state = self._shelf.barrier.models[model_id]
            if step in state.digests:
                found[model_id] = Serving(timeline=state.timeline, version=step, digest=state.digests[step])
            elif step < 0 or model_id not in live:
                found[model_id] = self._shelf.barrier.target(model_id)
        return found

    def wanted(self, step: int) -> Wanted:
        """The same, with the newest weights of the models that have not got there."""
        return {m: self._shelf.barrier.target(m) for m in self._shelf.process.policies} | self.reached(step)


class EvalRun:
    """One try at one evaluation."""

    def __init__(
        self, shelf: Shelf, fleet: RaaSFleet, sets: Sequence[EvalSet], job: EvalJob, pins: Pins, can_serve: Callable[[str], bool]
    ) -> None:
        """`can_serve(model)`: its batch is served, or is queued whole."""
        self._shelf, self._fleet, self._sets, self._job, self._pins, self._can_serve = shelf, fleet, sets, job, pins, can_serve
        self._synchronous = shelf.process.dataflow.eval.mode == "synchronous"
        self._who = f"dataflow:{job.eval_id}"
        self._notes: list[str] = []
        self._failures: Counter[str] = Counter()
        self._reset: set[str] = set()
        self._began: float | None = None
        """The first lane was open."""
        self._end = 0.0

    async def results(self) -> list[EvalResult]:
        """Within its deadlines. Empty when the version that was asked for is of a dead timeline by now."""
        job, limit = self._job, self._shelf.process.dataflow.eval.deadline_s
        try:
            if job.step >= 0 and not await self._all_reach(self._shelf.clock() + limit):
                self._shelf.event(f"{job.eval_id} ({job.why}) is given up: its versions are of a dead timeline")
                return []
            if job.step >= 0:
                job.wanted = self._pins.wanted(job.step)
            if self._synchronous:
                self._hold()
                await self._reset_all()
            return await self._evaluate(limit)
        finally:
            self._shelf.waits.over(self._who)

    # --- versions -------------------------------------------------------------------------------------------------------

    async def _all_reach(self, end: float) -> bool:
        """The barrier: every live model publishes the step. One that dies leaves it. False when the step is of a dead timeline."""
        shelf, job = self._shelf, self._job
        behind: list[str] = []
        while (left := end - shelf.clock()) > 0:
            reached = [(m, want) for m, want in job.wanted.items() if want.version == job.step]
            if not all(shelf.barrier.on_live_timeline(m, want.timeline, want.version) for m, want in reached):
                return False  # its trainer went back; it will ask again when it gets there on the new timeline
            behind = [m for m in shelf.barrier.live() if m in job.wanted and shelf.barrier.models[m].version < job.step]
            if self._synchronous:
                self._hold(behind)
            else:
                self._pins.best(self._pins.reached(job.step))
            if not behind:
                return True
            names = ", ".join(f"trainer:{m}" for m in behind)
            shelf.waits.note(self._who, names, f"version {job.step}", left)
            await shelf.pulse.wait(min(left, LOOK_S))
        self._say(f"{', '.join(behind)} did not reach version {job.step} in time")
        return True

    def _hold(self, behind: Sequence[str] = ()) -> None:
        """No new training leases, and no newer weights. Held back only as far as the barrier itself can pass: a model that is behind
        needs a batch, and when nothing that runs can fill one any more, submission goes on until it is there."""
        shelf, job = self._shelf, self._job
        running = shelf.recording > 0 or any(instance.held for instance in shelf.pool.instances.values())
        stuck = [m for m in behind if not self._can_serve(m)] if not running else []
        shelf.held_for = "" if stuck else job.eval_id
        self._pins.all(self._pins.reached(job.step) if behind else self._pins.wanted(job.step))

    async def _reset_all(self) -> None:
        """Take the engines from training, all at the same time."""
        usable = self._pins.usable
        if not usable:
            return
        names = ", ".join(f"raas:{name}" for name in usable)
        self._shelf.waits.note(self._who, names, "training rollouts are cancelled", self._shelf.process.dataflow.pool.call_timeout_s)
        await asyncio.gather(*(self._reset_one(name) for name in usable))

    async def _reset_one(self, instance_id: str) -> bool:
        shelf = self._shelf
        try:
            cancelled = await reset(shelf, self._fleet, instance_id)
        except AstraFlowError as error:
            self._failed(instance_id, f"reset: {error}")
            return False
        self._reset.add(instance_id)
        shelf.event(f"{self._job.eval_id}: {cancelled} training leases on {instance_id} were cancelled, they run again afterwards")
        return True

    # --- lanes ----------------------------------------------------------------------------------------------------------

    async def _evaluate(self, limit: float) -> list[EvalResult]:
        shelf, job = self._shelf, self._job
        started, wanted, rounds = shelf.clock(), job.wanted, 0
        book = self._book(rounds)
        while not await self._work(book, self._lane(rounds), wanted, limit):
            newest = {model_id: shelf.barrier.target(model_id) for model_id in wanted}
            if newest == wanted:
                self._say("no instance is left that can serve the wanted weights")
                break
            self._say(f"no instance can serve {words(wanted)} any more: {words(newest)} was evaluated")
            wanted, rounds = newest, rounds + 1
            book = self._book(rounds)  # other weights: nothing of what came before counts
            if self._synchronous:
                self._pins.all(wanted)
        if book.given_up:
            self._say(f"{len(book.given_up)} tasks were lost with {TRIES} instances each")
        duration = shelf.clock() - (self._began if self._began is not None else started)
        return [self._result(eval_set, rounds, book, wanted, duration) for eval_set in self._sets]

    def _lane(self, rounds: int) -> str:
        """Of this life of Dataflow: an instance may still hold leases of the same evaluation from the life before."""
        return f"{self._job.eval_id}.{rounds}~{self._shelf.identity.incarnation[:6]}"

    def _book(self, rounds: int) -> EvalBook:
        process, leases = self._shelf.process, {}
        for eval_set in self._sets:
            for number, task in enumerate(eval_set.tasks):
                lease_id = f"{self._lane(rounds)}-{eval_set.name}-{number:05d}"
                leases[lease_id] = Lease(
                    lease_id=lease_id,
                    attempt=1,
                    task_id=task.task_id,
                    workflow_id=eval_set.workflow_id,
                    n_samples=eval_set.n_samples,
                    data=task.data,
                    seed=process.seed + number,
                    max_prompt_tokens=eval_set.max_prompt_tokens,
                    deadline_s=process.dataflow.eval.deadline_s,
                )
        book = EvalBook(leases)
        book.waiting.extend(leases)
        return book

    async def _work(self, book: EvalBook, lane: str, wanted: Wanted, limit: float) -> bool:
        """Lanes on one instance (pinned) or all (synchronous), until the book is complete or the time is over. False when no instance
        can serve these weights any more."""
        shelf = self._shelf
        workers: dict[str, asyncio.Task[None]] = {}
        if self._began is None:
            self._end = shelf.clock() + limit
        try:
            while not book.complete and (left := self._end - shelf.clock()) > 0:
                workers = {key: task for key, task in workers.items() if not task.done()}
                found = [c for c in self._pins.candidates(wanted) if self._failures[c.instance_id] < TRIES]
                if not workers and not found and self._pins.usable:  # nobody at all: it waits for somebody
                    return False
                self._pin(found, workers, wanted)
                for candidate in found if self._synchronous else found[: 1 - len(workers)]:
                    if candidate.exact and candidate.instance_id not in workers:
                        work = self._one(candidate.instance_id, book, lane, wanted, limit)
                        workers[candidate.instance_id] = shelf.tasks.spawn(f"lane {candidate.instance_id}", work)
                self._waits(book, found, wanted, left)
                await shelf.pulse.wait(min(left, LOOK_S))
            if not book.complete:
                self._say(f"not done within {limit:g} s")
            return True
        finally:
            for task in workers.values():
                task.cancel()
            await asyncio.gather(*workers.values(), return_exceptions=True)

    def _pin(self, found: Sequence[Candidate], workers: dict[str, asyncio.Task[None]], wanted: Wanted) -> None:
        if self._synchronous:
            self._pins.all(wanted)
        elif workers:
            self._pins.set(dict.fromkeys(workers, wanted))
        elif found:
            self._pins.set({found[0].instance_id: wanted})

    async def _one(self, instance_id: str, book: EvalBook, name: str, wanted: Wanted, limit: float) -> None:
        """One instance works through the book; whatever happens to it, its tasks are given back and its lane is closed."""
        shelf = self._shelf
        if self._synchronous and instance_id not in self._reset and not await self._reset_one(instance_id):
            return
        lane = EvalLane(shelf, self._fleet, instance_id, name, wanted)
        try:
            if not await lane.open(limit if self._began is None else max(self._end - shelf.clock(), 1.0)):
                await shelf.pulse.wait(LOOK_S)
                return
            if self._began is None:  # the time it waited for an instance is not its own
                self._began, self._end = shelf.clock(), shelf.clock() + limit
            await lane.drive(book, lambda: self._end, lambda: len(self._pins.usable) if self._synchronous else 1)
        except AstraFlowError as error:
            self._failed(instance_id, str(error))
        finally:
            book.lost(instance_id)
            shelf.pulse.fire()
            # a task of its own: this one is cancelled as soon as the book is complete, and an open lane holds newer weights back
            await asyncio.shield(shelf.tasks.spawn(f"close {name}", lane.close()))

    def _failed(self, instance_id: str, why: str) -> None:
        self._failures[instance_id] += 1
        self._fleet.trouble(instance_id, f"{self._job.eval_id}: {why}")
        self._shelf.event(f"{self._job.eval_id}: try {self._failures[instance_id]} on {instance_id} ended: {why}")

    def _waits(self, book: EvalBook, found: Sequence[Candidate], wanted: Wanted, left: float) -> None:
        running = sorted(set(book.out.values()))
        if running:
            names = ", ".join(f"raas:{name}" for name in running)
            self._shelf.waits.note(self._who, names, f"{len(book.out)} of {len(book.leases)} tasks run there", left)
            return
        coming = ", ".join(sorted(f"raas:{candidate.instance_id}" for candidate in found)) or "raas"
        self._shelf.waits.note(self._who, coming, f"an instance at {words(wanted)}", left)

    # --- results --------------------------------------------------------------------------------------------------------

    def _say(self, remark: str) -> None:
        self._notes.append(remark)
        self._shelf.event(f"{self._job.eval_id}: {remark}")

    def _result(self, eval_set: EvalSet, rounds: int, book: EvalBook, served: Wanted, duration_s: float) -> EvalResult:
        config, n = self._shelf.process.dataflow.eval, eval_set.n_samples
        rewards: list[list[float | None]] = []
        for number in range(len(eval_set.tasks)):
            got = book.scores.get(f"{self._lane(rounds)}-{eval_set.name}-{number:05d}", [])
            rewards.append((got + [None] * n)[:n])
        missing = sum(reward is None for samples in rewards for reward in samples)
        return EvalResult(
            eval_id=self._job.eval_id,
            dataset=eval_set.name,
            versions=served,
            n_tasks=len(eval_set.tasks),
            n_samples=n,
            missing=missing,
            metrics=eval_metrics(rewards, n, config.correct_threshold, config.k),
            duration_s=duration_s,
            mode=config.mode,
            note="; ".join(self._notes),
        )
