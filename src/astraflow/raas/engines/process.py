"""Parent side of an engine that runs in a child process and speaks `frames.py` over a socketpair.

    spawn ─▶ Init ─▶ Ready ─▶ [Load the staged weights again] ─▶ up ─▶ death ─▶ requests fail (retryable) ─▶ back-off ─▶ spawn …

The child is dead when its end of the socket closes or when it answers no ping in time (it is killed then). The receipt survives
a restart, because the same weights come back before any request does; when they cannot be loaded it is taken back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from astraflow.lib.aio import deadline, one_line
from astraflow.lib.proc import Child
from astraflow.lib.registry import closest
from astraflow.lib.tokenizer import NO_LIMIT
from astraflow.protocol.errors import BY_NAME, AstraFlowError, BadMessage, ConfigError, DeadlinePassed, UserError
from astraflow.protocol.rollout import Serving
from astraflow.raas.engines import frames
from astraflow.raas.engines.base import EngineError, EngineSetup, Weights
from astraflow.raas.engines.frames import Cancel, Done, Failed, FromChild, Generate, Init, Load, Loaded, LoadFailed, Ping, Pong, Ready, Stop
from astraflow.raas.engines.life import SupervisedEngine, last_lines, size_of
from astraflow.workflows.api import EpisodeError, ModelRequest, ModelResponse

log = logging.getLogger(__name__)

STOP_S = 3.0
"""Time that the child gets to end after Stop before it is terminated."""


class ProcessEngine(SupervisedEngine):
    """One engine child and its restarts."""

    def __init__(self, kind: str, setup: EngineSetup, argv: Callable[[int], list[str]], init: Init, env: Mapping[str, str] | None = None):
        """argv(fd) is the child's command line."""
        super().__init__(kind, setup)
        self._argv, self._init = argv, init
        self._env = {**os.environ, **(env or {})}
        self._link: _Link | None = None

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Waits while the engine restarts; the caller's deadline bounds that."""
        return await (await self._usable()).generate(request)

    async def load(self, weights: Weights) -> None:
        link = await self._usable()
        self._status.state = "loading"
        try:
            await link.load(weights)
        finally:
            if self._status.state == "loading":
                self._status.state = "ready"

    async def _usable(self) -> _Link:
        while True:
            await self._alive()
            if self._link is not None and not self._link.closed.is_set():
                return self._link
            self._up.clear()  # `_live` has not seen this death yet; it sets the event again

    # --- one life after the other -------------------------------------------------------------------------------------------

    async def _spawn(self) -> None:
        """A child that answered Ready. Raises when there is none within `start_s`; nothing is left running then."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        log_start = size_of(self._setup.log_path)
        try:
            self._child = Child(
                self._argv(theirs.fileno()),
                env=self._env,
                log_path=self._setup.log_path,
                pass_fds=[theirs.fileno()],
                name=f"engine {self._setup.model_id}",
            )
        except AstraFlowError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._link = _Link(*await asyncio.open_connection(sock=ours), on_frame=self._note)
        try:
            ready = await deadline(self._link.open(self._init), self._setup.config.start_s, f"start of engine {self._setup.model_id}")
        except (EngineError, DeadlinePassed) as error:
            await self._end("did not start")  # first: its last words may come after it closed the socket
            words = last_lines(self._setup.log_path, log_start)
            raise _start_error(self._setup.model_id, words[-1].strip() if words else one_line(error)) from None
        self._status.pid, self._status.state, self._status.message = ready.pid, "ready", ""
        log.info("engine %s: pid %d on %s (%s), up after %.1f s", self._setup.model_id, ready.pid, ready.device, ready.dtype, ready.seconds)

    async def _watch(self) -> str:
        assert self._link is not None
        config, link = self._setup.config, self._link
        while not link.closed.is_set():
            link.ping()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(config.ping_s):
                    await link.closed.wait()
            silent_s = link.silent_s
            limit_s = max(config.ping_deadline_s, config.load_s) if link.loading else config.ping_deadline_s  # a load answers no ping
            if not link.closed.is_set() and silent_s > limit_s:
                return f"no sign of life for {silent_s:.0f} s"
        return link.why or "its process ended"

    async def _load_again(self) -> None:
        """The receipt stands meanwhile (no request passes), so that a short restart costs neither lanes nor leases."""
        weights, before = await asyncio.to_thread(self._setup.staged), self._serving
        if weights is None or self._link is None:
            self._serving = None
            return
        try:
            await deadline(self._link.load(weights), self._setup.config.load_s, f"load of {self._setup.model_id} after a restart")
        except (EngineError, DeadlinePassed) as error:
            self._serving = None
            self._status.message = f"restarted without weights (had version {before.version if before else -1}): {one_line(error)}"
            log.warning("engine %s: %s", self._setup.model_id, self._status.message)

    async def _end(self, reason: str) -> None:
        link, child = self._link, self._child
        self._link = self._child = None
        if link is not None:
            link.stop(reason)
        if child is not None:
            code = await asyncio.to_thread(_end_child, child)
            log.info("engine %s: pid %d ended (%s)", self._setup.model_id, child.pid, code)
        self._status.pid = self._status.running = self._status.queued = 0

    def _note(self, frame: FromChild) -> None:
        """Frames that are news about the engine as a whole."""
        if isinstance(frame, Loaded):
            self._serving = Serving(timeline=frame.timeline, version=frame.version, digest=frame.digest)
            self._metrics["load_s"] = frame.seconds
        elif isinstance(frame, Pong):
            self._status.running, self._status.queued = frame.running, frame.queued
            self._metrics.update(frame.stats)


class _Link:
    """Frames to and from one child; requests in flight by id."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, on_frame: Callable[[FromChild], None]) -> None:
        self._reader, self._writer, self._on_frame = reader, writer, on_frame
        self._requests: dict[str, asyncio.Future[ModelResponse]] = {}
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._loading: tuple[Weights, asyncio.Future[None]] | None = None
        """The last load that was asked for, until it is answered; its caller may have given up before."""
        self._nonce = 0
        self._asked_at: float | None = None
        """When the oldest ping was sent that nothing was heard after."""
        self.closed = asyncio.Event()
        self.why = ""
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def open(self, init: Init) -> Ready:
        self._send(init)
        return await self._ready

    async def generate(self, request: ModelRequest) -> ModelResponse:
        """Raises EngineError (retryable when the child died) or EpisodeError(prompt, overlong)."""
        self._check_open()
        answer: asyncio.Future[ModelResponse] = asyncio.get_running_loop().create_future()
        assert request.request_id not in self._requests, f"request {request.request_id} runs already"
        self._requests[request.request_id] = answer
        try:
            self._send(Generate(id=request.request_id, request=request))
            return await answer
        except asyncio.CancelledError:
            self._send(Cancel(id=request.request_id))
            raise
        finally:
            self._requests.pop(request.request_id, None)

    async def load(self, weights: Weights) -> None:
        self._check_open()
        assert self._loading is None or self._loading[1].done(), "one load at a time"
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loading = (weights, done)
        self._send(Load(path=weights.path, timeline=weights.timeline, version=weights.version, digest=weights.digest))
        await done

    @property
    def loading(self) -> bool:
        """A load was asked for and not answered yet."""
        return self._loading is not None

    @property
    def silent_s(self) -> float:
        """How long the child owes an answer. Time in which it was not asked, because this process stood still, is not its silence."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    def ping(self) -> None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()
        self._nonce += 1
        self._send(Ping(nonce=self._nonce))

    def stop(self, reason: str) -> None:
        """Say Stop, close, and fail whatever waits."""
        self._send(Stop())
        self._close(reason)
        self._reading.cancel()

    def _check_open(self) -> None:
        if self.closed.is_set():
            raise EngineError("crash", self.why, retryable=True)

    def _send(self, frame: frames.ToChild) -> None:
        # Not drained: what can be unsent is bounded by the slots (one request each), and a child that reads nothing misses its pings.
        if not self.closed.is_set():
            self._writer.write(frames.pack(frame))

    async def _read(self) -> None:
        why, incoming = "its process ended", frames.from_child()
        try:
            while True:
                frame = await incoming.read(self._reader)
                self._asked_at = None
                self._take(frame)
        except (asyncio.IncompleteReadError, OSError):
            pass
        except BadMessage as error:
            why = one_line(error)
        self._close(why)

    def _take(self, frame: FromChild) -> None:
        if isinstance(frame, Done):
            _resolve(self._requests.get(frame.id), frame.response)
        elif isinstance(frame, Failed):
            _reject(self._requests.get(frame.id), _request_error(frame))
        elif isinstance(frame, Ready):
            _resolve(self._ready, frame)
        else:
            self._on_frame(frame)
            if isinstance(frame, Loaded | LoadFailed) and self._loading is not None:
                self._loaded(frame, *self._loading)

    def _loaded(self, frame: Loaded | LoadFailed, weights: Weights, done: asyncio.Future[None]) -> None:
        if (frame.timeline, frame.version) != (weights.timeline, weights.version):
            return  # the answer to a load whose deadline passed; the receipt has been noted
        self._loading = None
        if isinstance(frame, LoadFailed):
            _reject(done, EngineError("load_failed", frame.message))
        else:
            _resolve(done, None)

    def _close(self, why: str) -> None:
        if self.closed.is_set():
            return
        self.why = why
        self.closed.set()
        self._writer.close()
        crash = EngineError("crash", f"the engine stopped in the middle of the request: {why}", retryable=True)
        loading = [self._loading[1]] if self._loading else []
        waiting: list[asyncio.Future[Any]] = [*self._requests.values(), self._ready, *loading]
        for future in waiting:
            _reject(future, crash)


def _resolve(future: asyncio.Future[Any] | None, value: Any) -> None:
    if future is not None and not future.done():
        future.set_result(value)


def _reject(future: asyncio.Future[Any] | None, error: AstraFlowError) -> None:
    if future is not None and not future.done():
        future.set_exception(error)
        future.exception()  # nobody may be waiting any more: that is fine


def _request_error(frame: Failed) -> AstraFlowError:
    if frame.kind == "overlong":
        return EpisodeError("prompt", "overlong", frame.message)
    return EngineError(frame.kind, frame.message, retryable=frame.kind == "engine")


def _start_error(model_id: str, words: str) -> AstraFlowError:
    """A child that ended with `ConfigError: …` names a mistake of the user."""
    name, _, text = words.partition(": ")
    if text and issubclass(BY_NAME.get(name, AstraFlowError), UserError):
        return ConfigError(f"engine of {model_id}: {text}")
    return EngineError("start", f"engine of {model_id} did not start: {words}")


def _end_child(child: Child) -> int:
    code = child.wait(STOP_S)
    return child.terminate(STOP_S) if code is None else code


def embedded(setup: EngineSetup) -> ProcessEngine:
    """The embedded engine (torch) in a child process. `options`: further fields of `frames.Init`."""
    config = setup.config
    if setup.architecture:
        names = ", ".join(setup.architecture)
        raise ConfigError(f"models.{setup.model_id}.options: {names}: the embedded engine takes its architecture from config.json only")
    own = {
        "model_dir": str(setup.model_dir),
        "dtype": config.dtype or setup.dtype,
        "device": config.device,
        "threads": config.threads,
        "max_slots": setup.max_slots,
        "max_len": 0 if setup.context_length >= NO_LIMIT else setup.context_length,
        "eos_ids": setup.eos_ids,
    }
    known = [name for name in Init.__struct_fields__ if name != "model_dir"]
    for name in config.options:
        if name not in known:
            raise ConfigError(f"raas.engine.options.{name}: unknown{closest(name, known)}; accepted: {', '.join(known)}")
    try:
        init = msgspec.convert({**own, **config.options}, Init)
    except msgspec.ValidationError as error:
        raise ConfigError(f"raas.engine: {error}") from None
    threads = {"OMP_NUM_THREADS": str(config.threads)} if config.threads else {}
    argv = [sys.executable, "-m", "astraflow.raas.engines.embedded", "--fd"]
    return ProcessEngine("embedded", setup, lambda fd: [*argv, str(fd)], init, threads)
