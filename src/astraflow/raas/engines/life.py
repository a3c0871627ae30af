"""The life of an engine that runs in a process of its own: first start, death, restarts with back-off, the end.

    spawn ─▶ up ─▶ watch ─▶ death ─▶ end ─▶ back-off ─▶ spawn ─▶ [load again] ─▶ up …        over the limit: dead, `on_death`

The receipt survives a restart, because the same weights come back before any request does; when they cannot be loaded it is
taken back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from abc import ABC, abstractmethod
from pathlib import Path

from astraflow.lib.aio import one_line
from astraflow.lib.proc import Child, RestartBook, RestartPolicy
from astraflow.protocol.control import EngineStatus
from astraflow.protocol.errors import AstraFlowError
from astraflow.protocol.rollout import Serving
from astraflow.raas.engines.base import EngineError, EngineReport, EngineSetup

log = logging.getLogger(__name__)

STOP_S = 3.0
"""Time that the supervision gets to end when the engine is closed."""
LOG_TAIL_BYTES = 16_384


class SupervisedEngine(ABC):
    """What engines with a process of their own share. A subclass says how it is started, watched and ended."""

    def __init__(self, kind: str, setup: EngineSetup) -> None:
        self._setup = setup
        self._book = RestartBook(RestartPolicy(setup.config.max_restarts, setup.config.restart_window_s))
        self._status = EngineStatus(kind=kind, state="starting")
        self._serving: Serving | None = None
        self._metrics: dict[str, float] = {}
        self._child: Child | None = None
        self._up = asyncio.Event()
        self._dead = ""
        """Why there is no engine any more; empty while there is hope."""
        self._planned = False
        """The coming death is wanted: it counts against no limit."""
        self._life: asyncio.Task[None] | None = None

    @abstractmethod
    async def _spawn(self) -> None:
        """A process that serves. Raises when there is none within `start_s`; nothing is left running then."""

    @abstractmethod
    async def _watch(self) -> str:
        """Until this process is dead; why it is."""

    @abstractmethod
    async def _load_again(self) -> None:
        """After a restart, before any request: the weights that were served, or the receipt is taken back."""

    @abstractmethod
    async def _end(self, reason: str) -> None:
        """Leave nothing of this process; requests that still wait for it fail."""

    async def start(self) -> None:
        """The first start must succeed; later deaths are restarted. Raises ConfigError or EngineError with the child's last words."""
        await self._spawn()
        self._up.set()
        self._life = asyncio.get_running_loop().create_task(self._live(), name=f"engine {self._setup.model_id}")
        self._life.add_done_callback(self._life_ended)

    def report(self) -> EngineReport:
        return EngineReport(status=self._status, serving=self._serving, metrics=self._metrics)

    async def close(self) -> None:
        self._dead = self._dead or "closed"
        if self._life is not None:
            self._life.cancel()
            await asyncio.wait({self._life}, timeout=STOP_S)
        self._up.set()
        await self._end("closed")

    async def _alive(self) -> None:
        """Wait while the engine restarts; the caller's deadline bounds that. Raises EngineError(dead)."""
        await self._up.wait()
        if self._dead:
            raise EngineError("dead", self._dead)

    def _life_ended(self, life: asyncio.Task[None]) -> None:
        """A bug (or a child that not even SIGKILL ends) must not leave requests waiting for a restart that never comes."""
        if not life.cancelled() and (error := life.exception()) is not None:
            self._give_up(f"its supervision failed: {one_line(error)}")

    async def _live(self) -> None:
        while True:
            reason = await self._watch()
            self._up.clear()
            await self._end(reason)
            if not await self._restart(reason):
                return

    async def _restart(self, reason: str) -> bool:
        """Start again, with pauses, up to the limit; load what is staged before any request may come."""
        while True:
            if self._planned:
                self._planned = False
            else:
                start_at = self._book.died(time.monotonic())
                if start_at is None:
                    self._give_up(f"gave up after {self._book.restarts} restarts: {reason}")
                    return False
                self._status.state, self._status.message, self._status.restarts = "restarting", reason, self._book.restarts
                log.warning("engine %s: %s; restart %d", self._setup.model_id, reason, self._book.restarts)
                await asyncio.sleep(max(0.0, start_at - time.monotonic()))
            try:
                await self._spawn()
            except (AstraFlowError, OSError) as error:
                reason = one_line(error)
                continue
            await self._load_again()
            self._up.set()
            return True

    def _give_up(self, reason: str) -> None:
        self._dead = reason
        self._status.state, self._status.message, self._serving = "error", reason, None
        self._up.set()
        self._setup.on_death(reason)


def size_of(log_path: Path) -> int:
    """Where the output of the next process begins."""
    return log_path.stat().st_size if log_path.exists() else 0


def last_lines(log_path: Path, start: int) -> list[str]:
    """The last lines that a process wrote since `start`; one that ended with a message says there why."""
    with contextlib.suppress(OSError), log_path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(start, file.tell() - LOG_TAIL_BYTES))
        return file.read().decode("utf-8", "replace").strip().splitlines()
    return []
