"""What a workflow is given and what it returns.

    engine     an `InferenceEngine`, or an `EngineGroup` of one engine per policy; seeds, prefix groups, interrupted
               generations and the context limit are the executor's business, a workflow only asks for tokens
    context    tokenizers, policies, the reward as an async callable, options and generation settings
    returns    `Episode` (or a bare `Trajectory`, a dict of columns, None = rejected); see `as_episode`

Errors carry the boundary that they crossed (`Attributed`); RaaS turns them into data with `rollout_error`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast, get_args, runtime_checkable

import msgspec

from astraflow.lib import options
from astraflow.lib.registry import closest
from astraflow.lib.tokenizer import Tokenizer
from astraflow.protocol.codec import column
from astraflow.protocol.errors import AstraFlowError, BadMessage, UserError
from astraflow.protocol.rollout import Boundary, Finish, RolloutError, Segment, Trajectory
from astraflow.workflows import WORKFLOWS, register_workflow

__all__ = [
    "WORKFLOWS",
    "Attributed",
    "EngineGroup",
    "Episode",
    "EpisodeError",
    "InferenceEngine",
    "ModelRequest",
    "ModelResponse",
    "Options",
    "RewardFunction",
    "RolloutWorkflow",
    "Score",
    "WorkflowContext",
    "as_episode",
    "engine_of",
    "is_overlong",
    "register_workflow",
    "rollout_error",
]

MAX_MESSAGE = 500


class ModelRequest(msgspec.Struct, kw_only=True):
    """One call of a model: continue this token sequence."""

    input_ids: list[int]
    """The whole context, T tokens."""
    max_new_tokens: int
    """Limit of new tokens over the whole call, interruptions included (case G23)."""
    request_id: str = ""
    """Unique per call; the executor fills it in when empty."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    stop: list[str] = []
    """Texts that end the generation; the tokens that complete the text are kept."""
    stop_ids: list[int] = []
    """Token ids that end the generation beside the model's own end tokens."""
    seed: int = 0
    """Of this call's sampler; the executor derives it from lease, sample and call."""
    greedy: bool = False
    """Take the most likely token; evaluation only."""
    prefix_group: str = ""
    """Requests with the same one probably share a prefix (the samples of one lease do)."""


class ModelResponse(msgspec.Struct, kw_only=True):
    """N sampled tokens; the end token is one of them."""

    output_ids: list[int]
    logprobs: list[float]
    """[N] behaviour log-probs at sampling time (numerics 2)."""
    versions: list[int]
    """[N] weight version that sampled each token."""
    finish: Literal["stop", "length"]
    """`length` = ran into the limit of new tokens, and nothing else (numerics 11)."""
    timeline: int = 0
    """The oldest timeline among the tokens' weights."""


class InferenceEngine(Protocol):
    """One policy's engine."""

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Raises an `Attributed` error (boundary `engine` or `prompt`) when no usable response comes."""
        ...


class EngineGroup:
    """Engines by policy name. A group of one can be used as the engine itself."""

    def __init__(self, engines: Mapping[str, InferenceEngine]) -> None:
        if not engines:
            raise UserError("EngineGroup: needs at least one engine")
        self._engines = dict(engines)

    def __getitem__(self, policy: str) -> InferenceEngine:
        try:
            return self._engines[policy]
        except KeyError:
            raise UserError(f"policy {policy!r}: no such engine; known: {', '.join(self._engines)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        if len(self._engines) != 1:
            raise UserError(f"name the policy: engine[name] with one of {', '.join(self._engines)}")
        return await next(iter(self._engines.values())).agenerate(request)


def engine_of(engine: InferenceEngine | EngineGroup, policy: str) -> InferenceEngine:
    """The engine of `policy`, whichever of the two forms was given."""
    return engine[policy] if isinstance(engine, EngineGroup) else engine


@runtime_checkable
class Attributed(Protocol):
    """An error that knows the boundary it crossed and a short stable word for counting."""

    boundary: Boundary
    kind: str


class EpisodeError(AstraFlowError):
    """An episode that cannot go on. Raise it where the boundary is known."""

    def __init__(self, boundary: Boundary, kind: str, message: str = "") -> None:
        super().__init__(message or f"{boundary}: {kind}")
        self.boundary = boundary
        self.kind = kind


def rollout_error(error: BaseException) -> RolloutError:
    """An exception as data. Without an address it counts against the workflow, whose code let it pass."""
    if isinstance(error, asyncio.CancelledError):
        return RolloutError(boundary="cancelled", kind="cancelled", message="the episode was cancelled")
    if isinstance(error, Attributed) and error.boundary in get_args(Boundary):
        return RolloutError(boundary=error.boundary, kind=str(error.kind), message=_one_line(str(error)))
    kind = "timeout" if isinstance(error, TimeoutError) else "exception"
    return RolloutError(boundary="workflow", kind=kind, message=_one_line(f"{type(error).__name__}: {error}"))


def is_overlong(error: BaseException) -> bool:
    """The next prompt does not fit: an episode that has an answer already ends with it."""
    return isinstance(error, Attributed) and error.boundary == "prompt"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:MAX_MESSAGE]


class Options(options.Options):
    """A workflow's options; read them at construction."""

    def __init__(self, workflow: str, values: Mapping[str, Any]) -> None:
        super().__init__(f"workflow {workflow!r}", values)


class RewardFunction(Protocol):
    """A reward as a workflow sees it: never blocks the loop; raises an `Attributed` error instead of a silent 0."""

    def __call__(
        self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
    ) -> Awaitable[float | None]: ...


class Score(msgspec.Struct, frozen=True):
    """Verdict over one completion: a number, None (unscored), or an error that makes it unscored."""

    reward: float | None
    error: RolloutError | None = None


@dataclass
class WorkflowContext:
    """Everything that a workflow may use beside the engine. Shared by all episodes: keep no state of one in it."""

    tokenizers: Mapping[str, Tokenizer]
    """By policy."""
    policies: list[str]
    """In the order that the workflow's roles name them."""
    reward: RewardFunction | None = None
    """None = the workflow scores by itself."""
    options: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)
    """Fields of `ModelRequest`: max_new_tokens, temperature, top_p, top_k, stop, stop_ids, greedy."""
    context_length: int = 0
    """Tokens that prompt and answer may have together; 0 = not known."""

    def request(self, input_ids: list[int], **overrides: Any) -> ModelRequest:
        """A request with the generation settings. Raises UserError that names a wrong setting."""
        settings = {"max_new_tokens": 256, **self.generation, **overrides, "input_ids": list(input_ids)}
        unknown = set(settings) - set(ModelRequest.__struct_fields__)
        if unknown:
            name, fields = min(unknown), list(ModelRequest.__struct_fields__)
            raise UserError(f"generation.{name}: unknown{closest(name, fields)}; accepted: {', '.join(fields)}")
        try:
            return msgspec.convert(settings, ModelRequest)
        except msgspec.ValidationError as error:
            raise UserError(f"generation: {error}") from None

    async def score(self, prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], data: Mapping[str, Any]) -> Score:
        """Ask the reward. An error of the reward's boundary becomes part of the verdict; any other one passes through."""
        if self.reward is None:
            raise UserError("workflow.reward: this workflow needs a reward; see `astraflow list rewards`")
        extra = {key: value for key, value in data.items() if key not in _REWARD_ARGUMENTS}
        try:
            reward = await self.reward(prompt, completion, prompt_ids, completion_ids, **extra)
        except AstraFlowError as error:
            if isinstance(error, Attributed) and error.boundary == "reward":
                return Score(None, rollout_error(error))
            raise
        return Score(None if reward is None else float(reward))


_REWARD_ARGUMENTS = {"prompt", "completions", "prompt_ids", "completion_ids"}


class RolloutWorkflow:
    """One episode per call; one instance serves many episodes at once."""

    def __init__(self, context: WorkflowContext) -> None:
        self.context = context

    async def arun_episode(
        self, engine: InferenceEngine | EngineGroup, data: dict[str, Any]
    ) -> Episode | Trajectory | dict[str, Any] | None:
        """Run the task `data` once. None = rejected: counted, never trained."""
        raise NotImplementedError(f"{type(self).__name__}.arun_episode")


@dataclass
class Episode:
    """A trajectory with what travels beside it."""

    trajectory: Trajectory
    """`index` and `record_ref` are set by RaaS."""
    record: list[dict[str, Any]] = field(default_factory=list)
    """Turns for people, JSON values only: `{"policy", "role", "content", …}`; goes to the run directory, never to the trainer."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers of this episode, `rollout/…`."""


def as_episode(result: Episode | Trajectory | dict[str, Any] | None, policies: list[str]) -> Episode:
    """Whatever a workflow returned as an `Episode`.

    A dict is one segment: `input_ids, loss_mask, logprobs, versions` of equal length and `reward`, optionally `policy`,
    `finish`, `temperature`; or `segments`: a list of such dicts. Raises EpisodeError(workflow, bad_result).
    """
    if isinstance(result, Episode):
        return result
    if isinstance(result, Trajectory):
        return Episode(result)
    if result is None:
        return Episode(Trajectory(index=0, finish="rejected"))
    if not isinstance(result, dict):
        raise EpisodeError("workflow", "bad_result", f"arun_episode returned {type(result).__name__}")
    try:
        rows = result.get("segments", [result])
        segments = [_segment(row, policies[0]) for row in rows]
        reward, finish = result.get("reward"), result.get("finish", "stop")
        if finish not in get_args(Finish):
            raise EpisodeError("workflow", "bad_result", f"finish {finish!r}: expected one of {', '.join(get_args(Finish))}")
        return Episode(
            Trajectory(
                index=0,
                segments=segments,
                reward=None if reward is None else float(reward),
                finish=cast(Finish, finish),
            )
        )
    except (KeyError, TypeError, ValueError, BadMessage) as error:
        raise EpisodeError("workflow", "bad_result", f"{type(error).__name__}: {error}") from None


def _segment(row: Mapping[str, Any], policy: str) -> Segment:
    columns = {name: column(row[name], dtype) for name, dtype in _COLUMNS.items()}
    lengths = {name: len(col) for name, col in columns.items()}
    if len(set(lengths.values())) != 1 or any(len(col.shape) != 1 for col in columns.values()):
        raise EpisodeError("workflow", "bad_result", f"columns differ in length: {lengths}")
    return Segment(
        policies=[str(row.get("policy", policy))],
        input_ids=columns["input_ids"],
        loss_mask=columns["loss_mask"],
        logprobs=columns["logprobs"],
        versions=columns["versions"],
        temperature=float(row.get("temperature", 1.0)),
    )


_COLUMNS = {"input_ids": "int32", "loss_mask": "uint8", "logprobs": "float32", "versions": "int32"}
