"""The conversations of an agent that shows us nothing but its messages: each of its calls is laid onto what was said before.

    messages, tools ─▶ the longest history that ends in an answer of ours ─▶ its conversation goes on, or a fork of it, or a new one

A client sends its whole history with every call, and our answers as it understood them: tool calls as JSON of its own layout,
whitespace gone, thoughts left out. Messages are therefore compared by what they say (`key`), and what goes on in the context are the
tokens that were sampled. An answer that the agent goes on from twice (a second sample, a retry, a branch) stays where it was
sampled; the second conversation has it as context. A history that says something else than we did is counted (`rewritten`): its
unknown part is context, and where nothing of it is known a new conversation begins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from astraflow.protocol.errors import UserError
from astraflow.workflows.api import EngineGroup, WorkflowContext
from astraflow.workflows.conversation import Conversation, Message, read_json
from astraflow.workflows.roles import together
from astraflow.workflows.tools import ToolBox, schema

PROBE = schema("probe", "Shows whether a template has a place for tools.")


@dataclass(kw_only=True)
class Asked:
    """One call of an agent, by whatever API it came. Messages: `role` (system, user, assistant, tool), `content` (text), `tool_calls`
    (`id`, `name`, `arguments` as JSON), `tool_call_id`."""

    policy: str
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    """OpenAI-shaped."""
    may_call: bool = True
    """Calls in the answer are looked for."""
    n: int = 1
    """Answers."""
    bare: bool = False
    """The one message is text to go on from, without a template."""
    generation: dict[str, Any] = field(default_factory=dict)
    """Overrides of the generation settings."""


@dataclass(frozen=True)
class Called:
    """A tool call; `arguments` is JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class Said:
    """One answer as the agent gets it, and its tokens."""

    text: str
    thoughts: str
    calls: list[Called]
    finish: Literal["stop", "length", "tool_calls"]
    stop: str
    """The stop text that ended it, which the text does not show; empty = none."""
    ids: list[int]
    logprobs: list[float]
    prompt_tokens: int


def key(message: Message) -> str:
    """What a message says, however it was written: equal for an answer and for what a client made of it."""
    parts: list[Any] = [message["role"], message["content"].strip() if message["role"] == "assistant" else message["content"]]
    parts += [[call["name"], _canonical(call["arguments"])] for call in message.get("tool_calls", [])]
    return json.dumps([*parts, message.get("tool_call_id", "")], ensure_ascii=False)


def _canonical(arguments: str) -> str:
    """JSON without layout; what is none stays text."""
    try:
        return json.dumps(read_json(arguments), sort_keys=True)
    except ValueError:
        return arguments


def split_thoughts(text: str) -> tuple[str, str]:
    """(thoughts, what stands after them) of a model that writes `<think>`; an opening one that is never closed is all thought."""
    if "</think>" in text:
        before, _, after = text.partition("</think>")
        return before.rpartition("<think>")[2].strip(), after.lstrip()
    before, found, after = text.partition("<think>")
    return (after.strip(), before.strip()) if found and not before.strip() else ("", text)


def cut(text: str, stops: list[str]) -> tuple[str, str]:
    """The text before the first stop text in it, and that stop text."""
    found = min(((place, stop) for stop in stops if stop and (place := text.find(stop)) >= 0), default=None)
    return (text, "") if found is None else (text[: found[0]], found[1])


@dataclass(eq=False)
class _Thread:
    """One conversation and how its agent sees it."""

    talk: Conversation
    setting: str
    origin: Conversation | None = None
    keys: list[str] = field(default_factory=list)
    """Of all its messages."""
    ends: list[int] = field(default_factory=list)
    """Messages up to and with each answer that it can go on from."""
    shown: list[str] = field(default_factory=list)
    """Of bare text: all of it up to and with each answer, as the agent has it …"""
    tails: list[str] = field(default_factory=list)
    """… and what its context has beyond that (a stop text)."""
    busy: bool = False

    def reach(self, keys: list[str], bare: str | None) -> tuple[int, int]:
        """(how much of the history, which answer) can be gone on from; (0, 0) = none."""
        for turn in range(len(self.ends), 0, -1):
            if bare is not None:
                if bare.startswith(self.shown[turn - 1]):
                    return len(self.shown[turn - 1]), turn
            elif keys[: self.ends[turn - 1]] == self.keys[: self.ends[turn - 1]]:
                return self.ends[turn - 1], turn
        return 0, 0

    def free(self, turn: int) -> bool:
        """It can be extended as it is."""
        return not self.busy and turn == len(self.ends)


@dataclass(frozen=True)
class _Place:
    """Where a call goes on from."""

    thread: _Thread
    turn: int
    rest: list[Message]


class Histories:
    """All conversations of one episode's agent."""

    def __init__(self, context: WorkflowContext, tool_format: str = "json", chat: Mapping[str, Any] | None = None) -> None:
        """tool_format: how the policies write tool calls (`tools.ToolBox`); chat: variables of the chat template."""
        self._context, self._format, self._chat = context, tool_format, dict(chat or {})
        self._threads: list[_Thread] = []
        self._boxes: dict[str, ToolBox] = {}
        self._examples: set[str] = set()
        """Answers that conversations were opened with."""
        self._calls = 0
        self.forks = 0
        self.rewritten = 0
        self.last: dict[str, tuple[Conversation, str]] = {}
        """Policy → the conversation of its last answer, and that answer as the agent got it."""

    @property
    def parts(self) -> list[tuple[Conversation, Conversation | None]]:
        """The conversations that have an answer, and what each was forked from, which stands before it."""
        return [(thread.talk, thread.origin) for thread in self._threads]

    async def reply(self, engines: EngineGroup, asked: Asked) -> list[Said]:
        """`n` answers. Raises what the engine raises, and UserError for messages that the template refuses; nothing has changed then."""
        keys = [] if asked.bare else [key(message) for message in asked.messages]
        setting, box = self._setting(asked)
        place = self._place(asked, keys, setting, box)
        if place is None:
            self._examples |= {one for one, message in zip(keys, asked.messages, strict=False) if message["role"] == "assistant"}
        threads = [self._thread(asked, place, setting, box) for _ in range(asked.n)]
        rest = place.rest if place is not None else []
        return await together(*(self._answer(engines, asked, thread, rest, keys, box) for thread in threads))

    def _setting(self, asked: Asked) -> tuple[str, ToolBox]:
        """What two calls must have in common to be one conversation, and the tools of it."""
        tokenizer = self._context.tokenizers[asked.policy]
        setting = json.dumps([tokenizer.hash, tokenizer.template_hash, asked.tools, asked.bare], sort_keys=True)
        if setting not in self._boxes:
            self._boxes[setting] = ToolBox(tokenizer, asked.tools or [PROBE], self._format)
        return setting, self._boxes[setting]

    def _place(self, asked: Asked, keys: list[str], setting: str, box: ToolBox) -> _Place | None:
        bare = asked.messages[0]["content"] if asked.bare else None
        reached = [(*thread.reach(keys, bare), thread) for thread in self._threads if thread.setting == setting]
        length, turn, thread = max(reached, key=lambda one: (one[0], one[2].free(one[1])), default=(0, 0, None))
        if thread is None or not turn:
            self.rewritten += self._is_rewritten(asked, keys, 0)
            return None
        if bare is None:
            self.rewritten += self._is_rewritten(asked, keys, length)
            return _Place(thread, turn, [box.message(message) for message in asked.messages[length:]])
        rest = bare[length:].removeprefix(thread.tails[turn - 1])  # the context has it already
        if not rest:
            raise UserError("prompt: nothing new in it since the last answer; expected text to go on from")
        return _Place(thread, turn, [{"role": "user", "content": rest}])

    def _is_rewritten(self, asked: Asked, keys: list[str], known: int) -> bool:
        """Whether the history has answers that are neither ours nor examples that the agent always gives."""
        strange = [one for one, message in zip(keys[known:], asked.messages[known:], strict=False) if message["role"] == "assistant"]
        return bool(self._threads) and not self._examples.issuperset(strange)

    def _thread(self, asked: Asked, place: _Place | None, setting: str, box: ToolBox) -> _Thread:
        if place is None:
            rendering = {**self._chat, **(box.rendering if asked.tools else {})}
            opening = asked.messages if asked.bare else self._opening(asked, box)
            return _Thread(Conversation(self._context, asked.policy, opening, keeps=True, bare=asked.bare, **rendering), setting, busy=True)
        thread, turn = place.thread, place.turn
        if thread.free(turn):
            thread.busy = True
            return thread
        self.forks += 1
        talk = thread.talk.fork(turn)
        kept = slice(turn - talk.answers, turn)  # those in the same segment
        return _Thread(talk, setting, thread.talk, [], thread.ends[kept], thread.shown[kept], thread.tails[kept], busy=True)

    def _opening(self, asked: Asked, box: ToolBox) -> list[Message]:
        messages = [box.message(message) for message in asked.messages]
        if not asked.tools or box.in_template:
            return messages
        system, rest = ("", messages) if messages[0]["role"] != "system" else (messages[0]["content"], messages[1:])
        return [{"role": "system", "content": box.told(system)}, *rest]

    async def _answer(
        self, engines: EngineGroup, asked: Asked, thread: _Thread, rest: list[Message], keys: list[str], box: ToolBox
    ) -> Said:
        talk, before = thread.talk, len(thread.talk.messages)
        answered = False
        talk.say(*rest)
        try:
            await talk.answer(engines, asked.policy, **asked.generation)
            answered = True
        finally:
            thread.busy = False
            if not answered:
                del talk.messages[before:]
        said = self._said(talk, asked, box)
        thread.keys = [*keys, key(message_of(said))]
        thread.ends.append(len(thread.keys))
        thread.shown.append(asked.messages[0]["content"] + said.text if asked.bare else "")
        thread.tails.append(talk.last_text[len(said.text) :] if asked.bare else "")
        if thread not in self._threads:
            self._threads.append(thread)
        self.last[asked.policy] = talk, said.text
        return said

    def _said(self, talk: Conversation, asked: Asked, box: ToolBox) -> Said:
        text, calls = box.read(talk) if asked.tools and asked.may_call else (talk.last_text, [])
        thoughts, text = ("", text) if asked.bare else split_thoughts(text)
        text, stop = cut(text, asked.generation.get("stop", []))
        called = []
        for call in calls:
            if not call.problem:
                self._calls += 1
                called.append(Called(f"call_{self._calls}", call.name, json.dumps(call.arguments, ensure_ascii=False)))
        return Said(
            text=text.strip() if called else text,
            thoughts=thoughts,
            calls=called,
            finish="tool_calls" if called else "length" if talk.finish == "length" else "stop",
            stop=stop,
            ids=list(talk.completion_ids),
            logprobs=talk.completion_logprobs,
            prompt_tokens=talk.prompt_tokens,
        )


def message_of(said: Said) -> Message:
    """An answer as a message of a history."""
    calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in said.calls]
    return {"role": "assistant", "content": said.text, "tool_calls": calls}
