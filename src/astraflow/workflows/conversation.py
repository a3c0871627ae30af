"""Messages and turns of one policy as token sequences: what is sent to the engine is, token by token, what is trained on.

A conversation is never re-encoded. The next turn is found by rendering the template with a marker in the place of the last
answer: the text after the marker is appended as tokens behind the tokens that the engine sampled. When the template rewrites
what came before (drops earlier thoughts, changes a header), the prefix is broken: a new segment starts from the full rendering
and is counted (`rollout/broken_prefix`); the old one stays a segment of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from astraflow.lib.tokenizer import Tokenizer, flat_ids
from astraflow.protocol.codec import column
from astraflow.protocol.errors import UserError
from astraflow.protocol.rollout import Finish, Segment, Trajectory
from astraflow.workflows.api import (
    EngineGroup,
    Episode,
    EpisodeError,
    InferenceEngine,
    ModelRequest,
    ModelResponse,
    Score,
    WorkflowContext,
    engine_of,
)

MARKER = "\u2060answer\u2060"
"""Stands for an answer while the template is rendered; word joiners, so that a template's `trim` leaves it alone."""

Message = dict[str, Any]


def messages_of(data: Mapping[str, Any], template: str = "{prompt}", system: str = "") -> list[Message]:
    """The opening messages of a task: `messages` as they are, else `prompt` put into the template.

    `template` may name any field of the data: `"{prompt}\\nThink, then answer in \\\\boxed{{}}."`.
    """
    if "messages" in data:
        if not isinstance(data["messages"], Sequence) or not data["messages"]:
            raise EpisodeError("prompt", "no_prompt", "task field `messages` is empty")
        return [dict(message) for message in data["messages"]]
    if "prompt" not in data:
        raise EpisodeError("prompt", "no_prompt", f"a task needs `messages` or `prompt`; it has {', '.join(sorted(data))}")
    opening = [{"role": "system", "content": system}] if system else []
    return [*opening, {"role": "user", "content": fill(template, data)}]


def fill(template: str, values: Mapping[str, Any]) -> str:
    """`str.format` with an error that names the option."""
    try:
        return template.format_map(values)
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(f"workflow.options: template {template!r}: {error}; fields: {', '.join(sorted(values))}") from None


@dataclass
class _Open:
    """The segment that is being extended; all columns have one entry per token."""

    ids: list[int]
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    temperature: float | None = None
    parent: int | None = None

    def context(self, ids: list[int]) -> None:
        """Tokens that nobody sampled."""
        self.ids += ids
        self._context(len(ids))

    def _context(self, count: int) -> None:
        self.mask += [0] * count
        self.logprobs += [0.0] * count
        self.versions += [-1] * count

    def sampled(self, response: ModelResponse) -> None:
        self.ids += response.output_ids
        self.mask += [1] * len(response.output_ids)
        self.logprobs += response.logprobs
        self.versions += response.versions

    def __post_init__(self) -> None:
        self._context(len(self.ids))


class Conversation:
    """Turns of one policy. `say` adds messages, `answer` lets the policy speak, `segments` is what is trained on."""

    def __init__(self, context: WorkflowContext, policy: str, messages: list[Message]) -> None:
        self._context = context
        self.policy = policy
        self.messages = list(messages)
        self.tokenizer: Tokenizer = context.tokenizers[policy]
        self.broken = 0
        """Broken prefixes, each the start of a new segment."""
        self.turns = 0
        """Answers so far."""
        self.last_text = ""
        self.finish: Finish = "stop"
        """Of the last answer."""
        self._closed: list[_Open] = []
        self._open: _Open | None = None
        self.completion_ids: list[int] = []
        """Of the last answer, its end token included."""
        self._rendered = ""
        self._ended = False
        """The last answer's last token was an end token."""

    def say(self, *messages: Message) -> None:
        """Add turns that no policy sampled (feedback, tool results)."""
        self.messages.extend(messages)

    async def answer(self, engine: InferenceEngine | EngineGroup, **overrides: Any) -> str:
        """Sample the next answer; returns its text without the end token. `overrides`: generation settings of this call."""
        prompt_ids = self._extend()
        limit = self._context.context_length
        if limit and len(prompt_ids) >= limit:
            raise EpisodeError("prompt", "overlong", f"prompt of {len(prompt_ids)} tokens, context of {limit}")
        request = self._context.request(prompt_ids, **overrides)
        response = await engine_of(engine, self.policy).agenerate(request)
        return self._accept(request, response)

    def _accept(self, request: ModelRequest, response: ModelResponse) -> str:
        sizes = {len(response.output_ids), len(response.logprobs), len(response.versions)}
        if len(sizes) != 1 or not response.output_ids:
            raise EpisodeError("engine", "bad_response", f"columns of lengths {sorted(sizes)}: expected equal ones, at least 1")
        open_ = self._open
        assert open_ is not None
        assert open_.temperature in (None, request.temperature), "one segment has one temperature"
        open_.temperature = request.temperature
        open_.sampled(response)
        self.finish = response.finish
        self._ended = response.output_ids[-1] in self._end_ids(request)
        self.completion_ids = list(response.output_ids)
        text = self.tokenizer.decode(self.completion_ids[:-1] if self._ended else self.completion_ids)
        self.messages.append({"role": "assistant", "content": text})
        self.last_text = text
        self.turns += 1
        return text

    def _end_ids(self, request: ModelRequest) -> set[int]:
        return {*self.tokenizer.eos_ids, *request.stop_ids}

    def _prompt_ids(self) -> list[int]:
        assert self._open is not None
        return self._open.ids[: len(self._open.ids) - len(self.completion_ids)]

    def _extend(self) -> list[int]:
        """Bring the open segment up to the messages; returns the ids to send."""
        rendered = self._render(self.messages)
        bridge = None if self._open is None else self._bridge(rendered)
        if self._open is None:
            self._open = _Open(self._encode())
        elif bridge is None:
            self.broken += 1
            self._closed.append(self._open)
            self._open = _Open(self._encode(), parent=len(self._closed) - 1)
        else:
            self._open.context(self.tokenizer.encode(bridge))
        self._rendered = rendered
        return list(self._open.ids)

    def _render(self, messages: list[Message]) -> str:
        """A base model without a chat template gets the bare texts, one after the other."""
        if self.tokenizer.has_chat_template:
            return self.tokenizer.render(messages, add_generation_prompt=True)
        return "".join(message["content"] for message in messages)

    def _encode(self) -> list[int]:
        if not self.tokenizer.has_chat_template:
            return self.tokenizer.encode(self._render(self.messages), add_special=True)
        return flat_ids(self.tokenizer.chat(self.messages, add_generation_prompt=True))

    def _bridge(self, rendered: str) -> str | None:
        """The text between the last sampled token and the next answer; None = the template changed what came before."""
        last = max(i for i, message in enumerate(self.messages) if message["role"] == "assistant")
        answer = self.messages[last]["content"]
        marked = [*self.messages[:last], {"role": "assistant", "content": MARKER}, *self.messages[last + 1 :]]
        before, found, after = self._render(marked).partition(MARKER)
        if not found or before != self._rendered or rendered not in (before + answer + after, before + answer.strip() + after):
            return None
        if not self._ended:
            return after
        open_ = self._open
        assert open_ is not None
        end = self.tokenizer.decode(open_.ids[-1:], skip_special=False)
        return after[len(end) :] if after.startswith(end) else after

    def segments(self, credit: float | None = None, *, scored: bool = False) -> list[Segment]:
        """All segments with a sampled token. `scored=True` writes `credit` (None = unscored) for this policy into each."""
        parts = self._closed if self._open is None else [*self._closed, self._open]
        return [self._segment(part, {self.policy: credit} if scored else {}) for part in parts if any(part.mask)]

    def _segment(self, part: _Open, credit: dict[str, float | None]) -> Segment:
        end = len(part.mask) - part.mask[::-1].index(1)  # a turn that was added but never answered teaches nothing
        return Segment(
            policies=[self.policy],
            parent=part.parent,
            input_ids=column(part.ids[:end], "int32"),
            loss_mask=column(part.mask[:end], "uint8"),
            logprobs=column(part.logprobs[:end], "float32"),
            versions=column(part.versions[:end], "int32"),
            temperature=1.0 if part.temperature is None else part.temperature,
            credit=credit,
        )

    async def score(self, data: Mapping[str, Any]) -> Score:
        """The reward's verdict over the last answer."""
        return await self._context.score(self._rendered, self.last_text, self._prompt_ids(), self.completion_ids, data)

    def record(self) -> list[Message]:
        """The turns for the viewer."""
        return [{"policy": self.policy, **message} for message in self.messages]

    def episode(self, score: Score) -> Episode:
        """This conversation as the whole trajectory."""
        trajectory = Trajectory(
            index=0,
            segments=self.segments(),
            reward=score.reward,
            error=score.error,
            finish="error" if score.error else self.finish,
        )
        return Episode(trajectory, self.record(), {"rollout/turns": float(self.turns), "rollout/broken_prefix": float(self.broken)})
