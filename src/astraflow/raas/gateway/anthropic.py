"""The Anthropic shape: messages, streams of events and errors."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from astraflow.raas.gateway.asks import (
    Refusal,
    Reply,
    Sampling,
    bad,
    check_messages,
    check_model,
    generation,
    object_of,
    text_of,
    typed,
)
from astraflow.workflows.histories import Asked, Said
from astraflow.workflows.visit import Visit

NEUTRAL: dict[str, tuple[Any, ...]] = {"metadata": (), "service_tier": ("auto", "standard_only"), "thinking": ({"type": "disabled"},)}
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
"""HTTP status → `error.type`, where it is not one of all."""

_serial = itertools.count(1)


class _Tool(msgspec.Struct):
    name: str
    input_schema: dict[str, Any]
    description: str = ""
    type: str = "custom"


class _Turn(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]]


class _Messages(msgspec.Struct, kw_only=True):
    model: str
    messages: list[_Turn]
    max_tokens: int
    system: str | list[dict[str, Any]] = ""
    tools: list[_Tool] = []
    tool_choice: dict[str, Any] = {}
    stop_sequences: list[str] = []
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool = False


async def messages(visit: Visit, body: bytes, training: bool) -> Reply:
    """`POST /v1/messages`."""
    call = typed(object_of(body), _Messages, NEUTRAL)
    choice = {"type": "auto", **call.tool_choice}
    if choice["type"] not in ("auto", "none") or choice.get("disable_parallel_tool_use"):
        bad("tool_choice", f"{call.tool_choice!r:.60} is not supported (answers are not forced into a form); accepted: auto, none")
    if other := next((tool.type for tool in call.tools if tool.type != "custom"), ""):
        bad("tools", f"type {other!r} is not supported; accepted: custom")
    wanted = Sampling(call.max_tokens, call.temperature, call.top_p, call.top_k, call.stop_sequences)
    system = text_of(call.system, "system")
    history = [{"role": "system", "content": system}] if system else []
    for place, turn in enumerate(call.messages):
        history += _turns(turn, f"messages[{place}]")
    asked = Asked(
        policy=check_model(visit, call.model),
        messages=check_messages(history),
        tools=[_tool(tool) for tool in call.tools],
        may_call=choice["type"] == "auto",
        generation=generation(visit, wanted, training),
    )
    (said,) = await visit.ask(asked)
    blocks, ending = _blocks(said), _ending(said)
    reads = {"input_tokens": said.prompt_tokens, "output_tokens": len(said.ids)}
    whole = {"id": f"msg_{next(_serial)}", "type": "message", "role": "assistant", "model": call.model}
    if not call.stream:
        return Reply([msgspec.json.encode({**whole, "content": blocks, **ending, "usage": reads})])
    return Reply([_event(one) for one in _events(whole, blocks, ending, reads)], stream=True)


def error(refusal: Refusal) -> dict[str, Any]:
    """The body of an error."""
    kind = KINDS.get(refusal.status, "api_error" if refusal.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(refusal)}}


def _tool(tool: _Tool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}}


def _turns(turn: _Turn, where: str) -> list[dict[str, Any]]:
    """One turn as messages: each tool result is one of its own."""
    if turn.role not in ("user", "assistant"):
        bad(f"{where}.role", f"{turn.role!r}, expected user, assistant")
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    texts, calls, results = [], [], []
    for place, block in enumerate(turn.content):
        kind, here = block.get("type"), f"{where}.content[{place}]"
        if kind == "text":
            texts.append(text_of([block], here))
        elif kind == "tool_use" and turn.role == "assistant":
            arguments = msgspec.json.encode(block.get("input", {})).decode()
            calls.append({"id": str(block.get("id", "")), "name": str(block.get("name", "")), "arguments": arguments})
        elif kind == "tool_result" and turn.role == "user":
            content = text_of(block.get("content"), f"{here}.content")
            results.append({"role": "tool", "content": content, "tool_call_id": str(block.get("tool_use_id", ""))})
        elif not (kind in ("thinking", "redacted_thinking") and turn.role == "assistant"):
            bad(here, f"blocks of type {kind!r} are not supported in a message of {turn.role!r}")
    if turn.role == "assistant":
        return [{"role": "assistant", "content": "".join(texts), **({"tool_calls": calls} if calls else {})}]
    return [*results, *([{"role": "user", "content": "".join(texts)}] if texts or not results else [])]


def _blocks(said: Said) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if said.thoughts:
        found.append({"type": "thinking", "thinking": said.thoughts, "signature": ""})
    if said.text:
        found.append({"type": "text", "text": said.text})
    for call in said.calls:
        found.append({"type": "tool_use", "id": call.id, "name": call.name, "input": msgspec.json.decode(call.arguments)})
    return found


def _ending(said: Said) -> dict[str, Any]:
    reason = {"stop": "stop_sequence" if said.stop else "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[said.finish]
    return {"stop_reason": reason, "stop_sequence": said.stop or None}


def _events(whole: dict[str, Any], blocks: list[dict[str, Any]], ending: dict[str, Any], usage: dict[str, int]) -> list[dict[str, Any]]:
    begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None, "usage": {**usage, "output_tokens": 0}}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
    for index, block in enumerate(blocks):
        empty = {**block, **{name: value for name, value in (("thinking", ""), ("text", ""), ("input", {})) if name in block}}
        events.append({"type": "content_block_start", "index": index, "content_block": empty})
        events.append({"type": "content_block_delta", "index": index, "delta": _delta(block)})
        events.append({"type": "content_block_stop", "index": index})
    events.append({"type": "message_delta", "delta": ending, "usage": {"output_tokens": usage["output_tokens"]}})
    return [*events, {"type": "message_stop"}]


def _delta(block: dict[str, Any]) -> dict[str, Any]:
    if block["type"] == "thinking":
        return {"type": "thinking_delta", "thinking": block["thinking"]}
    if block["type"] == "text":
        return {"type": "text_delta", "text": block["text"]}
    return {"type": "input_json_delta", "partial_json": msgspec.json.encode(block["input"]).decode()}


def _event(event: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), msgspec.json.encode(event))
