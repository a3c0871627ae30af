"""An engine that is a foreign HTTP server in a process of its own. What is said to it is the business of its dialect.

    a try       agenerate ─▶ [gate open] ─▶ generate ─▶ whole answer, or an abort with the tokens so far ─▶ asked again
    a load      gate shut ─▶ interrupt: every try comes back ─▶ reload in place, or restart on the new weights ─▶ receipt ─▶ resume
    its life    life.py; dead when its process ends or its /health stays silent

No try spans a load, so each try has one version, and what continues after it is prefilled again under the new weights
(`kv_on_update: recompute` of the embedded engine). A load that goes wrong half-way leaves a server that nobody may ask: it is started
again, on the new weights first, on the old ones when they cannot be served.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta

from astraflow.lib.aio import deadline, one_line
from astraflow.lib.net import free_port, http_url
from astraflow.lib.proc import Child, describe_exit
from astraflow.protocol.errors import AstraFlowError, ConfigError
from astraflow.raas.engines import guard
from astraflow.raas.engines.base import EngineError, EngineSetup, Piece, Weights, generate_through_aborts, typed_options
from astraflow.raas.engines.http import Http
from astraflow.raas.engines.life import SupervisedEngine, last_lines, size_of
from astraflow.raas.engines.served import ServedModel
from astraflow.workflows.api import ModelRequest, ModelResponse

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
CALL_S = 60.0
"""For calls that change no weights: far above what a busy server needs."""
LOOK_S = 0.1
"""How soon the death of the server's process is noticed."""
TERM_S = guard.GRACE_S + 5.0
"""For a server to close its children and shared memory before it is killed."""
RETURN_S = 0.5
"""After an interruption: time for the answers to arrive; what was on its way to the server meanwhile needs another one."""
INTERRUPTIONS = 4
"""Then the tries that did not come back are given up: they are asked again without what they had."""

_ERROR_LINE = re.compile(r"\b(\w*(?:Error|Exception): .+|No module named .+|.*error: .+)")


class ServerOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`raas.engine.options` of the kinds `vllm` and `sglang`."""

    python: str = ""
    """Python of the environment in which the server is installed; empty = this one."""
    tensor_parallel: Annotated[int, Meta(ge=1)] = 1
    """GPUs that share the model."""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Share of each GPU's memory that the server takes; None = its own default."""
    untie: bool = True
    """Serve tied models untied (needs weights.export_tied); false for architectures whose server refuses that and ties by itself."""
    args: list[str] = []
    """Further arguments of the server's command line, e.g. ["--enforce-eager"]."""
    env: dict[str, str] = {}
    """Further environment variables, e.g. {CUDA_VISIBLE_DEVICES: "0"}."""


@dataclass(frozen=True)
class Launch:
    """What a dialect needs to write its command line."""

    setup: EngineSetup
    options: ServerOptions
    python: str
    model_dir: str
    port: int
    dummy: bool
    """There are no weights yet: random ones will do until the first load."""


@dataclass(frozen=True)
class Answer:
    """What one try brought: N tokens."""

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Literal["stop", "length", "abort"] = "abort"


class Dialect(Protocol):
    """How one kind of server is started and talked to. All calls raise EngineError."""

    gauges: dict[str, str]
    """Name of a Prometheus gauge of the server → `running`, `queued` or a metric of ours."""

    def command(self, launch: Launch) -> tuple[list[str], dict[str, str]]:
        """Command line and environment variables; the options may override them."""
        ...

    async def probe(self, http: Http) -> None:
        """Learn what this server offers. Raises EngineError when it lacks what cannot be done without."""
        ...

    async def generate(self, http: Http, request: ModelRequest, request_id: str) -> Answer:
        """One try. Cancelling the call frees the request in the server."""
        ...

    async def interrupt(self, http: Http) -> None:
        """End all requests with the tokens that they have, and begin no new one until `resume`."""
        ...

    async def reload(self, http: Http, launch: Launch) -> None:
        """Load what is in the model directory now, and forget every cache of the old weights."""
        ...

    async def resume(self, http: Http) -> None: ...


class ServerEngine(SupervisedEngine):
    """The server of one model."""

    def __init__(self, kind: str, setup: EngineSetup, dialect: Dialect) -> None:
        """Raises ConfigError for options that do not exist or cannot work."""
        super().__init__(kind, setup)
        self._dialect = dialect
        self._options = typed_options(setup.config, ServerOptions)
        python = self._options.python or sys.executable
        self._python = shutil.which(os.path.abspath(os.path.expanduser(python)) if os.sep in python else python) or ""
        if not self._python:
            raise ConfigError(f"raas.engine.options.python: {python!r} is no program; expected the python of an environment with {kind}")
        directory = setup.log_path.with_suffix("")
        self._model = ServedModel(directory, setup.model_dir, setup.architecture, untie=self._options.untie)
        self._http: Http | None = None
        self._launch: Launch | None = None
        self._unwanted = ""
        """Why the running process is to be replaced; empty = it is not."""
        self._loaded: Weights | None = None
        """What the running process was started on or loaded since."""
        self._target: Weights | None = None
        """What the next start loads instead of what is staged."""
        self._complaint = ""
        """Why the last start failed."""
        self._gate = asyncio.Event()
        self._gate.set()
        self._tries: set[asyncio.Task[Answer]] = set()
        self._numbers = 0

    # --- Engine -----------------------------------------------------------------------------------------------------------

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Waits while the engine loads or restarts; the caller's deadline bounds that."""
        tokenizer, stops = self._setup.tokenizer, request.stop

        def stopped(output_ids: list[int]) -> bool:
            text = tokenizer.decode(output_ids, skip_special=False)
            return any(stop in text for stop in stops)

        return await generate_through_aborts(self._piece, request, stopped=stopped if stops else None)

    async def load(self, weights: Weights) -> None:
        await self._alive()
        started = time.monotonic()
        self._gate.clear()
        self._status.state = "loading"
        try:
            await asyncio.to_thread(self._model.link, weights)
            if not await self._load_in_place(weights):
                await self._load_by_restart(weights)
        finally:
            self._gate.set()
            if self._status.state == "loading":
                self._status.state = "ready"
        self._metrics["load_s"] = time.monotonic() - started

    # --- tries --------------------------------------------------------------------------------------------------------------

    async def _piece(self, request: ModelRequest) -> Piece:
        while not (self._up.is_set() and self._gate.is_set()) or self._dead:
            await self._alive()
            await self._gate.wait()
        serving, http = self._serving, self._http
        if serving is None or http is None:
            raise EngineError("not_loaded", "no weights have been loaded yet", retryable=http is None)
        self._numbers += 1
        call = self._dialect.generate(http, request, f"{request.request_id}:{self._numbers}.")  # the prefix of no other
        answer = await self._try(asyncio.get_running_loop().create_task(call))
        return Piece(
            output_ids=answer.output_ids,
            logprobs=answer.logprobs,
            versions=[serving.version] * len(answer.output_ids),
            finish=answer.finish,
            timeline=serving.timeline,
        )

    async def _try(self, task: asyncio.Task[Answer]) -> Answer:
        self._tries.add(task)
        task.add_done_callback(self._tries.discard)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            if self._gate.is_set():  # given up by `_end`
                raise EngineError("crash", "the server ended in the middle of the request", retryable=True) from None
            return Answer()  # given up for a load
        except EngineError as error:
            if error.retryable and not self._gate.is_set():
                return Answer()  # a load takes the server away from under its requests: they go on after it
            await self._look()
            raise

    async def _look(self) -> None:
        """After a failure: whoever asks again must wait for the restart of a dead server, and not fail again at once on what is left."""
        http = self._http
        try:
            if http is not None:
                await http.get("/health", timeout_s=self._setup.config.ping_s)
        except EngineError as error:
            if error.kind != "timeout" and http is self._http:
                self._kill(one_line(error))

    async def _interrupt(self, http: Http) -> None:
        """Return when no try is left."""
        for _ in range(INTERRUPTIONS):
            await self._dialect.interrupt(http)
            if not self._tries:
                return
            await asyncio.wait(self._tries, timeout=RETURN_S)
        for task in self._tries:
            task.cancel()
        if self._tries:
            await asyncio.wait(self._tries)

    # --- loads --------------------------------------------------------------------------------------------------------------

    async def _load_in_place(self, weights: Weights) -> bool:
        """False when this server cannot, or did not. A call that is cancelled meanwhile leaves nobody knows what: start it again."""
        http, launch, name = self._http, self._launch, self._setup.model_id
        if http is None or launch is None:
            return False  # it has just died; `_live` has not seen it yet
        try:
            await self._interrupt(http)
            await self._dialect.reload(http, launch)
            await self._dialect.resume(http)
            self._serving, self._loaded = weights.serving, weights
            return True
        except EngineError as error:
            log.warning("engine %s: version %d not loaded in place: %s", name, weights.version, one_line(error))
            return False
        except asyncio.CancelledError:
            self._kill("a load did not end in time")
            raise

    async def _load_by_restart(self, weights: Weights) -> None:
        await self._alive()  # it may be on its way back from a death of its own
        self._target, self._planned, self._complaint = weights, True, "the server started again without it"
        self._kill("a load by restart")
        await self._alive()
        if self._serving != weights.serving:
            raise EngineError("load_failed", f"version {weights.version}: {self._complaint}")

    def _kill(self, reason: str) -> None:
        """`_watch` ends the process and starts it again."""
        self._up.clear()
        self._unwanted = reason

    # --- one life after the other -------------------------------------------------------------------------------------------

    async def _spawn(self) -> None:
        setup, options = self._setup, self._options
        weights, self._target = self._target, None
        if weights is None:
            weights = await asyncio.to_thread(setup.staged)
        await asyncio.to_thread(self._model.link, weights)
        port = free_port(HOST)
        self._launch = Launch(setup, options, self._python, str(self._model.path), port, dummy=weights is None)
        argv, env = self._dialect.command(self._launch)
        threads = {"OMP_NUM_THREADS": str(setup.config.threads)} if setup.config.threads else {}
        log_start, started = size_of(setup.log_path), time.monotonic()
        self._child = Child(
            [sys.executable, guard.__file__, *argv, *options.args],
            env={**_environment(foreign=bool(options.python)), **env, **threads, **options.env},
            log_path=setup.log_path,
            name=f"engine {setup.model_id}",
            death_signal=signal.SIGUSR1,
        )
        self._http, self._unwanted = Http(http_url(HOST, port)), ""
        try:
            await deadline(self._healthy(), setup.config.start_s, f"start of engine {setup.model_id}")
            await self._dialect.probe(self._http)
        except AstraFlowError as error:
            words = _words(last_lines(setup.log_path, log_start)) if self._child.poll() is not None else ""
            await self._end("did not start")
            self._complaint = words or one_line(error)
            raise EngineError("start", f"engine of {setup.model_id} did not start: {self._complaint} (see {setup.log_path})") from None
        self._loaded = weights
        self._status.pid, self._status.state, self._status.message = self._child.pid, "ready", ""
        log.info("engine %s: pid %d on port %d, up after %.1f s", setup.model_id, self._child.pid, port, time.monotonic() - started)

    async def _healthy(self) -> None:
        """Wait until it answers. Raises EngineError when its process ends instead."""
        assert self._child is not None
        while (code := self._child.poll()) is None:
            if await self._ping():
                return
            await asyncio.sleep(LOOK_S)
        raise EngineError("start", describe_exit(code))

    async def _watch(self) -> str:
        assert self._child is not None
        config, asked, silent_s = self._setup.config, 0.0, 0.0
        while (code := self._child.poll()) is None:
            if self._unwanted:
                return self._unwanted
            if time.monotonic() - asked >= config.ping_s:
                asked = time.monotonic()
                # Counted in pings that failed: time in which it was not asked, because this process stood still, is not its silence.
                silent_s = 0.0 if await self._ping() else silent_s + config.ping_s
            limit_s = config.ping_deadline_s if self._gate.is_set() else max(config.ping_deadline_s, config.load_s)
            if silent_s > limit_s:
                return f"no sign of life for {silent_s:.0f} s"
            await asyncio.sleep(LOOK_S)
        return f"its process {describe_exit(code)}"

    async def _ping(self) -> bool:
        """Whether it is healthy; its gauges, where it has some."""
        assert self._http is not None
        try:
            await self._http.get("/health", timeout_s=self._setup.config.ping_s)
            for line in (await self._http.get("/metrics", timeout_s=self._setup.config.ping_s)).decode("utf-8", "replace").splitlines():
                name, _, value = line.partition(" ")
                if (ours := self._dialect.gauges.get(name.partition("{")[0])) is not None:
                    self._note(ours, float(value))
        except (EngineError, ValueError) as error:
            return isinstance(error, EngineError) and error.kind == "refused"  # it answers, but has no such route
        return True

    def _note(self, name: str, value: float) -> None:
        if name == "running":
            self._status.running = int(value)
        elif name == "queued":
            self._status.queued = int(value)
        else:
            self._metrics[name] = value

    async def _load_again(self) -> None:
        """The process was started on them."""
        self._serving = self._loaded.serving if self._loaded is not None else None

    async def _end(self, reason: str) -> None:
        child, http = self._child, self._http
        self._child = self._http = None
        if child is not None:
            code = await asyncio.to_thread(child.terminate, TERM_S)
            log.info("engine %s: pid %d ended (%s): %s", self._setup.model_id, child.pid, code, reason)
        if self._tries:  # their connections are gone
            _, late = await asyncio.wait(self._tries, timeout=RETURN_S)
            for task in late:
                task.cancel()
        if http is not None:
            await http.close()
        self._status.pid = self._status.running = self._status.queued = 0


def _environment(*, foreign: bool) -> dict[str, str]:
    """Ours, without what would make another environment's python import our packages."""
    return {name: value for name, value in os.environ.items() if not foreign or name not in ("PYTHONPATH", "PYTHONHOME")}


def _words(lines: list[str]) -> str:
    """The first error in a server's output, which is what happened; the last ones are what followed from it."""
    found = [match[1] for line in lines if (match := _ERROR_LINE.search(line))]
    return (found or lines[-1:] or [""])[0].strip()
