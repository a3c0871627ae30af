"""An engine that says what a test tells it to, one token per character, and remembers what it was sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from astraflow.lib.tokenizer import Tokenizer
from astraflow.workflows.api import ModelRequest, ModelResponse, WorkflowContext

TINY = Path(__file__).parents[3] / "assets" / "tiny" / "solver"


class Script:
    """Answers in order. Text that ends with "…" was cut off (no end token, finish `length`); versions count up per call."""

    def __init__(self, tokenizer: Tokenizer, answers: Iterable[str | Exception]) -> None:
        self.tokenizer = tokenizer
        self.answers = list(answers)
        self.requests: list[ModelRequest] = []

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        answer = self.answers[len(self.requests)]
        self.requests.append(request)
        if isinstance(answer, Exception):
            raise answer
        cut = answer.endswith("…")
        ids = self.tokenizer.encode(answer.rstrip("…")) + ([] if cut else [self.tokenizer.eos_ids[0]])
        version = len(self.requests)
        logprobs = [-0.25 * (i + 1) for i in range(len(ids))]
        return ModelResponse(output_ids=ids, logprobs=logprobs, versions=[version] * len(ids), finish="length" if cut else "stop")


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY)


@pytest.fixture
def script(tokenizer: Tokenizer) -> Callable[..., Script]:
    return lambda *answers: Script(tokenizer, answers)


@pytest.fixture
def context(tokenizer: Tokenizer) -> Callable[..., WorkflowContext]:
    def make(reward: Any = None, policies: tuple[str, ...] = ("default",), **options: Any) -> WorkflowContext:
        generation = {"max_new_tokens": 8, "temperature": 0.7}
        return WorkflowContext(dict.fromkeys(policies, tokenizer), list(policies), reward, options, generation, context_length=256)

    return make
