"""The handlers of DataflowAPI: thin, each leads to the part that knows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from astraflow.dataflow.acquisition import DataAcquisition
from astraflow.dataflow.evals import EvalManager
from astraflow.dataflow.fleet import RaaSFleet
from astraflow.dataflow.intake import Intake
from astraflow.dataflow.serving import DataServing
from astraflow.dataflow.shelf import Shelf
from astraflow.dataflow.stall_guard import StallGuard
from astraflow.dataflow.trainers import Trainers
from astraflow.lib.wire import Handler
from astraflow.protocol.control import (
    ConfigReply,
    DataflowStatus,
    DeregisterRaaS,
    QueueInfo,
    RaaSPool,
    RegisterRaaS,
    RegisterRaaSReply,
    SaveBuffer,
    SaveBufferReply,
    Shutdown,
    ShutdownReply,
)
from astraflow.protocol.message import Empty


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
        """`buffer/…`, `rollout/…`, `reward/…`, `staleness/…` now, for status and metrics.jsonl."""
        shelf, ledger = self._shelf, self._shelf.ledger.snapshot
        values: dict[str, float] = {f"{name}": float(count) for name, count in sorted(shelf.meter.counts.items())}
        values |= {f"rollout/{name}": value for name, value in shelf.meter.rates(shelf.clock()).items()}
        values |= {f"rollout/dropped/{reason}": float(count) for reason, count in ledger.dropped.items()}
        values |= {"rollout/made": float(ledger.made), "rollout/trained": float(ledger.trained)}
        source = shelf.source.state
        values |= {"rollout/curator_skipped": float(source.skipped), "rollout/curator_forced": float(source.forced)}
        values["buffer/in_flight_trajectories"] = float(shelf.groups_in_flight * shelf.n_samples)
        values["buffer/room"] = float(self._acquisition.room())
        for model_id, buffer in shelf.buffers.items():
            values[f"buffer/groups/{model_id}"] = float(len(buffer))
            values |= {f"{name}/{model_id}": value for name, value in shelf.flows[model_id].totals().items()}
            trained = shelf.staleness[model_id]
            if trained:
                values[f"staleness/mean/{model_id}"] = sum(g * c for g, c in trained.items()) / max(sum(trained.values()), 1)
        if shelf.meter.reward_mean is not None:
            values["reward/rollout_mean"] = shelf.meter.reward_mean
        return values

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

    async def shutdown(self, request: Shutdown) -> ShutdownReply:
        if not request.model_id:
            self._finish(request.reason or "asked to end")
            return ShutdownReply(run_ended=True)
        if await self._trainers.finish(request):
            self._finish("every trainer is done")
        return await self._trainers.stay(request)
