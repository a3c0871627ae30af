"""The handlers of DataflowAPI: thin, each leads to the part that knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, get_args

from astraflow.dataflow.acquisition import DataAcquisition
from astraflow.dataflow.evals import EvalManager
from astraflow.dataflow.fleet import RaaSFleet
from astraflow.dataflow.intake import Intake
from astraflow.dataflow.pool import InstanceState
from astraflow.dataflow.serving import DataServing
from astraflow.dataflow.shelf import Shelf
from astraflow.dataflow.stall_guard import StallGuard
from astraflow.dataflow.trainers import Trainers
from astraflow.lib.prometheus import Exposition, Histogram
from astraflow.lib.wire import Handler
from astraflow.protocol.control import (
    ConfigReply,
    DataflowStatus,
    DeregisterRaaS,
    QueueInfo,
    RaaSPool,
    RegisterRaaS,
    RegisterRaaSReply,
    RunEval,
    RunEvalReply,
    SaveBuffer,
    SaveBufferReply,
    SaveCheckpoint,
    SaveCheckpointReply,
    SetAcquisition,
    Shutdown,
    ShutdownReply,
)
from astraflow.protocol.errors import Conflict
from astraflow.protocol.message import Empty
from astraflow.protocol.metrics import DATAFLOW


class Handlers:
    """The routes: those that a part answers by itself, and one method for each of the others."""

    def __init__(
        self,
        shelf: Shelf,
        fleet: RaaSFleet,
        acquisition: DataAcquisition,
        intake: Intake,
        serving: DataServing,
        trainers: Trainers,
        evals: EvalManager,
        guard: StallGuard,
        save: Callable[[], Awaitable[str]],
        finish: Callable[[str], None],
    ) -> None:
        self._shelf, self._fleet, self._acquisition, self._intake = shelf, fleet, acquisition, intake
        self._serving, self._trainers, self._evals = serving, trainers, evals
        self._guard, self._save, self._finish = guard, save, finish
        self._exposition = Exposition(DATAFLOW, {"process": "dataflow"})

    def table(self) -> dict[str, Handler]:
        """Route name → handler."""
        return {
            "status": self.status,
            "config": self.config,
            "register_raas": self.register_raas,
            "deregister_raas": self.deregister_raas,
            "raas_pool": self.raas_pool,
            "ready": self._trainers.ready,
            "batch": self._serving.batch,
            "notify_version": self._trainers.notify,
            "eval_results": self._evals.answer,
            "save_buffer": self.save_buffer,
            "acquisition": self.acquisition,
            "checkpoint": self.checkpoint,
            "run_eval": self.run_eval,
            "shutdown": self.shutdown,
        }

    async def status(self, request: Empty) -> DataflowStatus:
        return self.now()

    def now(self) -> DataflowStatus:
        """From memory only: answers at once whatever goes on."""
        shelf, now = self._shelf, self._shelf.clock()
        state, message = "ready", ""
        if shelf.stopping:
            state, message = "draining", shelf.stalled
        elif not shelf.started:
            state, message = "starting", "acquisition has not begun"
        return DataflowStatus(
            state=state,  # type: ignore[arg-type]  # one of the three words above
            message=message,
            uptime_s=now - shelf.meter.started,
            service_version=shelf.barrier.service_version,
            started=shelf.started,
            trainers=shelf.barrier.info(now),
            instances=shelf.pool.info(now),
            queues={model_id: self._queue(model_id) for model_id in shelf.buffers},
            ledger=shelf.ledger.snapshot,
            waits=self._guard.edges(),
            rates=shelf.meter.rates(now),
            metrics=self.numbers(),
            tasks_drawn=shelf.source.state.drawn,
            epoch=shelf.source.state.epoch,
            staleness={model_id: dict(sorted(gaps.items())) for model_id, gaps in shelf.staleness.items()},
            steps=shelf.steps,
            events=list(shelf.events),
            idle_s=self._guard.idle_s,
            stall_s=shelf.process.dataflow.stall_s,
            recent_drops=shelf.ledger.recent_drops,
            paused=shelf.paused,
        )

    def _queue(self, model_id: str) -> QueueInfo:
        buffer, opened = self._shelf.buffers[model_id], self._serving.open.get(model_id)
        return QueueInfo(
            fresh_groups=len(buffer),
            fresh_trajectories=buffer.trajectories,
            replay_groups=buffer.replay_groups,
            held_groups=self._intake.held_groups(model_id),
            served=sum(entry.rows for entry in opened.fresh) if opened is not None else 0,
        )

    def numbers(self) -> dict[str, float]:
        """Everything that has a number now, for status, metrics.jsonl and /metrics; names and meaning in `protocol/metrics.py`."""
        shelf, ledger = self._shelf, self._shelf.ledger.snapshot
        values: dict[str, float] = {f"{name}": float(count) for name, count in sorted(shelf.meter.counts.items())}
        values |= {f"rollout/{name}": value for name, value in shelf.meter.rates(shelf.clock()).items()}
        values |= {f"rollout/dropped/{reason}": float(count) for reason, count in ledger.dropped.items()}
        values |= {"rollout/made": float(ledger.made), "rollout/trained": float(ledger.trained), "rollout/replayed": float(ledger.replayed)}
        values |= {f"rollout/in_flight/{state}": float(count) for state, count in ledger.in_flight.items()}
        source = shelf.source.state
        values |= {"rollout/curator_skipped": float(source.skipped), "rollout/curator_forced": float(source.forced)}
        values["buffer/in_flight_trajectories"] = float(shelf.groups_in_flight * shelf.n_samples)
        values["buffer/room"] = float(self._acquisition.room())
        values |= {"time/idle_s": self._guard.idle_s, "time/uptime_s": shelf.clock() - shelf.meter.started}
        states = Counter(instance.state for instance in shelf.pool.instances.values())
        values |= {f"raas/instances/{state}": float(states[state]) for state in get_args(InstanceState)}
        for model_id in shelf.buffers:
            queue, model = self._queue(model_id), shelf.barrier.models[model_id]
            values |= {f"buffer/{name}/{model_id}": float(getattr(queue, name)) for name in QueueInfo.__struct_fields__}
            values[f"policy/version/{model_id}"] = float(model.version)
            values[f"policy/checkpoint_version/{model_id}"] = float(model.checkpoint_version)
            values[f"policy/timeline/{model_id}"] = float(model.timeline)
            values |= {f"{name}/{model_id}": value for name, value in shelf.flows[model_id].totals().items()}
            trained = shelf.staleness[model_id]
            if trained:
                values[f"staleness/mean/{model_id}"] = sum(g * c for g, c in trained.items()) / max(sum(trained.values()), 1)
        if shelf.meter.reward_mean is not None:
            values["reward/rollout_mean"] = shelf.meter.reward_mean
        return values

    def prometheus(self) -> str:
        """The same for `GET /metrics`, and the staleness of all that was trained as a histogram."""
        gaps = [Histogram("staleness/trained/{model}", {"model": name}, counts) for name, counts in self._shelf.staleness.items() if counts]
        return self._exposition.text(self.numbers(), gaps)

    async def config(self, request: Empty) -> ConfigReply:
        shown: dict[str, Any] = {key: value for key, value in self._shelf.process.experiment.items() if key != "plugins"}
        return ConfigReply(config=shown)

    async def register_raas(self, request: RegisterRaaS) -> RegisterRaaSReply:
        await self._fleet.join(request)
        return RegisterRaaSReply(instance_id=request.instance_id, pool_size=len(self._shelf.pool.instances))

    async def deregister_raas(self, request: DeregisterRaaS) -> Empty:
        await self._fleet.leave(request.instance_id, request.drain, request.shutdown)
        return Empty()

    async def raas_pool(self, request: Empty) -> RaaSPool:
        return RaaSPool(instances=self._shelf.pool.info(self._shelf.clock()))

    async def save_buffer(self, request: SaveBuffer) -> SaveBufferReply:
        return SaveBufferReply(path=await self._save())

    async def acquisition(self, request: SetAcquisition) -> Empty:
        if request.paused != self._shelf.paused:
            self._shelf.paused = request.paused
            self._shelf.event("acquisition paused by an operator" if request.paused else "acquisition goes on")
            self._shelf.pulse.fire()
        return Empty()

    async def checkpoint(self, request: SaveCheckpoint) -> SaveCheckpointReply:
        versions = self._shelf.barrier.want_checkpoint(request.model_id)
        if versions:
            asked = ", ".join(f"{name} at version {version}" for name, version in versions.items())
            self._shelf.event(f"an operator asks for a checkpoint of {asked}")
            self._shelf.pulse.fire()
        return SaveCheckpointReply(versions=versions)

    async def run_eval(self, request: RunEval) -> RunEvalReply:
        if not self._shelf.barrier.all_ready:
            raise Conflict("run_eval: the expected trainers are not ready, so no weights are published yet")
        models = self._shelf.barrier.models.values()
        why = "operator " + " ".join(f"{state.model_id} v{state.version}@{state.timeline}" for state in models)
        return RunEvalReply(eval_id=await self._evals.request(why))

    async def shutdown(self, request: Shutdown) -> ShutdownReply:
        if not request.model_id:
            self._finish(request.reason or "asked to end")
            return ShutdownReply(run_ended=True)
        if await self._trainers.finish(request):
            self._finish("every trainer is done")
        return await self._trainers.stay(request)
