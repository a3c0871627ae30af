"""One episode as its workflow sees the engines: seeds, prefix groups, the context limit and the rules of training.

The rules (numerics 2, case G20) live here and nowhere else, so that every engine and every workflow obeys the same ones.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from astraflow.lib.aio import Threads, contained
from astraflow.lib.trace import TRACE
from astraflow.protocol.rollout import Boundary, Lease
from astraflow.raas.engines.base import EngineError, check_piece, stable_hash
from astraflow.raas.models import ServedModel
from astraflow.workflows.api import EngineGroup, EpisodeError, ModelRequest, ModelResponse, RewardFunction, charged

T = TypeVar("T")

CURRENT: ContextVar[Episode | None] = ContextVar("episode", default=None)
"""The episode whose task runs: how a reward, shared by all episodes, knows whom it works for."""


def training_refusal(request: ModelRequest) -> str:
    """Why this request may not be trained on: behaviour log-probs are those of log_softmax(logits / T) only (numerics 2)."""
    if request.greedy or request.temperature <= 0:
        return f"temperature {0 if request.greedy else request.temperature:g}: training needs a temperature above 0 and no greedy"
    if request.top_p < 1:
        return f"top_p {request.top_p:g}: training needs 1"
    if request.top_k > 0:
        return f"top_k {request.top_k}: training needs 0 (off)"
    return ""


@dataclass(frozen=True)
class Call:
    """One model call, for the record."""

    policy: str
    input_ids: list[int]
    response: ModelResponse


@dataclass
class Episode:
    """State of one run of a workflow."""

    lease: Lease
    index: int
    training: bool
    serial: int = 0
    """Unique in the process: the request ids of a retry or of a lease issued again never meet those of the first run."""
    inside: Boundary = "workflow"
    """The boundary that a deadline would be charged to now."""
    calls: list[Call] = field(default_factory=list)
    timelines: dict[str, int] = field(default_factory=dict)
    """Oldest timeline per policy."""
    temperature: float = 1.0
    """Of the last request."""
    engine_s: float = 0.0
    numbers: Counter[str] = field(default_factory=Counter)
    """Calls per policy."""

    @contextmanager
    def crossing(self, boundary: Boundary) -> Iterator[None]:
        """Note that the episode is inside; after a cancellation the note stays, for the report of the deadline."""
        before, self.inside = self.inside, boundary
        begun, cancelled = time.monotonic(), False
        try:
            yield
        except asyncio.CancelledError:
            cancelled = True
            raise
        finally:
            TRACE.add(boundary, begun, lease=self.lease.lease_id, attempt=self.lease.attempt, index=self.index)
            if not cancelled:
                self.inside = before

    def engines(self, models: Mapping[str, ServedModel], policies: list[str]) -> EngineGroup:
        """What the workflow gets."""
        return EngineGroup({policy: PolicyEngine(self, policy, models[policy]) for policy in policies})


class PolicyEngine:
    """`InferenceEngine` of one policy in one episode."""

    def __init__(self, episode: Episode, policy: str, model: ServedModel) -> None:
        self._episode, self._policy, self._model = episode, policy, model

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Fill in what the executor owns, ask the engine, check and remember the answer."""
        episode = self._episode
        prepared = self._prepare(request)
        started = time.monotonic()
        with episode.crossing("engine"):
            await self._model.gate.passed()
            response = await self._model.engine.agenerate(prepared)
        episode.engine_s += time.monotonic() - started
        self._check(response, prepared)
        episode.calls.append(Call(self._policy, prepared.input_ids, response))
        known = episode.timelines.get(self._policy, response.timeline)
        episode.timelines[self._policy] = min(known, response.timeline)
        return response

    def _prepare(self, request: ModelRequest) -> ModelRequest:
        episode, lease = self._episode, self._episode.lease
        if episode.training and (refusal := training_refusal(request)):
            raise EpisodeError("workflow", "generation", refusal)
        if request.max_new_tokens < 1:
            raise EpisodeError("workflow", "generation", f"max_new_tokens {request.max_new_tokens}: must be at least 1")
        first = not episode.numbers
        number = episode.numbers[self._policy]
        budget = self._budget(len(request.input_ids), request.max_new_tokens, first)
        episode.numbers[self._policy] += 1
        episode.temperature = request.temperature
        return msgspec.structs.replace(
            request,
            request_id=f"{lease.lease_id}/{lease.attempt}/{episode.index}/{self._policy}/{number}#{episode.serial}",
            max_new_tokens=budget,
            seed=stable_hash(lease.seed, episode.index, number, self._policy),
            prefix_group=lease.lease_id,
        )

    def _budget(self, prompt: int, wanted: int, first: bool) -> int:
        """New tokens that fit. The prompt is never cut: one that leaves no room is refused without a request (case G20)."""
        context, limit = self._model.context_length, self._episode.lease.max_prompt_tokens
        if prompt == 0:
            raise EpisodeError("prompt", "empty", "the prompt has no tokens")
        if first and limit is not None and prompt > limit:
            raise EpisodeError("prompt", "overlong", f"{prompt} prompt tokens, max_prompt_tokens {limit}")
        if context and prompt >= context:
            raise EpisodeError("prompt", "overlong", f"{prompt} prompt tokens, {self._policy} has a context of {context}")
        return min(wanted, context - prompt) if context else wanted

    def _check(self, response: ModelResponse, request: ModelRequest) -> None:
        check_piece(response.output_ids, response.logprobs, response.versions, request.max_new_tokens)
        if response.finish not in ("stop", "length"):
            raise EngineError("bad_response", f"finish {response.finish!r}: expected stop or length")


class ChargedThreads(Threads):
    """Threads of environments, which tell the episode that they work for, so that a deadline inside is charged to the environment."""

    async def run(self, call: Callable[[], T], seconds: float, name: str) -> T:
        episode = CURRENT.get()
        with nullcontext() if episode is None else episode.crossing("environment"):
            return await super().run(call, seconds, name)


class ChargedReward:
    """A reward that tells the episode it works for, so that a deadline inside it is charged to the reward."""

    def __init__(self, reward: RewardFunction) -> None:
        self._reward = reward

    async def __call__(self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float | None:
        episode = CURRENT.get()
        with nullcontext() if episode is None else episode.crossing("reward"), charged("reward", "reward"):
            return await contained(self._reward, prompt, completions, prompt_ids, completion_ids, **data)
