"""The I/O of the pool: heartbeats, catch-up, notices, receipts, reconciliation. `pool` and `barrier` decide, this calls.

Per instance one keeper task (introduces the workflows, then collects) and one notifier per model (sends the newest version
at once, again with back-off as long as the instance is behind; a newer notice replaces an older one that still waits).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from astraflow.dataflow.pool import Held, Instance
from astraflow.dataflow.shelf import Pulse, Shelf
from astraflow.lib.aio import Backoff
from astraflow.lib.wire_client import Client
from astraflow.protocol.control import RaaSStatus, RegisterRaaS, Shutdown
from astraflow.protocol.errors import AstraFlowError, ConfigError, Unavailable
from astraflow.protocol.message import Message
from astraflow.protocol.rollout import CancelLeases, RegisterWorkflow, Serving, WorkflowSpec
from astraflow.protocol.routes import RaaSAPI, Route
from astraflow.protocol.weights import NotifyRaaS

Q = TypeVar("Q", bound=Message)
P = TypeVar("P", bound=Message)

SUSPECT_BEAT_S = 1.0
"""Pause between checks while somebody is suspect: two failures take an instance out within seconds."""
NOTICE_WAIT_S = 10.0
"""An instance answers a notice when it loaded, or after this time."""
SILENT_TRIES = 3
RECONCILE_AFTER_S = 10.0
"""Leases older than this are compared with the instance's own list at each heartbeat."""

Lost = Callable[[Iterable[Held], str], Awaitable[None]]


class Peer(Client):
    """One instance. It may leave the pool between two calls of whoever holds this; then it is unavailable, like a dead one."""

    left = False

    async def call(self, route: Route[Q, P], request: Q | None = None, *, timeout_s: float, ref: str = "") -> P:
        if self.left:
            raise Unavailable(f"{route.path} at {self.url}: the instance left the pool")
        return await super().call(route, request, timeout_s=timeout_s, ref=ref)

    async def close(self) -> None:
        self.left = True
        await super().close()


class RaaSFleet:
    """All instances of the pool."""

    def __init__(self, shelf: Shelf, workflows: dict[str, WorkflowSpec]) -> None:
        self._shelf, self._workflows = shelf, workflows
        self._clients: dict[str, Peer] = {}
        self._running: dict[str, list[asyncio.Task[None]]] = {}
        self._introduced: dict[str, str] = {}
        """Instance → incarnation that knows the workflows."""
        self._silent: dict[str, int] = {}
        """Url → registrations in a row to which it did not answer."""
        self._reconciling: set[str] = set()
        """Instances whose list of leases is being asked for."""
        self._wake = Pulse()
        self._kicks: dict[tuple[str, str], asyncio.Event] = {}
        self.pins: dict[str, dict[str, Serving]] = {}
        """Instance → versions that an evaluation wants there; newer notices wait."""
        self.on_lost: Lost
        """Set by the service: what to do with leases of an instance that died."""
        self.collect: Callable[[str], Awaitable[None]]
        """Set by the service: one collect loop."""
        self.on_joined: Callable[[], None]
        """Set by the service: an instance is new in the pool, and nothing was sent to it yet."""

    # --- what others need -----------------------------------------------------------------------------------------------

    def client(self, instance_id: str) -> Client | None:
        return self._clients.get(instance_id)

    def trouble(self, instance_id: str, reason: str) -> None:
        """A data-path call failed: no new work until its own /status says otherwise."""
        if self._shelf.pool.suspect(instance_id, reason):
            self._shelf.event(f"instance {instance_id} is suspect: {reason}")
            self._wake.fire()

    def receipts(self, instance_id: str, serving: dict[str, Serving]) -> None:
        """What an instance says it serves, from any of its replies."""
        shelf = self._shelf
        if instance_id not in shelf.pool.instances or serving == (before := shelf.pool.instances[instance_id].serving):
            return
        shelf.pool.served(instance_id, serving)
        if any(model_id in before and receipt.timeline > before[model_id].timeline for model_id, receipt in serving.items()):
            self._ask_leases(instance_id)  # it dropped what the dead timeline was producing
        for model_id, receipt in serving.items():
            complaint = shelf.barrier.receipt(instance_id, model_id, receipt)
            if complaint:
                shelf.event(complaint)
        self._caught_up()
        shelf.pulse.fire()

    def announce(self) -> None:
        """Versions or pins changed: every notifier looks again."""
        for kick in self._kicks.values():
            kick.set()
        self._caught_up()
        self._shelf.pulse.fire()

    def _caught_up(self) -> None:
        shelf = self._shelf
        if not shelf.barrier.all_ready:
            return
        for instance_id in shelf.pool.catch_up(self._is_current):
            shelf.event(f"instance {instance_id} is live at the current versions")

    def introduced(self, instance_id: str) -> bool:
        """This process of the instance knows the workflows."""
        instance = self._shelf.pool.instances.get(instance_id)
        return instance is not None and self._introduced.get(instance_id) == instance.record.incarnation

    def _is_current(self, instance: Instance) -> bool:
        """It knows the workflows and serves the newest weights of all trained models that it has."""
        trained = [m for m in instance.record.models if m in self._shelf.barrier.models]
        return self.introduced(instance.instance_id) and all(self._shelf.barrier.is_current(m, instance.serving.get(m)) for m in trained)

    # --- joining and leaving --------------------------------------------------------------------------------------------

    async def join(self, message: RegisterRaaS) -> None:
        """A rollout service registers. Raises ConfigError when it cannot take part or its url does not answer."""
        shelf = self._shelf
        self._check(message)
        client = Client(message.url, shelf.identity)
        try:
            status = await client.call(RaaSAPI.status, timeout_s=shelf.process.dataflow.pool.status_timeout_s)
        except AstraFlowError as error:
            raise self._unanswered(message, error) from None
        finally:
            await client.close()
        self._silent.pop(message.url, None)
        if status.instance_id != message.instance_id:
            raise ConfigError(f"url: {message.url} answers as instance {status.instance_id!r}, not as {message.instance_id!r}")
        outcome = shelf.pool.register(message, shelf.clock())
        if outcome.kind != "same":
            shelf.barrier.forget_instance(message.instance_id)
            self._introduced.pop(message.instance_id, None)
            again = " again as a new process" if outcome.kind == "replaced" else ""
            shelf.event(f"instance {message.instance_id} joined{again} with {message.total_slots} slots at {message.url}")
        self.on_joined()
        await self.on_lost(outcome.lost, f"{message.instance_id} came back as a new process")
        await self.open(shelf.pool.instances[message.instance_id])
        await shelf.write(shelf.ledger.put, shelf.pool_meta())
        self._answered(message.instance_id, status)
        if outcome.kind != "same":
            shelf.tasks.spawn(f"introduce {message.instance_id}", self._introduce(message.instance_id))
            self._ask_leases(message.instance_id)

    def _unanswered(self, message: RegisterRaaS, error: AstraFlowError) -> AstraFlowError:
        """A busy machine may miss one deadline; an address that is silent three times is a mistake of the user."""
        self._silent[message.url] = self._silent.get(message.url, 0) + 1
        text = f"url: {message.url} of instance {message.instance_id!r} does not answer /status: {error}"
        if self._silent[message.url] < SILENT_TRIES:
            return Unavailable(text)
        del self._silent[message.url]
        return ConfigError(text)

    def _check(self, message: RegisterRaaS) -> None:
        process = self._shelf.process
        missing = [policy for policy in process.policies if policy not in message.models]
        if missing:
            raise ConfigError(f"models: instance {message.instance_id!r} serves {message.models}, the workflow needs {missing[0]!r} too")
        if message.total_slots < self._shelf.n_samples:
            raise ConfigError(
                f"total_slots: {message.total_slots} of {message.instance_id!r} is less than a group ({self._shelf.n_samples})"
            )
        for name, state in self._shelf.barrier.models.items():
            agree("tokenizer_hash", name, message.instance_id, message.tokenizer_hash.get(name, ""), state.tokenizer_hash)
            agree("template_hash", name, message.instance_id, message.template_hash.get(name, ""), state.template_hash)

    async def open(self, instance: Instance) -> None:
        """Start the tasks of an instance (again, when its address changed)."""
        key, old = instance.instance_id, self._clients.get(instance.instance_id)
        if old is not None and old.url == instance.record.url.rstrip("/") and self._running.get(key):
            return
        await self._close(key)
        self._clients[key] = Peer(instance.record.url, self._shelf.identity)
        tasks = [self._shelf.tasks.spawn(f"collect {key}", self._collect(key))]
        for model_id in instance.record.models:
            if model_id in self._shelf.barrier.models:
                self._kicks[(key, model_id)] = asyncio.Event()
                tasks.append(self._shelf.tasks.spawn(f"notify {key} {model_id}", self._notify_loop(key, model_id)))
        self._running[key] = tasks

    async def out(self, instance_id: str, reason: str) -> None:
        """An instance is gone: its leases run elsewhere. What is out already stays so."""
        shelf = self._shelf
        if instance_id not in shelf.pool.instances:
            return
        held = shelf.pool.remove(instance_id)
        shelf.barrier.forget_instance(instance_id)
        self._introduced.pop(instance_id, None)
        self.pins.pop(instance_id, None)
        shelf.event(f"instance {instance_id} is out of the pool: {reason}")
        await self._close(instance_id)
        await self.on_lost(held, f"{instance_id} is gone")
        await shelf.write(shelf.ledger.put, shelf.pool_meta())
        shelf.pulse.fire()

    async def leave(self, instance_id: str, drain: bool, shutdown: bool) -> None:
        """POST /deregister_raas; unknown instances are gone already."""
        if instance_id not in self._shelf.pool.instances:
            return
        self._shelf.pool.drain(instance_id, shutdown)
        if not drain:
            await self._part(instance_id)

    async def _part(self, instance_id: str) -> None:
        instance = self._shelf.pool.instances.get(instance_id)
        if instance is not None and instance.shutdown_after:
            await self._shut(instance_id, "deregistered")
        await self.out(instance_id, "deregistered")

    async def shutdown_all(self, reason: str) -> None:
        """The run ends: every instance is asked to end, in parallel."""
        await asyncio.gather(*(self._shut(instance_id, reason) for instance_id in list(self._clients)))

    async def _shut(self, instance_id: str, reason: str) -> None:
        limit, client = self._shelf.process.dataflow.pool.status_timeout_s, self._clients.get(instance_id)
        if client is None:
            return
        try:
            await client.call(RaaSAPI.shutdown, Shutdown(reason=reason), timeout_s=limit)
        except AstraFlowError as error:
            self._shelf.event(f"instance {instance_id} did not take the shutdown: {error}")

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    async def _close(self, instance_id: str) -> None:
        me = asyncio.current_task()
        for task in self._running.pop(instance_id, []):
            if task is not me:
                task.cancel()
        for key in [key for key in self._kicks if key[0] == instance_id]:
            del self._kicks[key]
        client = self._clients.pop(instance_id, None)
        if client is not None:
            await client.close()

    # --- heartbeat ------------------------------------------------------------------------------------------------------

    async def heartbeat_loop(self) -> None:
        """All instances in parallel; suspects at once and then every second."""
        shelf, next_full = self._shelf, 0.0
        while True:
            now, everyone = shelf.clock(), list(shelf.pool.instances.values())
            suspects = [i for i in everyone if i.state == "suspect" or i.failures]
            full = now >= next_full
            if full:
                next_full = now + shelf.process.dataflow.pool.heartbeat_s
            await asyncio.gather(*(self._check_one(i.instance_id) for i in (everyone if full else suspects)))
            for instance_id in shelf.pool.drained():
                await self._part(instance_id)
            busy = any(i.state in ("suspect", "draining") or i.failures for i in shelf.pool.instances.values())
            pause = SUSPECT_BEAT_S if busy else shelf.process.dataflow.pool.heartbeat_s
            await self._wake.wait(max(min(pause, next_full - shelf.clock()), 0.05))

    async def _check_one(self, instance_id: str) -> None:
        shelf, client = self._shelf, self._clients.get(instance_id)
        if client is None:
            return
        try:
            status = await client.call(RaaSAPI.status, timeout_s=shelf.process.dataflow.pool.status_timeout_s)
            if status.state == "error":
                raise Unavailable(f"its state is error: {status.message}")
        except AstraFlowError as error:
            if self._clients.get(instance_id) is client and shelf.pool.failed(instance_id, str(error)):
                await self.out(instance_id, f"{shelf.process.dataflow.pool.max_failures} heartbeats failed: {error}")
            return
        if self._clients.get(instance_id) is not client:
            return  # it left or moved while it was asked
        await self.on_lost(self._answered(instance_id, status), f"{instance_id} is a new process")
        instance, old = shelf.pool.instances.get(instance_id), shelf.clock() - RECONCILE_AFTER_S
        if instance is not None and any(not held.confirmed or held.since < old for held in instance.held.values()):
            self._ask_leases(instance_id)

    def _answered(self, instance_id: str, status: RaaSStatus) -> list[Held]:
        shelf, pool = self._shelf, self._shelf.pool
        instance = pool.instances[instance_id]
        was_suspect, before = instance.state == "suspect", instance.record.incarnation
        lost = pool.answered(instance_id, status.incarnation, shelf.clock())
        if instance.record.incarnation != before:
            shelf.barrier.forget_instance(instance_id)
            shelf.event(f"instance {instance_id} is a new process")
            shelf.tasks.spawn(f"introduce {instance_id}", self._introduce(instance_id))
        elif was_suspect and instance.state != "suspect":
            shelf.event(f"instance {instance_id} is confirmed by its own status")
        if status.state == "draining" and instance.state != "draining":
            pool.drain(instance_id, False)
        pool.reported(instance_id, status.availability.free_slots, shelf.clock())
        self.receipts(instance_id, status.serving)
        self._caught_up()
        shelf.pulse.fire()
        return lost

    def _ask_leases(self, instance_id: str) -> None:
        """Compare what should run there with its own list, apart from the heartbeat: a slow one must not delay the others' checks."""
        client = self._clients.get(instance_id)
        if client is not None and instance_id not in self._reconciling:
            self._reconciling.add(instance_id)
            self._shelf.tasks.spawn(f"reconcile {instance_id}", self._reconcile(instance_id, client))

    async def _reconcile(self, instance_id: str, client: Peer) -> None:
        """GET /leases: what it lost runs again, what is not its own any more is cancelled there."""
        shelf, limit, before = self._shelf, self._shelf.process.dataflow.pool.call_timeout_s, self._shelf.clock()
        gone: list[Held] = []
        try:
            answer = await client.call(RaaSAPI.leases, timeout_s=limit)
            if self._clients.get(instance_id) is not client:
                return
            there = {held.lease_id: held.attempt for held in answer.held if not held.lane}
            gone, foreign = shelf.pool.reconcile(instance_id, there, before)
            # a lease that is not open any more waits in its outbox for our acknowledgement: no harm in forgetting it
            if foreign:  # before any of them may be issued to it again: a cancellation names no attempt
                await client.call(RaaSAPI.cancel, CancelLeases(lease_ids=foreign), timeout_s=limit)
        except AstraFlowError as error:
            self.trouble(instance_id, f"leases: {error}")
        finally:
            self._reconciling.discard(instance_id)
            await self.on_lost(gone, f"{instance_id} does not hold them")

    # --- work of one instance -------------------------------------------------------------------------------------------

    async def _collect(self, instance_id: str) -> None:
        await self._introduce(instance_id)
        await self.collect(instance_id)

    async def _introduce(self, instance_id: str) -> None:
        """Name the workflows to a process that does not know them yet."""
        shelf, backoff, complained = self._shelf, Backoff(), ""
        while (instance := shelf.pool.instances.get(instance_id)) is not None:
            incarnation, client = instance.record.incarnation, self._clients.get(instance_id)
            if self._introduced.get(instance_id) == incarnation:
                return
            if client is None or instance.state == "suspect":
                await shelf.pulse.wait(0.5)
                continue
            try:
                for workflow_id, spec in self._workflows.items():
                    request = RegisterWorkflow(workflow_id=workflow_id, spec=spec)
                    await client.call(RaaSAPI.register_workflow, request, timeout_s=shelf.process.dataflow.pool.call_timeout_s)
                self._introduced[instance_id] = incarnation
                self._caught_up()
            except AstraFlowError as error:
                complaint = f"instance {instance_id} does not take workflows: {error}"
                if complaint != complained:
                    complained = complaint
                    shelf.event(complaint)
                await asyncio.sleep(backoff.next())

    # --- notices --------------------------------------------------------------------------------------------------------

    def target(self, instance_id: str, model_id: str) -> Serving | None:
        """What an instance should serve now; None before the trainer is ready."""
        state = self._shelf.barrier.models[model_id]
        if not state.registered:
            return None
        return self.pins.get(instance_id, {}).get(model_id) or self._shelf.barrier.target(model_id)

    def behind(self, instance_id: str, model_id: str) -> bool:
        instance, target = self._shelf.pool.instances[instance_id], self.target(instance_id, model_id)
        serving = instance.serving.get(model_id)
        if target is None or instance.state in ("suspect", "draining"):
            return False
        if serving is None or serving.timeline != target.timeline:
            return True
        if serving.version > target.version:
            return False  # pinned too late: it moved on already
        return serving.version < target.version or bool(target.digest and serving.digest and serving.digest != target.digest)

    async def _notify_loop(self, instance_id: str, model_id: str) -> None:
        shelf, backoff, kick = self._shelf, Backoff(first_s=0.2), self._kicks[(instance_id, model_id)]
        await self._introduce(instance_id)
        complained = ""
        told: tuple[int, int] = (-1, -1)
        since = shelf.clock()
        while instance_id in shelf.pool.instances and (client := self._clients.get(instance_id)) is not None:
            target = self.target(instance_id, model_id)
            if target is None or not self.behind(instance_id, model_id):
                backoff.reset()
                await _woken(kick, shelf.pulse, 1.0)
                continue
            if told != (target.timeline, target.version):
                told, since = (target.timeline, target.version), shelf.clock()
            trouble = await self._notice(instance_id, model_id, client, target, kick)
            if shelf.clock() - since > shelf.process.dataflow.pool.load_timeout_s:
                shelf.event(f"instance {instance_id} has not loaded {model_id} version {target.version} in {shelf.clock() - since:.0f} s")
                since = shelf.clock()
            if trouble:
                complaint = f"instance {instance_id}: {model_id} version {target.version}: {trouble}"
                if complaint != complained:
                    complained = complaint
                    shelf.event(complaint)
                await _woken(kick, None, backoff.next())

    async def _notice(self, instance_id: str, model_id: str, client: Client, target: Serving, kick: asyncio.Event) -> str:
        """One notice; returns what went wrong. A newer target ends the wait for this one."""
        shelf = self._shelf
        request = NotifyRaaS(
            model_id=model_id,
            timeline=target.timeline,
            version=target.version,
            digest=target.digest,
            sender_endpoint=shelf.barrier.models[model_id].sender_endpoint,
            wait_s=NOTICE_WAIT_S,
        )
        kick.clear()
        limit = NOTICE_WAIT_S + shelf.process.dataflow.pool.call_timeout_s
        call = asyncio.ensure_future(client.call(RaaSAPI.notify_version, request, timeout_s=limit))
        kicked = asyncio.ensure_future(kick.wait())
        try:
            while not call.done():
                await asyncio.wait({call, kicked}, return_when=asyncio.FIRST_COMPLETED)
                if kicked.done() and not call.done():
                    moved = shelf.barrier.models[model_id].sender_endpoint != request.sender_endpoint
                    if moved or self.target(instance_id, model_id) != target:
                        return ""
                    kick.clear()
                    kicked = asyncio.ensure_future(kick.wait())
            reply = call.result()
        except AstraFlowError as error:
            self.trouble(instance_id, f"notify_version: {error}")
            return str(error)
        finally:
            for task in (call, kicked):
                task.cancel()
        self.receipts(instance_id, reply.serving)
        if reply.state == "failed":
            return f"load failed: {reply.message}"
        still = self.behind(instance_id, model_id) and self.target(instance_id, model_id) == target
        return "" if reply.state == "loading" or not still else "says it is current, but its receipt is another one"


async def _woken(kick: asyncio.Event, pulse: Pulse | None, timeout_s: float) -> None:
    """Until the kick (or the pulse), at most this long."""
    waits: set[asyncio.Future[Any]] = {asyncio.ensure_future(kick.wait())}
    if pulse is not None:
        waits.add(asyncio.ensure_future(pulse.wait(timeout_s)))
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waits:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*waits, return_exceptions=True)
    kick.clear()


def agree(field: str, model_id: str, instance_id: str, served: str, trained: str) -> None:
    """Raise ConfigError when rollout service and trainer would read tokens differently; an empty hash is not compared."""
    if served and trained and served != trained:
        raise ConfigError(f"{field}: instance {instance_id!r} has {served} for {model_id!r}, its trainer has {trained}")
