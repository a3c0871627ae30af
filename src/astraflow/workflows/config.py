"""Settings of workflows that only a rollout service's own configuration may hold, because they name code."""

from __future__ import annotations

import msgspec


class AgentConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One agent that the workflow `agent` can run; exactly one of `command`, `function` and `url`."""

    command: list[str] = []
    """Program and arguments, run once per episode in the rollout service's directory; `{prompt}` (of a task with `messages` the last
    one's text) and other fields of the task are filled in."""
    function: str = ""
    """`module:attr` of an `async def (task, base_url, api_key)` in the rollout service itself; it must not block."""
    url: str = ""
    """Where an agent that runs elsewhere is told of each episode: `POST {task, base_url, api_key, models}`."""
