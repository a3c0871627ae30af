from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
import tokenizers

from astraflow.lib.aio import deadline, poll_until
from astraflow.lib.tokenizer import Tokenizer
from astraflow.protocol.errors import UserError
from astraflow.workflows.api import EpisodeError
from astraflow.workflows.code_tests import read_tests
from astraflow.workflows.conversation import Conversation
from astraflow.workflows.tools import CALLS, ToolBox, ToolCall, ToolMistake, schema

LOOK = schema("look", "Look something up.", word={"type": "string"})
TOOLED = "{% if tools %}{{ tools[0].function.name }}|{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


def answered(context: Any, script: Any, text: str) -> Conversation:
    talk = Conversation(context(), "default", [{"role": "user", "content": "?"}])
    asyncio.run(talk.answer(script(text)))
    return talk


def with_template(tokenizer: Tokenizer, template: str, *tokens: str) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(tokenizer._backend.to_str())
    backend.add_tokens(list(tokens))
    return Tokenizer(backend, tokenizer._special, {"default": template}, tokenizer._configs)


def test_a_template_that_knows_tools_shows_them_and_another_one_gets_a_system_message(tokenizer):
    plain = ToolBox(tokenizer, [LOOK])
    assert (plain.in_template, plain.rendering) == (False, {})
    assert plain.told("Be short.").startswith("Be short.\n\nYou may call these tools:\n{")
    assert '"name": "look"' in plain.told("")
    own = ToolBox(with_template(tokenizer, TOOLED), [LOOK])
    assert (own.in_template, own.told("Be short.")) == (True, "Be short.")
    assert own.rendering == {"tools": [LOOK]}


def test_calls_are_read_in_their_order_and_malformed_ones_say_what_is_wrong(context, script, tokenizer):
    box = ToolBox(tokenizer, [LOOK])
    text = '<tool_call>{"name": "look", "arguments": {"word": "a"}}</tool_call> and <tool_call>[1]</tool_call><tool_call>{"na'
    found = box.calls(answered(context, script, text))
    assert found[0] == ToolCall("look", {"word": "a"})
    assert ["JSON object" in found[1].problem, "not closed" in found[2].problem] == [True, True]
    assert box.calls(answered(context, script, "no call")) == []
    (wrong,) = box.calls(answered(context, script, '<tool_call>{"name": 3, "arguments": []}</tool_call>'))
    assert "must be text" in wrong.problem


def test_results_come_in_the_calls_order_and_a_tool_without_end_is_the_tool_s_error(tokenizer):
    async def look(word: str) -> str:
        if word == "for ever":
            await asyncio.Event().wait()
        return f"seen {word}"

    box = ToolBox(tokenizer, [LOOK], deadline_s=0.05)

    def run(*words: str) -> list[dict[str, Any]]:
        return asyncio.run(box.run([ToolCall("look", {"word": word}) for word in words], {"look": look}))

    assert [message["content"] for message in run("b", "a")] == ["seen b", "seen a"]
    with pytest.raises(EpisodeError) as caught:
        run("for ever")
    assert (caught.value.boundary, caught.value.kind) == ("tool", "timeout")


FATAL = (SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError())
ERRORS = (RuntimeError("x"), TimeoutError("x"), *FATAL, BaseExceptionGroup("x", [SystemExit()]))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_whatever_a_tool_raises_is_the_tool_s_error_and_ends_no_loop(tokenizer, error):
    async def look(word: str) -> str:
        raise error

    async def scenario() -> None:
        with pytest.raises(EpisodeError, match="tool 'look': ") as caught:
            await ToolBox(tokenizer, [LOOK]).run([ToolCall("look", {"word": "a"})] * 2, {"look": look})
        assert (caught.value.boundary, caught.value.kind) == ("tool", "exception")

    asyncio.run(scenario())


def test_a_tool_that_swallows_its_cancellation_is_left_behind_at_its_deadline_and_counted(tokenizer):
    async def scenario() -> None:
        release = asyncio.Event()

        async def look(word: str) -> str:
            while not release.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await release.wait()
            return "late"

        box = ToolBox(tokenizer, [LOOK], deadline_s=0.05)
        with pytest.raises(EpisodeError) as caught:
            await deadline(box.run([ToolCall("look", {"word": "a"})], {"look": look}), 60, "the tool")
        assert (caught.value.boundary, caught.value.kind, CALLS.left) == ("tool", "timeout", 1)
        release.set()
        await poll_until(lambda: CALLS.left == 0, 60, "the end of the tool")

    asyncio.run(scenario())


def test_half_a_surrogate_pair_is_no_result_of_a_tool_and_is_cleaned_in_what_it_objects(tokenizer):
    async def look(word: str) -> str:
        if word == "mistake":
            raise ToolMistake("no \ud800")
        return "a\ud800"

    def run(word: str) -> list[dict[str, Any]]:
        return asyncio.run(ToolBox(tokenizer, [LOOK]).run([ToolCall("look", {"word": word})], {"look": look}))

    assert run("mistake")[0]["content"] == "Error: look: no ?"
    with pytest.raises(EpisodeError, match="half a surrogate pair") as caught:
        run("a")
    assert (caught.value.boundary, caught.value.kind) == ("tool", "bad_result")


def test_braces_of_the_system_message_are_text(tokenizer):
    for system in ("Put it in \\boxed{}.", '{"a": 1}', "{schemas}", "100 %s"):
        told = ToolBox(tokenizer, [LOOK]).told(system)
        assert told.startswith(f"{system}\n\nYou may call")
        assert '{"name": "the tool", "arguments": {}}' in told


DEEP = ["[" * 5000, "[" * 70 + "]" * 70, '{"a":' * 5000, '{"name": "look", "arguments": {"word": ' + "[" * 3000 + "]" * 3000 + "}}"]


@pytest.mark.parametrize("deep", DEEP, ids=range(4))
def test_brackets_without_end_are_a_mistake_of_the_model(context, script, tokenizer, deep):
    talk = answered(context, script, "x")
    talk.last_text = f"<tool_call>{deep}</tool_call>"
    (call,) = ToolBox(tokenizer, [LOOK]).calls(talk)
    assert "JSON object" in call.problem
    assert read_tests(f"```json\n{deep}\n```", 1) is None


def test_half_a_surrogate_pair_in_a_call_can_be_encoded(context, script, tokenizer):
    talk = answered(context, script, "x")
    talk.last_text = '<tool_call>{"name": "look", "arguments": {"word": "\\ud800 \\u00e9"}}</tool_call>'
    (call,) = ToolBox(tokenizer, [LOOK]).calls(talk)
    assert call.arguments["word"].encode() == "? é".encode()


def test_other_families_are_read_by_their_tokens_through_renderers(context, script, tokenizer):
    pytest.importorskip("renderers")
    qwen = with_template(tokenizer, TOOLED, "<tool_call>", "</tool_call>")
    talk = answered(context, script, "x")
    for text, calls in (
        ('see <tool_call>{"name": "look", "arguments": {"word": "a"}}</tool_call>', [ToolCall("look", {"word": "a"})]),
        ("none", []),
    ):
        talk.completion_ids = [*qwen.encode(text), qwen.eos_ids[0]]
        assert ToolBox(qwen, [LOOK], "qwen3").calls(talk) == calls
    talk.completion_ids = qwen.encode('<tool_call>{"name": </tool_call>')
    (broken,) = ToolBox(qwen, [LOOK], "qwen3").calls(talk)
    assert broken.problem


def test_an_unknown_format_is_refused_by_name(tokenizer):
    with pytest.raises(UserError, match=r"tools\.format 'qwne3'"):
        ToolBox(tokenizer, [LOOK], "qwne3")
