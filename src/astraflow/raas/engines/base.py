"""What an inference engine is to the rollout service, and the loop for engines that abort generations.

    start ─▶ (agenerate | load | report)* ─▶ close

`load` is called inside the guarded block of `sync.py` (no new request starts meanwhile); what runs is kept and continued
under the new weights, each token stamped with the version that sampled it.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import msgspec
import xxhash

from astraflow.lib.aio import Backoff
from astraflow.lib.tokenizer import Tokenizer
from astraflow.protocol.control import EngineStatus
from astraflow.protocol.errors import AstraFlowError, ConfigError
from astraflow.protocol.rollout import Boundary, Serving
from astraflow.raas.config import EngineConfig
from astraflow.workflows.api import ModelRequest, ModelResponse

T = TypeVar("T")

MAX_EMPTY_ABORTS = 100
"""Interruptions in a row that bring no token: with back-off up to 1 s this is well over a minute of an engine that does nothing."""


class EngineError(AstraFlowError):
    """A request (or load) that the engine did not serve. `retryable`: the same episode may succeed when it is run again."""

    boundary: Boundary = "engine"

    def __init__(self, kind: str, message: str = "", *, retryable: bool = False) -> None:
        super().__init__(message or f"engine: {kind}")
        self.kind = kind
        self.retryable = retryable


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """A staged file and its name."""

    path: str
    """model.safetensors with HF names."""
    timeline: int
    version: int
    digest: str

    @property
    def serving(self) -> Serving:
        return Serving(timeline=self.timeline, version=self.version, digest=self.digest)


class EngineReport(msgspec.Struct, kw_only=True):
    """An engine as it sees itself, from memory."""

    status: EngineStatus
    serving: Serving | None
    """The receipt: what the engine itself confirmed to have loaded last; None before the first load."""
    metrics: dict[str, float] = {}
    has_model: bool = True
    """Its log-probs come from the weights that were loaded, so that the canary can check them; False for scripted answers."""


class Engine(Protocol):
    """One model's inference engine. All methods are called in the loop of the RaaS process and must not block it."""

    async def start(self) -> None:
        """Return when healthy. Raises EngineError or ConfigError."""
        ...

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Continue a token sequence; request_id is unique. Raises EngineError. Cancelling the call cancels the request."""
        ...

    async def load(self, weights: Weights) -> None:
        """Serve these weights. Returns only once they are in place; raises EngineError and serves the old ones otherwise."""
        ...

    def report(self) -> EngineReport:
        """State, receipt and numbers; no I/O."""
        ...

    async def close(self) -> None:
        """Free everything; requests in flight fail."""
        ...


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """What a factory of the engine table gets."""

    model_id: str
    model_dir: Path
    """HF directory with config.json and tokenizer files."""
    tokenizer: Tokenizer
    eos_ids: list[int]
    context_length: int
    """Bound on prompt + new tokens."""
    max_slots: int
    """Requests that may run at once."""
    config: EngineConfig
    """The `raas.engine` section; `options` are the factory's to check."""
    dtype: str
    """Compute dtype."""
    architecture: dict[str, object] = field(default_factory=dict)
    """Overrides of config.json."""
    staged: Callable[[], Weights | None]
    """Newest staged weights, verified: what an engine that has to start again loads. Reads the file, so it is called in a thread."""
    on_death: Callable[[str], None]
    """Called with a reason when the engine is beyond its restart limit."""
    log_path: Path
    """For the output of an engine's process."""
    seed: int = 0


def typed_options(config: EngineConfig, kind: type[T]) -> T:
    """`raas.engine.options` as the Struct of this kind of engine. Raises ConfigError naming the field."""
    try:
        return msgspec.convert(config.options, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"raas.engine.options: {error}") from None


class Piece(msgspec.Struct, kw_only=True):
    """Answer of one try of an engine that may abort: M sampled tokens."""

    output_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: Literal["stop", "length", "abort"]
    """`abort` = interrupted (a weight update); the tokens so far are good."""
    timeline: int = 0


async def generate_through_aborts(
    once: Callable[[ModelRequest], Awaitable[Piece]],
    request: ModelRequest,
    *,
    pauses: Backoff | None = None,
    stopped: Callable[[list[int]], bool] | None = None,
) -> ModelResponse:
    """Ask again with the tokens so far until the generation ends by itself (case G23).

    The budget is over the whole call: each try asks for what is left of `request.max_new_tokens`. An abort that used the
    budget up ends as `length`; an abort without tokens resumes after a pause. Every further try samples with its own seed:
    the same one would draw the same random numbers again. `stopped`: whether these new tokens hold a stop text; one that begins
    before an interruption and ends after it is seen by nobody else. Raises EngineError(aborted) after MAX_EMPTY_ABORTS in a row.
    """
    pauses = pauses or Backoff(0.01, 2.0, 1.0)
    out = ModelResponse(output_ids=[], logprobs=[], versions=[], finish="length")
    timelines: list[int] = []
    tries = empty = 0
    while (left := request.max_new_tokens - len(out.output_ids)) > 0:
        seed = request.seed if tries == 0 else stable_hash(request.seed, tries)
        piece = await once(msgspec.structs.replace(request, input_ids=request.input_ids + out.output_ids, max_new_tokens=left, seed=seed))
        check_piece(piece.output_ids, piece.logprobs, piece.versions, left)
        tries += 1
        out.output_ids += piece.output_ids
        out.logprobs += piece.logprobs
        out.versions += piece.versions
        timelines += [piece.timeline] if piece.output_ids else []
        if tries > 1 and stopped is not None and stopped(out.output_ids):
            _cut(out, 1 + bisect_left(range(1, len(out.output_ids)), True, key=lambda count: stopped(out.output_ids[:count])))
            break
        if piece.finish != "abort":
            out.finish = piece.finish
            break
        empty = 0 if piece.output_ids else empty + 1
        if empty >= MAX_EMPTY_ABORTS:
            raise EngineError("aborted", f"{empty} interruptions in a row without a token", retryable=True)
        if empty:
            await asyncio.sleep(pauses.next())
        else:
            pauses.reset()
    out.timeline = min(timelines, default=0)
    return out


def _cut(out: ModelResponse, count: int) -> None:
    """End it after its first `count` tokens: those that complete a stop text."""
    out.output_ids, out.logprobs, out.versions = out.output_ids[:count], out.logprobs[:count], out.versions[:count]
    out.finish = "stop"


def check_piece(output_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], limit: int) -> None:
    """Raise EngineError(bad_response) unless the columns agree and stay within the budget."""
    if not len(output_ids) == len(logprobs) == len(versions):
        raise EngineError("bad_response", f"{len(output_ids)} tokens, {len(logprobs)} log-probs, {len(versions)} versions")
    if len(output_ids) > limit:
        raise EngineError("bad_response", f"{len(output_ids)} tokens, {limit} were asked for")


def stable_hash(*parts: object) -> int:
    """63 bits that depend on nothing but the parts: the same in every process and on every machine."""
    return xxhash.xxh3_64_intdigest("\x1f".join(str(part) for part in parts).encode()) >> 1
