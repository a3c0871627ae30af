"""What a trainer's /ready, /notify_version and /shutdown do: the barrier decides, the ledger writes, the fleet is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from astraflow.dataflow.barrier import ReadyOutcome
from astraflow.dataflow.buffer import make_entry
from astraflow.dataflow.evals import AT_START
from astraflow.dataflow.fleet import RaaSFleet, agree, no_plain_address
from astraflow.dataflow.intake import Intake
from astraflow.dataflow.journal import Settled
from astraflow.dataflow.policies.curation import Curation
from astraflow.dataflow.serving import DataServing
from astraflow.dataflow.shelf import Shelf
from astraflow.lib.trace import TRACE
from astraflow.protocol.control import NotifyVersion, NotifyVersionReply, Ready, ReadyReply, Shutdown, ShutdownReply
from astraflow.protocol.errors import ConfigError

RequestEval = Callable[[str, int], Awaitable[str]]
"""(why, version that all models should be at) → id of the evaluation, empty when there is nothing to evaluate."""
LONGEST_STAY_S = 30.0
FAREWELL_S = 5.0
"""At the end: a trainer that stays asks again within a call's time; one that was ended meanwhile does not."""


class Trainers:
    """One per service."""

    def __init__(
        self, shelf: Shelf, serving: DataServing, intake: Intake, fleet: RaaSFleet, curation: Curation, request_eval: RequestEval
    ) -> None:
        self._shelf, self._serving, self._intake, self._fleet = shelf, serving, intake, fleet
        self._curation, self._request_eval = curation, request_eval
        self.run_ended = False
        """Set by the service when it ends, and the run with it."""
        self._staying: set[str] = set()
        """Models whose trainer is done and asks when the run ends."""

    async def ready(self, message: Ready) -> ReadyReply:
        """A trainer attaches. The same call again changes nothing."""
        shelf, model_id = self._shelf, message.model_id
        shelf.barrier.state(model_id)
        self._check(message)
        for url in (message.sender_endpoint, *message.more_senders):
            await self._fleet.check_address(url)
        async with self._serving.locks[model_id]:
            state = shelf.barrier.models[model_id]
            before, earlier, unknown = state.version, state.incarnation, not state.digests
            outcome = shelf.barrier.ready(message, shelf.clock())
            if outcome.bumped:
                await self._roll_back(model_id, outcome)
            elif outcome.commit_through is not None:
                await self._commit(model_id, before, outcome.version, {})
            await shelf.write(shelf.ledger.put, shelf.versions_meta())
            if outcome.fresh and not outcome.bumped:
                shelf.reset_pace(model_id, outcome.version, self._under_way(model_id))
        word = "rolled back to" if outcome.bumped else "is ready at"
        taken = f" (process {message.incarnation} takes over from {earlier})" if message.incarnation != earlier and earlier else ""
        shelf.event(f"trainer {model_id} {word} version {outcome.version}, timeline {outcome.timeline}{taken}")
        if unknown and message.recovered_version:
            shelf.event(f"trainer {model_id} resumes at version {message.recovered_version}; this ledger knows nothing of its past")
        self._fleet.announce()
        at_start = False
        if shelf.process.dataflow.eval.at_start and shelf.barrier.all_ready:
            at_start = bool(await self._request_eval(AT_START, -1))
        return ReadyReply(timeline=outcome.timeline, version=outcome.version, eval_at_start=at_start)

    def _check(self, message: Ready) -> None:
        shelf, n = self._shelf, self._shelf.n_samples
        if message.train_batch_size < 1:
            raise ConfigError(f"train_batch_size: {message.train_batch_size} of {message.model_id!r}, expected at least 1")
        if shelf.process.dataflow.buffer.unit == "groups" and (message.train_batch_size < n or message.train_batch_size % n):
            raise ConfigError(f"train_batch_size: {message.train_batch_size} of {message.model_id!r} is not a multiple of n_samples ({n})")
        for url in (message.sender_endpoint, *message.more_senders):
            no_plain_address("sender_endpoint", url, f"trainer {message.model_id!r}", shelf.process.tls)
        for instance in shelf.pool.instances.values():
            record, name = instance.record, message.model_id
            agree("tokenizer_hash", name, instance.instance_id, record.tokenizer_hash.get(name, ""), message.tokenizer_hash)
            agree("template_hash", name, instance.instance_id, record.template_hash.get(name, ""), message.template_hash)

    async def notify(self, message: NotifyVersion) -> NotifyVersionReply:
        """A version is published: commit its batch, then tell the instances. Raises Conflict for a dead timeline."""
        shelf, model_id = self._shelf, message.model_id
        shelf.barrier.claim(model_id, message.incarnation)
        await self._fleet.check_address(message.sender_endpoint)
        if shelf.barrier.touch(model_id, shelf.clock()):
            shelf.event(f"trainer {model_id} is back")
        trained = 0
        async with self._serving.locks[model_id]:
            outcome = shelf.barrier.notify(message, shelf.clock())
            version = shelf.barrier.models[model_id].version
            first = outcome.first if outcome.kind == "new" else version
            trained = await self._commit(model_id, first, version, message.metrics)
        if outcome.skipped:
            shelf.meter.counts["rollout/versions_without_batch"] += outcome.skipped
            shelf.event(f"trainer {model_id} went from version {outcome.first} to {message.version}: no batch was served in between")
        self._fleet.announce()
        eval_id = ""
        if message.run_eval and message.version == version:  # also when the notice is repeated: the same why is the same evaluation
            lines = ", ".join(f"{name} {state.timeline}" for name, state in shelf.barrier.models.items() if state.timeline)
            eval_id = await self._request_eval(f"step {version}" + (f", timeline {lines}" if lines else ""), version)
        return NotifyVersionReply(service_version=shelf.barrier.service_version, trained=trained, eval_id=eval_id)

    async def finish(self, message: Shutdown) -> bool:
        """A trainer is done; the same call again changes nothing. True when every trainer is."""
        shelf = self._shelf
        if shelf.barrier.finish(message.model_id, shelf.clock(), message.incarnation):
            await shelf.write(shelf.ledger.put, shelf.versions_meta())
            shelf.event(f"trainer {message.model_id} is done")
            shelf.pulse.fire()
        return shelf.barrier.all_done

    async def stay(self, message: Shutdown) -> ShutdownReply:
        """Wait at most `wait_s` for the others to be done as well, or for another end of the run."""
        shelf = self._shelf
        if message.wait_s > 0:
            self._staying.add(message.model_id)
        end = shelf.clock() + min(max(message.wait_s, 0.0), LONGEST_STAY_S)
        while not shelf.barrier.all_done and not shelf.stopping and (left := end - shelf.clock()) > 0:
            await shelf.pulse.wait(min(left, 1.0))
            shelf.barrier.claim(message.model_id, message.incarnation)
        waits_for = [model_id for model_id, state in shelf.barrier.models.items() if not state.done]
        if ended := self.run_ended or not waits_for:
            self._staying.discard(message.model_id)
        return ShutdownReply(run_ended=ended, waits_for=waits_for)

    async def farewell(self) -> None:
        """Answer until every trainer that stays knows that the run has ended: it would take a silent Dataflow for a dead one."""
        end = self._shelf.clock() + FAREWELL_S
        while self._staying and self._shelf.clock() < end:
            await asyncio.sleep(0.02)

    async def _commit(self, model_id: str, first: int, version: int, metrics: dict[str, float]) -> int:
        """Batches first … version − 1 are trained; what the newest checkpoint holds becomes final."""
        shelf, begun = self._shelf, time.monotonic()
        state, opened = shelf.barrier.models[model_id], self._serving.open.get(model_id)
        unused = (version - first) * state.batch_size
        if opened is not None and first <= opened.row.version < version:
            del self._serving.open[model_id]
            for entry in opened.fresh:
                shelf.staleness[model_id][opened.row.version - entry.min_version] += entry.rows
            unused -= sum(entry.places for entry in (*opened.fresh, *opened.replayed))
            shelf.flows[model_id].committed(opened.fresh)
            shelf.buffers[model_id].remember(opened.fresh)
        # a version made from less than a batch opens no more room than it consumed: what is under way stays ≤ (max_staleness + 1) · B
        shelf.buffers[model_id].pace.accepted += unused
        keep = shelf.buffers[model_id].replay_ids
        meta = shelf.versions_meta() | (self._curation.moved(model_id, version, shelf.source.state.epoch) if version > first else {})
        trained = await shelf.write(shelf.ledger.commit, model_id, state.timeline, first, version, state.checkpoint_version, keep, meta)
        if fallen := shelf.buffers[model_id].fallen():
            await shelf.write(shelf.ledger.forget, model_id, fallen)
        TRACE.add("commit", begun, model=model_id, version=version)
        if metrics:
            shelf.steps[model_id] = metrics
        return trained

    async def _roll_back(self, model_id: str, outcome: ReadyOutcome) -> None:
        """Back to an earlier version: rows trained later are buffered again, unless they are stale or of the dead timeline."""
        shelf, buffer = self._shelf, self._shelf.buffers[model_id]
        self._serving.open.pop(model_id, None)
        gone = buffer.expire(lambda e: self._intake.unservable(model_id, e))
        buffer.forget_replay(lambda e: not shelf.barrier.on_live_timeline(model_id, e.timeline, e.max_version))
        back = await shelf.write(shelf.ledger.rollback, model_id, outcome.version, shelf.versions_meta())
        again = {share.lease_id for share in back}
        buffer.forget_replay(lambda e: e.lease_id in again)
        settled = [Settled(e.lease_id, model_id, "dropped", reason, e.part) for e, reason in gone]
        for share in back:
            entry = make_entry(share.lease_id, share.arrival, share.stats, buffer.config.unit, share.members)
            reason = self._intake.unservable(model_id, entry) or ("" if buffer.add(entry) else "no_room")
            if reason:
                settled.append(Settled(share.lease_id, model_id, "dropped", reason, share.part))
        await shelf.write(shelf.ledger.settle, settled)
        shelf.reset_pace(model_id, outcome.version, self._intake.held_places(model_id))
        shelf.staleness[model_id].clear()
        shelf.staleness[model_id].update(await shelf.write(shelf.ledger.staleness, model_id))
        shelf.event(f"{model_id}: {len(back)} groups trained after version {outcome.version} are open again, {len(settled)} dropped")

    def _under_way(self, model_id: str) -> int:
        """Places of groups that are held or served."""
        opened = self._serving.open.get(model_id)
        return self._intake.held_places(model_id) + (sum(entry.places for entry in opened.fresh) if opened is not None else 0)
