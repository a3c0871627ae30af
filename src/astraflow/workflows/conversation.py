"""Messages and turns as token sequences: what is sent to the engine is, token by token, what is trained on.

A conversation is never re-encoded. The next turn is found by rendering the template with a marker in the place of the last
answer: the text after the marker is appended as tokens behind the tokens that the engine sampled. When the template rewrites
what came before (drops earlier thoughts, changes a header), the prefix is broken: a new segment starts from the full rendering
and is counted (`rollout/broken_prefix`); the old one stays a segment of its own. A conversation that `keeps` its past is extended
all the same: what was sampled stays in its context, thoughts and all.

Several policies may speak in one conversation; every token keeps whose it is, in the one order in which they were sampled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from astraflow.lib.tokenizer import Tokenizer, flat_ids
from astraflow.protocol.codec import column
from astraflow.protocol.errors import UserError
from astraflow.protocol.rollout import Finish, Segment
from astraflow.workflows.api import (
    EngineGroup,
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

MAX_DEPTH = 64
"""Of a model's JSON: whatever walks it afterwards (repr, the codec, a sandbox) has room on its stack."""

Message = dict[str, Any]


def messages_of(data: Mapping[str, Any], template: str = "{prompt}", system: str = "") -> list[Message]:
    """The opening messages of a task: its `messages` (`prompt` is then the last one's text), else its `prompt` in the template.

    `template` may name any field of the data: `"{prompt}\\nThink, then answer in \\\\boxed{{}}."`; `system` comes first, or behind
    a system message that the task has.
    """
    if "messages" in data:
        if not isinstance(data["messages"], Sequence) or not data["messages"]:
            raise EpisodeError("prompt", "no_prompt", "task field `messages` is empty")
        *before, last = (dict(message) for message in data["messages"])
        if template != "{prompt}":
            last["content"] = fill(template, {**data, "prompt": last["content"]})
        if system and before and before[0]["role"] == "system":
            before[0]["content"] += f"\n\n{system}"
        elif system:
            before.insert(0, {"role": "system", "content": system})
        return [*before, last]
    if "prompt" not in data:
        raise EpisodeError("prompt", "no_prompt", f"a task needs `messages` or `prompt`; it has {', '.join(sorted(data))}")
    opening = [{"role": "system", "content": system}] if system else []
    return [*opening, {"role": "user", "content": fill(template, data)}]


def fill(template: str, values: Mapping[str, Any]) -> str:
    """`str.format` with an error that names the option."""
    try:
        return template.format_map(values)
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"workflow.options: template {template!r}: {error}; fields: {', '.join(sorted(values))}") from None


def read_json(text: str) -> Any:
    """JSON that a model wrote. Raises ValueError for what is none or is nested deeper than MAX_DEPTH; its texts can be encoded."""
    try:
        found = json.loads(text)
        if "\\u" in text:  # half of a surrogate pair is no text for a tokenizer or the wire
            found = json.loads(json.dumps(found, ensure_ascii=False).encode("utf-8", "replace"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    level = [found]
    for _ in range(MAX_DEPTH):
        level = [below for one in level if isinstance(one, dict | list) for below in (one.values() if isinstance(one, dict) else one)]
        if not level:
            return found
    raise ValueError("nested too deeply")


@dataclass
class _Open:
    """The segment that is being extended; all columns have one entry per token."""

    ids: list[int]
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    """Position in `speakers` of whoever sampled the token; 0 where nobody did."""
    speakers: list[str] = field(default_factory=list)
    """Policies in the order of their first word here."""
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
        self.owner += [0] * count

    def sampled(self, policy: str, response: ModelResponse) -> None:
        if policy not in self.speakers:
            self.speakers.append(policy)
        self.owner += [self.speakers.index(policy)] * len(response.output_ids)
        self.ids += response.output_ids
        self.mask += [1] * len(response.output_ids)
        self.logprobs += response.logprobs
        self.versions += response.versions

    def __post_init__(self) -> None:
        self._context(len(self.ids))


@dataclass(frozen=True)
class _Next:
    """What the next call is to be sent."""

    rendered: str
    ids: list[int]
    """All of it."""
    added: list[int] | None
    """What of it comes behind the open segment; None = it is a segment of its own."""


@dataclass(frozen=True)
class _Mark:
    """Where an answer stands."""

    segment: int
    asked: int
    """Tokens of the segment before it …"""
    tokens: int
    """… and with it."""
    messages: int
    """Messages up to and with it."""
    ended: bool


class Conversation:
    """Turns in one context. `say` adds messages, `answer` lets a policy speak, `segments` is what is trained on."""

    def __init__(
        self, context: WorkflowContext, policy: str, messages: list[Message], *, keeps: bool = False, bare: bool = False, **rendering: Any
    ) -> None:
        """`policy` opens it and lends its tokenizer and template; `rendering`: variables of the template (`tools`, `enable_thinking`).

        keeps: what was said stays in the context whatever the template would make of it; bare: the texts one after the other, without
        the template.
        """
        self._context = context
        self._keeps, self._rendering = keeps, rendering
        self.policy = policy
        self.messages = list(messages)
        self._speakers: list[str] = []
        """Policy of each answer."""
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
        self._templated = self.tokenizer.has_chat_template and not bare
        self._rendered = ""
        self._marks: list[_Mark] = []
        """Of each answer that was sampled here, or in the conversation that this one was forked from."""

    def say(self, *messages: Message) -> None:
        """Add turns that no policy sampled (feedback, tool results)."""
        self.messages.extend(messages)

    @property
    def policies(self) -> list[str]:
        """Whoever has spoken, in the order of their first words; before that the policy that will open it."""
        return list(dict.fromkeys(self._speakers)) or [self.policy]

    async def answer(self, engine: InferenceEngine | EngineGroup, policy: str = "", **overrides: Any) -> str:
        """Sample the next answer; returns its text without the end token. `overrides`: generation settings of this call.

        policy: who speaks, by default the one that opened; another one must have the same tokenizer (`same_tokenizer`).
        """
        step = self._next()
        limit = self._context.context_length
        if limit and len(step.ids) >= limit:
            raise EpisodeError("prompt", "overlong", f"prompt of {len(step.ids)} tokens, context of {limit}")
        request = self._context.request(step.ids, **overrides)
        response = await engine_of(engine, policy or self.policy).agenerate(request)
        sizes = {len(response.output_ids), len(response.logprobs), len(response.versions)}
        if len(sizes) != 1 or not response.output_ids:
            raise EpisodeError("engine", "bad_response", f"columns of lengths {sorted(sizes)}: expected equal ones, at least 1")
        open_ = self._advance(step, request.temperature)  # not before: a call that failed leaves everything as it was
        return self._accept(open_, policy or self.policy, request, response)

    def _advance(self, step: _Next, temperature: float) -> _Open:
        """The open segment, brought up to what was sent."""
        before = self._open
        if before is not None and step.added is not None and before.temperature in (None, temperature):
            before.context(step.added)
        elif before is None:
            self._open = _Open(step.ids)
        else:
            if step.added is None:
                self.broken += 1
            elif not self._keeps:
                raise UserError(f"generation.temperature: {temperature:g} after {before.temperature:g} in one context")
            self._closed.append(before)
            self._open = _Open(step.ids, parent=len(self._closed) - 1)
        assert self._open is not None
        self._rendered = step.rendered
        return self._open

    def _accept(self, open_: _Open, policy: str, request: ModelRequest, response: ModelResponse) -> str:
        asked = len(open_.ids)
        open_.temperature = request.temperature
        open_.sampled(policy, response)
        self._speakers.append(policy)
        self.finish = response.finish
        ended = response.output_ids[-1] in {*self.tokenizer.eos_ids, *request.stop_ids}
        self.completion_ids = list(response.output_ids)
        text = self.tokenizer.decode(self.completion_ids[:-1] if ended else self.completion_ids)
        self.messages.append({"role": "assistant", "content": text})
        self._marks.append(_Mark(len(self._closed), asked, len(open_.ids), len(self.messages), ended))
        self.last_text = text
        self.turns += 1
        return text

    @property
    def completion_logprobs(self) -> list[float]:
        """Of the last answer's tokens, its end token included."""
        return [] if self._open is None else self._open.logprobs[len(self._open.ids) - len(self.completion_ids) :]

    @property
    def prompt_tokens(self) -> int:
        """That the last answer was asked for with."""
        return len(self._prompt_ids())

    @property
    def answers(self) -> int:
        """That it can be forked at: its own, and those of the segment that it was forked from."""
        return len(self._marks)

    def fork(self, turn: int) -> Conversation:
        """Another conversation that goes on from this one's answer number `turn` (the first is 1). All tokens up to there are the same and
        are context there: whoever sampled them is trained on them here."""
        mark = self._marks[turn - 1]
        part = [*self._closed, *([] if self._open is None else [self._open])][mark.segment]
        bare = not self._templated
        other = Conversation(self._context, self.policy, self.messages[: mark.messages], keeps=self._keeps, bare=bare, **self._rendering)
        other._open = _Open(part.ids[: mark.tokens])
        other._rendered = self.tokenizer.decode(part.ids[: mark.asked], skip_special=False)
        other._marks = [replace(one, segment=0) for one in self._marks[:turn] if one.segment == mark.segment]
        return other

    def _prompt_ids(self) -> list[int]:
        assert self._open is not None
        return self._open.ids[: len(self._open.ids) - len(self.completion_ids)]

    def _next(self) -> _Next:
        """What the messages so far come to, token by token behind the open segment where that is possible."""
        if self._open is None:
            return _Next(self._render(self.messages), self._encode(), None)
        rendered = None if self._keeps else self._render(self.messages)
        bridge = self._bridge(rendered)
        if bridge is None:
            return _Next(self._render(self.messages), self._encode(), None)
        added = self.tokenizer.encode(bridge)
        ids = [*self._open.ids, *added]
        return _Next(self.tokenizer.decode(ids, skip_special=False) if rendered is None else rendered, ids, added)

    def _render(self, messages: list[Message]) -> str:
        """A base model without a chat template gets the bare texts, one after the other."""
        if self._templated:
            return self.tokenizer.render(messages, add_generation_prompt=True, **self._rendering)
        return "".join(message["content"] for message in messages)

    def _encode(self) -> list[int]:
        if not self._templated:
            return self.tokenizer.encode(self._render(self.messages), add_special=True)
        return flat_ids(self.tokenizer.chat(self.messages, add_generation_prompt=True, **self._rendering))

    def _bridge(self, rendered: str | None) -> str | None:
        """The text between the last sampled token and the next answer; None = the template changed what came before.

        rendered: all messages, None = the past is kept, so that it does not matter what they look like now.
        """
        mark, open_ = self._marks[-1], self._open
        assert open_ is not None
        last = mark.messages - 1
        answer = self.messages[last]["content"]
        marked = [*self.messages[:last], {"role": "assistant", "content": MARKER}, *self.messages[last + 1 :]]
        before, found, after = self._render(marked).partition(MARKER)
        kept = rendered is None or (before == self._rendered and rendered in (before + answer + after, before + answer.strip() + after))
        if not found or not kept:
            return None
        if not mark.ended:
            return after
        end = self.tokenizer.decode(open_.ids[-1:], skip_special=False)
        return after[len(end) :] if after.startswith(end) else after

    def segments(self, credit: Mapping[str, float | None] | None = None, *, first: int = 0, parent: int | None = None) -> list[Segment]:
        """All segments with a sampled token, each with the `credit` of whoever speaks in it (None = the trajectory's reward).

        first: place in the trajectory that the first one will have; parent: place of the segment that this conversation comes from.
        """
        parts = self._closed if self._open is None else [*self._closed, self._open]
        return [self._segment(part, credit or {}, first, parent) for part in parts if any(part.mask)]

    def _segment(self, part: _Open, credit: Mapping[str, float | None], first: int, parent: int | None) -> Segment:
        end = len(part.mask) - part.mask[::-1].index(1)  # a turn that was added but never answered teaches nothing
        return Segment(
            policies=part.speakers,
            policy_of_token=column(part.owner[:end], "uint8") if len(part.speakers) > 1 else None,
            parent=parent if part.parent is None else first + part.parent,
            input_ids=column(part.ids[:end], "int32"),
            loss_mask=column(part.mask[:end], "uint8"),
            logprobs=column(part.logprobs[:end], "float32"),
            versions=column(part.versions[:end], "int32"),
            temperature=1.0 if part.temperature is None else part.temperature,
            credit={policy: credit[policy] for policy in part.speakers if policy in credit},
        )

    async def score(self, data: Mapping[str, Any], answer: str | None = None) -> Score:
        """The reward's verdict over the last answer, or over what somebody made of it."""
        text = self.last_text if answer is None else answer
        return await self._context.score(self._rendered, text, self._prompt_ids(), self.completion_ids, data)

    def record(self) -> list[Message]:
        """The turns for the viewer; an answer under its own policy."""
        answers, out = self.turns, []
        for message in reversed(self.messages):
            spoken = message["role"] == "assistant" and answers > 0  # the first ones may be examples of the task
            answers -= spoken
            out.append({"policy": self._speakers[answers] if spoken else self.policy, **message})
        return out[::-1]
