"""A simulated trainer: the contract of `trainer` (link and loop), with a book of its own that every batch is compared with.

Its weights are their history: a digest names the batches that made them. What is trained on must have been sampled by weights of
this very history, and nothing may be in it twice; what Dataflow's ledger says in the end must be exactly what the book says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np
import xxhash

from astraflow.lib.aio import Backoff
from astraflow.lib.wire import Identity
from astraflow.lib.wire_client import Caller
from astraflow.protocol import codec
from astraflow.protocol.batch import Batch, BatchReply, BatchRequest
from astraflow.protocol.control import EvalResultsRequest, NotifyVersion, Ready, Shutdown
from astraflow.protocol.errors import Conflict, Replaced, Retryable
from astraflow.protocol.message import Message
from astraflow.protocol.routes import DataflowAPI, Route
from astraflow.tools.chaos_raas import EVAL_MARK, mark
from astraflow.tools.chaos_schedule import BATCH_GROUPS, N_SAMPLES, Schedule

Q = TypeVar("Q", bound=Message)
P = TypeVar("P", bound=Message)
POLL_S = 5.0
EVAL_PATIENCE_S = 40.0


@dataclass(frozen=True)
class History:
    """What made the present weights, from version 0 on."""

    digests: tuple[str, ...]
    """Per version."""
    batches: tuple[frozenset[str], ...] = ()
    """Fresh trajectories of the batch that made version i + 1."""

    @property
    def version(self) -> int:
        return len(self.digests) - 1

    @property
    def trained(self) -> frozenset[str]:
        return frozenset().union(*self.batches)


class Complain(Protocol):
    def __call__(self, what: str) -> NoReturn: ...


@dataclass
class TrainerBook:
    """What outlives a trainer's process: its checkpoint, and what the world saw of it."""

    model_id: str
    checkpoint: History | None = None
    now: History | None = None
    """Of the live process."""
    names: dict[tuple[int, int], str] = field(default_factory=dict)
    """(timeline, version) → digest of the batch of this name."""
    published: dict[int, str] = field(default_factory=dict)
    """Version → digest that the present sender serves."""
    ever: set[str] = field(default_factory=set)
    """All digests that were published."""
    timeline: int = -1
    lives: int = 0
    attached: int = 0
    """The newest life that Dataflow answered."""
    reached: dict[int, int] = field(default_factory=dict)
    """Timeline → highest version that Dataflow confirmed on it."""
    leaving: bool = False
    """It says /shutdown, and will not train again."""
    done: bool = False
    """… and was answered."""
    rolled_back: int = 0
    data_ended: bool = False

    @property
    def sender(self) -> str:
        return f"sim://sender-{self.model_id}-{self.lives}"


class SimTrainer:
    """One life of one trainer."""

    def __init__(
        self, book: TrainerBook, schedule: Schedule, identity: Identity, client: Caller, seconds: Callable[[str], float], complain: Complain
    ) -> None:
        self._book, self._schedule, self._identity, self._client = book, schedule, identity, client
        self._seconds, self._complain = seconds, complain
        self._incarnation = ""
        self._timeline = 0
        self._life = book.lives
        self._now = book.checkpoint or History((_digest(book.model_id, "initial"),))
        self._resumed = book.checkpoint is not None
        self._backoff = Backoff(0.1, 2.0, 1.0, seed=identity.incarnation)

    async def run(self) -> None:
        """From the newest checkpoint to the last step. Raises Replaced when another life has taken its place."""
        book = self._book
        self._publish()
        await self._attach()
        while self._now.version < self._schedule.steps and (batch := await self._batch()) is not None:
            await asyncio.sleep(self._seconds("step"))
            self._train(batch)
            self._publish()
            if self._now.version % self._schedule.checkpoint_every == 0 and self._lives:
                book.checkpoint = self._now
            await self._notify()
        if self._schedule.eval_every:
            await self._look_at_evals()
        book.leaving = True
        await self._call(DataflowAPI.shutdown, lambda: Shutdown(model_id=book.model_id, reason="trained"))
        book.done = True

    @property
    def _lives(self) -> bool:
        """No newer life was started; what an older one does leaves no trace in the book."""
        return self._book.lives == self._life

    def _publish(self) -> None:
        """The newest version and the one before it can be pulled."""
        book, history = self._book, self._now
        if not self._lives:
            return
        book.now = history
        version = history.version
        older = {version - 1: history.digests[-2]} if version - 1 in book.published else {}
        book.published = {**older, version: history.digests[-1]}
        book.ever.add(history.digests[-1])

    # --- calls ----------------------------------------------------------------------------------------------------------

    async def _call(self, route: Route[Q, P], request: Callable[[], Q], extra_s: float = 0.0) -> P:
        while True:
            try:
                reply = await self._client.call(route, request(), timeout_s=3.0 + extra_s)
                self._backoff.reset()
                return reply
            except Retryable:
                await asyncio.sleep(self._backoff.next())

    async def _attach(self) -> None:
        book, history = self._book, self._now
        checkpoint = -1 if book.checkpoint is None else book.checkpoint.version

        def ready() -> Ready:
            return Ready(
                model_id=book.model_id, train_batch_size=BATCH_GROUPS * N_SAMPLES, sender_endpoint=book.sender, version=history.version,
                digest=history.digests[-1], recovered_version=history.version if self._resumed else None, checkpoint_version=checkpoint,
            )  # fmt: skip

        replaced = book.attached > self._life
        reply = await self._call(DataflowAPI.ready, ready)
        self._resumed = True
        if replaced:
            self._complain(f"a life of {book.model_id} that was replaced could attach again")
        self._timeline, self._incarnation = reply.timeline, reply.incarnation
        if book.attached > self._life:
            return  # it was replaced meanwhile, and its next call says so
        book.attached = self._life
        if reply.version != history.version:
            self._complain(f"/ready of {book.model_id} at version {history.version} was answered with version {reply.version}")
        if reply.timeline < book.timeline:
            self._complain(f"timeline of {book.model_id} went back from {book.timeline} to {reply.timeline}")
        book.rolled_back += reply.timeline > max(book.timeline, 0)
        book.timeline = reply.timeline
        self._confirmed(history.version)

    def _confirmed(self, version: int) -> None:
        if not self._lives:
            return
        before = self._book.reached.get(self._timeline, 0)
        if version < before:
            self._complain(f"{self._book.model_id}: version went back from {before} to {version} on timeline {self._timeline}")
        self._book.reached[self._timeline] = version

    async def _batch(self) -> Batch | None:
        """The batch of this version; None at the end of the data."""
        book = self._book
        while True:
            version = self._now.version

            def request(version: int = version) -> BatchRequest:
                return BatchRequest(model_id=book.model_id, timeline=self._timeline, version=version, wait_s=POLL_S)

            try:
                reply: BatchReply = await self._call(DataflowAPI.batch, request, extra_s=POLL_S)
            except Replaced:
                raise
            except Conflict:
                await self._attach()
                continue
            if reply.incarnation != self._incarnation:
                await self._attach()
                if reply.batch is None or reply.batch.timeline != self._timeline:
                    continue
            if reply.kind == "stale_timeline":
                await self._attach()
            elif reply.kind == "batch":
                assert reply.batch is not None
                return reply.batch
            elif reply.kind == "end_of_data":
                book.data_ended = True
                return None
            elif reply.kind == "starved":
                self._complain(f"{book.model_id} starves: {reply.reason}")

    async def _notify(self) -> None:
        book, history = self._book, self._now

        def notice() -> NotifyVersion:
            every = self._schedule.eval_every
            return NotifyVersion(
                model_id=book.model_id, timeline=self._timeline, version=history.version, digest=history.digests[-1],
                checkpoint_version=-1 if book.checkpoint is None else book.checkpoint.version,
                run_eval=bool(every) and history.version % every == 0,
            )  # fmt: skip

        try:
            reply = await self._call(DataflowAPI.notify_version, notice)
        except Replaced:
            raise
        except Conflict:
            await self._attach()
            reply = await self._call(DataflowAPI.notify_version, notice)
        if reply.incarnation != self._incarnation:
            await self._attach()
        self._confirmed(history.version)

    async def _look_at_evals(self) -> None:
        """Every evaluation ends, and what it says was really published."""
        clock = asyncio.get_running_loop().time
        end = clock() + EVAL_PATIENCE_S
        while True:
            reply = await self._call(DataflowAPI.eval_results, lambda: EvalResultsRequest(wait_s=1.0))
            if not reply.running:
                break
            if clock() > end:
                self._complain(f"evaluations {reply.running} do not end")
            await asyncio.sleep(0.5)
        for result in reply.results:
            if not 0 <= result.missing <= result.n_tasks * result.n_samples:
                self._complain(f"{result.eval_id}: {result.missing} samples are missing of {result.n_tasks} × {result.n_samples}")
            digest = result.versions[self._book.model_id].digest
            if digest not in self._book.ever:
                self._complain(f"{result.eval_id} evaluated {digest} of {self._book.model_id}, which was never published")

    # --- the book -------------------------------------------------------------------------------------------------------

    def _train(self, batch: Batch) -> None:
        history = self._now
        self._check_name(batch)
        fresh = self._check_rows(batch, history)
        self._check_tokens(batch, history)
        digest = _digest(history.digests[-1], batch.digest, str(self._life))  # a step that is done again gives other bytes
        self._now = replace(history, digests=(*history.digests, digest), batches=(*history.batches, fresh))

    def _check_name(self, batch: Batch) -> None:
        book = self._book
        name = (batch.timeline, batch.version)
        if name != (self._timeline, self._now.version):
            self._complain(f"batch {name} of {book.model_id} for the request {(self._timeline, self._now.version)}")
        known = book.names.setdefault(name, batch.digest)
        if known != batch.digest:
            self._complain(f"batch {name} of {book.model_id} was {known} and is {batch.digest}")

    def _check_rows(self, batch: Batch, history: History) -> frozenset[str]:
        """Whole groups, fresh enough, never twice. Returns the fresh trajectories."""
        book, buffer = self._book, self._schedule.dataflow.buffer
        rows = {name: codec.array(column) for name, column in batch.rows.items()}
        if not len(rows["rewards"]):
            self._complain(f"batch {batch.version} of {book.model_id} is empty")
        replayed = rows["replayed"]
        ids = np.array(batch.trajectory_ids)[rows["trajectory_index"]]
        fresh = frozenset(str(key) for key in ids[~replayed])
        again = history.trained & fresh
        if again:
            self._complain(f"{book.model_id} version {batch.version}: {sorted(again)} were trained already on this history")
        unknown = {str(key) for key in ids[replayed]} - history.trained
        if unknown:
            self._complain(f"{book.model_id} version {batch.version}: {sorted(unknown)} are replayed, but were never trained")
        gaps = batch.version - rows["min_version"]
        for name, chosen, limit in (("fresh", ~replayed, buffer.max_staleness), ("replayed", replayed, buffer.replay.max_staleness)):
            if limit is not None and chosen.any() and int(gaps[chosen].max()) > limit:
                self._complain(f"{book.model_id} version {batch.version}: a {name} group is {int(gaps[chosen].max())} versions old")
        if len(set(batch.group_ids)) != len(batch.group_ids) or any("eval-" in key for key in batch.group_ids):
            self._complain(f"groups of batch {batch.version} of {book.model_id}: {batch.group_ids}")
        return fresh

    def _check_tokens(self, batch: Batch, history: History) -> None:
        """Each token that is trained on was sampled by an ancestor of these weights, the one that its version names."""
        tokens: dict[str, Any] = {name: codec.array(column) for name, column in batch.tokens.items()}
        own = tokens["loss_mask"] == 1
        found, versions = tokens["input_ids"][own], tokens["versions"][own]
        if (found == EVAL_MARK).any():
            self._complain(f"{self._book.model_id} version {batch.version}: an evaluation's rollout is trained on")
        marks = np.array([mark(digest) for digest in history.digests])
        if (versions > history.version).any() or (marks[np.minimum(versions, history.version)] != found).any():
            names = sorted(set(batch.group_ids))
            self._complain(f"{self._book.model_id} version {batch.version}: tokens of a dead timeline in one of {names}")


def _digest(*parts: str) -> str:
    return xxhash.xxh3_64_hexdigest("/".join(parts).encode())
