"""What the tests of the door share: a rollout service whose door is open, and agents that play what a test says."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from astraflow.lib.wire import Server, new_identity
from astraflow.protocol.rollout import Group
from astraflow.raas.gateway.door import PREFIX
from astraflow.workflows.config import AgentConfig

Play = Callable[[dict[str, Any], str, str], Awaitable[Any]]
plays: dict[str, Play] = {}
"""By the task's `play`."""
TASK = re.compile(r"(\d+) \+ (\d+) =")


async def playing(task: dict[str, Any], base_url: str, api_key: str) -> Any:
    """An agent in the loop of the rollout service."""
    return await plays[task["play"]](task, base_url, api_key)


def tool_loop(prompt: str) -> str | None:
    """A solver for the scripted engine: two calls of `add`, then the sum."""
    found = TASK.search(prompt)
    if found is None:
        return None
    a, b = found.groups()
    said = prompt.count('"arguments": {"a"')
    if said == 2:
        return str(int(a) + int(b))
    pair = f'{{"a": {a}, "b": {b}}}' if said == 0 else f'{{"a":  {b}, "b":  {a}}}'
    return f'<think>Number {said}.</think>\n\nI add. <tool_call>\n{{"name": "add", "arguments": {pair}}}\n</tool_call>'


WAIT_S = 60.0


class NoApi:
    """A service with nothing but the door."""


@asynccontextmanager
async def opened(rig: Callable[..., Any], agents: dict[str, AgentConfig] | None = None, **options: Any) -> AsyncIterator[Any]:
    """A rollout service's executor whose door is served; with a cluster token, which nobody here knows."""
    world = rig(context=4096, agents=agents or {"played": AgentConfig(function="gateway_agents:playing")}, **options)
    server = Server("raas0", NoApi, {}, new_identity("r", "cluster-token"), extra_routes=world.door.routes, open_paths=[PREFIX])
    await server.start()
    world.urls.append(server.url)
    try:
        yield world
    finally:
        await world.tasks.stop()
        await world.programs.close()
        await server.stop(1.0)


def run(test: Any) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(4 * WAIT_S):
            return await test

    return asyncio.run(bounded())


def client(key: str, **more: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=WAIT_S, **more)


async def post(url: str, key: str, body: Any) -> Any:
    async with client(key) as http:
        reply = await http.post(url, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def played(world: Any, play: Any, n: int = 1, options: dict[str, Any] | None = None, **spec: Any) -> Group:
    """The group of one lease whose agent does this."""
    plays["it"] = play
    world.register(workflow="agent", options=options or {}, **{"reward": "last_number", **spec})
    world.executor.submit([world.lease(n=n, data={"play": "it", "prompt": "2 + 3 =", "answer": "5"}, deadline_s=WAIT_S)])
    (group,) = await world.groups()
    assert not world.failures
    return group
