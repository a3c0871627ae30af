"""What the parts of Dataflow share: the pure cores, the ledger, and a way to wake whoever waits. No decisions are made here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from astraflow.dataflow.barrier import ModelState, VersionBarrier
from astraflow.dataflow.buffer import RolloutBuffer
from astraflow.dataflow.config import DataflowProcess
from astraflow.dataflow.flow import Flow
from astraflow.dataflow.leases import LeaseBook
from astraflow.dataflow.ledger import Ledger, LedgerThread
from astraflow.dataflow.ledger_lives import LedgerDamaged
from astraflow.dataflow.pool import RaaSPool
from astraflow.dataflow.segments import DiskRefused
from astraflow.dataflow.source import TaskSource
from astraflow.lib.aio import Tasks, Waits
from astraflow.lib.metrics import Mean, Metrics
from astraflow.lib.wire import Identity

log = logging.getLogger("astraflow.dataflow")
T = TypeVar("T")

RATE_WINDOW_S = 60.0
EVENTS_KEPT = 200
MAX_EVENT_CHARS = 1000


class Pulse:
    """Wakes everybody who waits; they look again at what they wait for. Check and `wait` without an await in between."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}  # in order, so that who waited first looks first

    def fire(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for news in waiting:
            _wake(news)

    async def wait(self, timeout_s: float) -> None:
        """Until the next `fire`, at most this long. (A bare future: every pulse wakes every waiter, so that this is the most run
        wait of the service.)"""
        loop = asyncio.get_running_loop()
        news: asyncio.Future[None] = loop.create_future()
        self._waiting[news] = None
        timer = loop.call_later(timeout_s, _wake, news)
        try:
            await news
        finally:
            timer.cancel()
            self._waiting.pop(news, None)


def _wake(news: asyncio.Future[None]) -> None:
    if not news.done():
        news.set_result(None)


@dataclass
class Meter:
    """Counts since the start, and rates over the last minute."""

    started: float
    counts: Counter[str] = field(default_factory=Counter)
    """Trajectories and groups by what happened to them (`rollout/…`)."""
    _seconds: deque[list[int]] = field(default_factory=deque)
    """[second, trajectories, tokens] of the last minute: a status answer adds up sixty numbers, whatever the speed."""
    _rewards: deque[float] = field(default_factory=lambda: deque(maxlen=512))
    """Group means of the newest groups; 512 is a few batches."""

    def group(self, now: float, trajectories: int, tokens: int) -> None:
        """A group arrived."""
        second = int(now)
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append([second, 0, 0])
            self._trim(now)
        self._seconds[-1][1] += trajectories
        self._seconds[-1][2] += tokens

    def _trim(self, now: float) -> None:
        while self._seconds and self._seconds[0][0] < now - RATE_WINDOW_S:
            self._seconds.popleft()

    def reward(self, mean: float) -> None:
        self._rewards.append(mean)

    @property
    def reward_mean(self) -> float | None:
        return sum(self._rewards) / len(self._rewards) if self._rewards else None

    def rates(self, now: float) -> dict[str, float]:
        span = max(min(RATE_WINDOW_S, now - self.started), 1.0)
        self._trim(now)
        trajectories, tokens = sum(item[1] for item in self._seconds), sum(item[2] for item in self._seconds)
        return {"trajectories_per_s": trajectories / span, "tokens_per_s": tokens / span}


@dataclass
class Rejections:
    """What a model's groups came to since its last batch; decides on starvation."""

    seen: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    in_a_row: int = 0
    rejecting_since: float = 0.0
    """When the present row of rejections began."""

    def counts(self) -> dict[str, int]:
        return {"seen": self.seen, **{f"dropped/{reason}": count for reason, count in sorted(self.dropped.items())}}

    def new_batch(self) -> None:
        self.seen, self.dropped = 0, Counter()


@dataclass
class Shelf:
    """Built once by the service."""

    process: DataflowProcess
    identity: Identity
    ledger: Ledger
    thread: LedgerThread
    barrier: VersionBarrier
    pool: RaaSPool
    leases: LeaseBook
    source: TaskSource
    buffers: dict[str, RolloutBuffer]
    metrics: Metrics
    tasks: Tasks
    clock: Callable[[], float] = time.monotonic
    pulse: Pulse = field(default_factory=Pulse)
    waits: Waits = field(default_factory=Waits)
    events: deque[str] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    rejections: dict[str, Rejections] = field(default_factory=dict)
    staleness: dict[str, Counter[int]] = field(default_factory=dict)
    steps: dict[str, dict[str, float]] = field(default_factory=dict)
    meter: Meter = field(init=False)
    group_means: Mean = field(default_factory=Mean)
    """Means of what rollout services report per group, since the last metrics line."""
    flows: dict[str, Flow] = field(init=False)
    """Per model, what was generated against what was trained on."""
    stalled: str = ""
    """Why the run is stalled; empty = it is not."""
    _writing: dict[int, tuple[str, float]] = field(default_factory=dict)
    held_for: str = ""
    """The synchronous evaluation for which no training leases are submitted; empty = none."""
    reserved: set[str] = field(default_factory=set)
    """Instances whose next free places belong to an evaluation."""
    recording: int = 0
    """Groups that are being written: no longer leased, not yet queued."""
    started: bool = False
    paused: bool = False
    """An operator has paused acquisition."""
    stopping: bool = False

    def __post_init__(self) -> None:
        self.meter = Meter(self.clock())
        self.flows = {model_id: Flow() for model_id in self.buffers}
        for model_id in self.buffers:
            self.rejections[model_id] = Rejections()
            self.staleness[model_id] = Counter()

    @property
    def n_samples(self) -> int:
        return self.process.workflow.n_samples

    @property
    def groups_in_flight(self) -> int:
        """Leases that are out or about to be issued again."""
        return len(self.leases.open)

    def event(self, text: str) -> None:
        """Something happened to a process: shown in /status, newest last."""
        text = text if len(text) <= MAX_EVENT_CHARS else f"{text[:MAX_EVENT_CHARS]} …"  # peers' words are in it
        log.info("%s", text)
        self.events.append(f"{time.strftime('%H:%M:%S')} {text}")

    def tell_mended(self) -> None:
        """What the ledger found damaged and made good."""
        while self.ledger.mended:
            self.event(self.ledger.mended.pop(0))

    async def write(self, function: Callable[..., T], *arguments: Any) -> T:
        """A ledger call in its own thread; calls run in the order in which they were made."""
        call = object()
        self._writing[id(call)] = (getattr(function, "__name__", "call"), self.clock())
        try:
            return await self.thread.call(function, *arguments)
        except (DiskRefused, LedgerDamaged) as error:  # memory is ahead of the disk now: only a restart brings them together again
            self.tasks.failed("ledger", error)
            raise
        finally:
            del self._writing[id(call)]

    def writing(self) -> list[tuple[str, float]]:
        """(name, since) of ledger calls that have not returned, oldest first."""
        return list(self._writing.values())

    def versions_meta(self) -> dict[str, bytes]:
        """The barrier's state as the ledger keeps it."""
        return {"models": msgspec.msgpack.encode(list(self.barrier.models.values()))}

    def pool_meta(self) -> dict[str, bytes]:
        return {"instances": msgspec.msgpack.encode([instance.record for instance in self.pool.instances.values()])}

    def source_meta(self) -> dict[str, bytes]:
        return {"source": msgspec.msgpack.encode(self.source.state), "lease_number": msgspec.msgpack.encode(self.leases.next_number)}

    def reset_pace(self, model_id: str, version: int, served_places: int) -> None:
        """Count places from here on (a start, a restart, a rollback): what is queued or served now is accepted already."""
        pace = self.buffers[model_id].pace
        pace.v_start, pace.accepted = version, self.buffers[model_id].places + served_places


def decode_models(data: bytes) -> list[ModelState]:
    return msgspec.msgpack.decode(data, type=list[ModelState])
