"""The I/O of the pool: joining and leaving, checks, receipts, reconciliation. `pool` and `barrier` decide, this calls.

Each instance has tasks of its own, so that a slow or dead one delays nobody else: `watch` asks for its /status, `introduce` names
the workflows to a new process, `collect` pulls results, `notices` tells it of new weights, `reconcile` compares leases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from astraflow.dataflow.notices import Notices, woken
from astraflow.dataflow.pool import Held, Instance
from astraflow.dataflow.shelf import Shelf
from astraflow.lib.aio import Backoff
from astraflow.lib.tls import Tls
from astraflow.lib.wire import Identity
from astraflow.lib.wire_client import Caller
from astraflow.protocol.control import RaaSStatus, RegisterRaaS, Shutdown
from astraflow.protocol.errors import AstraFlowError, ConfigError, DeadlinePassed, ProtocolError, Refused, Unavailable, UserError
from astraflow.protocol.message import Message
from astraflow.protocol.rollout import CancelLeases, RegisterWorkflow, Serving, WorkflowSpec
from astraflow.protocol.routes import RaaSAPI, Route

Q = TypeVar("Q", bound=Message)
P = TypeVar("P", bound=Message)

SUSPECT_BEAT_S = 1.0
"""Pause between checks of an instance that is suspect, late or draining: two failures take it out within seconds."""
SILENT_TRIES = 3
MAX_SILENT = 1024
"""Addresses that did not answer and are remembered."""
RECONCILE_AFTER_S = 10.0
"""Leases older than this are compared with the instance's own list at each heartbeat."""
FINAL = (UserError, ProtocolError, Refused)
"""Answers that asking again cannot change."""

Lost = Callable[[Iterable[Held], str], Awaitable[None]]


class Peer:
    """One instance. It may leave the pool between two calls of whoever holds this; then it is unavailable, like a dead one."""

    def __init__(self, client: Caller) -> None:
        self.url, self._client, self.left = client.url, client, False

    async def call(self, route: Route[Q, P], request: Q | None = None, *, timeout_s: float, ref: str = "") -> P:
        if self.left:
            raise Unavailable(f"{route.path} at {self.url}: the instance left the pool")
        return await self._client.call(route, request, timeout_s=timeout_s, ref=ref)

    async def close(self) -> None:
        self.left = True
        await self._client.close()


class RaaSFleet:
    """All instances of the pool."""

    def __init__(self, shelf: Shelf, workflows: dict[str, WorkflowSpec], connect: Callable[[str, Identity], Caller]) -> None:
        self._shelf, self._workflows, self._connect = shelf, workflows, connect
        self._clients: dict[str, Peer] = {}
        self._running: dict[str, list[asyncio.Task[None]]] = {}
        self._introduced: dict[str, str] = {}
        """Instance → incarnation that knows the workflows."""
        self._silent: dict[str, int] = {}
        """Url → registrations in a row to which it did not answer."""
        self.reconciling: set[str] = set()
        """Instances whose list of leases is being asked for."""
        self._introducing: set[str] = set()
        self._wakes: dict[str, asyncio.Event] = {}
        """Instance → to be checked at once."""
        self.notices = Notices(shelf, self)
        self.on_lost: Lost
        """Set by the service: what to do with leases of an instance that died."""
        self.collect: Callable[[str], Awaitable[None]]
        """Set by the service: one collect loop."""
        self.on_joined: Callable[[], None]
        """Set by the service: an instance is new in the pool, and nothing was sent to it yet."""

    # --- what others need -----------------------------------------------------------------------------------------------

    def client(self, instance_id: str) -> Caller | None:
        return self._clients.get(instance_id)

    @property
    def pins(self) -> dict[str, dict[str, Serving]]:
        """Instance → versions that an evaluation wants there."""
        return self.notices.pins

    @pins.setter
    def pins(self, pins: dict[str, dict[str, Serving]]) -> None:
        self.notices.pins = pins

    def target(self, instance_id: str, model_id: str) -> Serving | None:
        """What an instance should serve now."""
        return self.notices.target(instance_id, model_id)

    def behind(self, instance_id: str, model_id: str) -> bool:
        """It serves less than that."""
        return self.notices.behind(instance_id, model_id)

    def trouble(self, instance_id: str, reason: str) -> None:
        """A data-path call failed: no new work until its own /status says otherwise."""
        if self._shelf.pool.suspect(instance_id, reason):
            self._shelf.meter.counts["raas/suspicions"] += 1
            self._shelf.event(f"instance {instance_id} is suspect: {reason}")
            if (wake := self._wakes.get(instance_id)) is not None:
                wake.set()

    def heard(self, instance_id: str, incarnation: str) -> bool:
        """A data-path call was answered. False when another process did it: what it says is not this instance's word."""
        if self._shelf.pool.heard(instance_id, incarnation, self._shelf.clock()):
            return True
        self.trouble(instance_id, "another process answers at its address")
        return False

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
        self.notices.announce()
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

    async def check_address(self, url: str) -> None:
        """Raise ConfigError for what can be the address of no peer; empty = none is given."""
        if url:
            await self._connect(url, self._shelf.identity).close()

    async def join(self, message: RegisterRaaS) -> None:
        """A rollout service registers. Raises ConfigError when it cannot take part or its url does not answer."""
        shelf = self._shelf
        self._check(message)
        client = self._connect(message.url, shelf.identity)
        try:
            status = await client.call(RaaSAPI.status, timeout_s=shelf.process.dataflow.pool.status_timeout_s)
        except AstraFlowError as error:
            raise self._unanswered(message, error) from None
        finally:
            await client.close()
        self._silent.pop(message.url, None)
        if status.instance_id != message.instance_id:
            raise ConfigError(f"url: {message.url} answers as instance {status.instance_id!r}, not as {message.instance_id!r}")
        if message.incarnation and status.incarnation and status.incarnation != message.incarnation:
            raise Unavailable(f"url: {message.url} answers as a newer process of {message.instance_id!r} than the one that registers")
        await self._name_is_free(message)
        for other in shelf.pool.others_at(message.url, message.instance_id):
            await self.out(other, f"{message.instance_id} listens at its address now")
        outcome = shelf.pool.register(message, shelf.clock())
        if outcome.kind != "same":
            shelf.barrier.forget_instance(message.instance_id)
            self._introduced.pop(message.instance_id, None)
            again = " again as a new process" if outcome.kind == "replaced" else ""
            shelf.event(f"instance {message.instance_id} joined{again} with {message.total_slots} slots at {message.url}")
        self.on_joined()
        await self.on_lost(outcome.lost, f"{message.instance_id} came back as a new process")
        if (instance := shelf.pool.instances.get(message.instance_id)) is not None:
            await self.open(instance)
        await shelf.write(shelf.ledger.put, shelf.pool_meta())
        if message.instance_id not in shelf.pool.instances:
            return  # it left again while something was written
        self._answered(message.instance_id, status)
        if outcome.kind != "same":
            self._meet(message.instance_id)
            self._ask_leases(message.instance_id)

    async def _name_is_free(self, message: RegisterRaaS) -> None:
        """Two machines may start instances under one name. The first one keeps it while it lives: otherwise each registration
        would throw the other out, and its work away. Raises ConfigError, or Unavailable while that is not clear."""
        old = self._shelf.pool.instances.get(message.instance_id)
        if old is None or message.incarnation == old.record.incarnation or message.url.rstrip("/") == old.record.url.rstrip("/"):
            return
        where = f"instance_id: {message.instance_id!r} is the name of the instance at {old.record.url}"
        client = self._connect(old.record.url, self._shelf.identity)
        try:
            status = await client.call(RaaSAPI.status, timeout_s=self._shelf.process.dataflow.pool.status_timeout_s)
        except DeadlinePassed:
            self.trouble(message.instance_id, "it does not answer, and another process registers under its name")
            raise Unavailable(f"{where}, which may be alive: try again") from None
        except AstraFlowError:
            return
        finally:
            await client.close()
        if (status.instance_id, status.incarnation) != (message.instance_id, old.record.incarnation):
            return
        if status.state in ("draining", "error"):
            raise Unavailable(f"{where}, which is about to end: try again")
        raise ConfigError(f"{where}, which is alive; expected a name of its own")

    def _unanswered(self, message: RegisterRaaS, error: AstraFlowError) -> AstraFlowError:
        """A busy machine may miss one deadline; an address that is silent three times is a mistake of the user."""
        if len(self._silent) >= MAX_SILENT:
            self._silent.clear()
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
        no_plain_address("url", message.url, f"instance {message.instance_id!r}", process.tls)
        for name, state in self._shelf.barrier.models.items():
            agree("tokenizer_hash", name, message.instance_id, message.tokenizer_hash.get(name, ""), state.tokenizer_hash)
            agree("template_hash", name, message.instance_id, message.template_hash.get(name, ""), state.template_hash)

    async def open(self, instance: Instance) -> None:
        """Start the tasks of an instance (again, when its address changed)."""
        key, old = instance.instance_id, self._clients.get(instance.instance_id)
        if old is not None and old.url == instance.record.url.rstrip("/") and self._running.get(key):
            return
        await self._close(key)
        self._clients[key], self._wakes[key] = Peer(self._connect(instance.record.url, self._shelf.identity)), asyncio.Event()
        spawn = self._shelf.tasks.spawn
        tasks = [spawn(f"collect {key}", self._collect(key)), spawn(f"watch {key}", self._watch(key, self._clients[key]))]
        for model_id in instance.record.models:
            if model_id in self._shelf.barrier.models:
                tasks.append(spawn(f"notify {key} {model_id}", self.notices.notifier(key, model_id)))
        self._running[key] = tasks
        self._meet(key)
        if instance.state == "suspect":
            self._wakes[key].set()

    async def out(self, instance_id: str, reason: str) -> None:
        """An instance is gone: its leases run elsewhere. What is out already stays so."""
        shelf = self._shelf
        if instance_id not in shelf.pool.instances:
            return
        held = shelf.pool.remove(instance_id)
        shelf.barrier.forget_instance(instance_id)
        self._introduced.pop(instance_id, None)
        self.pins.pop(instance_id, None)
        shelf.meter.counts["raas/removed"] += 1
        shelf.event(f"instance {instance_id} is out of the pool: {reason}")
        await self._close(instance_id)
        await self.on_lost(held, f"{instance_id} is gone")
        await shelf.write(shelf.ledger.put, shelf.pool_meta())
        shelf.pulse.fire()

    async def leave(self, instance_id: str, drain: bool, shutdown: bool) -> None:
        """POST /deregister_raas; unknown instances are gone already."""
        if instance_id not in self._shelf.pool.instances:
            return
        shelf = self._shelf
        shelf.pool.drain(instance_id, shutdown, shelf.clock())
        if not drain:
            await self._part(instance_id)
            return
        shelf.event(f"instance {instance_id} drains: {len(shelf.pool.instances[instance_id].held)} leases run there")
        await shelf.write(shelf.ledger.put, shelf.pool_meta())
        if (wake := self._wakes.get(instance_id)) is not None:
            wake.set()

    async def _part(self, instance_id: str, why: str = "deregistered") -> None:
        instance = self._shelf.pool.instances.get(instance_id)
        if instance is not None and instance.record.shutdown_after:
            await self._shut(instance_id, why)
        await self.out(instance_id, why)

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
        self.notices.close(instance_id)
        self._wakes.pop(instance_id, None)
        client = self._clients.pop(instance_id, None)
        if client is not None:
            await client.close()

    # --- heartbeat ------------------------------------------------------------------------------------------------------

    async def _watch(self, instance_id: str, client: Peer) -> None:
        """Its own /status, as long as it is in the pool at this address; every second while there is a reason for doubt."""
        shelf, wake = self._shelf, self._wakes[instance_id]
        pause = shelf.process.dataflow.pool.heartbeat_s
        while self._clients.get(instance_id) is client and (instance := shelf.pool.instances.get(instance_id)) is not None:
            uneasy = instance.state in ("suspect", "draining") or instance.doubted or instance.failures or instance.late
            await woken(wake, min(SUSPECT_BEAT_S, pause) if uneasy else pause)
            if instance_id in shelf.pool.drained():
                await self._part(instance_id)
            elif instance_id in shelf.pool.instances and shelf.pool.overdue(instance_id, shelf.clock()):
                await self._part(instance_id, f"its drain did not end within {shelf.pool.drain_s:g} s")
            elif self._clients.get(instance_id) is client:
                await self._check_one(instance_id, client)

    async def _check_one(self, instance_id: str, client: Peer) -> None:
        shelf, limit = self._shelf, self._shelf.process.dataflow.pool.status_timeout_s
        asked = shelf.clock()
        try:
            status = await client.call(RaaSAPI.status, timeout_s=limit)
            if status.state == "error":
                raise Unavailable(f"its state is error: {status.message}")
        except AstraFlowError as error:
            if self._clients.get(instance_id) is client:
                await self._silent_check(instance_id, error, shelf.clock() - asked)
            return
        if self._clients.get(instance_id) is not client:
            return  # it left or moved while it was asked
        if status.instance_id != instance_id:
            await self.out(instance_id, f"{client.url} answers as instance {status.instance_id!r}")
            return
        await self.on_lost(self._answered(instance_id, status), f"{instance_id} is a new process")
        instance, old = shelf.pool.instances.get(instance_id), shelf.clock() - RECONCILE_AFTER_S
        if instance is not None and any(not held.confirmed or held.since < old for held in instance.held.values()):
            self._ask_leases(instance_id)

    async def _silent_check(self, instance_id: str, error: AstraFlowError, waited_s: float) -> None:
        """A /status failed: a failure, unless it is only late, here or there."""
        shelf, config = self._shelf, self._shelf.process.dataflow.pool
        if waited_s > 2 * config.status_timeout_s:  # this process itself had no time to look at the answer
            shelf.meter.counts["raas/late_status"] += 1
            return
        late, before = isinstance(error, DeadlinePassed), shelf.pool.instances[instance_id].failures
        if shelf.pool.failed(instance_id, str(error), shelf.clock(), late=late):
            await self.out(instance_id, f"{config.max_failures} heartbeats failed: {error}")
        elif shelf.pool.instances[instance_id].failures == before:
            shelf.meter.counts["raas/late_status"] += 1

    def _answered(self, instance_id: str, status: RaaSStatus) -> list[Held]:
        shelf, pool = self._shelf, self._shelf.pool
        instance = pool.instances[instance_id]
        was_suspect, before = instance.state == "suspect", instance.record.incarnation
        lost = pool.answered(instance_id, status.incarnation, shelf.clock())
        if instance.record.incarnation != before:
            shelf.barrier.forget_instance(instance_id)
            shelf.event(f"instance {instance_id} is a new process")
            self._meet(instance_id)
        elif was_suspect and instance.state != "suspect":
            rests = instance.rests_until > shelf.clock()
            shelf.meter.counts["raas/rests"] += rests
            shelf.event(f"instance {instance_id} is confirmed by its own status" + (f"; {instance.reason}" if rests else ""))
        if status.state == "draining" and instance.state != "draining":
            pool.drain(instance_id, False, shelf.clock())
        pool.reported(instance_id, status.availability.free_slots, shelf.clock(), status.availability.total_slots)
        self.receipts(instance_id, status.serving)
        self._caught_up()
        shelf.pulse.fire()
        return lost

    def _ask_leases(self, instance_id: str) -> None:
        """Compare what should run there with its own list, apart from the heartbeat: a slow one must not delay the others' checks."""
        client = self._clients.get(instance_id)
        if client is not None and instance_id not in self.reconciling:
            self.reconciling.add(instance_id)
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
            self.reconciling.discard(instance_id)
            await self.on_lost(gone, f"{instance_id} does not hold them")

    # --- work of one instance -------------------------------------------------------------------------------------------

    async def _collect(self, instance_id: str) -> None:
        while instance_id in self._shelf.pool.instances and not self.introduced(instance_id):
            await self._shelf.pulse.wait(0.5)
        await self.collect(instance_id)

    def _meet(self, instance_id: str) -> None:
        """Name the workflows to a process that does not know them yet."""
        if instance_id not in self._introducing:
            self._introducing.add(instance_id)
            self._shelf.tasks.spawn(f"introduce {instance_id}", self._introduce(instance_id))

    async def _introduce(self, instance_id: str) -> None:
        """An instance that refuses a workflow, or that fails to take it for too long, leaves the pool and says why; it may
        register again."""
        shelf, complained, since = self._shelf, "", self._shelf.clock()
        limit_s, backoff = shelf.process.dataflow.pool.introduce_s, Backoff(seed=f"{shelf.identity.incarnation} introduce {instance_id}")
        try:
            while (instance := shelf.pool.instances.get(instance_id)) is not None and not self.introduced(instance_id):
                client = self._clients.get(instance_id)
                if client is None or instance.state == "suspect":
                    await shelf.pulse.wait(0.5)
                    since = shelf.clock()  # its silence is the heartbeat's affair
                    continue
                try:
                    await self._name_workflows(instance_id, client, instance.record.incarnation)
                except AstraFlowError as error:
                    complaint = f"it does not take the workflows: {error}"
                    if self._clients.get(instance_id) is client and (isinstance(error, FINAL) or shelf.clock() - since > limit_s):
                        await self.out(instance_id, complaint)
                        return
                    if complaint != complained:
                        complained = complaint
                        shelf.event(f"instance {instance_id}: {complaint}")
                    await asyncio.sleep(backoff.next())
        finally:
            self._introducing.discard(instance_id)

    async def _name_workflows(self, instance_id: str, client: Peer, incarnation: str) -> None:
        limit_s = self._shelf.process.dataflow.pool.call_timeout_s
        for workflow_id, spec in self._workflows.items():
            await client.call(RaaSAPI.register_workflow, RegisterWorkflow(workflow_id=workflow_id, spec=spec), timeout_s=limit_s)
        if self._clients.get(instance_id) is client:
            self._introduced[instance_id] = incarnation
            self._caught_up()
            self._shelf.pulse.fire()


def no_plain_address(field: str, url: str, whose: str, tls: Tls) -> None:
    """In a job that speaks TLS nobody is called, and no weights are pulled, in plain. Raises ConfigError."""
    if tls.cert and not url.startswith("https:"):
        raise ConfigError(f"{field}: {url!r} of {whose} is plain, but this job speaks TLS; expected https://…: give it a certificate too")


def agree(field: str, model_id: str, instance_id: str, served: str, trained: str) -> None:
    """Raise ConfigError when rollout service and trainer would read tokens differently; an empty hash is not compared."""
    if served and trained and served != trained:
        raise ConfigError(f"{field}: instance {instance_id!r} has {served} for {model_id!r}, its trainer has {trained}")
