"""Programs on the real SDKs, unchanged, as agents: what they understand, and what is captured of it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from gateway_agents import opened, run

from astraflow.lib.aio import poll_until
from astraflow.protocol.codec import array
from astraflow.workflows.config import AgentConfig

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
EXAMPLES = Path(__file__).parents[3] / "examples"
START_S = 120.0
"""An SDK's first import on a busy machine takes half a minute."""


def need(sdk: str) -> None:
    if importlib.util.find_spec(sdk) is None:
        pytest.skip(f"the package {sdk} is not installed: pip install 'astraflow[agents]'")


@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
def test_a_tool_loop_of_an_sdk_is_captured_token_by_token(rig, tmp_path, sdk):
    need(sdk)
    program = tmp_path / "agent.py"
    program.write_text((EXAMPLES / f"agent_{sdk}.py").read_text().replace('MODEL = "small"', 'MODEL = "default"'))
    agent = AgentConfig(command=["python", str(program), "{prompt}"])

    async def test() -> None:
        async with opened(rig, {"mine": agent}, solver="gateway_agents:tool_loop", correct=1.0, correct_max=1.0) as world:
            world.register(workflow="agent", reward="last_number", options={"deadline_s": START_S})
            world.executor.submit([world.lease(n=2, deadline_s=2 * START_S)])
            (group,) = await world.groups(deadline_s=2 * START_S)
            assert [(one.error, one.reward, len(one.segments)) for one in group.trajectories] == [(None, 1.0, 1)] * 2
            assert (group.metrics["rollout/rewritten"], group.metrics["rollout/forks"], group.metrics["rollout/calls"]) == (0, 0, 3)
            tokenizer = world.engine._setup.tokenizer
            whole = [array(one.segments[0].input_ids).tolist() for one in group.trajectories]
            for request in world.engine.seen:
                assert request.input_ids in [ids[: len(request.input_ids)] for ids in whole]
            for one, ids in zip(group.trajectories, whole, strict=True):
                mask = array(one.segments[0].loss_mask).tolist()
                said = tokenizer.decode([token for token, sampled in zip(ids, mask, strict=True) if sampled], skip_special=False)
                assert said == "".join(f"{text}<end>" for text in SAID)

    run(test())


CALL = '<think>Number %d.</think>\n\nI add. <tool_call>\n{"name": "add", "arguments": %s}\n</tool_call>'
SAID = [CALL % (0, '{"a": 2, "b": 3}'), CALL % (1, '{"a":  3, "b":  2}'), "5"]


OPENAI = """
import openai
client = openai.OpenAI(max_retries=0)
messages = [{"role": "user", "content": "2 + 3 ="}]
tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
whole = client.chat.completions.create(model="default", messages=messages, tools=[tool], logprobs=True).choices[0]
with client.chat.completions.stream(model="default", messages=messages, tools=[tool]) as stream:
    final = stream.get_final_completion().choices[0]
assert final.message.content == whole.message.content == "I add."
calls = [choice.message.tool_calls[0].function for choice in (final, whole)]
assert calls[0].name == calls[1].name == "add" and calls[0].arguments == calls[1].arguments, calls
assert final.finish_reason == whole.finish_reason == "tool_calls"
assert whole.message.reasoning_content == "Number 0."
assert "".join(one.token for one in whole.logprobs.content).endswith("</tool_call><end>")
assert [model.id for model in client.models.list()] == ["default"]
assert client.completions.create(model="default", prompt="2 + 3 =", n=2).choices[1].text.startswith("<think>")
def fails(kind, words, **more):
    try:
        client.chat.completions.create(**{"model": "default", "messages": messages, **more})
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__}")
fails(openai.NotFoundError, "the models of this episode: default", model="gpt")
fails(openai.BadRequestError, "response_format", response_format={"type": "json_object"})
fails(openai.BadRequestError, "context of 4096", messages=[{"role": "user", "content": "x" * 5000}])
client.api_key = "wrong"
fails(openai.AuthenticationError, "not that of this episode")
"""
ANTHROPIC = """
import anthropic
client = anthropic.Anthropic(max_retries=0)
ask = dict(model="default", max_tokens=200, messages=[{"role": "user", "content": "2 + 3 ="}])
tools = [{"name": "add", "input_schema": {"type": "object"}}]
whole = client.messages.create(**ask, tools=tools)
with client.messages.stream(**ask, tools=tools) as stream:
    final = stream.get_final_message()
assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
for one, two in zip(whole.content, final.content, strict=True):
    assert one.model_dump(exclude={"id"}) == two.model_dump(exclude={"id"})
assert whole.stop_reason == final.stop_reason == "tool_use"
assert whole.usage.output_tokens == final.usage.output_tokens > 0
def fails(kind, words, **more):
    try:
        client.messages.create(**{**ask, **more})
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__}")
fails(anthropic.NotFoundError, "the models of this episode: default", model="claude")
fails(anthropic.BadRequestError, "tool_choice", tools=tools, tool_choice={"type": "any"})
client.api_key = "wrong"
fails(anthropic.AuthenticationError, "not that of this episode")
"""


@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
def test_an_sdk_understands_answers_streams_and_errors(rig, tmp_path, sdk):
    need(sdk)
    program = tmp_path / "agent.py"
    program.write_text({"openai": OPENAI, "anthropic": ANTHROPIC}[sdk])

    async def test() -> None:
        agent = AgentConfig(command=["python", str(program)])
        async with opened(rig, {"mine": agent}, solver="gateway_agents:tool_loop", correct=1.0, correct_max=1.0) as world:
            world.register(workflow="agent", options={"deadline_s": START_S, "score": "exit"})
            world.executor.submit([world.lease(deadline_s=2 * START_S)])
            (group,) = await world.groups(deadline_s=2 * START_S)
            (member,) = group.trajectories
            await poll_until(lambda: member.record_ref in world.executor._records._kept, START_S, "the record")
            assert (member.error, member.reward) == (None, 1.0), world.executor._records.load(member.record_ref).decode()
            masks = [array(segment.loss_mask) for segment in member.segments]
            assert sum(int(mask.sum()) for mask in masks) == sum(len(CALL % (0, '{"a": 2, "b": 3}')) + 1 for _ in world.engine.seen)

    run(test())


