"""Tools that a model may call in its answers: what it is told about them, how its calls are read, how they are run.

Told: by the model's own chat template where that knows tools, else by a system message. Read: `json` is
`<tool_call>{"name": …, "arguments": {…}}</tool_call>` in the text (Hermes, Qwen2.5, Qwen3, and what the system message asks for);
other model families by their token ids through the package `renderers` (its `TOOL_PARSERS`: qwen3, qwen3.5, glm, deepseek_v3 …).
A mistake of the model is an answer to the model; a tool that takes too long is an error of the boundary `tool`.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from astraflow.lib.aio import Abandoned, contained, text_of
from astraflow.lib.registry import closest
from astraflow.lib.tokenizer import Tokenizer
from astraflow.protocol.errors import DeadlinePassed, UserError
from astraflow.workflows.api import EpisodeError, charged, is_text
from astraflow.workflows.conversation import Conversation, Message, read_json
from astraflow.workflows.roles import together

CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
TELL = (
    "You may call these tools:\n%s\n\nTo call one, write\n"
    '<tool_call>{"name": "the tool", "arguments": {}}</tool_call>\nand end your turn; its result is the next message.'
)
DEADLINE_S = 60.0
"""Of one call, unless the workflow says otherwise."""


CALLS = Abandoned()
"""The process's tool calls; `left`: those that outlive their deadline or their episode."""

ToolFunction = Callable[..., Awaitable[str]]
"""Called with the arguments by name."""


class ToolMistake(ValueError):
    """What the model asked for cannot be done; its text is the answer to the model."""


def schema(name: str, description: str, **parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as chat templates and OpenAI-shaped servers want it; `parameters`: JSON schema by name, all of them required."""
    arguments = {"type": "object", "properties": dict(parameters), "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": arguments}}


@dataclass(frozen=True)
class ToolCall:
    """One call as the model wrote it."""

    name: str
    arguments: dict[str, Any]
    problem: str = ""
    """Why it cannot be run; empty = it can be tried."""


class ToolBox:
    """The tools of one role with one tokenizer. One per role, shared by all episodes."""

    def __init__(self, tokenizer: Tokenizer, schemas: Sequence[Mapping[str, Any]], format: str = "json", deadline_s: float = DEADLINE_S):
        """Raises UserError for a format that is not known here."""
        self._tokenizer, self._schemas, self._deadline_s = tokenizer, list(schemas), deadline_s
        self._parser = None if format == "json" else _foreign_parser(format, tokenizer)

    @cached_property
    def in_template(self) -> bool:
        """Whether the model's own template shows tools."""
        probe = [{"role": "user", "content": "?"}]
        return self._tokenizer.has_chat_template and self._tokenizer.render(probe, self._schemas) != self._tokenizer.render(probe)

    @property
    def rendering(self) -> dict[str, Any]:
        """For the conversation: variables of the chat template."""
        return {"tools": self._schemas} if self.in_template else {}

    def told(self, system: str) -> str:
        """The system message, with the tools where the template does not show them."""
        if self.in_template:
            return system
        tell = TELL % "\n".join(json.dumps(schema) for schema in self._schemas)
        return f"{system}\n\n{tell}".strip()

    def calls(self, talk: Conversation) -> list[ToolCall]:
        """What the last answer calls, in its order; malformed ones say what is wrong."""
        return self.read(talk)[1]

    def read(self, talk: Conversation) -> tuple[str, list[ToolCall]]:
        """The last answer as the text beside its calls, and its calls; in the format `json` the text keeps those that are malformed."""
        if self._parser is not None:
            rest, calls = self._parser(talk.completion_ids)
            return self._tokenizer.decode(rest), calls
        calls = [_call(found[1], closed=bool(found[2])) for found in CALL.finditer(talk.last_text)]
        places = iter(calls)
        return CALL.sub(lambda found: found[0] if next(places).problem else "", talk.last_text), calls

    def message(self, message: Message) -> Message:
        """A message of an OpenAI-shaped client (text, tool calls with their arguments as JSON, tool results) as the template takes it."""
        role = message["role"]
        if role == "tool" and not self.in_template:
            return {"role": "user", "content": message["content"]}
        if role != "assistant" or not message.get("tool_calls"):
            return message
        calls = [{"name": call["name"], "arguments": _arguments(call["arguments"])} for call in message["tool_calls"]]
        if self.in_template:
            return {**message, "tool_calls": [{"type": "function", "function": call} for call in calls]}
        written = [f"<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>" for call in calls]
        return {"role": role, "content": "\n".join([message["content"], *written]).strip()}

    async def run(self, calls: Sequence[ToolCall], tools: Mapping[str, ToolFunction]) -> list[Message]:
        """The results as messages, in the calls' order. Raises EpisodeError(tool, timeout | exception | bad_result).

        An error of ours that a tool raises passes as it is.
        """
        texts = await together(*(self._one(call, tools) for call in calls))
        return [{"role": "tool" if self.in_template else "user", "content": text} for text in texts]

    async def _one(self, call: ToolCall, tools: Mapping[str, ToolFunction]) -> str:
        if call.problem:
            return f"Error: {call.problem}"
        if call.name not in tools:
            return f"Error: there is no tool {call.name!r}{closest(call.name, list(tools))}; known: {', '.join(tools)}"
        try:
            inspect.signature(tools[call.name]).bind(**call.arguments)
        except TypeError as error:
            return f"Error: {call.name}: {error}"
        what = f"tool {call.name!r}"
        with charged("tool", what):
            try:
                result: Any = await CALLS.run(contained(tools[call.name], **call.arguments), self._deadline_s, what)
            except ToolMistake as error:
                return f"Error: {call.name}: {text_of(error)}".encode("utf-8", "replace").decode()
            except DeadlinePassed as error:
                raise EpisodeError("tool", "timeout", str(error)) from None
        if not isinstance(result, str):
            raise EpisodeError("tool", "bad_result", f"{what} returned {type(result).__name__}, expected text")
        if not is_text(result):
            raise EpisodeError("tool", "bad_result", f"{what} returned half a surrogate pair, which is no text")
        return result


def _arguments(text: str) -> Any:
    """Templates want an object; what is none stays as it was written."""
    try:
        return read_json(text)
    except ValueError:
        return text


def _call(text: str, closed: bool) -> ToolCall:
    if not closed:
        return ToolCall("", {}, "the call was not closed with </tool_call>")
    try:
        found = read_json(text)
        name, arguments = found["name"], found.get("arguments", {})
    except (ValueError, KeyError, TypeError, AttributeError):
        return ToolCall("", {}, 'a call is a JSON object {"name": "...", "arguments": {...}}')
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall("", {}, "`name` must be text and `arguments` an object")
    return ToolCall(name, arguments)


def _foreign_parser(format: str, tokenizer: Tokenizer) -> Callable[[list[int]], tuple[list[int], list[ToolCall]]]:
    try:
        from renderers.parsers import TOOL_PARSERS  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise UserError(f"tools.format {format!r} needs the package: pip install renderers; without it there is `json`") from None
    if format not in TOOL_PARSERS:
        raise UserError(f"tools.format {format!r} is unknown{closest(format, list(TOOL_PARSERS))}; known: json, {', '.join(TOOL_PARSERS)}")
    parser = TOOL_PARSERS[format](_Surface(tokenizer))

    def parse(ids: list[int]) -> tuple[list[int], list[ToolCall]]:
        ends = set(tokenizer.eos_ids)
        said = ids[:-1] if ids and ids[-1] in ends else ids
        try:
            rest, found = parser.extract(said)
        except RecursionError:  # brackets without end
            return said, [ToolCall("", {}, "the call cannot be read (nested too deeply)")]
        return rest, [
            ToolCall(one.name, one.arguments)
            if one.status == "ok" and isinstance(one.arguments, dict)
            else ToolCall(one.name or "", {}, f"the call cannot be read ({one.status})")
            for one in found
        ]

    return parse


class _Surface:
    """Our tokenizer as `renderers` wants one."""

    unk_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = next(iter(tokenizer.eos_ids), None)
        self.convert_tokens_to_ids, self.encode = tokenizer.token_id, tokenizer.encode

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(ids, skip_special=skip_special_tokens)
