"""One asyncio loop per process: supervised tasks, named deadlines, back-off, and the list of who waits for whom."""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from astraflow.protocol.batch import WaitEdge
from astraflow.protocol.errors import AstraFlowError, DeadlinePassed

T = TypeVar("T")
log = logging.getLogger(__name__)


class Tasks:
    """The supervised tasks of a process. A task that raises is logged and reported to `on_failure(name, error)` once;
    cancellation is silent. Tasks that end by themselves are forgotten."""

    def __init__(self, on_failure: Callable[[str, BaseException], None]):
        self._on_failure = on_failure
        self._running: set[asyncio.Task[Any]] = set()
        self._stopping = False

    def spawn(self, name: str, coro: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `coro` under supervision. After `stop` began nothing new is started: the coroutine is closed, the task cancelled."""
        task = asyncio.get_running_loop().create_task(coro, name=name)
        if self._stopping:
            task.cancel()
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    @property
    def names(self) -> list[str]:
        """Names of the tasks that run now."""
        return sorted(task.get_name() for task in self._running)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if task.cancelled():
            return
        error = task.exception()  # also marks it as retrieved
        if error is None:
            return
        self.failed(task.get_name(), error)

    def failed(self, name: str, error: BaseException) -> None:
        """Report a failure. One that has an address (`AstraFlowError`) needs no traceback. Also for what is no task of its own."""
        trace = None if isinstance(error, AstraFlowError) else error
        log.error("task %s failed: %s: %s", name, type(error).__name__, error, exc_info=trace)
        self._on_failure(name, error)

    async def stop(self, deadline_s: float = 5.0) -> None:
        """Cancel all tasks and wait for their ends; those that do not end by the deadline are named in the log."""
        self._stopping = True
        running = {task for task in self._running if task is not asyncio.current_task()}
        for task in running:
            task.cancel()
        if running:
            _, late = await asyncio.wait(running, timeout=deadline_s)
            for task in late:
                log.error("task %s did not end within %.1f s of its cancellation", task.get_name(), deadline_s)


async def deadline(awaitable: Awaitable[T], seconds: float, name: str) -> T:
    """Await for at most `seconds`; then cancel and raise DeadlinePassed naming the wait."""
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            return await awaitable
    except TimeoutError:
        if scope.expired():
            raise DeadlinePassed(f"{name}: not done within {seconds:g} s") from None
        raise


async def poll_until(condition: Callable[[], T | Awaitable[T]], deadline_s: float, name: str, interval_s: float = 0.05) -> T:
    """Call `condition` (plain or async) until it is truthy and return its value. Raises DeadlinePassed naming the wait."""
    end = time.monotonic() + deadline_s
    while True:
        value = condition()
        result = cast(T, await deadline(value, max(end - time.monotonic(), 0.001), name) if inspect.isawaitable(value) else value)
        if result:
            return result
        left = end - time.monotonic()
        if left <= 0:
            raise DeadlinePassed(f"{name}: not done within {deadline_s:g} s")
        await asyncio.sleep(min(interval_s, left))


class Backoff:
    """Growing pauses between tries: first_s, first_s·factor, … at most max_s, each shortened by up to `jitter` of itself."""

    def __init__(self, first_s: float = 0.1, factor: float = 2.0, max_s: float = 5.0, jitter: float = 0.2, seed: int | str | None = None):
        self._first_s, self._factor, self._max_s, self._jitter = first_s, factor, max_s, jitter
        self._random = random.Random(seed)
        self._pause_s = first_s

    def next(self) -> float:
        """Seconds to wait before the next try."""
        pause_s = min(self._pause_s, self._max_s)
        self._pause_s = min(self._pause_s * self._factor, self._max_s)
        return pause_s * (1.0 - self._jitter * self._random.random())

    def reset(self) -> None:
        """After a success: start small again."""
        self._pause_s = self._first_s


class Waits:
    """Named waits of a process, for `/status`: who waits for whom, since when."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._open: dict[int, tuple[str, str, str, float, float | None]] = {}
        self._noted: dict[str, tuple[str, str, str, float, float | None]] = {}
        self._next = 0

    @contextmanager
    def waiting(self, who: str, waits_for: str, why: str, deadline_s: float | None = None) -> Iterator[None]:
        """List this wait while the block runs."""
        key, self._next = self._next, self._next + 1
        now = self._clock()
        self._open[key] = (who, waits_for, why, now, None if deadline_s is None else now + deadline_s)
        try:
            yield
        finally:
            del self._open[key]

    def note(self, who: str, waits_for: str, why: str, deadline_s: float | None = None) -> None:
        """`who` waits for this now, until `over`: for a wait that is looked at again and again. It keeps its age as long as
        `waits_for` stays the same."""
        now = self._clock()
        known = self._noted.get(who)
        since = known[3] if known is not None and known[1] == waits_for else now
        self._noted[who] = (who, waits_for, why, since, None if deadline_s is None else now + deadline_s)

    def over(self, who: str) -> None:
        """`who` waits no more."""
        self._noted.pop(who, None)

    def edges(self) -> list[WaitEdge]:
        """The open waits, oldest first."""
        now = self._clock()
        return [
            WaitEdge(who=who, waits_for=waits_for, why=why, since_s=now - since, deadline_s=None if end is None else end - now)
            for who, waits_for, why, since, end in sorted([*self._open.values(), *self._noted.values()], key=lambda wait: wait[3])
        ]


def one_line(error: BaseException) -> str:
    """An error as one line: its text, with the class name in front unless it is one of ours."""
    text = " ".join(str(error).split())
    if isinstance(error, AstraFlowError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
