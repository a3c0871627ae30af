"""A stand-in for an OpenAI-compatible service, by OpenAI's reference: /v1/models, /v1/completions, /v1/chat/completions.

`python openai_service.py --port=… [--token-ids] [--busy=N]`: with token ids as vLLM adds them; the first N requests find it busy.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec
from double import Double, Refused, now, read, serve
from starlette.requests import Request


class Completion(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    prompt: str
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: list[str] | None = None


class TokenCompletion(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    prompt: list[int]
    return_token_ids: bool
    stop_token_ids: list[int]
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: list[str] | None = None
    logprobs: int | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str


class ChatCompletion(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    messages: list[Message]
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: list[str] | None = None


double = Double(sys.argv[1:])
token_ids = "--token-ids" in double.flags
busy = [int(double.args.get("busy", "0"))]


async def admitted(request: Request, kind: type[Any]) -> Any:
    if request.headers.get("authorization") != "Bearer secret":
        raise Refused(401, "Incorrect API key provided")
    body = read(await request.body(), kind)
    double.seen.append(msgspec.to_builtins(body))
    if body.model != "judge":
        raise Refused(404, f"The model `{body.model}` does not exist")
    if busy[0]:
        busy[0] -= 1
        raise Refused(429, "Rate limit reached")
    return body


def reply(choice: dict[str, Any], model: str) -> dict[str, Any]:
    return {"id": "cmpl-1", "object": "text_completion", "created": now(), "model": model, "choices": [{"index": 0, **choice}]}


async def completions(request: Request) -> Any:
    body = await admitted(request, TokenCompletion if token_ids else Completion)
    if "filter" in body.prompt:
        return reply({"text": "", "logprobs": None, "finish_reason": "content_filter"}, body.model)
    if not token_ids:
        whole = body.max_tokens >= 3
        return reply({"text": "yes"[: body.max_tokens], "logprobs": None, "finish_reason": "stop" if whole else "length"}, body.model)
    tokens = [30, 31, 2][: body.max_tokens]
    logprobs = {"tokens": [""] * len(tokens), "token_logprobs": [-0.5] * len(tokens), "text_offset": [], "top_logprobs": []}
    finish = "stop" if tokens[-1] in body.stop_token_ids else "length"
    return reply({"text": "78", "logprobs": logprobs, "finish_reason": finish, "token_ids": tokens}, body.model)


async def chat(request: Request) -> Any:
    body = await admitted(request, ChatCompletion)
    return reply({"message": {"role": "assistant", "content": "no"}, "finish_reason": "stop"}, body.model)


async def models(request: Request) -> Any:
    return {"object": "list", "data": [{"id": "judge", "object": "model", "created": now(), "owned_by": "x"}]}


routes = {"/v1/completions": ("POST", completions), "/v1/chat/completions": ("POST", chat), "/v1/models": ("GET", models)}
fields = (TokenCompletion if token_ids else Completion).__struct_fields__
serve(double, routes, {"CompletionRequest": list(fields)}, [])
