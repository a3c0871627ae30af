"""DataServing: batches by name. The same (model, timeline, version) is the same bytes, however often it is asked for.

A batch is assembled by a task of its own, so that a caller who hangs up changes nothing, and is durable before it is sent.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

from astraflow.dataflow.barrier import Edge
from astraflow.dataflow.buffer import Entry, Taken
from astraflow.dataflow.collate import Item, collate
from astraflow.dataflow.intake import Intake
from astraflow.dataflow.journal import BatchRow, Pick, Settled
from astraflow.dataflow.segments import PayloadDamaged
from astraflow.dataflow.shelf import Shelf
from astraflow.lib.trace import TRACE
from astraflow.protocol import codec
from astraflow.protocol.batch import Batch, BatchReply, BatchRequest, WaitEdge
from astraflow.protocol.errors import BadMessage, Conflict

REJECTED_BATCHES = 16
"""Default starvation limit in batches' worth of groups: dynamic sampling on a hard set needs several, a broken reward none."""
LONGEST_WAIT_S = 30.0


@dataclass
class OpenBatch:
    """Served, not committed yet."""

    row: BatchRow
    fresh: list[Entry]
    replayed: list[Entry]
    batch: Batch | None
    """None after a restart, until it is asked for."""
    metrics: dict[str, float]


class DataServing:
    """Per-model queues and batch assembly."""

    def __init__(self, shelf: Shelf, intake: Intake) -> None:
        self._shelf, self._intake = shelf, intake
        self.open: dict[str, OpenBatch] = {}
        """Per model, at most one."""
        self.locks = {model_id: asyncio.Lock() for model_id in shelf.buffers}
        """Assembly, commit and rollback of one model exclude each other."""
        self._waiting: dict[str, tuple[Edge, float]] = {}
        self._asked: dict[str, int] = {}
        """Version of the checkpoint that a waiting trainer was told to write last."""
        self._assembling: dict[str, asyncio.Task[None]] = {}

    async def batch(self, request: BatchRequest) -> BatchReply:
        """Long-poll for the batch of this name. Raises Conflict for a version that is trained already."""
        shelf, model_id = self._shelf, request.model_id
        shelf.barrier.state(model_id)
        end = shelf.clock() + min(max(request.wait_s, 0.0), LONGEST_WAIT_S)
        while True:
            shelf.barrier.claim(model_id, request.incarnation)  # in the loop: another process may attach while this one waits
            if shelf.barrier.touch(model_id, shelf.clock()):
                shelf.event(f"trainer {model_id} is back")
            answer: BatchReply | Edge = Edge("dataflow", "it ends") if shelf.stopping else await self._answer(request)
            wanted = shelf.barrier.models[model_id].checkpoint_wanted
            if isinstance(answer, BatchReply):
                self._waiting.pop(model_id, None)
                answer.save_checkpoint = wanted >= 0
                return answer
            self._waits(model_id, answer)
            left = end - shelf.clock()
            news = wanted >= 0 and self._asked.get(model_id) != wanted  # told at once, and then no more often than anything else
            if left <= 0 or shelf.stopping or news:
                self._asked[model_id] = wanted
                counts = shelf.rejections[model_id].counts()
                if shelf.stalled:
                    return BatchReply(kind="stalled", reason=shelf.stalled, counts=counts)
                waits = [*self.edges(), *shelf.waits.edges()]
                return BatchReply(kind="wait", reason=answer.why, waits=waits, counts=counts, save_checkpoint=wanted >= 0)
            await shelf.pulse.wait(min(left, 1.0))

    async def _answer(self, request: BatchRequest) -> BatchReply | Edge:
        shelf, model_id = self._shelf, request.model_id
        state = shelf.barrier.models[model_id]
        if not state.registered:
            raise Conflict(f"model {model_id}: /batch before /ready")
        if request.timeline != state.timeline:
            reason = f"timeline {request.timeline} of {model_id} is dead, live is {state.timeline}: call /ready again"
            return BatchReply(kind="stale_timeline", reason=reason)
        if request.version < state.version:
            raise Conflict(
                f"model {model_id}: the batch of version {request.version} is committed, the trainer is at version {state.version}"
            )
        if request.version > state.version:
            return Edge(f"trainer:{model_id}", f"the notice of version {request.version} has not come (known: {state.version})")
        opened = self.open.get(model_id)
        if opened is not None:
            assert (opened.row.timeline, opened.row.version) == (request.timeline, request.version), f"{opened.row} for {request}"
            return await self._again(opened)
        edges = shelf.barrier.gate(request.version, model_id)
        if edges:
            return edges[0]
        if await self._assemble(request):
            return await self._again(self.open[model_id])
        return self._none(model_id, state.batch_size)

    async def _again(self, opened: OpenBatch) -> BatchReply:
        """The bytes that were persisted under this name."""
        shelf, row = self._shelf, opened.row
        if opened.batch is None:
            opened.batch = await shelf.write(self._read, row)
            shelf.tell_mended()
        return BatchReply(kind="batch", batch=opened.batch, counts={}, metrics=opened.metrics)

    def _read(self, row: BatchRow) -> Batch:
        ledger = self._shelf.ledger
        data = ledger.batch_bytes(row.policy, row.timeline, row.version)
        assert data is not None, f"served batch {row} has no bytes"
        try:
            return codec.decode(data, Batch)
        except BadMessage as error:
            raise ledger.damaged(f"batch {row.version} of {row.policy}, which is open, cannot be decoded: {error}") from None

    def _none(self, model_id: str, batch_size: int) -> BatchReply | Edge:
        """No batch can be made: the end, starvation, or patience."""
        shelf, config = self._shelf, self._shelf.process.dataflow.buffer
        tally, queued = shelf.rejections[model_id], len(shelf.buffers[model_id])
        groups = max(-(-batch_size // shelf.n_samples), 1)
        if self.at_end and not queued:
            return BatchReply(kind="end_of_data", reason="every task was used and nothing is in flight", counts=tally.counts())
        limit = config.max_rejected_groups or REJECTED_BATCHES * groups
        too_long = tally.in_a_row > 0 and shelf.clock() - tally.rejecting_since > config.starvation_s
        if tally.in_a_row >= limit or too_long:
            reason = f"{tally.in_a_row} groups in a row were rejected"
            return BatchReply(kind="starved", reason=reason, counts=tally.counts())
        there = shelf.buffers[model_id].progress(batch_size, shelf.n_samples)
        return Edge("groups", f"{there} are there, {shelf.groups_in_flight} groups are in flight")

    def can_serve(self, model_id: str) -> bool:
        """Its next batch is served, or is queued whole."""
        return model_id in self.open or self._shelf.buffers[model_id].places >= self._shelf.barrier.models[model_id].batch_size

    @property
    def at_end(self) -> bool:
        """Every task was handed out, and nothing will come any more."""
        shelf = self._shelf
        return shelf.source.exhausted and not shelf.leases.open and not self._intake.held and shelf.recording == 0

    # --- assembly -------------------------------------------------------------------------------------------------------

    async def _assemble(self, request: BatchRequest) -> bool:
        """True when the batch of this name is open now."""
        model_id = request.model_id
        running = self._assembling.get(model_id)
        if running is None or running.done():
            running = self._shelf.tasks.spawn(f"assemble {model_id}", self._assemble_locked(request))
            self._assembling[model_id] = running
        await asyncio.shield(running)
        opened = self.open.get(model_id)
        return opened is not None and (opened.row.timeline, opened.row.version) == (request.timeline, request.version)

    async def _assemble_locked(self, request: BatchRequest) -> None:
        model_id = request.model_id
        async with self.locks[model_id]:
            state = self._shelf.barrier.models[model_id]
            if (state.timeline, state.version) != (request.timeline, request.version) or model_id in self.open:
                return
            await self._expire(model_id, request.version)
            buffer = self._shelf.buffers[model_id]
            taken = buffer.take(state.batch_size, self._shelf.n_samples, request.version, last=self.at_end)
            if taken is None:
                return
            try:
                await self._make(request, taken)
            except PayloadDamaged as error:
                buffer.put_back(taken)
                await self._give_up(model_id, error)
                return
            except Exception:
                buffer.put_back(taken)
                raise
            buffer.pace.accepted += sum(entry.places for entry in taken.replayed)

    async def _give_up(self, model_id: str, error: PayloadDamaged) -> None:
        """A group whose bytes were damaged on disk can never be served: it is dropped, counted and named, and the others go on."""
        shelf, buffer = self._shelf, self._shelf.buffers[model_id]
        shelf.event(f"group {error.lease_id} of {model_id} is lost: {error}")
        buffer.forget_replay(lambda entry: entry.lease_id == error.lease_id)
        for entry in buffer.discard(lambda entry: entry.lease_id == error.lease_id):
            buffer.pace.give_back(entry.places)
            shelf.rejections[model_id].dropped["damaged"] += 1
            await shelf.write(shelf.ledger.settle, [Settled(entry.lease_id, model_id, "dropped", "damaged", entry.part)])
        shelf.pulse.fire()

    async def _expire(self, model_id: str, version: int) -> None:
        """Drop what may no longer be served: stale, or (a rollback came while it was written) of a dead timeline."""
        shelf, buffer = self._shelf, self._shelf.buffers[model_id]
        gone: list[Settled] = []
        for entry, reason in buffer.expire(lambda e: self._intake.unservable(model_id, e)):
            gone.append(Settled(entry.lease_id, model_id, "dropped", reason, entry.part))
            buffer.pace.give_back(entry.places)
            shelf.rejections[model_id].dropped[reason] += 1
        buffer.expire_replay(version)
        if gone:
            await shelf.write(shelf.ledger.settle, gone)
            shelf.pulse.fire()

    async def _make(self, request: BatchRequest, taken: Taken) -> None:
        begun = time.monotonic()
        shelf, model_id, fresh, again = self._shelf, request.model_id, taken.fresh, taken.replayed
        members: dict[str, tuple[int, ...]] = {}
        for entry in fresh:  # parts that a rollback brought back together are one group of the batch
            members[entry.lease_id] = members.get(entry.lease_id, ()) + entry.members
        wanted = [(lease_id, False) for lease_id in members] + [(entry.lease_id, True) for entry in again]
        found = await shelf.write(shelf.ledger.shares_of, model_id, [lease_id for lease_id, _ in wanted])

        def build() -> tuple[Batch, bytes]:
            items = [Item(shelf.ledger.payload(key), found[key], replayed, members.get(key, ())) for key, replayed in wanted]
            batch = collate(items, model_id, request.timeline, request.version)
            return batch, codec.encode(batch)

        batch, data = await asyncio.to_thread(build)
        row = BatchRow(
            policy=model_id,
            timeline=request.timeline,
            version=request.version,
            fresh=[Pick(entry.lease_id, entry.part) for entry in fresh],
            replayed=[entry.lease_id for entry in again],
        )
        if taken.rest is not None:
            row.fresh[-1] = replace(row.fresh[-1], rest=taken.rest.members)
        await shelf.write(shelf.ledger.serve, row, data)
        metrics = self._metrics(model_id, request.version, fresh, again)
        self.open[model_id] = OpenBatch(row, fresh, again, batch, metrics)
        shelf.metrics.log(request.version, metrics, model=model_id)
        TRACE.add("batch", begun, model=model_id, version=request.version, leases=[lease_id for lease_id, _ in wanted])
        shelf.rejections[model_id].new_batch()

    def _metrics(self, model_id: str, version: int, fresh: list[Entry], again: list[Entry]) -> dict[str, float]:
        shelf = self._shelf
        rows = sum(entry.rows for entry in fresh) or 1
        gaps = [version - entry.min_version for entry in fresh]
        return {
            "buffer/groups": float(len(shelf.buffers[model_id])),
            "buffer/in_flight": float(shelf.groups_in_flight),
            "buffer/held": float(self._intake.held_groups(model_id)),
            "buffer/replayed_groups": float(len(again)),
            "staleness/mean": sum(gap * entry.rows for gap, entry in zip(gaps, fresh, strict=True)) / rows,
            "staleness/max": float(max(gaps, default=0)),
            "reward/mean": sum(entry.mean * entry.rows for entry in fresh) / rows,
            "reward/std": sum(entry.spread * entry.rows for entry in fresh) / rows,
            "rollout/effective_groups": float(len({entry.lease_id for entry in fresh if not entry.all_equal})),
            "reward/zero_variance_groups": float(len({entry.lease_id for entry in fresh if entry.all_equal})),
            "rollout/groups": float(len({entry.lease_id for entry in fresh})),
            "rollout/trajectories": float(sum(entry.rows for entry in fresh)),
            "rollout/tokens_mean": sum(entry.loss_tokens for entry in fresh) / rows,
            **{f"rollout/{name}": value for name, value in shelf.meter.rates(shelf.clock()).items()},
        }

    # --- who waits ------------------------------------------------------------------------------------------------------

    def _waits(self, model_id: str, edge: Edge) -> None:
        """Keep the time since when the trainer waits for the same one, over all its polls."""
        old = self._waiting.get(model_id)
        since = old[1] if old is not None and old[0].waits_for == edge.waits_for else self._shelf.clock()
        self._waiting[model_id] = (edge, since)

    def edges(self) -> list[WaitEdge]:
        """Trainers that wait for a batch."""
        now = self._shelf.clock()
        return [
            WaitEdge(
                who=f"trainer:{model_id}",
                waits_for=edge.waits_for,
                why=edge.why,
                since_s=now - since,
                deadline_s=None if edge.until is None else edge.until - now,
            )
            for model_id, (edge, since) in self._waiting.items()
        ]
