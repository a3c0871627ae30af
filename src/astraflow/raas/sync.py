"""Weight updates of one model: notices in, pulls and loads out. One at a time, the newest notice first.

    notice ─▶ judge ─▶ wanted (newest only) ─▶ [lanes closed] ─▶ pull in a thread ─▶ [lanes closed] ─▶ pause · load · resume ─▶ canary

A failure leaves the old version served and its number unmoved; it is shown in `/status` and tried again with the next notice.
The receipt (`serving`) moves when the engine confirmed a load and the canary passed it: until then what is sampled under the new
weights waits at Dataflow for its receipt. When the canary fails there is no receipt, so that the instance gets no work, what runs is
cancelled, and every further notice (Dataflow repeats a failed one) loads again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from astraflow.lib.aio import Tasks, Waits, deadline, in_daemon_thread, one_line
from astraflow.lib.metrics import Counter
from astraflow.lib.trace import TRACE
from astraflow.protocol.errors import AstraFlowError, BadMessage, Conflict
from astraflow.protocol.rollout import Serving
from astraflow.protocol.weights import NotifyRaaS
from astraflow.raas.canary import Canary
from astraflow.raas.engines.base import EngineError, Weights
from astraflow.raas.lanes import same_weights
from astraflow.raas.models import ServedModel

log = logging.getLogger(__name__)

MAX_WAIT_S = 600.0


class Receiver(Protocol):
    """What is needed of `weights.receiver.WeightReceiver`; blocking, called in a thread."""

    def pull(
        self,
        sender_endpoint: str,
        version: int,
        digest: str,
        *,
        full: bool = False,
        deadline_s: float,
        stop: threading.Event,
        keep: Path | None = None,
    ) -> Any: ...

    def intact(self, path: Path, digest: str) -> bool: ...

    def abandon(self, stop: threading.Event) -> None: ...

    def close(self) -> None: ...


@dataclass
class LaneGate:
    """How a load waits for the evaluation lanes to end."""

    idle: asyncio.Event
    """Set while no lane is open."""
    time_left_s: Callable[[], float]


@dataclass
class Outcome:
    """What became of a notice."""

    state: Literal["current", "loaded", "loading", "failed"]
    """`current`, `loaded`, `loading` or `failed`, as in `NotifyRaaSReply`."""
    message: str = ""


class ModelSync:
    """The weight updates of one model."""

    def __init__(
        self,
        model: ServedModel,
        receiver: Receiver,
        *,
        lanes: LaneGate,
        rollback: Callable[[str, int], object],
        tasks: Tasks,
        waits: Waits,
        counts: Counter,
        pull_s: float,
        load_s: float,
        canary: Canary | None = None,
    ) -> None:
        """rollback(model_id, timeline) forgets what is running, and what older timelines produced."""
        self.model, self.message = model, ""
        self.last: dict[str, float] = {}
        """Numbers of the last load, for status."""
        self._receiver, self._lanes, self._rollback = receiver, lanes, rollback
        self._tasks, self._waits, self._counts = tasks, waits, counts
        self._pull_s, self._load_s, self._canary = pull_s, load_s, canary
        self._settled = asyncio.Event()
        self._settled.set()
        self._lock = asyncio.Lock()
        self._wanted: NotifyRaaS | None = None
        self._working_on: NotifyRaaS | None = None
        self._stop = threading.Event()
        """Of the notice that is worked on: ends its pull."""
        self._task: asyncio.Task[None] | None = None
        self._timeline = -1
        """Newest timeline that was announced."""
        self._turned = asyncio.Event()
        self._superseded = False
        """The last pull found that the sender holds newer versions only: no failure, the next notice is coming."""
        self._staged: Weights | None = None
        self._loaded: Weights | None = None

    @property
    def staged(self) -> Weights | None:
        """What a restarted engine loads: what it served, else the newest staged one. A load that ended after its deadline counts."""
        if self._staged is not None and self._staged.serving == self.model.loaded:
            return self._staged
        if self._loaded is not None and Path(self._loaded.path).exists():
            return self._loaded
        return self._staged

    def reload(self) -> Weights | None:
        """`staged`, unless its bytes are no longer those that were verified: then nothing, and the receipt goes, so that the next notice
        pulls it anew. Reads the whole file: called in a thread."""
        weights = self.staged
        if weights is None or self._receiver.intact(Path(weights.path), weights.digest):
            return weights
        self.message = f"version {weights.version}: its staged file changed on disk and was not loaded again"
        self._counts.add("weights/damaged_files")
        log.error("model %s: %s", self.model.model_id, self.message)
        return None

    @property
    def rolling_back(self) -> bool:
        """A new timeline was announced and is not served yet: new training work would belong to a dead one."""
        serving = self.model.serving
        return serving is not None and self._timeline > serving.timeline

    @property
    def _newest_timeline(self) -> int:
        """Of what was announced and of what is served."""
        serving = self.model.serving
        return max(self._timeline, -1 if serving is None else serving.timeline)

    @property
    def busy(self) -> bool:
        return self._task is not None and not self._task.done()

    @property
    def loading(self) -> bool:
        """Weights are being loaded or checked."""
        return not self._settled.is_set()

    async def load_ended(self, wait_s: float) -> None:
        """Wait, at most so long, while weights are being loaded or checked."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._settled.wait()

    async def notice(self, notice: NotifyRaaS) -> Outcome:
        """Take a notice and wait at most its `wait_s` for the load. Raises BadMessage for what names no weights."""
        if notice.version < 0 or notice.timeline < 0:
            raise BadMessage(f"notice of version {notice.version} on timeline {notice.timeline}: both are counted from 0")
        reason = self._nothing_to_do(notice)
        if reason:
            return Outcome("current", reason)
        before, self._timeline = self._newest_timeline, notice.timeline
        if notice.timeline > before >= 0:  # whatever is served now: an engine that restarts may serve nothing
            self._rollback(self.model.model_id, notice.timeline)
        self._want(notice)
        if self._task is None or self._task.done():
            self._task = self._tasks.spawn(f"weights {self.model.model_id}", self._work())
        end = time.monotonic() + min(notice.wait_s, MAX_WAIT_S)
        while self._pending and not self._served(notice) and await self._turn(end - time.monotonic()):
            continue
        if self._served(notice):
            return Outcome("loaded")
        return Outcome("loading" if self._pending else "failed", self.message)

    @property
    def _pending(self) -> bool:
        """Something is being pulled, or a newer version exists whose notice must come soon."""
        return self.busy or self._superseded

    async def _turn(self, seconds: float) -> bool:
        """Wait until some notice was dealt with; False when the time is over."""
        turned = self._turned
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await turned.wait()
        except TimeoutError:
            return False
        return True

    def _nothing_to_do(self, notice: NotifyRaaS) -> str:
        """The no-op rule; empty = pull. A dead timeline's notice may come late, while its successor's weights are not here yet."""
        if notice.timeline < self._newest_timeline:
            return f"timeline {notice.timeline} is dead: it is {self._newest_timeline} now"
        serving = self.model.serving
        if serving is None or notice.timeline > serving.timeline:
            return ""
        if notice.version < serving.version:
            return f"version {serving.version} is newer"
        return "served already" if same_weights(serving, _named(notice)) else ""

    def _served(self, notice: NotifyRaaS) -> bool:
        serving = self.model.serving
        if serving is None:
            return False
        newer = (serving.timeline, serving.version) > (notice.timeline, notice.version)
        return newer or same_weights(serving, _named(notice))

    def _want(self, notice: NotifyRaaS) -> None:
        """Keep the newest notice; an older one than what is asked for already says nothing new.

        A pull from another sender or of a dead timeline is ended: its trainer was restarted, and it would wait for nothing.
        """
        running = self._working_on
        for other in (self._wanted, running):
            if other is not None and (other.timeline, other.version) > (notice.timeline, notice.version):
                return
        same_sender = running is None or running.sender_endpoint == notice.sender_endpoint
        if running is not None and same_sender and _named(running) == _named(notice):
            return
        if self._wanted is not None:
            self._counts.add("weights/notices_coalesced")
        self._wanted = notice
        if running is not None and (running.timeline < notice.timeline or not same_sender):
            self._receiver.abandon(self._stop)

    async def _work(self) -> None:
        """Until no notice is left. Errors end with the notice that met them."""
        async with self._lock:
            while self._wanted is not None:
                notice, self._wanted = self._wanted, None
                self._working_on, self._superseded, self._stop = notice, False, threading.Event()
                try:
                    await self._apply(notice)
                except Conflict as error:
                    self.message = one_line(error)
                    self._superseded = "superseded" in self.message
                    if not self._superseded:
                        self._failed(notice, error)
                except (AstraFlowError, OSError, ValueError) as error:
                    self._failed(notice, error)
                finally:
                    self._working_on = None
                    self._turned.set()
                    self._turned = asyncio.Event()

    def _failed(self, notice: NotifyRaaS, error: Exception) -> None:
        self.message = f"version {notice.version} (timeline {notice.timeline}) not loaded: {one_line(error)}"
        self._counts.add("weights/failures")
        log.warning("%s: %s", self.model.model_id, self.message)

    async def _apply(self, notice: NotifyRaaS) -> None:
        if self._nothing_to_do(notice):
            return
        await self._lanes_idle(notice)
        if self._wanted is not None:
            return  # a newer one came while a lane was open
        serving = self.model.serving
        rollback = serving is not None and notice.timeline > serving.timeline
        keep = Path(self.staged.path) if self.staged else None  # an engine that dies before the load ended comes back with it
        self.message = f"pulling version {notice.version}"
        with self._waits.waiting(f"raas:{self.model.model_id}", notice.sender_endpoint, self.message, self._pull_s):
            pull = partial(self._receiver.pull, full=rollback, deadline_s=self._pull_s, stop=self._stop, keep=keep)
            with TRACE.span("transfer", model=self.model.model_id, version=notice.version):
                staged = await in_daemon_thread(lambda: pull(notice.sender_endpoint, notice.version, notice.digest), "weight pull")
        await self._lanes_idle(notice)
        if notice.timeline < self._timeline:
            return  # its timeline died meanwhile; the successor's notice is waiting
        weights = Weights(path=str(Path(staged.path)), timeline=notice.timeline, version=staged.version, digest=staged.digest)
        self._staged = weights
        self._settled.clear()
        try:
            await self._replace(weights, staged)
        finally:
            self._settled.set()

    async def _replace(self, weights: Weights, staged: Any) -> None:
        """Load, check, and only then move the receipt."""
        model, canary = self.model, self._canary
        self.message = f"loading version {weights.version}"
        if canary is not None:
            model.before, model.withheld = model.serving, True
        with TRACE.span("load", model=model.model_id, version=weights.version):
            seconds = await self._load(weights)
        self._loaded = weights
        self._note(staged, seconds)
        if canary is not None:
            self.message = f"checking version {weights.version}"
            verdict = await canary.check(weights)
            self.last |= verdict.metrics
            if verdict.complaint:
                model.before = None
                self._rollback(model.model_id, self._timeline)
                raise EngineError("canary", verdict.complaint)
            model.withheld = False
        self.message = canary.note if canary is not None else ""

    async def _load(self, weights: Weights) -> float:
        """Pause, load, resume: one block that always resumes."""
        started = time.monotonic()
        async with self.model.gate.paused():
            await deadline(self.model.engine.load(weights), self._load_s, f"load of {self.model.model_id} version {weights.version}")
        return time.monotonic() - started

    async def _lanes_idle(self, notice: NotifyRaaS) -> None:
        """Loads are put off while an evaluation lane is open; a lane ends by itself at its deadline."""
        while not self._lanes.idle.is_set():
            self.message = f"version {notice.version} is put off: an evaluation lane is open"
            with self._waits.waiting(f"raas:{self.model.model_id}", "lane", self.message, self._lanes.time_left_s()):
                await self._lanes.idle.wait()

    def _note(self, staged: Any, seconds: float) -> None:
        """Numbers of the transfer for status and report."""
        self._counts.add(f"weights/syncs_{staged.mode}")
        self._counts.add(f"weights/bytes_{staged.mode}", staged.size_bytes)
        if staged.fallback:
            self._counts.add("weights/fallbacks")
        self.last = {
            "weights/pull_s": staged.seconds,
            "weights/load_s": seconds,
            "weights/size_bytes": float(staged.size_bytes),
            "weights/changed_elements": float(staged.changed_elements),
        }
        log.info(
            "%s: version %d loaded (%s, %.2f MB, pull %.2f s, load %.2f s)%s",
            self.model.model_id,
            staged.version,
            staged.mode,
            staged.size_bytes / 1e6,
            staged.seconds,
            seconds,
            f"; {staged.fallback}" if staged.fallback else "",
        )


def _named(notice: NotifyRaaS) -> Serving:
    return Serving(timeline=notice.timeline, version=notice.version, digest=notice.digest)
