"""A loop in simulated time, and processes that can be killed between two steps of their tasks.

`time()` stands still while anything can run and then jumps to the next timer. Work for threads runs on the same thread, later by
a moment that the schedule chose, calls of one executor in order. The same inputs give the same run, step by step.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")
OWNER: contextvars.ContextVar[Process | None] = contextvars.ContextVar("owner", default=None)
"""The simulated process whose code runs; None = the world itself."""
DISPOSAL_ROUNDS = 8
LONGEST_RUN = 300_000
"""Steps of one run; a few thousand are usual."""


class Process:
    """One life of one process: all tasks that were begun by it. `die` is kill -9: no task runs one step more, nothing is cleaned up."""

    def __init__(self, name: str, loop: VirtualLoop) -> None:
        self.name, self.alive, self._loop = name, True, loop
        self.paused = False
        """Stopped like by SIGSTOP: what is due meanwhile runs when it goes on."""
        self.deferred: list[asyncio.Handle] = []
        self.signals: dict[int, Callable[[], None]] = {}
        self.tasks: list[asyncio.Task[Any]] = []
        self._context = contextvars.Context()
        self._context.run(OWNER.set, self)

    def spawn(self, coro: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        """Run in this process."""
        return self._loop.create_task(coro, name=name or None, context=self._context.copy())

    def soon(self, delay_s: float, callback: Callable[..., Any], *args: Any) -> None:
        self._loop.call_at(self._loop.time() + delay_s, callback, *args, context=self._context)

    def die(self) -> None:
        self.alive = False

    def go_on(self) -> None:
        """SIGCONT."""
        self.paused, deferred = False, self.deferred
        self.deferred = []
        self._loop.requeue(deferred, self)


class Inline(Executor):
    """Stands for a thread of its own; the loop runs its calls in order."""

    def __init__(self) -> None:
        self.free_at = 0.0

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        return None


class Deadlock(RuntimeError):
    """Nobody can run and no timer is set, or somebody runs for ever."""


class VirtualLoop(asyncio.BaseEventLoop):
    """asyncio's contract on a clock of its own. What belongs to a dead process is passed over."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._queue: deque[tuple[asyncio.Handle, Process | None]] = deque()
        self._timers: list[tuple[float, int, asyncio.Handle, Process | None]] = []
        self._order = itertools.count()
        self._current: asyncio.Task[Any] | None = None
        self.thread_delay: Callable[[], float] = lambda: 0.0
        """How long the next call in a thread takes."""
        self.thread_call: Callable[[Process | None, Callable[[], Any]], Any] = lambda _, call: call()
        """Runs it; the world's place to interrupt."""
        self.set_task_factory(self._make_task)
        self.set_exception_handler(lambda loop, context: self.complaints.append(context))
        self.complaints: list[dict[str, Any]] = []
        """What no task took: a bug."""

    def _make_task(self, loop: asyncio.AbstractEventLoop, coro: Any, context: contextvars.Context | None = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, context=context)
        owner = context.get(OWNER) if context is not None else OWNER.get()
        if owner is not None:
            owner.tasks.append(task)
        return task

    def time(self) -> float:
        return self._now

    def call_soon(  # type: ignore[override]  # callbacks of any kind
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        context = context if context is not None else contextvars.copy_context()
        handle = asyncio.Handle(callback, args, self, context)
        self._queue.append((handle, context.get(OWNER)))
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        context = context if context is not None else contextvars.copy_context()
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._order), handle, context.get(OWNER)))
        return handle

    def run_until_complete(self, future: Any) -> Any:
        """Until `future` is done. Raises Deadlock when that can never be."""
        previous = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            task = asyncio.ensure_future(future, loop=self)
            for steps in itertools.count():
                if task.done():
                    return task.result()
                if steps >= LONGEST_RUN:
                    raise Deadlock(f"at {self._now:.3f} s: {LONGEST_RUN} steps, and no end")
                self._step()
        finally:
            asyncio._set_running_loop(previous)

    def _step(self) -> None:
        if not self._queue:
            if not self._timers:
                raise Deadlock(f"at {self._now:.3f} s: nobody can run and no timer is set")
            when, _, handle, owner = heapq.heappop(self._timers)
            if handle.cancelled() or (owner is not None and not owner.alive):
                return
            self._now = max(self._now, when)
        else:
            handle, owner = self._queue.popleft()
        if handle.cancelled():
            return
        if owner is None:
            handle._run()
        elif owner.paused or not owner.alive:  # of the dead: for `dispose`
            owner.deferred.append(handle)
        else:
            handle._run()

    def requeue(self, handles: list[asyncio.Handle], owner: Process) -> None:
        """Of a process that goes on."""
        self._queue.extend((handle, owner) for handle in handles)

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future: asyncio.Future[T] = self.create_future()
        when = self._now + self.thread_delay()
        if isinstance(executor, Inline):
            when = executor.free_at = max(when, executor.free_at)
        self.call_at(when, self._execute, OWNER.get(), future, func, args, context=contextvars.Context())
        return future

    def _execute(self, owner: Process | None, future: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if owner is not None and not owner.alive:
            return
        if owner is not None and owner.paused:
            arguments = (owner, future, func, args)
            owner.deferred.append(asyncio.Handle(self._execute, arguments, self, contextvars.Context()))
            return
        result: Any = None
        failure: Exception | None = None
        try:
            result = self.thread_call(owner, lambda: func(*args))
        except Exception as error:  # handed to the one who awaits
            failure = error
        if (owner is not None and not owner.alive) or future.done():
            return
        if failure is None:
            future.set_result(result)
        else:
            future.set_exception(failure)

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:  # type: ignore[override]
        """Kept with the process: `signals[sig]()` is what the kernel would do."""
        owner = OWNER.get()
        if owner is not None:
            owner.signals[sig] = lambda: owner.soon(0.0, callback, *args)

    def dispose(self, processes: list[Process]) -> None:
        """After the run: let every task, of the dead too, come to its end in an empty world, so that none is left to the collector."""
        self.complaints, ignored = [], self.complaints
        self._timers.clear()
        for process in processes:
            process.alive = True
            process.go_on()
        previous = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            for _ in range(DISPOSAL_ROUNDS):
                open_tasks = [task for process in processes for task in process.tasks if not task.done()]
                if not open_tasks:
                    break
                for task in open_tasks:
                    task.cancel()
                self._timers.clear()
                for _ in range(LONGEST_RUN):
                    if not self._queue:
                        break
                    self._step()
        finally:
            asyncio._set_running_loop(previous)
        for process in processes:
            for task in process.tasks:
                if task.done() and not task.cancelled():
                    task.exception()  # marks it as retrieved
        self.complaints = ignored
        self._queue.clear()
        self._timers.clear()
        self.close()
