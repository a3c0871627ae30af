"""The OpenAI shape: chat completions, completions, models and errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec

from astraflow.raas.gateway.asks import (
    Refusal,
    Reply,
    Sampling,
    bad,
    check_count,
    check_messages,
    check_model,
    generation,
    object_of,
    text_of,
    typed,
)
from astraflow.workflows.histories import Asked, Said
from astraflow.workflows.visit import Report, Visit

DONE = b"data: [DONE]\n\n"
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool", "function": "tool"}
COMMON: dict[str, tuple[Any, ...]] = {
    "user": (),
    "metadata": (),
    "store": (False,),
    "seed": (),  # the samples of a group must differ: their seeds are derived from the lease
    "service_tier": ("auto", "default"),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
}
CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **COMMON,
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "top_logprobs": (0,),
    "prompt_cache_key": (),
    "safety_identifier": (),
}
TEXT_NEUTRAL: dict[str, tuple[Any, ...]] = {**COMMON, "echo": (False,), "suffix": ("",), "best_of": (1,)}

_serial = itertools.count(1)


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _Call(msgspec.Struct):
    function: _Function
    id: str = ""


class _Message(msgspec.Struct):
    role: str
    content: Any = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Chat(msgspec.Struct, kw_only=True):
    model: str
    messages: list[_Message]
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    n: int = 1
    stop: str | list[str] = []
    logprobs: bool = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool = False
    stream_options: _StreamOptions = msgspec.field(default_factory=_StreamOptions)


class _Text(msgspec.Struct, kw_only=True):
    model: str
    prompt: str
    n: int = 1
    stop: str | list[str] = []
    logprobs: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool = False
    stream_options: _StreamOptions = msgspec.field(default_factory=_StreamOptions)


async def chat(visit: Visit, body: bytes, training: bool) -> Reply:
    """`POST /v1/chat/completions`."""
    call = typed(object_of(body), _Chat, CHAT_NEUTRAL)
    for place, tool in enumerate(call.tools):
        if tool.get("type") != "function" or not isinstance(tool.get("function"), dict) or "name" not in tool["function"]:
            bad(f"tools[{place}]", 'expected {"type": "function", "function": {"name": …}}')
    if call.tool_choice not in ("auto", "none"):
        bad("tool_choice", f"{call.tool_choice!r:.60} is not supported (answers are not forced into a form); accepted: auto, none")
    asked = Asked(
        policy=check_model(visit, call.model),
        messages=check_messages([_message(one, f"messages[{place}]") for place, one in enumerate(call.messages)]),
        tools=call.tools,
        may_call=call.tool_choice == "auto",
        n=check_count(call.n),
        generation=generation(visit, _sampling(call, call.max_completion_tokens or call.max_tokens), training),
    )
    answers = await visit.ask(asked)
    head = {"id": f"chatcmpl-{next(_serial)}", "created": 0, "model": call.model}
    decode = visit.context.tokenizers[call.model].decode
    ends = [_ending(place, said, _logprobs(said, decode) if call.logprobs else None) for place, said in enumerate(answers)]
    if call.stream:
        return _stream(call.stream_options, {**head, "object": "chat.completion.chunk"}, _chat_chunks(ends, answers), answers)
    choices = [{**end, "message": _said(said)} for end, said in zip(ends, answers, strict=True)]
    return _json({**head, "object": "chat.completion", "choices": choices, "usage": _usage(answers)})


async def text(visit: Visit, body: bytes, training: bool) -> Reply:
    """`POST /v1/completions`."""
    call = typed(object_of(body), _Text, TEXT_NEUTRAL)
    if call.logprobs:
        bad("logprobs", f"{call.logprobs}: only the sampled token's own is known; expected 0")
    asked = Asked(
        policy=check_model(visit, call.model),
        messages=[{"role": "user", "content": call.prompt}],
        bare=True,
        n=check_count(call.n),
        generation=generation(visit, _sampling(call, call.max_tokens), training),
    )
    answers = await visit.ask(asked)
    head = {"id": f"cmpl-{next(_serial)}", "object": "text_completion", "created": 0, "model": call.model}
    decode = visit.context.tokenizers[call.model].decode
    tokens = [_text_logprobs(said, decode) if call.logprobs is not None else None for said in answers]
    choices = [{**_ending(place, said, tokens[place]), "text": said.text} for place, said in enumerate(answers)]
    if not call.stream:
        return _json({**head, "choices": choices, "usage": _usage(answers)})
    return _stream(call.stream_options, head, [{"choices": [choice]} for choice in choices], answers)


async def models(visit: Visit, name: str) -> Reply:
    """`GET /v1/models` and `/v1/models/{name}`."""
    listed = [{"id": policy, "object": "model", "created": 0, "owned_by": "astraflow"} for policy in visit.policies]
    if name:
        return _json(listed[visit.policies.index(check_model(visit, name))])
    return _json({"object": "list", "data": listed})


async def reward(visit: Visit, body: bytes, training: bool) -> Reply:
    """`POST /v1/reward`."""
    found = object_of(body)
    for name in found:
        if name not in Report.__struct_fields__:
            bad(name, f"unknown field; expected {', '.join(Report.__struct_fields__)}")
    visit.take(typed(found, Report, {}))
    return _json({"object": "reward", "taken": True})


def error(refusal: Refusal) -> dict[str, Any]:
    """The body of an error."""
    kind = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    found = kind.get(refusal.status, "server_error" if refusal.status >= 500 else "invalid_request_error")
    return {"error": {"message": str(refusal), "type": found, "param": refusal.param, "code": refusal.code}}


def _message(message: _Message, where: str) -> dict[str, Any]:
    if message.role not in ROLES:
        bad(f"{where}.role", f"{message.role!r}, expected {', '.join(ROLES)}")
    found: dict[str, Any] = {"role": ROLES[message.role], "content": text_of(message.content, f"{where}.content")}
    if message.tool_calls:
        if found["role"] != "assistant":
            bad(f"{where}.tool_calls", f"in a message of {message.role!r}, expected them in the assistant's only")
        calls = message.tool_calls
        found["tool_calls"] = [{"id": one.id, "name": one.function.name, "arguments": one.function.arguments} for one in calls]
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    return found


def _sampling(call: _Chat | _Text, max_tokens: int | None) -> Sampling:
    stop = [call.stop] if isinstance(call.stop, str) else call.stop
    return Sampling(max_tokens, call.temperature, call.top_p, call.top_k, stop)


def _said(said: Said) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": said.text or None if said.calls else said.text}
    if said.thoughts:
        message["reasoning_content"] = said.thoughts
    if said.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in said.calls
        ]
    return message


def _ending(place: int, said: Said, logprobs: Any) -> dict[str, Any]:
    return {"index": place, "logprobs": logprobs, "finish_reason": said.finish}


def _pieces(said: Said, decode: Callable[..., str]) -> list[str]:
    return [decode([token], skip_special=False) for token in said.ids]


def _logprobs(said: Said, decode: Callable[..., str]) -> dict[str, Any]:
    rows = zip(_pieces(said, decode), said.logprobs, strict=True)
    return {"content": [{"token": piece, "logprob": value, "bytes": list(piece.encode()), "top_logprobs": []} for piece, value in rows]}


def _text_logprobs(said: Said, decode: Callable[..., str]) -> dict[str, Any]:
    pieces = _pieces(said, decode)
    offsets = list(itertools.accumulate((len(piece) for piece in pieces[:-1]), initial=0))
    return {"tokens": pieces, "token_logprobs": said.logprobs, "top_logprobs": None, "text_offset": offsets}


def _usage(answers: list[Said]) -> dict[str, int]:
    prompt, sampled = answers[0].prompt_tokens, sum(len(said.ids) for said in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _chat_chunks(ends: list[dict[str, Any]], answers: list[Said]) -> list[dict[str, Any]]:
    chunks: list[dict[str, Any]] = []
    for end, said in zip(ends, answers, strict=True):
        message = _said(said)
        calls = [{"index": index, **one} for index, one in enumerate(message.pop("tool_calls", []))]
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{name: message[name]} for name in ("reasoning_content", "content") if message.get(name)]
        deltas += [{"tool_calls": [one]} for one in calls]
        chunks += [{"choices": [{"index": end["index"], "delta": delta, "logprobs": None, "finish_reason": None}]} for delta in deltas]
        chunks.append({"choices": [{**end, "delta": {}}]})
    return chunks


def _stream(options: _StreamOptions, head: dict[str, Any], chunks: list[dict[str, Any]], answers: list[Said]) -> Reply:
    if options.include_usage:
        chunks = [*({**chunk, "usage": None} for chunk in chunks), {"choices": [], "usage": _usage(answers)}]
    return Reply([*(b"data: %s\n\n" % msgspec.json.encode({**head, **chunk}) for chunk in chunks), DONE], stream=True)


def _json(value: Any) -> Reply:
    return Reply([msgspec.json.encode(value)])
