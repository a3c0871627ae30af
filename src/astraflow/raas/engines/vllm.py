"""vLLM's OpenAI server: token ids in, token ids and processed log-probs out; weights reloaded in place.

Server routes used, where they are offered: /v1/completions with `return_token_ids` (needed), /pause, /resume, /collective_rpc,
/reset_prefix_cache, /health, /metrics. Without /collective_rpc (VLLM_SERVER_DEV_MODE) each load is a restart on the new weights.
Requests carry no seed: a batch depends on timing anyway, a generator per request costs time on GPUs, and on CPUs it kills the server
(0.32) as soon as a prompt is prefilled in two pieces.
Source: vLLM's documentation of the OpenAI-compatible server and its development endpoints.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from astraflow.lib.tokenizer import NO_LIMIT
from astraflow.protocol.errors import ConfigError
from astraflow.raas.engines.base import EngineError, EngineSetup
from astraflow.raas.engines.completions import completion, completion_body
from astraflow.raas.engines.http import Http, OpenAPI, decoded, offered
from astraflow.raas.engines.server import CALL_S, HOST, Answer, Launch, ServerEngine
from astraflow.workflows.api import ModelRequest


class _Cleared(msgspec.Struct):
    success: bool = True
    """Old servers answer without a word."""


class VLLM:
    """The dialect."""

    gauges = {
        "vllm:num_requests_running": "running",
        "vllm:num_requests_waiting": "queued",
        "vllm:kv_cache_usage_perc": "kv_use",
        "vllm:gpu_cache_usage_perc": "kv_use",
    }

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        self._offered = OpenAPI()

    def command(self, launch: Launch) -> tuple[list[str], dict[str, str]]:
        setup, options = launch.setup, launch.options
        settings: dict[str, object] = {
            "model": launch.model_dir,
            "served-model-name": setup.model_id,
            "host": HOST,
            "port": launch.port,
            "dtype": setup.dtype,
            "seed": setup.seed,
            "max-num-seqs": setup.max_slots,
            "tensor-parallel-size": options.tensor_parallel,
            "load-format": "dummy" if launch.dummy else "auto",
            "logprobs-mode": "processed_logprobs",  # of the distribution that was sampled from (numerics 2)
            "generation-config": "vllm",  # or the model's own sampling defaults would apply where a request says nothing
            "uvicorn-log-level": "warning",
        }
        if setup.context_length < NO_LIMIT:
            settings["max-model-len"] = setup.context_length
        if options.gpu_memory_utilization is not None:
            settings["gpu-memory-utilization"] = options.gpu_memory_utilization
        argv = [launch.python, "-m", "vllm.entrypoints.openai.api_server", *(f"--{name}={value}" for name, value in settings.items())]
        return argv, ENVIRONMENT | {name: os.environ.get(name, value) for name, value in ON_CPUS.items()}

    async def probe(self, http: Http) -> None:
        self._offered = await offered(http, CALL_S)
        if not self._offered.takes("CompletionRequest", "return_token_ids"):
            raise EngineError("start", "this vLLM's /v1/completions has no return_token_ids; a newer one is needed")

    async def generate(self, http: Http, request: ModelRequest, request_id: str) -> Answer:
        eos_ids = self._setup.eos_ids
        body = completion_body(request, self._setup.model_id) | {
            "prompt": request.input_ids,
            "top_k": request.top_k or -1,
            "stop_token_ids": sorted({*eos_ids, *request.stop_ids}),
            "ignore_eos": True,  # the end tokens are those of ours, all of them
            "skip_special_tokens": False,
            "logprobs": 0,
            "return_token_ids": True,
            "request_id": request_id,
        }
        # A closed connection frees the request
        choice = completion(await http.post("/v1/completions", body, timeout_s=None))
        if choice.token_ids is None or choice.logprobs is None:
            raise EngineError("bad_response", "/v1/completions: an answer without token_ids or logprobs")
        return Answer(choice.token_ids, choice.logprobs.token_logprobs, choice.ending)

    async def interrupt(self, http: Http) -> None:
        if "/pause" not in self._offered.paths:
            raise EngineError("unsupported", "this vLLM has no /pause")
        await http.post("/pause", query={"mode": "abort"}, timeout_s=CALL_S)

    async def reload(self, http: Http, launch: Launch) -> None:
        if launch.dummy:  # the loader of random weights cannot load others
            await self._workers(http, "update_config", overrides={"load_config": {"load_format": "auto"}})
        await self._workers(http, "reload_weights")
        if not decoded(await http.post("/reset_prefix_cache", timeout_s=CALL_S) or b"{}", _Cleared, "/reset_prefix_cache").success:
            raise EngineError("engine", "/reset_prefix_cache: the cache of the old weights is still in use")

    async def _workers(self, http: Http, method: str, **arguments: Any) -> None:
        if "/collective_rpc" not in self._offered.paths:
            raise EngineError("unsupported", "this vLLM has no /collective_rpc (VLLM_SERVER_DEV_MODE=1)")
        await http.post("/collective_rpc", {"method": method, "kwargs": arguments}, timeout_s=None)

    async def resume(self, http: Http) -> None:
        await http.post("/resume", timeout_s=CALL_S)


ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
ON_CPUS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
"""Unless the environment says otherwise: no binding to cores that others use too, and 1 GiB of KV cache. GPUs ignore them."""


def vllm(setup: EngineSetup) -> ServerEngine:
    """A vLLM server. `raas.engine.options`: `ServerOptions`."""
    if setup.config.device != "auto":
        raise ConfigError(f"raas.engine.device {setup.config.device!r}: which device vLLM uses is decided by its package; expected auto")
    return ServerEngine("vllm", setup, VLLM(setup))
