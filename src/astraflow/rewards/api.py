"""Rewards as the rollout service uses them: by name, with a deadline per sample, and never a silent 0.

A reward is `(prompt, completions, prompt_ids, completion_ids, **data) -> float | None` for one sample; None = unscored.
Cheap pure ones (`@register_reward(name, blocking=False)`) run where they are called; the others run in worker processes
(`rewards/worker.py`) that are killed and replaced when a sample passes its deadline, so that one endless expression costs
one worker restart and not the pool (case G04).

    caller ──await──▶ free worker ──frame──▶ python -m astraflow.rewards.worker
                          │ deadline: SIGKILL, replace, RewardError(timeout)
                          │ pipe closed: replace, RewardError(crash)
                          └ reply: float | None | RewardError(exception)
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import os
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec

from astraflow.lib.frames import FrameReader, pack
from astraflow.lib.proc import descendants
from astraflow.protocol.codec import fault_of
from astraflow.protocol.errors import AstraFlowError, BadMessage, ConfigError
from astraflow.protocol.rollout import Boundary
from astraflow.rewards import REWARDS

__all__ = ["REWARDS", "AsyncRewardWrapper", "RewardError", "inline", "load_reward", "register_reward"]

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., Any]
F = TypeVar("F", bound=RewardFunction)

END_DEADLINE_S = 10.0
START_DEADLINE_S = 180.0
"""Importing sympy took up to 18 s on a loaded machine; reasoning-gym 62 s."""
RECENT, RECENT_S, FEWEST = 200, 60.0, 20
"""Newest verdicts that the error rate is taken over, how old they may be, and how many it needs."""


class RewardError(AstraFlowError):
    """No score: the sample is unscored and counted under `kind`."""

    boundary: Boundary = "reward"

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(message or f"reward: {kind}")
        self.kind = kind
        """`timeout`, `crash` (the worker died) or `exception` (the reward raised, or returned no number)."""


def inline(function: F) -> F:
    """Mark a reward as cheap and pure: it runs in the event loop, without a worker process."""
    function.blocking = False  # type: ignore[attr-defined]
    return function


def register_reward(name: str, *, blocking: bool = True) -> Callable[[F], F]:
    """Decorator of plug-in modules. `blocking=False` only for microseconds of pure Python."""

    def register(function: F) -> F:
        REWARDS.register(name)(function)
        return function if blocking else inline(function)

    return register


def load_reward(name: str) -> RewardFunction:
    """The function of a registry name, or of `module:attr` (local configuration only). Raises UnknownName, ConfigError."""
    function = REWARDS.resolve(name)
    if not callable(function):
        raise ConfigError(f"reward {name!r}: {type(function).__name__} is not a function")
    return cast(RewardFunction, function)


def checked(value: Any) -> float | None:
    """A reward's return value. Raises RewardError(exception) for what is neither None nor a finite number."""
    if value is None:
        return None
    try:
        if isinstance(value, str | bytes):  # `float` would read a number out of them
            raise TypeError
        score = float(value)
    except (TypeError, ValueError, OverflowError):
        raise RewardError("exception", f"reward returned {type(value).__name__}, expected a number or None") from None
    if not math.isfinite(score):
        raise RewardError("exception", f"reward returned {score}")
    return score


class Sample(msgspec.Struct, array_like=True):
    """Frame to a worker."""

    prompt: str
    completions: str
    prompt_ids: list[int]
    completion_ids: list[int]
    data: dict[str, Any]
    number: int = 0
    """Of this worker's samples."""


class Verdict(msgspec.Struct, array_like=True):
    """Frame from a worker; the first one after start has `ready` set."""

    score: float | None = None
    error: str = ""
    ready: bool = False
    number: int = 0
    """The sample's."""


class RecentErrors:
    """Share of errors among the newest verdicts. Pure."""

    def __init__(self) -> None:
        self._verdicts: deque[tuple[float, bool]] = deque(maxlen=RECENT)

    def add(self, now: float, error: bool) -> None:
        self._verdicts.append((now, error))

    def rate(self, now: float) -> float:
        """0 … 1; 0 while there are too few verdicts of the last minute to tell. So a gate that goes by it opens again by itself."""
        recent = [error for when, error in self._verdicts if now - when <= RECENT_S]
        return sum(recent) / len(recent) if len(recent) >= FEWEST else 0.0


class _Worker:
    """One child process; `start` again after `kill`."""

    def __init__(self, reward: str, plugins: tuple[str, ...]) -> None:
        self._argv = [sys.executable, "-m", "astraflow.rewards.worker", reward, *plugins]
        self._process: asyncio.subprocess.Process | None = None
        self._verdicts: FrameReader[Verdict] = FrameReader(Verdict, "reward worker")
        self._samples = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Spawn and wait until the reward is imported. Raises RewardError(crash)."""
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._verdicts = FrameReader(Verdict, "reward worker")  # nothing of an earlier process
        self._process = await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C in the terminal drains the run; samples in flight are still scored
        )
        try:
            verdict = await asyncio.wait_for(self._read(), START_DEADLINE_S)
        except TimeoutError:
            raise RewardError("crash", f"reward worker did not start within {START_DEADLINE_S:g} s") from None
        if not verdict.ready:
            raise RewardError("crash", f"reward worker did not start: {verdict.error}")

    async def score(self, sample: Sample, deadline_s: float) -> Verdict:
        """Raises TimeoutError past the deadline, RewardError(crash) when the process dies, BadMessage for data that cannot be sent."""
        assert self._process is not None
        assert self._process.stdin is not None
        sample.number = self._samples + 1
        frame = pack(sample)
        self._samples += 1
        self._process.stdin.write(frame)
        verdict = await asyncio.wait_for(self._read(), deadline_s)
        if verdict.number != sample.number:
            raise RewardError("crash", f"reward worker answered sample {verdict.number} instead of {sample.number}")
        return verdict

    async def _read(self) -> Verdict:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            return await self._verdicts.read(self._process.stdout)
        except (asyncio.IncompleteReadError, ConnectionError, BadMessage):
            raise RewardError("crash", "reward worker died") from None

    async def kill(self) -> None:
        """SIGKILL to its whole group and to all that a reward has started elsewhere, and reap: a call into C cannot be interrupted by
        anything softer."""
        process, self._process = self._process, None
        if process is None:
            return
        elsewhere: list[int] = []
        if process.returncode is None:
            elsewhere = descendants(process.pid)
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                logger.debug("reward worker %s was gone already", process.pid)
            for pid in elsewhere:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), END_DEADLINE_S)
        except TimeoutError:  # something that could not be killed holds its pipes
            logger.warning("reward worker %d did not end within %g s of SIGKILL", process.pid, END_DEADLINE_S)


class AsyncRewardWrapper:
    """A reward as an async callable. One per (reward name) in a rollout service; `close` it at the end.

    `counts`: `scored, unscored, timeout, crash, exception, restarts`.
    """

    def __init__(self, reward_name: str, workers: int = 2, deadline_s: float = 10.0, plugins: tuple[str, ...] | list[str] = ()) -> None:
        if workers < 1:
            raise ValueError(f"rewards.workers: {workers}, expected at least 1")
        self.name = reward_name
        self.deadline_s = deadline_s
        self.counts: Counter[str] = Counter()
        self.recent = RecentErrors()
        function = load_reward(reward_name)
        self._function = function if not getattr(function, "blocking", True) or inspect.iscoroutinefunction(function) else None
        self._workers = [] if self._function else [_Worker(reward_name, tuple(plugins)) for _ in range(workers)]
        self._free: asyncio.Queue[_Worker] = asyncio.Queue(maxsize=workers)  # bound: each worker is in it at most once
        for worker in self._workers:
            self._free.put_nowait(worker)
        self._closed = False

    def pids(self) -> list[int]:
        """Process ids of the live workers."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    async def start(self) -> None:
        """Bring all workers up (also happens on first use). Raises RewardError(crash) when one cannot start."""
        idle = [self._free.get_nowait() for _ in range(self._free.qsize())]
        try:
            await asyncio.gather(*(worker.start() for worker in idle if worker.pid is None))
        finally:
            for worker in idle:
                self._free.put_nowait(worker)

    async def __call__(self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float | None:
        """Score one sample; None = unscored. Raises RewardError(timeout | crash | exception)."""
        try:
            if self._closed:
                raise RewardError("crash", f"reward {self.name!r} is closed")
            score = await self._score(Sample(prompt, completions, prompt_ids, completion_ids, data))
        except RewardError as error:
            self.counts[error.kind] += 1
            self.recent.add(time.monotonic(), True)
            logger.warning("reward %s: %s", self.name, error)
            raise
        self.recent.add(time.monotonic(), False)
        self.counts["unscored" if score is None else "scored"] += 1
        return score

    async def _score(self, sample: Sample) -> float | None:
        if self._function is not None:
            return await self._inline(self._function, sample)
        worker = await self._free.get()
        healthy = False
        try:
            if self._closed:
                raise RewardError("crash", f"reward {self.name!r} is closed")
            if worker.pid is None:
                await worker.start()
            verdict = await worker.score(sample, self.deadline_s)
            healthy = True
        except BadMessage as error:  # raised before a byte was sent: the worker is as good as before
            healthy = True
            raise RewardError("exception", f"{error} ({fault_of(sample.data) or 'prompt or completion'})") from None
        except TimeoutError:
            raise RewardError("timeout", f"reward {self.name!r} took longer than {self.deadline_s:g} s") from None
        finally:  # a cancelled caller leaves an unread reply behind: such a worker is replaced as well
            if not healthy:
                await asyncio.shield(self._retire(worker))
            self._free.put_nowait(worker)
        if verdict.error:
            raise RewardError("exception", verdict.error)
        return checked(verdict.score)

    async def _inline(self, function: RewardFunction, sample: Sample) -> float | None:
        try:
            result = function(sample.prompt, sample.completions, sample.prompt_ids, sample.completion_ids, **sample.data)
            if inspect.isawaitable(result):
                result = await asyncio.wait_for(result, self.deadline_s)
        except TimeoutError:
            raise RewardError("timeout", f"reward {self.name!r} took longer than {self.deadline_s:g} s") from None
        except RewardError:
            raise
        except Exception as error:  # the boundary between a user's reward and the system: whatever it raises is its verdict
            raise RewardError("exception", f"{type(error).__name__}: {error}") from error
        return checked(result)

    async def _retire(self, worker: _Worker) -> None:
        self.counts["restarts"] += 1
        await worker.kill()

    async def close(self) -> None:
        """Kill and reap all workers; calls in flight end with RewardError(crash)."""
        self._closed = True
        await asyncio.gather(*(worker.kill() for worker in self._workers))
