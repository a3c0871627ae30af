"""What a workflow is given and what it returns.

    engine     an `InferenceEngine`, or an `EngineGroup` of one engine per policy; seeds, prefix groups, interrupted
               generations and the context limit are the executor's business, a workflow only asks for tokens
    context    tokenizers, policies, the reward as an async callable, options and generation settings
    returns    `Episode` (or a bare `Trajectory`, a dict of columns, None = rejected); see `as_episode`

Errors carry the boundary that they crossed (`Attributed`); RaaS turns them into data with `rollout_error`.
"""

from __future__ import annotations

import asyncio
import re
import string
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, cast, get_args, runtime_checkable

import msgspec

from astraflow.lib import options
from astraflow.lib.aio import Threads, asked_to_cancel, carried, one_line, text_of
from astraflow.lib.registry import closest
from astraflow.lib.tokenizer import Tokenizer
from astraflow.protocol.codec import column
from astraflow.protocol.errors import AstraFlowError, BadMessage, UserError
from astraflow.protocol.rollout import Boundary, Finish, RolloutError, Segment, Trajectory
from astraflow.workflows import WORKFLOWS, register_workflow
from astraflow.workflows.config import AgentConfig

if TYPE_CHECKING:
    from astraflow.workflows.visit import Door

__all__ = [
    "WORKFLOWS",
    "Attributed",
    "EngineGroup",
    "Environment",
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
    "charged",
    "engine_of",
    "is_overlong",
    "is_text",
    "register_workflow",
    "rollout_error",
]

MAX_MESSAGE = 500


class ModelRequest(msgspec.Struct, kw_only=True):
    """One call of a model: continue this token sequence."""

    input_ids: list[int]
    """The whole context, T tokens."""
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1)]
    """Limit of new tokens over the whole call, interruptions included (case G23)."""
    request_id: str = ""
    """Unique per call; the executor fills it in when empty."""
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0
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


@contextmanager
def charged(boundary: Boundary, what: str) -> Iterator[None]:
    """Whatever the code of others raises inside, SystemExit too, is an EpisodeError(boundary, exception) that begins with `what`.

    Errors of ours and those that know their boundary pass, and so do the cancellation of the episode and the end of a coroutine that is
    closed. A GeneratorExit by hand looks like the latter here: what can raise it is awaited `contained`.
    """
    try:
        yield
    except (AstraFlowError, GeneratorExit):
        raise
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and asked_to_cancel():
            raise
        if isinstance(error, Attributed) and error.boundary in get_args(Boundary):
            raise carried(error) from None
        raise EpisodeError(boundary, "exception", f"{what}: {one_line(error)}") from error


def rollout_error(error: BaseException) -> RolloutError:
    """An exception as data. Without an address it counts against the workflow, whose code let it pass."""
    if isinstance(error, asyncio.CancelledError):
        return RolloutError(boundary="cancelled", kind="cancelled", message="the episode was cancelled")
    if isinstance(error, Attributed) and error.boundary in get_args(Boundary):
        return RolloutError(boundary=error.boundary, kind=str(error.kind), message=text_of(error)[:MAX_MESSAGE])
    kind = "timeout" if isinstance(error, TimeoutError) else "exception"
    return RolloutError(boundary="workflow", kind=kind, message=one_line(error)[:MAX_MESSAGE])


def is_text(value: str) -> bool:
    """Whether it can be sent and tokenized: half a surrogate pair, as Python's file names have them, cannot."""
    try:
        str.encode(value)
    except UnicodeEncodeError:
        return False
    return True


def is_overlong(error: BaseException) -> bool:
    """The next prompt does not fit: an episode that has an answer already ends with it."""
    return isinstance(error, Attributed) and error.boundary == "prompt"


class Options(options.Options):
    """A workflow's options; read them at construction."""

    def __init__(self, workflow: str, values: Mapping[str, Any]) -> None:
        super().__init__(f"workflow {workflow!r}", values)

    def template(self, name: str, default: str, fields: Collection[str] | None = None) -> str:
        """A text with `{field}`s. Raises ConfigError for braces that name no field: those of `\\boxed{}` or JSON are to be doubled.

        fields: all that there will be (`WorkflowContext.fields_with`); None = not known.
        """
        text: str = self.take(name, default)
        try:
            named = [one for _, one, _, _ in string.Formatter().parse(text) if one is not None]
        except ValueError as error:
            raise self.refuse(name, f"{text!r}: {error}; braces that are text are doubled: {{{{ }}}}") from None
        for one in named:
            if not one or one[0].isdigit() or set(one) & set("\"'\\\n{}"):
                raise self.refuse(name, f"{text!r}: {{{one}}} names no field; braces that are text are doubled: {{{{ }}}}")
            root = re.split(r"[.\[]", one)[0]
            if fields is not None and root not in fields:
                known = sorted(fields)
                raise self.refuse(name, f"{text!r}: there is no field {root!r}{closest(root, known)}; fields: {', '.join(known)}")
        return text


class RewardFunction(Protocol):
    """A reward as a workflow sees it: never blocks the loop; raises an `Attributed` error instead of a silent 0."""

    def __call__(
        self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
    ) -> Awaitable[float | None]: ...


class Environment(Protocol):
    """A world as a workflow sees it, one per episode; its methods may block (`environments/api.py`)."""

    def reset(self, data: Mapping[str, Any]) -> str: ...

    def step(self, action: str) -> tuple[str, float, bool]: ...

    def close(self) -> None: ...


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
    environment: Callable[[str], Callable[[Mapping[str, Any]], Environment]] | None = None
    """Name → class, which takes the options of an episode's environment. Raises UnknownName. None = there are none here."""
    fields: frozenset[str] | None = None
    """Names of the fields that the tasks have, as far as they are known before an episode runs."""
    threads: Threads = field(default_factory=Threads)
    """Where environments run: one for all workflows of a process, which counts those that hang."""
    agents: Mapping[str, AgentConfig] = field(default_factory=dict)
    """Programs that the workflow `agent` may run, by name: of this process's own configuration."""
    door: Door | None = None
    """Where they reach the policies; None = no episode runs in this process."""

    def fields_with(self, *added: str) -> set[str] | None:
        """The fields that a template may name: a task's own, its prompt and what the workflow adds; None = not known."""
        return None if self.fields is None else {*self.fields, "prompt", *added}

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
            name = str(error).rpartition("`$.")[2].partition("`")[0].partition("[")[0]
            raise UserError(f"generation.{name}: {settings.get(name)!r}: {error}") from None

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
