"""What a trainer's /ready, /notify_version and /shutdown do: the barrier decides, the ledger writes, the fleet is told."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from astraflow.dataflow.barrier import ReadyOutcome
from astraflow.dataflow.evals import AT_START
from astraflow.dataflow.fleet import RaaSFleet, agree
from astraflow.dataflow.intake import Intake, entry_of
from astraflow.dataflow.journal import Settled
from astraflow.dataflow.policies.base import Curator
from astraflow.dataflow.serving import DataServing
from astraflow.dataflow.shelf import Shelf
from astraflow.protocol.control import NotifyVersion, NotifyVersionReply, Ready, ReadyReply
from astraflow.protocol.errors import ConfigError

RequestEval = Callable[[str, int], Awaitable[str]]
"""(why, version that all models should be at) → id of the evaluation, empty when there is nothing to evaluate."""


class Trainers:
    """One per service."""

    def __init__(
        self, shelf: Shelf, serving: DataServing, intake: Intake, fleet: RaaSFleet, curator: Curator, request_eval: RequestEval
    ) -> None:
        self._shelf, self._serving, self._intake, self._fleet = shelf, serving, intake, fleet
        self._curator, self._request_eval = curator, request_eval

    async def ready(self, message: Ready) -> ReadyReply:
        """A trainer attaches. The same call again changes nothing."""
        shelf, model_id = self._shelf, message.model_id
        shelf.barrier.state(model_id)
        self._check(message)
        async with self._serving.locks[model_id]:
            before = shelf.barrier.models[model_id].version
            outcome = shelf.barrier.ready(message, shelf.clock())
            if outcome.bumped:
                await self._roll_back(model_id, outcome)
            elif outcome.commit_through is not None:
                await self._commit(model_id, before, outcome.version, {})
            await shelf.write(shelf.ledger.put, shelf.versions_meta())
            if outcome.fresh and not outcome.bumped:
                shelf.reset_pace(model_id, outcome.version, self._under_way(model_id))
        word = "rolled back to" if outcome.bumped else "is ready at"
        shelf.event(f"trainer {model_id} {word} version {outcome.version}, timeline {outcome.timeline}")
        self._fleet.announce()
        at_start = False
        if shelf.process.dataflow.eval.at_start and shelf.barrier.all_ready:
            at_start = bool(await self._request_eval(AT_START, -1))
        return ReadyReply(timeline=outcome.timeline, version=outcome.version, eval_at_start=at_start)

    def _check(self, message: Ready) -> None:
        shelf, n = self._shelf, self._shelf.n_samples
        if message.train_batch_size < n or message.train_batch_size % n:
            raise ConfigError(f"train_batch_size: {message.train_batch_size} of {message.model_id!r} is not a multiple of n_samples ({n})")
        for instance in shelf.pool.instances.values():
            record, name = instance.record, message.model_id
            agree("tokenizer_hash", name, instance.instance_id, record.tokenizer_hash.get(name, ""), message.tokenizer_hash)
            agree("template_hash", name, instance.instance_id, record.template_hash.get(name, ""), message.template_hash)

    async def notify(self, message: NotifyVersion) -> NotifyVersionReply:
        """A version is published: commit its batch, then tell the instances. Raises Conflict for a dead timeline."""
        shelf, model_id = self._shelf, message.model_id
        shelf.barrier.state(model_id)
        trained = 0
        async with self._serving.locks[model_id]:
            outcome = shelf.barrier.notify(message, shelf.clock())
            version = shelf.barrier.models[model_id].version
            first = outcome.first if outcome.kind == "new" else version
            trained = await self._commit(model_id, first, version, message.metrics)
        if outcome.kind == "new":
            self._curator.on_version(model_id, message.version)
        self._fleet.announce()
        eval_id = ""
        if message.run_eval and message.version == version:  # also when the notice is repeated: the same why is the same evaluation
            lines = ", ".join(f"{name} {state.timeline}" for name, state in shelf.barrier.models.items() if state.timeline)
            eval_id = await self._request_eval(f"step {version}" + (f", timeline {lines}" if lines else ""), version)
        return NotifyVersionReply(service_version=shelf.barrier.service_version, trained=trained, eval_id=eval_id)

    async def finish(self, model_id: str) -> bool:
        """A trainer is done. True when it was the last."""
        shelf = self._shelf
        shelf.barrier.state(model_id)
        shelf.barrier.finish(model_id, shelf.clock())
        await shelf.write(shelf.ledger.put, shelf.versions_meta())
        shelf.event(f"trainer {model_id} is done")
        shelf.pulse.fire()
        return shelf.barrier.all_done

    async def _commit(self, model_id: str, first: int, version: int, metrics: dict[str, float]) -> int:
        """Batches first … version − 1 are trained; what the newest checkpoint holds becomes final."""
        shelf = self._shelf
        state, opened = shelf.barrier.models[model_id], self._serving.open.get(model_id)
        unused = (version - first) * state.batch_size
        if opened is not None and first <= opened.row.version < version:
            del self._serving.open[model_id]
            for entry in opened.fresh:
                shelf.staleness[model_id][opened.row.version - entry.min_version] += entry.rows
            unused -= sum(entry.places for entry in (*opened.fresh, *opened.replayed))
            shelf.buffers[model_id].remember(opened.fresh)
        # a version made from less than a batch opens no more room than it consumed: what is under way stays ≤ (max_staleness + 1) · B
        shelf.buffers[model_id].pace.accepted += unused
        keep = shelf.buffers[model_id].replay_ids
        trained = await shelf.write(
            shelf.ledger.commit, model_id, state.timeline, first, version, state.checkpoint_version, keep, shelf.versions_meta()
        )
        if fallen := shelf.buffers[model_id].fallen():
            await shelf.write(shelf.ledger.forget, model_id, fallen)
        if metrics:
            shelf.steps[model_id] = metrics
        return trained

    async def _roll_back(self, model_id: str, outcome: ReadyOutcome) -> None:
        """Back to an earlier version: rows trained later are buffered again, unless they are stale or of the dead timeline."""
        shelf, buffer = self._shelf, self._shelf.buffers[model_id]
        self._serving.open.pop(model_id, None)
        gone = buffer.discard(lambda e: bool(self._intake.unservable(model_id, e)))
        buffer.forget_replay(lambda e: not shelf.barrier.on_live_timeline(model_id, e.timeline, e.max_version))
        back = await shelf.write(shelf.ledger.rollback, model_id, outcome.version, shelf.versions_meta())
        buffer.forget_replay(lambda e: any(e.lease_id == share.lease_id for share in back))
        settled = [Settled(e.lease_id, model_id, "dropped", self._intake.unservable(model_id, e)) for e in gone]
        for share in back:
            entry = entry_of(share)
            reason = self._intake.unservable(model_id, entry) or ("" if buffer.add(entry) else "no_room")
            if reason:
                settled.append(Settled(share.lease_id, model_id, "dropped", reason))
        await shelf.write(shelf.ledger.settle, settled)
        shelf.reset_pace(model_id, outcome.version, self._intake.held_places(model_id))
        shelf.staleness[model_id].clear()
        shelf.staleness[model_id].update(await shelf.write(shelf.ledger.staleness, model_id))
        shelf.event(f"{model_id}: {len(back)} groups trained after version {outcome.version} are open again, {len(settled)} dropped")

    def _under_way(self, model_id: str) -> int:
        """Places of groups that are held or served."""
        opened = self._serving.open.get(model_id)
        return self._intake.held_places(model_id) + (sum(entry.places for entry in opened.fresh) if opened is not None else 0)
