"""EvalManager: evaluations one after the other, and their results. What one of them does stands in `eval_run`.

Results travel by their own calls and never come near the training buffer. When no instance can serve the wanted versions any
more, the newest are evaluated instead, and the result names what was really evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from astraflow.dataflow.eval_run import EvalJob, EvalRun, EvalSet, Pins
from astraflow.dataflow.fleet import RaaSFleet
from astraflow.dataflow.shelf import Shelf
from astraflow.protocol.control import EvalResult, EvalResults, EvalResultsRequest

MAX_QUEUED = 64
"""Evaluations that wait for their turn; a trainer asks for one in many steps, so that more means that none gets through."""
AT_START = "start"
"""Asked for once in a run."""


class EvalManager:
    """One per service; `run` is its supervised task."""

    def __init__(self, shelf: Shelf, fleet: RaaSFleet, sets: Sequence[EvalSet], can_serve: Callable[[str], bool]) -> None:
        """`can_serve(model)`: its batch is served, or is queued whole."""
        self._shelf, self._fleet, self._sets, self._can_serve = shelf, fleet, sets, can_serve
        self.pins = Pins(shelf, fleet)
        self.results: list[EvalResult] = []
        self.queue: list[EvalJob] = []
        """First = running or next."""
        self._asked: dict[str, str] = {}
        """Why → id, the newest: what is asked again is not run again."""
        self._number = 0

    def restore(self, results: list[EvalResult], meta: Mapping[str, bytes]) -> None:
        """What an earlier life left: finished results, and jobs to be run again. Nothing in a new run."""
        self.results = results
        if "evals" in meta:
            self.queue, self._number, self._asked = msgspec.msgpack.decode(meta["evals"], type=tuple[list[EvalJob], int, dict[str, str]])
        if self._sets and self._synchronous and self._shelf.process.dataflow.eval.at_start and AT_START not in self._asked:
            self._shelf.held_for = self._name(self._number + 1)  # the first /ready asks for it; nothing may be submitted before that
        self._turn()

    async def request(self, why: str, step: int = -1) -> str:
        """Queue an evaluation; its id, also when the same was asked before (each trainer asks for its step). Empty = nothing to
        evaluate."""
        if not self._sets:
            return ""
        if why in self._asked:
            known = self._asked[why]
            return known if why != AT_START or any(job.eval_id == known for job in self.queue) else ""
        if len(self.queue) >= MAX_QUEUED:
            self._shelf.event(f"evaluation {why} left out: {len(self.queue)} are waiting")
            return ""
        self._number += 1
        job = EvalJob(eval_id=self._name(self._number), wanted=self.pins.wanted(step), why=why, step=step)
        self.queue.append(job)
        self._asked[why] = job.eval_id
        while len(self._asked) > MAX_QUEUED:
            del self._asked[next(key for key in self._asked if key != AT_START)]
        if self.queue[0] is job:
            self._turn()
        await self._shelf.write(self._shelf.ledger.put, self._meta())
        self._shelf.pulse.fire()
        return job.eval_id

    def joined(self) -> None:
        """A new instance: an evaluation that waits for one takes it before it gets newer weights."""
        if self.queue and (self._synchronous or not self._fleet.pins):
            self._pin()

    async def answer(self, request: EvalResultsRequest) -> EvalResults:
        """Results from `since` on; waits up to `wait_s` for the first."""
        end = self._shelf.clock() + min(max(request.wait_s, 0.0), 30.0)
        while len(self.results) <= request.since and (left := end - self._shelf.clock()) > 0 and not self._shelf.stopping:
            await self._shelf.pulse.wait(left)
        running = [job.eval_id for job in self.queue]
        return EvalResults(results=self.results[request.since :], next=max(len(self.results), request.since), running=running)

    async def run(self) -> None:
        """Evaluates what is queued, for ever."""
        shelf = self._shelf
        while True:
            if not self.queue:
                await shelf.pulse.wait(1.0)
                continue
            job, started = self.queue[0], shelf.clock()
            try:
                results = await EvalRun(shelf, self._fleet, self._sets, job, self.pins, self._can_serve).results()
            finally:  # whatever happened, training goes on
                self._let_go()
            self.queue.pop(0)
            self.results += results  # now, so that the evaluation is always either running or done
            self._turn()
            await shelf.write(shelf.ledger.add_evals, results, self._meta())
            for result in results:
                values = {f"eval/{result.dataset}/{k}": v for k, v in result.metrics.items() if v is not None}
                values[f"eval/{result.dataset}/missing"] = float(result.missing)
                shelf.metrics.log(max((s.version for s in result.versions.values()), default=0), values)
            shelf.event(f"{job.eval_id} ({job.why}) done in {shelf.clock() - started:.1f} s")
            shelf.pulse.fire()

    # --- whose turn it is -----------------------------------------------------------------------------------------------

    @property
    def _synchronous(self) -> bool:
        return self._shelf.process.dataflow.eval.mode == "synchronous"

    def _turn(self) -> None:
        """The first in the queue is next: from now on, not only from when its task wakes, its weights are held and, in the
        synchronous mode, nothing new is submitted."""
        if not self.queue or not self._sets:
            return
        if self._synchronous:
            self._shelf.held_for = self.queue[0].eval_id
        self._pin()

    def _pin(self) -> None:
        wanted = self.pins.reached(self.queue[0].step)
        if self._synchronous:
            self.pins.all(wanted)
        else:
            self.pins.best(wanted)

    def _name(self, number: int) -> str:
        return f"eval-{number:04d}"

    def _let_go(self) -> None:
        """Submission and loads go on."""
        self._shelf.held_for = ""
        self.pins.set({})
        self._shelf.pulse.fire()

    def _meta(self) -> dict[str, bytes]:
        return {"evals": msgspec.msgpack.encode((self.queue, self._number, self._asked))}
