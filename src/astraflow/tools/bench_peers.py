"""The processes of `astraflow bench dataflow` besides its trainer: `python -m astraflow.tools.bench_peers raas|dataflow …`.

A rollout service here is a script: its trajectories are made of their lease's seed, their index and the version that they are
stamped with, so that whoever gets them can make them again and compare every token. It must cost little, because all processes
share the machine with the Dataflow that is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from astraflow.dataflow import ledger, service
from astraflow.dataflow.config import DataflowProcess
from astraflow.dataflow.journal import BatchRow, LeaseRow, Result, Settled
from astraflow.dataflow.policies.base import GroupStats
from astraflow.dataflow.surroundings import MACHINE
from astraflow.lib.wire import Handler, Identity, Server, new_identity
from astraflow.lib.wire_client import Client
from astraflow.protocol import codec, control, rollout, weights
from astraflow.protocol.errors import Conflict, Retryable
from astraflow.protocol.message import Empty, Message
from astraflow.protocol.routes import DataflowAPI, RaaSAPI

RUN_ID = "bench"
MODEL = "default"
PROMPT_SHARE = 8
"""One token of so many belongs to the prompt."""
STEP, MIX = np.uint64(0x9E3779B97F4A7C15), (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))

Array = npt.NDArray[Any]


# --- contents -----------------------------------------------------------------------------------------------------------


def keys(seeds: npt.ArrayLike, indices: npt.ArrayLike, versions: npt.ArrayLike) -> Array:
    """uint64 per trajectory (splitmix64 of its lease's seed, its index and its version): everything else follows from it."""
    mixed = (
        np.asarray(seeds, np.uint64) * np.uint64(64) + np.asarray(indices, np.uint64) + (np.asarray(versions, np.uint64) << np.uint64(44))
    )
    mixed = mixed * STEP
    mixed = (mixed ^ (mixed >> np.uint64(30))) * MIX[0]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * MIX[1]
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


def contents(key: Array, tokens: int) -> tuple[Array, Array]:
    """(input ids int32, log-probs float32), [len(key), tokens] each; log-probs of the prompt are 0."""
    mixed = key[:, None] + np.arange(tokens, dtype=np.uint64) * STEP
    mixed ^= mixed >> np.uint64(29)
    mixed *= MIX[0]
    ids = (mixed >> np.uint64(49)).astype(np.int32)
    logprobs = ((mixed >> np.uint64(33)) & np.uint64(0xFFFF)).astype(np.float32) * np.float32(-(2.0**-16))
    logprobs[:, : tokens // PROMPT_SHARE] = 0.0
    return ids, logprobs


def rewards(key: Array) -> Array:
    """float64 in [0, 1), exact in float32."""
    return (key >> np.uint64(52)).astype(np.float64) / 4096.0


def encoded_group(lease: rollout.Lease, serving: rollout.Serving, tokens: int) -> bytes:
    """The result of a lease, stamped with what was served."""
    prompt = tokens // PROMPT_SHARE
    key = keys([lease.seed], range(lease.n_samples), [serving.version])
    (ids, logprobs), values = contents(key, tokens), rewards(key).tolist()
    mask, versions = np.ones(tokens, np.uint8), np.full(tokens, serving.version, np.int32)
    mask[:prompt], versions[:prompt] = 0, -1
    shape = (tokens,)
    mask_column, version_column = codec.Column("uint8", shape, mask.tobytes()), codec.Column("int32", shape, versions.tobytes())
    trajectories = [
        rollout.Trajectory(
            index=index,
            segments=[
                rollout.Segment(
                    policies=[MODEL],
                    input_ids=codec.Column("int32", shape, ids[index].tobytes()),
                    loss_mask=mask_column,
                    logprobs=codec.Column("float32", shape, logprobs[index].tobytes()),
                    versions=version_column,
                )
            ],
            reward=values[index],
        )
        for index in range(lease.n_samples)
    ]
    span = rollout.VersionSpan(timeline=serving.timeline, min=serving.version, max=serving.version)
    return codec.encode(
        rollout.Group(
            lease_id=lease.lease_id, attempt=lease.attempt, task_id=lease.task_id, versions={MODEL: span}, trajectories=trajectories
        )
    )


# --- rollout service ----------------------------------------------------------------------------------------------------


@dataclass
class BenchRaaS:
    """Leases in, groups out as fast as they are pulled; loads are instant."""

    instance_id: str
    identity: Identity
    slots: int
    tokens: int
    serving: dict[str, rollout.Serving] = field(default_factory=dict)
    workflows: list[str] = field(default_factory=list)
    queue: deque[tuple[rollout.Lease, rollout.Serving]] = field(default_factory=deque)
    """Accepted leases, with what was served then."""
    outbox: dict[str, rollout.Delivery] = field(default_factory=dict)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    work: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def in_flight(self) -> int:
        return sum(lease.n_samples for lease, _ in self.queue)

    def handlers(self) -> dict[str, Handler]:
        served: dict[str, Handler] = {
            "status": self.status, "availability": self.availability, "register_workflow": self.register_workflow,
            "submit": self.submit, "pull": self.pull, "leases": self.leases, "cancel": self.cancel,
            "notify_version": self.notify_version, "shutdown": self.shutdown,
        }  # fmt: skip
        others = ("reset_training_engine", "eval_start", "eval_submit", "eval_pull", "eval_end", "media", "record")
        return served | dict.fromkeys(others, self.refuse)

    async def refuse(self, request: Message | str) -> NoReturn:
        raise Conflict(f"{self.instance_id} is a script of the bench and does not do this")

    async def availability(self, request: Empty) -> control.Availability:
        busy = self.in_flight
        return control.Availability(total_slots=self.slots, free_slots=self.slots - busy, in_flight=busy, outbox=len(self.outbox))

    async def status(self, request: Empty) -> control.RaaSStatus:
        return control.RaaSStatus(
            instance_id=self.instance_id, state="ready", availability=await self.availability(request), models=[MODEL],
            serving=self.serving, engines={}, workflows=self.workflows,
        )  # fmt: skip

    async def register_workflow(self, request: rollout.RegisterWorkflow) -> rollout.RegisterWorkflowReply:
        self.workflows.append(request.workflow_id)
        return rollout.RegisterWorkflowReply(workflow_id=request.workflow_id, total_workflows=len(self.workflows))

    async def submit(self, request: rollout.Submit) -> rollout.SubmitReply:
        free, verdicts = self.slots - self.in_flight, []
        for lease in request.leases:
            fits = lease.n_samples <= free
            if fits:
                free -= lease.n_samples
                self.queue.append((lease, self.serving[MODEL]))
            verdicts.append(rollout.LeaseVerdict(lease_id=lease.lease_id, verdict="accepted" if fits else "over_capacity"))
        self.work.set()
        return rollout.SubmitReply(verdicts=verdicts, free_slots=free, serving=self.serving)

    async def pull(self, request: rollout.Pull) -> rollout.PullReply:
        for delivery_id in request.ack:
            self.outbox.pop(delivery_id, None)
        end = time.monotonic() + request.wait_s
        while not self.queue and not self.outbox and (left := end - time.monotonic()) > 0:
            self.work.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.work.wait(), left)
        while self.queue and len(self.outbox) < request.max_items:
            lease, serving = self.queue.popleft()
            delivery_id = f"{lease.lease_id}/{lease.attempt}"
            self.outbox[delivery_id] = rollout.Delivery(
                delivery_id=delivery_id, lease_id=lease.lease_id, attempt=lease.attempt,
                group=msgspec.Raw(encoded_group(lease, serving, self.tokens)),
            )  # fmt: skip
        busy = self.in_flight
        return rollout.PullReply(
            deliveries=list(self.outbox.values())[: request.max_items], free_slots=self.slots - busy, in_flight=busy, waiting=0,
            serving=self.serving,
        )  # fmt: skip

    async def leases(self, request: Empty) -> rollout.Leases:
        held = [rollout.HeldLease(lease_id=lease.lease_id, attempt=lease.attempt, state="running") for lease, _ in self.queue]
        held += [rollout.HeldLease(lease_id=d.lease_id, attempt=d.attempt, state="done") for d in self.outbox.values()]
        return rollout.Leases(held=held)

    async def cancel(self, request: rollout.CancelLeases) -> Empty:
        gone = set(request.lease_ids)
        self.queue = deque(item for item in self.queue if item[0].lease_id not in gone)
        self.outbox = {key: delivery for key, delivery in self.outbox.items() if delivery.lease_id not in gone}
        return Empty()

    async def notify_version(self, request: weights.NotifyRaaS) -> weights.NotifyRaaSReply:
        self.serving = {request.model_id: rollout.Serving(timeline=request.timeline, version=request.version, digest=request.digest)}
        return weights.NotifyRaaSReply(state="loaded", serving=self.serving)

    async def shutdown(self, request: control.Shutdown) -> Empty:
        self.ended.set()
        return Empty()

    async def serve(self, dataflow: str) -> None:
        """Register, and work until /shutdown."""
        server = Server(self.instance_id, RaaSAPI, self.handlers(), self.identity)
        await server.start()
        request = control.RegisterRaaS(instance_id=self.instance_id, url=server.url, models=[MODEL], total_slots=self.slots)
        async with Client(dataflow, self.identity) as client:
            while True:
                try:
                    await client.call(DataflowAPI.register_raas, request, timeout_s=30.0)
                    break
                except Retryable:  # Dataflow is slow to start on a busy machine
                    await asyncio.sleep(0.1)
        await self.ended.wait()
        await server.stop(1.0)


# --- Dataflow without its ledger ----------------------------------------------------------------------------------------


class MemoryLedger(ledger.Ledger):
    """Writes nothing and keeps what the bench's job asks for in memory: what a run with it is faster by is what the ledger costs."""

    def __init__(self, directory: Path, segment_bytes: int) -> None:
        super().__init__(directory, segment_bytes)
        self._payloads: dict[str, bytes] = {}
        self._stats: dict[str, GroupStats] = {}
        self._where: dict[str, str] = {}
        """Lease → state of its share; nothing is known of it once it has ended."""
        self._served: dict[int, list[str]] = {}

    def issue(self, leases: Sequence[LeaseRow], meta: dict[str, bytes]) -> None:
        places = sum(lease.n_samples for lease in leases)
        self._made += places
        self._states["leased"] += places
        self.snapshot = self.counts()

    def record(self, results: Sequence[Result], *_: Any) -> None:
        for result in results:
            for share in result.shares:
                assert share.stats is not None
                assert not share.lost
                self._go(share.stats.n_samples, "leased", share.state, share.reason)
                if share.state != "dropped":
                    self._payloads[result.lease_id], self._stats[result.lease_id] = result.payload, share.stats
                    self._where[result.lease_id] = share.state
        self.snapshot = self.counts()

    def settle(self, items: Sequence[Settled], *_: Any) -> None:
        for item in items:
            self._go(self._stats[item.lease_id].n_samples, self._where[item.lease_id], item.state, item.reason)
            self._where[item.lease_id] = item.state
            if item.state == "dropped":
                self._forget(item.lease_id)
        self.snapshot = self.counts()

    def serve(self, batch: BatchRow, payload: Any, *_: Any) -> None:
        fresh = self._served[batch.version] = [pick.lease_id for pick in batch.fresh]
        self._go(sum(self._stats[lease_id].n_samples for lease_id in fresh), "buffered", "served")
        self.snapshot = self.counts()

    def shares_of(self, policy: str, lease_ids: Sequence[str]) -> dict[str, GroupStats]:
        return {lease_id: self._stats[lease_id] for lease_id in lease_ids}

    def payload(self, lease_id: str) -> bytes:
        return self._payloads[lease_id]

    def commit(
        self, policy: str, timeline: int, first: int, version: int, checkpoint: int, keep: set[str], meta: dict[str, bytes], *_: Any
    ) -> int:
        trained = 0
        for name in range(first, version):
            for lease_id in self._served.pop(name, []):
                trained += self._stats[lease_id].n_samples
                self._forget(lease_id)
        self._go(trained, "served", "trained")
        self.snapshot = self.counts()
        return trained

    def put(self, meta: dict[str, bytes]) -> None:
        """Nothing here outlives the process."""

    def check(self) -> control.LedgerCounts:
        return self.counts()

    def _forget(self, lease_id: str) -> None:
        del self._payloads[lease_id], self._stats[lease_id], self._where[lease_id]

    def _go(self, places: int, before: str, after: str, reason: str = "") -> None:
        self._states[before] -= places
        if after == "dropped":
            self._dropped[reason] += places
        else:
            self._states[after] += places


# --- main ---------------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench_peers", description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    raas = parts.add_parser("raas")
    raas.add_argument("--dataflow", required=True)
    raas.add_argument("--instance", required=True)
    raas.add_argument("--slots", type=int, required=True)
    raas.add_argument("--tokens", type=int, required=True)
    dataflow = parts.add_parser("dataflow")
    dataflow.add_argument("process", type=Path)
    dataflow.add_argument("--without-ledger", action="store_true")
    given = parser.parse_args(arguments)
    if given.part == "dataflow":
        process = msgspec.json.decode(given.process.read_bytes(), type=DataflowProcess)
        return service.run(process, replace(MACHINE, ledger=MemoryLedger) if given.without_ledger else MACHINE)
    asyncio.run(BenchRaaS(given.instance, new_identity(RUN_ID), given.slots, given.tokens).serve(given.dataflow))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
