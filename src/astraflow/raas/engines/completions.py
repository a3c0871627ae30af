"""`/v1/completions` as OpenAI documents it, with the token ids that vLLM adds: what its engine and the OpenAI one share."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from astraflow.raas.engines.base import EngineError
from astraflow.raas.engines.http import decoded
from astraflow.workflows.api import ModelRequest


class Logprobs(msgspec.Struct):
    token_logprobs: list[float]


class Choice(msgspec.Struct):
    finish_reason: str | None
    text: str = ""
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None

    @property
    def ending(self) -> Literal["stop", "length", "abort"]:
        """Raises EngineError(bad_response) for an ending that is none of ours (an error, a content filter)."""
        if self.finish_reason not in ("stop", "length", "abort"):
            raise EngineError("bad_response", f"finish_reason {self.finish_reason!r}: expected stop, length or abort")
        return self.finish_reason  # type: ignore[return-value]


class _Completion(msgspec.Struct):
    choices: list[Choice]


def completion_body(request: ModelRequest, model: str) -> dict[str, Any]:
    """The fields that every such server knows; the prompt is the caller's."""
    return {
        "model": model,
        "max_tokens": request.max_new_tokens,
        "temperature": 0.0 if request.greedy else request.temperature,
        "top_p": request.top_p,
        **({"stop": request.stop} if request.stop else {}),
    }


def completion(body: bytes) -> Choice:
    """The only choice of a reply. Raises EngineError(bad_response)."""
    choices = decoded(body, _Completion, "/v1/completions").choices
    if len(choices) != 1:
        raise EngineError("bad_response", f"/v1/completions: {len(choices)} choices, 1 was asked for")
    return choices[0]
