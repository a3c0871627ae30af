"""Any OpenAI-compatible service for frozen helpers and judges: it has its own weights, and no training may come from its tokens.

A server that offers token ids (vLLM's does) is asked with them. Any other one gets the prompt as text, and its text is tokenised here;
log-probs are 0 then, because none are known.
"""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from astraflow.lib.aio import Backoff, deadline, one_line
from astraflow.protocol.control import EngineStatus
from astraflow.protocol.errors import ConfigError
from astraflow.protocol.rollout import Serving
from astraflow.raas.engines.base import EngineError, EngineReport, EngineSetup, Weights, check_piece, typed_options
from astraflow.raas.engines.completions import Choice, completion, completion_body
from astraflow.raas.engines.http import Http, decoded, offered
from astraflow.workflows.api import ModelRequest, ModelResponse

CALL_S = 20.0


class OpenAIOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`raas.engine.options` of kind `openai`."""

    url: str
    """Address up to and including the version, e.g. http://127.0.0.1:8000/v1."""
    model: str = ""
    """Its name there; empty = the only one that /models lists."""
    api: Literal["completions", "chat"] = "completions"
    """`chat`: the prompt's text is sent as one user message, for services that have nothing else."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the key, which never stands in a configuration; one that is not set means no key."""
    tries: Annotated[int, Meta(ge=1)] = 5
    """Of one request that failed in a way that may pass (busy, broken connection), with growing pauses."""


class _Listed(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Listed]


class _Message(msgspec.Struct):
    content: str | None = None


class _ChatChoice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Chat(msgspec.Struct):
    choices: list[_ChatChoice]


class OpenAIEngine:
    """A service that somebody else runs; it is never restarted."""

    def __init__(self, setup: EngineSetup) -> None:
        """Raises ConfigError for options that do not exist."""
        self._setup, self.options = setup, typed_options(setup.config, OpenAIOptions)
        if not self.options.url.startswith(("http://", "https://")):
            raise ConfigError(f"raas.engine.options.url: {self.options.url!r}: expected http://host:port/v1")
        key = os.environ.get(self.options.key_variable, "")
        self._http = Http(self.options.url.rstrip("/"), {"Authorization": f"Bearer {key}"} if key else {})
        self._name = self.options.model
        self._token_ids = False
        self._status = EngineStatus(kind="openai", state="starting")
        self._metrics = {"requests": 0.0, "failures": 0.0}

    async def start(self) -> None:
        """Wait until it answers. Raises EngineError, or ConfigError for a model that is not served there."""
        await deadline(self._reached(), self._setup.config.start_s, f"answer of {self.options.url}")
        self._status.state = "ready"

    async def _reached(self) -> None:
        pauses = Backoff()
        while True:
            try:
                names = [model.id for model in decoded(await self._http.get("/models", timeout_s=CALL_S), _Models, "/models").data]
                break
            except EngineError as error:
                if not error.retryable:
                    raise
                self._status.message = one_line(error)
                await asyncio.sleep(pauses.next())
        self._status.message = ""
        if self._name not in names if self._name else len(names) != 1:
            raise ConfigError(f"raas.engine.options.model: {self._name!r}; {self.options.url} serves {', '.join(names)}")
        self._name = self._name or names[0]
        root = Http(self.options.url.rstrip("/").rsplit("/", 1)[0])
        try:
            self._token_ids = (await offered(root, CALL_S)).takes("CompletionRequest", "return_token_ids")
        finally:
            await root.close()

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        self._status.running += 1
        self._metrics["requests"] += 1
        pauses = Backoff(0.5, 2.0, 20.0)
        try:
            for left in reversed(range(self.options.tries)):
                try:
                    return await self._once(request)
                except EngineError as error:
                    self._metrics["failures"] += 1
                    if not error.retryable or not left:
                        raise
                await asyncio.sleep(pauses.next())
            raise AssertionError("the last try returns or raises")
        finally:
            self._status.running -= 1

    async def _once(self, request: ModelRequest) -> ModelResponse:
        body = completion_body(request, self._name) | {"seed": request.seed}
        if request.top_k:
            if not self._token_ids:
                raise EngineError("unsupported", f"top_k {request.top_k}: {self.options.url} documents none; expected 0 (all tokens)")
            body["top_k"] = request.top_k
        if self.options.api == "chat":
            return self._from_text(request, await self._chat(request, body))
        if not self._token_ids:
            body["prompt"] = self._setup.tokenizer.decode(request.input_ids, skip_special=False)
            return self._from_text(request, completion(await self._http.post("/completions", body, timeout_s=None)))
        stop_ids = sorted({*self._setup.eos_ids, *request.stop_ids})
        body |= {"prompt": request.input_ids, "stop_token_ids": stop_ids, "logprobs": 0, "return_token_ids": True}
        choice = completion(await self._http.post("/completions", body, timeout_s=None))
        if choice.token_ids is None or choice.logprobs is None:
            raise EngineError("bad_response", "/completions: an answer without token_ids or logprobs")
        return self._response(request, choice.token_ids, choice.logprobs.token_logprobs, choice)

    async def _chat(self, request: ModelRequest, body: dict[str, Any]) -> Choice:
        body["messages"] = [{"role": "user", "content": self._setup.tokenizer.decode(request.input_ids)}]
        choices = decoded(await self._http.post("/chat/completions", body, timeout_s=None), _Chat, "/chat/completions").choices
        if len(choices) != 1:
            raise EngineError("bad_response", f"/chat/completions: {len(choices)} choices, 1 was asked for")
        return Choice(choices[0].finish_reason, choices[0].message.content or "")

    def _from_text(self, request: ModelRequest, choice: Choice) -> ModelResponse:
        """Its tokens as ours; the end token that it does not show is added."""
        tokens = self._setup.tokenizer.encode(choice.text)
        if choice.ending == "stop" and not any(stop in choice.text for stop in request.stop):
            tokens += self._setup.eos_ids[:1]
        ends = [place for place, token in enumerate(tokens) if token in request.stop_ids]  # which that service does not know
        tokens = tokens[: min([request.max_new_tokens, *(place + 1 for place in ends)])]  # the same text may be more tokens here
        return self._response(request, tokens, [0.0] * len(tokens), choice)

    def _response(self, request: ModelRequest, tokens: list[int], logprobs: list[float], choice: Choice) -> ModelResponse:
        versions = [0] * len(tokens)
        check_piece(tokens, logprobs, versions, request.max_new_tokens)
        if choice.ending == "abort":
            raise EngineError("aborted", f"{self.options.url} ended the request", retryable=True)
        return ModelResponse(output_ids=tokens, logprobs=logprobs, versions=versions, finish=choice.ending)

    async def load(self, weights: Weights) -> None:
        """A frozen model has no other weights. Raises EngineError."""
        raise EngineError("frozen", f"{self._setup.model_id} is served by {self.options.url}, which takes no weights of ours")

    def report(self) -> EngineReport:
        """Its receipt is version 0 without a digest: unverified."""
        return EngineReport(status=self._status, serving=Serving(timeline=0, version=0, digest=""), metrics=self._metrics)

    async def close(self) -> None:
        self._status.state = "error"
        await self._http.close()
