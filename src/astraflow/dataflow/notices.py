"""Notices: every instance is told of the newest weights, each model by a task of its own.

One notifier per (instance, model): it sends the newest version at once, again with back-off as long as the instance's own receipt
is behind; a newer notice replaces an older one that still waits. So neither a slow load, nor a dead instance, nor another model
delays anybody else's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, Protocol

from astraflow.dataflow.shelf import Shelf
from astraflow.lib.aio import Backoff
from astraflow.lib.wire_client import Caller
from astraflow.protocol.errors import AstraFlowError
from astraflow.protocol.rollout import Serving
from astraflow.protocol.routes import RaaSAPI
from astraflow.protocol.weights import NotifyRaaS

NOTICE_WAIT_S = 10.0
"""An instance answers a notice when it loaded, or after this time."""


class Fleet(Protocol):
    """What notices need of the fleet."""

    def client(self, instance_id: str) -> Caller | None: ...

    def introduced(self, instance_id: str) -> bool:
        """This process of the instance knows the workflows."""
        ...

    def trouble(self, instance_id: str, reason: str) -> None: ...

    def receipts(self, instance_id: str, serving: dict[str, Serving]) -> None: ...

    def heard(self, instance_id: str, incarnation: str) -> bool: ...


class Notices:
    """Who should serve what, and telling them."""

    def __init__(self, shelf: Shelf, fleet: Fleet) -> None:
        self._shelf, self._fleet = shelf, fleet
        self._kicks: dict[tuple[str, str], asyncio.Event] = {}
        self.pins: dict[str, dict[str, Serving]] = {}
        """Instance → versions that an evaluation wants there; newer notices wait."""

    def announce(self) -> None:
        """Versions or pins changed: every notifier looks again."""
        for kick in self._kicks.values():
            kick.set()

    def target(self, instance_id: str, model_id: str) -> Serving | None:
        """What an instance should serve now; None before the trainer is ready."""
        state = self._shelf.barrier.models[model_id]
        if not state.registered:
            return None
        return self.pins.get(instance_id, {}).get(model_id) or self._shelf.barrier.target(model_id)

    def behind(self, instance_id: str, model_id: str) -> bool:
        """Its receipt is older than what it should serve, and it can be told."""
        instance, target = self._shelf.pool.instances[instance_id], self.target(instance_id, model_id)
        serving = instance.serving.get(model_id)
        if target is None or instance.state in ("suspect", "draining"):
            return False
        if serving is None or serving.timeline != target.timeline:
            return True
        if serving.version > target.version:
            return False  # pinned too late: it moved on already
        return serving.version < target.version or bool(target.digest and serving.digest and serving.digest != target.digest)

    # --- one notifier ---------------------------------------------------------------------------------------------------

    def notifier(self, instance_id: str, model_id: str) -> Coroutine[Any, Any, None]:
        """The task of one model on one instance; it may be kicked from now on."""
        self._kicks[(instance_id, model_id)] = asyncio.Event()
        return self._loop(instance_id, model_id)

    def close(self, instance_id: str) -> None:
        """Its notifiers are ended by the fleet."""
        for key in [key for key in self._kicks if key[0] == instance_id]:
            del self._kicks[key]

    async def _loop(self, instance_id: str, model_id: str) -> None:
        shelf, kick = self._shelf, self._kicks[(instance_id, model_id)]
        backoff = Backoff(first_s=0.2, seed=f"{shelf.identity.incarnation} notify {instance_id} {model_id}")
        complained = ""
        told: tuple[int, int] = (-1, -1)
        since = shelf.clock()
        while instance_id in shelf.pool.instances and (client := self._fleet.client(instance_id)) is not None:
            target = self.target(instance_id, model_id)
            if target is None or not self._fleet.introduced(instance_id) or not self.behind(instance_id, model_id):
                backoff.reset()
                await shelf.pulse.wait(1.0)  # whoever kicks fires it too
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
                await woken(kick, backoff.next())

    async def _notice(self, instance_id: str, model_id: str, client: Caller, target: Serving, kick: asyncio.Event) -> str:
        """One notice; returns what went wrong. A newer target ends the wait for this one."""
        shelf = self._shelf
        request = NotifyRaaS(
            model_id=model_id,
            timeline=target.timeline,
            version=target.version,
            digest=target.digest,
            sender_endpoint=shelf.barrier.sender_for(model_id, instance_id),
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
                    moved = shelf.barrier.sender_for(model_id, instance_id) != request.sender_endpoint
                    if moved or self.target(instance_id, model_id) != target:
                        return ""
                    kick.clear()
                    kicked = asyncio.ensure_future(kick.wait())
            reply = call.result()
        except AstraFlowError as error:
            self._fleet.trouble(instance_id, f"notify_version: {error}")
            return str(error)
        finally:
            for task in (call, kicked):
                task.cancel()
        if not self._fleet.heard(instance_id, reply.incarnation):
            return "it was answered by another process"
        self._fleet.receipts(instance_id, reply.serving)
        if reply.state == "failed":
            return f"load failed: {reply.message}"
        still = self.behind(instance_id, model_id) and self.target(instance_id, model_id) == target
        return "" if reply.state == "loading" or not still else "says it is current, but its receipt is another one"


async def woken(kick: asyncio.Event, timeout_s: float) -> None:
    """Until the kick, at most this long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await kick.wait()
    kick.clear()
