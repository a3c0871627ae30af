"""The handlers of `RaaSAPI`: thin; each names who decides. None of them does I/O in the loop, so `/status` answers at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from astraflow.lib.wire import Handler
from astraflow.protocol.control import Availability, RaaSStatus, Shutdown
from astraflow.protocol.errors import Conflict, Unavailable, UnknownName
from astraflow.protocol.message import Empty, Message
from astraflow.protocol.rollout import (
    CancelLeases,
    Delivery,
    EvalEnd,
    EvalStart,
    Leases,
    Pull,
    PullReply,
    RegisterWorkflow,
    RegisterWorkflowReply,
    ResetEngine,
    ResetEngineReply,
    Submit,
    SubmitReply,
)
from astraflow.protocol.weights import NotifyRaaS, NotifyRaaSReply

if TYPE_CHECKING:
    from astraflow.raas.service import RaaSManager

LANE_WAITS_FOR_LOAD_S = 20.0
"""How long /eval_start waits for a load that is going on before it asks to be called again."""


class Handlers:
    """One method per route."""

    def __init__(self, manager: RaaSManager) -> None:
        self._raas = manager

    def table(self) -> dict[str, Handler]:
        """Route name → handler."""
        names = (
            "status availability register_workflow submit pull leases cancel notify_version reset_training_engine "
            "eval_start eval_submit eval_pull eval_end media record shutdown"
        )
        return {name: getattr(self, name) for name in names.split()}

    def _dataflow(self, request: Message) -> None:
        """Only Dataflow makes this call."""
        self._raas.heard(request.incarnation, True)

    async def status(self, request: Empty) -> RaaSStatus:
        self._raas.heard(request.incarnation, False)
        return self._raas.status()

    async def availability(self, request: Empty) -> Availability:
        self._raas.heard(request.incarnation, False)
        return self._raas.availability()

    async def register_workflow(self, request: RegisterWorkflow) -> RegisterWorkflowReply:
        self._dataflow(request)
        await asyncio.to_thread(self._raas.programs.preload, request.spec)
        self._raas.programs.register(request)
        return RegisterWorkflowReply(workflow_id=request.workflow_id, total_workflows=len(self._raas.programs))

    async def submit(self, request: Submit) -> SubmitReply:
        self._dataflow(request)
        if request.lane:
            raise Conflict(f"lane {request.lane!r}: /submit takes training leases; use /eval_submit")
        return self._submitted(request)

    def _submitted(self, request: Submit) -> SubmitReply:
        verdicts = self._raas.executor.submit(request.leases, request.lane)
        return SubmitReply(verdicts=verdicts, free_slots=self._raas.executor.slots.free_slots, serving=self._raas.serving())

    async def pull(self, request: Pull) -> PullReply:
        self._dataflow(request)
        if request.lane:
            raise Conflict(f"lane {request.lane!r}: /pull gives training results; use /eval_pull")
        return self._pulled(*await self._raas.executor.pull(request, ""))

    def _pulled(self, deliveries: list[Delivery], waiting: int) -> PullReply:
        slots = self._raas.executor.slots
        return PullReply(
            deliveries=deliveries, free_slots=slots.free_slots, in_flight=slots.in_flight, waiting=waiting, serving=self._raas.serving()
        )

    async def leases(self, request: Empty) -> Leases:
        self._dataflow(request)
        return Leases(held=self._raas.executor.slots.listing())

    async def cancel(self, request: CancelLeases) -> Empty:
        self._dataflow(request)
        self._raas.executor.cancel(request.lease_ids)
        return Empty()

    async def notify_version(self, request: NotifyRaaS) -> NotifyRaaSReply:
        self._dataflow(request)
        outcome = await self._raas.sync_of(request.model_id).notice(request)
        return NotifyRaaSReply(state=outcome.state, message=outcome.message, serving=self._raas.serving())

    async def reset_training_engine(self, request: ResetEngine) -> ResetEngineReply:
        self._dataflow(request)
        return ResetEngineReply(cancelled=await self._raas.executor.reset_training(request.deadline_s))

    async def eval_start(self, request: EvalStart) -> Empty:
        self._dataflow(request)
        syncs = {model_id: self._raas.sync_of(model_id) for model_id in request.versions}
        await asyncio.gather(*(sync.load_ended(LANE_WAITS_FOR_LOAD_S) for sync in syncs.values()))
        # All at the same moment, after the waits: while one model was waited for, another one may have begun to load.
        loading = [model_id for model_id, sync in syncs.items() if sync.loading]
        if loading:
            raise Unavailable(f"lane {request.lane!r}: {', '.join(loading)} is loading weights; try again")
        self._raas.open_lane(request)
        return Empty()

    async def eval_submit(self, request: Submit) -> SubmitReply:
        self._dataflow(request)
        self._raas.lanes.check(request.lane)
        return self._submitted(request)

    async def eval_pull(self, request: Pull) -> PullReply:
        self._dataflow(request)
        return self._pulled(*await self._raas.executor.pull(request, request.lane, lambda: self._raas.lanes.check(request.lane)))

    async def eval_end(self, request: EvalEnd) -> Empty:
        """Ending a lane twice is fine: the first reply may have been lost."""
        self._dataflow(request)
        self._raas.close_lane(request.lane, "ended")
        return Empty()

    async def media(self, ref: str) -> bytes:
        raise UnknownName(f"media {ref!r}: this instance holds none")

    async def record(self, ref: str) -> bytes:
        return await asyncio.to_thread(self._raas.records.load, ref)

    async def shutdown(self, request: Shutdown) -> Empty:
        self._raas.stop(request.reason or "/shutdown", request.deadline_s, request.incarnation)
        return Empty()
