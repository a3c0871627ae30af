"""A stand-in for SGLang's server, by its documentation: /generate, /pause_generation, /update_weights_from_disk, /abort_request."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any, Literal

import msgspec
from double import Double, Refused, read, serve
from starlette.requests import Request


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True):
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    sampling_seed: int | None = None


class GenerateReqInput(msgspec.Struct, forbid_unknown_fields=True):
    input_ids: list[int]
    sampling_params: SamplingParams
    rid: str
    return_logprob: bool = False
    logprob_start_len: int = -1
    stream: bool = False


class Pause(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class Update(msgspec.Struct, forbid_unknown_fields=True):
    model_path: str
    load_format: str | None = None
    flush_cache: bool = True


class Abort(msgspec.Struct, forbid_unknown_fields=True):
    rid: str = ""
    abort_all: bool = False


double = Double(sys.argv[1:])
double.start_model(double.args["model-path"])
assert os.environ["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"
deterministic = "--enable-deterministic-inference" in double.flags


async def generate(request: Request) -> Any:
    body = read(await request.body(), GenerateReqInput)
    double.seen.append(msgspec.to_builtins(body))
    wanted = body.sampling_params
    if wanted.top_k == 0 or (wanted.sampling_seed or 0) >= 1 << 31:
        raise Refused(400, "top_k must be -1 (disable) or at least 1; seeds have 31 bits")
    if len(body.input_ids) >= int(double.args["context-length"]):
        raise Refused(400, "The input is longer than the model's context length.")
    out, finish = await double.generate(
        body.rid, body.input_ids, wanted.max_new_tokens, set(wanted.stop_token_ids) | {2}, wanted.stop
    )  # its disconnected clients are noticed seconds later: here never
    tokens = [token for _, token in out]
    meta = {
        "id": body.rid,
        "finish_reason": {"type": finish, **({"message": "Aborted"} if finish == "abort" else {"matched": None})},
        "prompt_tokens": len(body.input_ids),
        "completion_tokens": len(tokens),
        "weight_version": "default",
    }
    if body.return_logprob:
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in out]
    return {"text": double.tokenizer.decode(tokens), "output_ids": tokens, "meta_info": meta}


async def pause(request: Request) -> Any:
    assert read(await request.body(), Pause).mode == "abort"
    double.resumed.clear()
    while double.running:
        double.end()
        await asyncio.sleep(0.01)
    return {"status": "ok", "message": "Generation paused successfully."}


async def resume(request: Request) -> Any:
    read(await request.body(), dict[str, bool])
    double.resumed.set()
    return {"status": "ok", "message": "Generation continued successfully."}


async def update(request: Request) -> Any:
    wanted = read(await request.body(), Update)
    if (wanted.load_format or double.args["load-format"]) != "auto" or wanted.model_path != str(double.directory):
        raise Refused(400, f"cannot load {wanted}")
    await double.reload()
    double.stale = not wanted.flush_cache
    return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}


async def abort(request: Request) -> Any:
    wanted = read(await request.body(), Abort)
    if wanted.rid or wanted.abort_all:
        double.end(wanted.rid)


async def server_info(request: Request) -> Any:
    return {**double.args, "enable_deterministic_inference": deterministic, "version": "0.0.0"}


routes = {
    "/generate": ("POST", generate),
    "/pause_generation": ("POST", pause),
    "/continue_generation": ("POST", resume),
    "/update_weights_from_disk": ("POST", update),
    "/abort_request": ("POST", abort),
    "/get_server_info": ("GET", server_info),
}
serve(double, routes, {}, ["sglang:num_running_reqs", "sglang:token_usage"])
