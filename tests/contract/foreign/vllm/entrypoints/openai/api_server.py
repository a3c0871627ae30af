"""A stand-in for vLLM's OpenAI server, by its documentation: /v1/completions with token ids, /pause, /resume, /collective_rpc."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import msgspec
from double import Double, Refused, now, read, serve
from starlette.requests import Request


class CompletionRequest(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    prompt: list[int]
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    return_token_ids: bool = False
    request_id: str = ""


class RPC(msgspec.Struct, forbid_unknown_fields=True):
    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


double = Double(sys.argv[1:])
double.start_model(double.args["model"])
assert os.environ["VLLM_SERVER_DEV_MODE"] == "1"
assert double.args["logprobs-mode"] == "processed_logprobs"
state = {"format": double.args["load-format"]}


async def gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def completions(request: Request) -> Any:
    body = read(await request.body(), CompletionRequest)
    double.seen.append(msgspec.to_builtins(body))
    if body.model != double.args["served-model-name"]:
        raise Refused(404, f"The model `{body.model}` does not exist.")
    if len(body.prompt) + 1 > int(double.args["max-model-len"]):
        raise Refused(400, f"This model's maximum context length is {double.args['max-model-len']} tokens.")
    stop_ids = set(body.stop_token_ids) | (set() if body.ignore_eos else {2})
    work = asyncio.create_task(double.generate(body.request_id, body.prompt, body.max_tokens, stop_ids, body.stop))
    watch = asyncio.create_task(gone(request))
    await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
    watch.cancel()
    if not work.done():
        work.cancel()
        return None
    out, finish = work.result()
    tokens = [token for _, token in out]
    logprobs = {"text_offset": [], "token_logprobs": [p for p, _ in out], "tokens": [""] * len(out), "top_logprobs": []}
    choice = {
        "index": 0,
        "text": double.tokenizer.decode(tokens),
        "logprobs": logprobs if body.logprobs is not None else None,
        "finish_reason": finish,
        "stop_reason": None,
        "token_ids": tokens if body.return_token_ids else None,
    }
    return {"id": f"cmpl-{body.request_id}", "object": "text_completion", "created": now(), "model": body.model, "choices": [choice]}


async def pause(request: Request) -> Any:
    assert request.query_params["mode"] == "abort"
    double.resumed.clear()
    double.end()
    return {"status": "paused"}


async def resume(request: Request) -> Any:
    double.resumed.set()
    return {"status": "resumed"}


async def collective_rpc(request: Request) -> Any:
    call = read(await request.body(), RPC)
    if call.method == "update_config":
        assert call.kwargs == {"overrides": {"load_config": {"load_format": "auto"}}}, call
        state["format"] = "auto"
    elif call.method == "reload_weights":
        if state["format"] != "auto":
            raise Refused(500, f"Model reloading with `{state['format']}` format")
        await double.reload()
    else:
        raise Refused(500, f"no method {call.method}")
    return {"results": [None]}


async def reset_prefix_cache(request: Request) -> Any:
    double.stale = False
    return {"success": not double.running}


routes = {
    "/v1/completions": ("POST", completions),
    "/pause": ("POST", pause),
    "/resume": ("POST", resume),
    "/collective_rpc": ("POST", collective_rpc),
    "/reset_prefix_cache": ("POST", reset_prefix_cache),
}
schemas = {"CompletionRequest": list(CompletionRequest.__struct_fields__)}
serve(double, routes, schemas, ["vllm:num_requests_running", "vllm:kv_cache_usage_perc"])
