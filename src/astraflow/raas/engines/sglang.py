"""SGLang's own server: token ids in, token ids with the log-probs of the sampled distribution out; weights reloaded from disk in place.

Server routes used: /generate (needed), /pause_generation, /continue_generation, /update_weights_from_disk, /abort_request, /server_info,
/health, /metrics. Without those for updates each load is a restart on the new weights. Tested against its documented schema only: its
package needs CUDA. Sources: SGLang's documentation ("Sampling Parameters", "SGLang for RL Systems") and its request structures.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Literal

import msgspec

from astraflow.lib.tokenizer import NO_LIMIT
from astraflow.raas.engines.base import EngineError, EngineSetup
from astraflow.raas.engines.http import Http, OpenAPI, decoded, offered
from astraflow.raas.engines.server import CALL_S, HOST, Answer, Launch, ServerEngine
from astraflow.workflows.api import ModelRequest

PAUSE, CONTINUE, UPDATE = "/pause_generation", "/continue_generation", "/update_weights_from_disk"
SERVER_INFO = ("/server_info", "/get_server_info")
SEEDS = 1 << 31
"""Sampling seeds are 32-bit there."""


class _Finish(msgspec.Struct):
    type: Literal["stop", "length", "abort"]


class _Meta(msgspec.Struct):
    finish_reason: _Finish
    completion_tokens: int = -1
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    """(log-prob, token id, text) of every sampled token, its end token included."""


class _Generated(msgspec.Struct):
    meta_info: _Meta


class _Updated(msgspec.Struct):
    success: bool
    message: str = ""


class _Info(msgspec.Struct):
    enable_deterministic_inference: bool = False


class SGLang:
    """The dialect."""

    gauges = {"sglang:num_running_reqs": "running", "sglang:num_queue_reqs": "queued", "sglang:token_usage": "kv_use"}

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        self._offered = OpenAPI()
        self._seeds = False

    def command(self, launch: Launch) -> tuple[list[str], dict[str, str]]:
        setup, options = launch.setup, launch.options
        settings: dict[str, object] = {
            "model-path": launch.model_dir,
            "served-model-name": setup.model_id,
            "host": HOST,
            "port": launch.port,
            "dtype": setup.dtype,
            "random-seed": setup.seed,
            "max-running-requests": setup.max_slots,
            "tp-size": options.tensor_parallel,
            "load-format": "dummy" if launch.dummy else "auto",
            "log-level": "warning",
        }
        if setup.context_length < NO_LIMIT:
            settings["context-length"] = setup.context_length
        if options.gpu_memory_utilization is not None:
            settings["mem-fraction-static"] = options.gpu_memory_utilization
        if setup.config.device != "auto":
            settings["device"] = setup.config.device
        argv = [launch.python, "-m", "sglang.launch_server", *(f"--{name}={value}" for name, value in settings.items()), "--enable-metrics"]
        return argv, {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}  # log-probs of the distribution that was sampled from (numerics 2)

    async def probe(self, http: Http) -> None:
        self._offered = await offered(http, CALL_S)
        info = next((path for path in SERVER_INFO if path in self._offered.paths), None)
        if info is not None:
            self._seeds = decoded(await http.get(info, timeout_s=CALL_S), _Info, info).enable_deterministic_inference

    async def generate(self, http: Http, request: ModelRequest, request_id: str) -> Answer:
        sampling = {
            "max_new_tokens": request.max_new_tokens,
            "temperature": 0.0 if request.greedy else request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k or -1,
            "min_p": 0.0,  # these two, or the model's own defaults would apply
            "repetition_penalty": 1.0,
            "stop": request.stop,
            "stop_token_ids": sorted({*self._setup.eos_ids, *request.stop_ids}),
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        if self._seeds:  # only a deterministic server knows them
            sampling["sampling_seed"] = request.seed % SEEDS
        body = {
            "rid": request_id,
            "input_ids": request.input_ids,
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": False,
        }
        try:
            reply = await http.post("/generate", body, timeout_s=None)
        except asyncio.CancelledError:
            with contextlib.suppress(EngineError):  # a closed connection is noticed late there
                await http.post("/abort_request", {"rid": request_id, "abort_all": False}, timeout_s=CALL_S)
            raise
        meta = decoded(reply, _Generated, "/generate").meta_info
        if meta.completion_tokens not in (-1, len(meta.output_token_logprobs)):
            raise EngineError("bad_response", f"/generate: {len(meta.output_token_logprobs)} log-probs of {meta.completion_tokens} tokens")
        columns = meta.output_token_logprobs
        return Answer([token for _, token, _ in columns], [logprob for logprob, _, _ in columns], meta.finish_reason.type)

    async def interrupt(self, http: Http) -> None:
        if PAUSE not in self._offered.paths:
            raise EngineError("unsupported", f"this SGLang has no {PAUSE}")
        await http.post(PAUSE, {"mode": "abort"}, timeout_s=CALL_S)

    async def reload(self, http: Http, launch: Launch) -> None:
        if UPDATE not in self._offered.paths:
            raise EngineError("unsupported", f"this SGLang has no {UPDATE}")
        body = {"model_path": launch.model_dir, "load_format": "auto", "flush_cache": True}  # its own format may be that of no weights
        updated = decoded(await http.post(UPDATE, body, timeout_s=None), _Updated, UPDATE)
        if not updated.success:
            raise EngineError("load_failed", f"{UPDATE}: {updated.message}")

    async def resume(self, http: Http) -> None:
        await http.post(CONTINUE, {}, timeout_s=CALL_S)


def sglang(setup: EngineSetup) -> ServerEngine:
    """An SGLang server. `raas.engine.options`: `ServerOptions`."""
    return ServerEngine("sglang", setup, SGLang(setup))
