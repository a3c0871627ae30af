"""What the service takes from outside. `tools/chaos` gives its own, and then the same code runs in simulated time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from starlette.routing import BaseRoute

from astraflow.dataflow.ledger import Ledger, LedgerThread
from astraflow.lib.wire import Handler, Identity, Server, new_identity
from astraflow.lib.wire_client import Caller, Client


class Listener(Protocol):
    """The server side of one service."""

    identity: Identity

    @property
    def url(self) -> str: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class Listen(Protocol):
    def __call__(
        self,
        name: str,
        api: type,
        handlers: Mapping[str, Handler],
        identity: Identity,
        *,
        host: str,
        port: int,
        extra_routes: Sequence[BaseRoute],
    ) -> Listener: ...


@dataclass(frozen=True)
class Surroundings:
    """Clock, network, thread and disk of one process."""

    clock: Callable[[], float] = time.monotonic
    """Seconds; the loop's own timers run by it too."""
    identity: Callable[[str, str], Identity] = new_identity
    """(run id, token) → who this process is."""
    connect: Callable[[str, Identity], Caller] = Client
    """(url, identity) → a client of that peer."""
    listen: Listen = Server
    ledger: Callable[[Path, int], Ledger] = Ledger
    """(directory, segment_bytes) → the ledger that lies there."""
    thread: Callable[[], LedgerThread] = LedgerThread


MACHINE = Surroundings()
"""This machine, as it is."""
