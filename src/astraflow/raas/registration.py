"""Registration with Dataflow: in any start order, again when Dataflow is a new process, again when it has gone silent."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from astraflow.lib.aio import Backoff, one_line
from astraflow.lib.wire_client import Client
from astraflow.protocol.control import DeregisterRaaS, RegisterRaaS, RegisterRaaSReply
from astraflow.protocol.errors import AstraFlowError, ProtocolError, Refused, RemoteError, Retryable, UserError
from astraflow.protocol.routes import DataflowAPI

log = logging.getLogger(__name__)

CALL_S = 10.0


class Registrar:
    """Keeps this instance in Dataflow's pool."""

    def __init__(
        self,
        client: Client,
        message: Callable[[], RegisterRaaS],
        *,
        silence_s: float,
        on_registered: Callable[[RegisterRaaSReply], None],
        backoff: Backoff | None = None,
    ) -> None:
        self._client, self._message, self._silence_s, self._on_registered = client, message, silence_s, on_registered
        self._backoff = backoff or Backoff(0.1, 2.0, 5.0)
        self._lost = asyncio.Event()
        self._other = ""
        self._last_heard = time.monotonic()
        self.known = ""
        """Incarnation of the Dataflow that knows us; empty = not registered."""
        self.message = "not registered yet"

    def heard(self, incarnation: str, only_dataflow_calls_this: bool) -> None:
        """Every incoming call. Another process behind a call that only Dataflow makes is a restarted Dataflow."""
        if incarnation and incarnation == self.known:
            self._last_heard = time.monotonic()
        elif incarnation and self.known and only_dataflow_calls_this:
            self._other = incarnation
            self._lost.set()

    async def run(self) -> None:
        """For ever: register, then watch. Raises what can only be a mistake: refused, another run or protocol, a wrong token."""
        while True:
            await self._register()
            await self._until_lost()

    async def _register(self) -> None:
        said = ""
        while True:
            self._lost.clear()
            try:
                reply = await self._client.call(DataflowAPI.register_raas, self._message(), timeout_s=CALL_S)
                break
            except (Retryable, RemoteError) as error:  # an answer that is an error is no registration
                self.message = f"not registered with Dataflow: {one_line(error)}"
                if self.message != said:
                    log.warning("%s; trying again", self.message)
                said = self.message
                await asyncio.sleep(self._backoff.next())
        wanted = self._message().instance_id
        if reply.instance_id != wanted:
            raise UserError(f"dataflow_url {self._client.url!r}: registered {reply.instance_id!r} instead of {wanted!r}")
        self._backoff.reset()
        if self._other == reply.incarnation:
            self._lost.clear()  # its calls overtook its reply
        self.known, self.message, self._last_heard = reply.incarnation, "", time.monotonic()
        self._on_registered(reply)
        log.info("registered with Dataflow at %s (pool of %d)", self._client.url, reply.pool_size)

    async def _until_lost(self) -> None:
        """Until a new Dataflow shows up or the known one was silent for too long."""
        while True:
            left = self._last_heard + self._silence_s - time.monotonic()
            if left <= 0:
                log.info("no call from Dataflow for %.0f s: registering again", self._silence_s)
                return
            try:
                async with asyncio.timeout(left):
                    await self._lost.wait()
            except TimeoutError:
                continue
            log.info("Dataflow is a new process: registering again")
            return

    async def leave(self, *, drain: bool) -> None:
        """Tell Dataflow that this instance goes; it may be gone itself."""
        if not self.known:
            return
        call = DeregisterRaaS(instance_id=self._message().instance_id, drain=drain)
        try:
            await self._client.call(DataflowAPI.deregister_raas, call, timeout_s=min(CALL_S, 3.0))
        except AstraFlowError as error:
            log.info("not deregistered: %s", one_line(error))


MISTAKES = (Refused, ProtocolError, UserError)
"""Errors of a registration that trying again cannot mend."""
