"""One asyncio loop per process: supervised tasks, named deadlines, back-off, and the list of who waits for whom."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
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


class Escaped(RuntimeError):
    """What the code of others raised and no task or future can carry: SystemExit, KeyboardInterrupt and their like end the loop that a
    task runs in, StopIteration never gets through a future. The original is its `__cause__`, its text names it."""


def carried(error: BaseException) -> Exception:
    """The error itself where it can be handed on, else as `Escaped`."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    escaped = Escaped(one_line(error))
    escaped.__cause__ = error
    return escaped


class Contained(Coroutine[Any, Any, T]):
    """A coroutine of others that ends in a result, an `Exception` or its cancellation, and never ends the process.

    An object and not an `async def` around it, so that one which is cancelled before its first step still closes what it holds.
    """

    def __init__(self, coro: Coroutine[Any, Any, T]) -> None:
        self._coro = coro

    def send(self, value: Any) -> Any:
        return self._step(self._coro.send, value)

    def throw(self, *error: Any) -> Any:
        if isinstance(error[0], GeneratorExit) or error[0] is GeneratorExit:  # it is being closed
            return self._coro.throw(*error)
        return self._step(self._coro.throw, *error)

    def close(self) -> None:
        self._coro.close()

    def _step(self, step: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return step(*arguments)
        except (Exception, asyncio.CancelledError):  # StopIteration is how a coroutine returns
            raise
        except BaseException as error:  # GeneratorExit too: nobody closes it here, so its own code raised that
            raise carried(error) from error

    def __await__(self) -> Generator[Any, Any, T]:
        return cast("Generator[Any, Any, T]", self)

    def __iter__(self) -> Contained[T]:
        return self

    def __next__(self) -> Any:
        return self.send(None)


def contained(call: Callable[..., Awaitable[T]], *args: Any, **named: Any) -> Contained[T]:
    """A call of others' code, to be awaited: contained from its first line on, also where it raises before there is a coroutine."""

    async def run() -> T:
        return await call(*args, **named)

    return Contained(run())


def asked_to_cancel() -> bool:
    """Whether somebody wants the present task to end; a CancelledError of its own subtask, or raised by hand, says nothing of it."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def contain_tasks(loop: asyncio.AbstractEventLoop, where: Callable[[], Any]) -> None:
    """From now on each task that is started where `where()` is true is `Contained`, also those that the code of others starts itself."""

    def start(loop: asyncio.AbstractEventLoop, coro: Any, **more: Any) -> asyncio.Task[Any]:
        return asyncio.Task(Contained(coro) if where() else coro, loop=loop, **more)

    loop.set_task_factory(start)


async def in_daemon_thread(call: Callable[[], T], name: str) -> T:
    """Like `asyncio.to_thread`, but the end of the process does not wait for the thread, which may sit out a whole deadline, and
    whatever `call` raises is an `Exception` here (see `Escaped`)."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(cast(T, result))
        else:
            done.set_exception(error)

    def work() -> None:
        result: T | None = None
        failure: Exception | None = None
        try:
            result = call()
        except BaseException as error:  # handed to the one who awaits
            failure = carried(error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody awaits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await done


def within(call: Callable[[], T], seconds: float, name: str) -> T:
    """`Threads.run` for where no loop may be awaited: the caller blocks, for `seconds` at most. Raises DeadlinePassed naming the wait, or
    whatever the call raised, as an `Exception`."""
    done: SimpleQueue[tuple[T | None, Exception | None]] = SimpleQueue()

    def work() -> None:
        try:
            done.put((call(), None))
        except BaseException as error:  # handed to the one who waits
            done.put((None, carried(error)))

    threading.Thread(target=work, name=name, daemon=True).start()
    try:
        result, failure = done.get(timeout=seconds)
    except Empty:
        raise DeadlinePassed(f"{name}: not done within {seconds:g} s") from None
    if failure is not None:
        raise failure
    return cast(T, result)


class Threads:
    """Calls that may block for ever, each in a thread of its own: one that hangs holds up no other, and is left behind at its deadline.

    A thread cannot be ended from outside, so those left behind are counted and bounded.
    """

    def __init__(self, most: int = 64) -> None:
        """`most`: hung calls from which on `full` says so; each holds a stack, a few hundred kB."""
        self.most = most
        self._left: set[object] = set()

    @property
    def left(self) -> int:
        """Calls that were left behind and still have not ended."""
        return len(self._left)

    @property
    def full(self) -> bool:
        """Too many hang: whoever begins something new should not."""
        return self.left >= self.most

    async def run(self, call: Callable[[], T], seconds: float, name: str) -> T:
        """The call's result. Raises DeadlinePassed naming the wait, or whatever the call raised, as an `Exception`."""
        mine, ended = object(), threading.Event()

        def work() -> T:
            try:
                return call()
            finally:
                ended.set()
                self._left.discard(mine)

        try:
            return await deadline(in_daemon_thread(work, name), seconds, name)
        finally:
            self._left.add(mine)
            if ended.is_set():  # looked at after it was added: a call that ends just now is not left on the list by either side
                self._left.discard(mine)


class Abandoned:
    """Calls that are awaited up to their deadline and no longer: one that swallows its cancellation is left behind, and counted."""

    def __init__(self) -> None:
        self._left: set[asyncio.Task[Any]] = set()

    @property
    def left(self) -> int:
        """Calls that were left behind and still have not ended."""
        return len(self._left)

    async def run(self, call: Coroutine[Any, Any, T], seconds: float, name: str) -> T:
        """The call's result, or what it raised. Raises DeadlinePassed naming the wait."""
        task = asyncio.get_running_loop().create_task(call, name=name)
        try:
            await asyncio.wait({task}, timeout=seconds)
            if task.done():
                return task.result()
            raise DeadlinePassed(f"{name}: not done within {seconds:g} s")
        finally:
            if not task.done():
                self._left.add(task)
                task.add_done_callback(self._ended)
                task.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._left.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: nobody asks any more


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


def text_of(error: BaseException) -> str:
    """Its text on one line, whatever the code of others does in `__str__`."""
    try:
        return " ".join(str(error).split())
    except BaseException as failure:
        return f"its text cannot be read: {type(failure).__name__}"


def one_line(error: BaseException) -> str:
    """An error as one line: its text, with the class name in front unless it is one of ours. Never raises."""
    text = text_of(error)
    if isinstance(error, AstraFlowError | Escaped) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
