"""How an agent is set going: a program, a function of ours, or somebody else's service. All of them get an address and a key."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

from astraflow.lib.aio import Abandoned, contained, in_daemon_thread, one_line, poll_until
from astraflow.lib.proc import Child, describe_exit
from astraflow.lib.registry import import_attr
from astraflow.protocol.errors import DeadlinePassed, Unavailable, UserError
from astraflow.workflows.api import EpisodeError, charged
from astraflow.workflows.config import AgentConfig
from astraflow.workflows.conversation import fill
from astraflow.workflows.roles import fields_of
from astraflow.workflows.visit import Admission, Report, Visit

OUTPUT_BYTES = 64 * 1024
"""The end of a program's output that is kept for the viewer."""
TERM_S = 2.0
"""Between SIGTERM and SIGKILL of a program whose time is up."""
POST_S = 30.0
LEFT = Abandoned()
"""Agents that are functions; `left`: those that outlive their deadline."""


@dataclass(frozen=True)
class End:
    """How an agent ended by itself."""

    code: int | None = None
    """Exit code of a program."""
    output: str = ""
    """Its output, or the end of it."""
    value: float | str | None = None
    """What a function returned."""


class Runner(Protocol):
    async def run(self, task: Mapping[str, Any], visit: Visit, admission: Admission, deadline_s: float) -> End:
        """Until it ends. Raises DeadlinePassed, or EpisodeError(workflow, …); whatever it started has ended then."""
        ...


def runner_of(name: str, config: AgentConfig) -> Runner:
    """Raises UserError for a configuration that names none or several, or code that is not there."""
    given = [kind for kind in ("command", "function", "url") if getattr(config, kind)]
    if len(given) != 1:
        raise UserError(f"raas.agents.{name}: {', '.join(given) or 'nothing'} is given, expected one of command, function, url")
    if config.command:
        return Program(config.command)
    if config.url:
        if not config.url.startswith(("http://", "https://")):
            raise UserError(f"raas.agents.{name}.url: {config.url!r}: expected http://host:port/path")
        return Remote(config.url)
    call = import_attr(config.function)
    if not inspect.iscoroutinefunction(call):
        raise UserError(f"raas.agents.{name}.function: {config.function!r} is no `async def`; blocking code is run as a `command`")
    return Function(config.function, call)


class Program:
    """A process per episode, in a group of its own that ends with it."""

    def __init__(self, command: list[str]) -> None:
        self._command = command

    async def run(self, task: Mapping[str, Any], visit: Visit, admission: Admission, deadline_s: float) -> End:
        with tempfile.TemporaryDirectory(prefix="agent-") as directory:
            path = Path(directory) / "task.json"
            path.write_text(json.dumps(task, ensure_ascii=False, default=str), encoding="utf-8")
            fields = dict(task) if "prompt" in task or "messages" not in task else {**task, "prompt": fields_of(task)["problem"]}
            return await self._run([fill(part, fields) for part in self._command], _environment(visit, admission, path), deadline_s)

    async def _run(self, command: list[str], env: dict[str, str], deadline_s: float) -> End:
        reading, writing = os.pipe()
        output = _Tail()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: output, os.fdopen(reading, "rb", 0))
        child = None
        try:
            try:
                child = Child(command, env=env, output_fd=writing, name="agent")
            except Unavailable as error:
                raise EpisodeError("workflow", "agent_unreachable", str(error)) from None
            finally:
                os.close(writing)
            try:
                await poll_until(lambda: child.poll() is not None, deadline_s, "agent")
            except DeadlinePassed:
                await in_daemon_thread(lambda: child.terminate(TERM_S), "agent ends")
                raise DeadlinePassed(f"the agent did not end within {deadline_s:g} s; its last output: {output.last_line}") from None
            with contextlib.suppress(TimeoutError):  # what left the group may hold the pipe for ever
                await asyncio.wait_for(output.ended.wait(), 1.0)
            code = child.poll()
            assert code is not None
            return End(code, output.text)
        finally:
            transport.close()
            if child is not None and child.poll() is None:
                await in_daemon_thread(child.kill, "agent ends")


class _Tail(asyncio.Protocol):
    """The end of what a program wrote; reading goes on, so that it never waits for us."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._left_out = 0
        self.ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self._kept += data
        over = max(0, len(self._kept) - OUTPUT_BYTES)
        self._left_out += over
        del self._kept[:over]

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()

    @property
    def text(self) -> str:
        before = f"({self._left_out} bytes before this are left out)\n" if self._left_out else ""
        return before + self._kept.decode("utf-8", "replace")

    @property
    def last_line(self) -> str:
        return (self.text.strip().splitlines() or ["none"])[-1][:200]


def _environment(visit: Visit, admission: Admission, task: Path) -> dict[str, str]:
    path = [str(Path(sys.executable).parent), *filter(None, [os.environ.get("PATH", "")])]
    return {
        **os.environ,
        "PATH": os.pathsep.join(path),  # `python` is the one that this service runs with
        "OPENAI_BASE_URL": admission.base_url,
        "OPENAI_API_KEY": admission.key,
        "ANTHROPIC_BASE_URL": admission.anthropic_url,
        "ANTHROPIC_API_KEY": admission.key,
        "ASTRAFLOW_MODEL": visit.policies[0],
        "ASTRAFLOW_TASK": str(task),
    }


class Function:
    """A coroutine in the rollout service's own loop."""

    def __init__(self, name: str, call: Callable[..., Any]) -> None:
        self._name, self._call = name, call

    async def run(self, task: Mapping[str, Any], visit: Visit, admission: Admission, deadline_s: float) -> End:
        work = contained(self._call, dict(task), base_url=admission.base_url, api_key=admission.key)
        with charged("workflow", f"agent {self._name}"):
            value: Any = await LEFT.run(work, deadline_s, "agent")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float | str)):
            raise EpisodeError("workflow", "bad_result", f"agent {self._name} returned {type(value).__name__}: expected number, text, None")
        return End(value=float(value) if isinstance(value, int) else value)


class Remote:
    """A service that is told of the episode and posts when it is done."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def run(self, task: Mapping[str, Any], visit: Visit, admission: Admission, deadline_s: float) -> End:
        note = {"task": dict(task), "base_url": admission.base_url, "api_key": admission.key, "models": visit.policies}
        try:
            async with httpx.AsyncClient(timeout=min(POST_S, deadline_s)) as client:
                reply = await client.post(self._url, content=json.dumps(note, default=str), headers={"content-type": "application/json"})
        except httpx.HTTPError as error:
            raise EpisodeError("workflow", "agent_unreachable", f"agent {self._url}: {one_line(error)}") from None
        if reply.status_code >= 300:
            raise EpisodeError("workflow", "agent_unreachable", f"agent {self._url}: HTTP {reply.status_code}: {reply.text[:200]}")
        try:
            async with asyncio.timeout(deadline_s):
                await visit.reported.wait()
        except TimeoutError:
            raise DeadlinePassed(f"the agent at {self._url} did not report within {deadline_s:g} s") from None
        return End()


def exit_problem(end: End) -> str:
    """Why a program that ended did not do its work; empty = it did."""
    return "" if not end.code else f"the agent {describe_exit(end.code)}; its last output: {_last(end.output)}"


def _last(output: str) -> str:
    return (output.strip().splitlines() or ["none"])[-1][:200]


def reported(end: End, report: Report | None) -> Report | None:
    """What is known of its own work: what it posted, else what it returned."""
    if report is not None or end.value is None:
        return report
    return Report(answer=end.value) if isinstance(end.value, str) else Report(reward=end.value)
