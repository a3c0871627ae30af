"""Random agents: what the engine saw is what is trained on, however a client writes back what it was told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.lib.tokenizer import Tokenizer
from astraflow.protocol.codec import array
from astraflow.protocol.rollout import Trajectory
from astraflow.raas.trajectory import check_trajectory
from astraflow.workflows.api import EngineGroup, EpisodeError, ModelRequest, ModelResponse, Score, WorkflowContext
from astraflow.workflows.histories import Asked, Histories, Said, key, message_of, split_thoughts
from astraflow.workflows.roles import Team
from astraflow.workflows.tools import schema

DATA = Path(__file__).parents[2] / "data"
ENDS = {"smollm2": "<|im_end|>", "qwen": "<|im_end|>", "llama": "<|eot_id|>"}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin|>"]
ADD = schema("add", "Adds.", a={"type": "integer"}, b={"type": "integer"})
POLICIES = ["solver", "verifier"]


@cache
def tokenizer(name: str) -> Tokenizer:
    """The characters of the small test model and the template's own end of turn."""
    backend = tokenizers.Tokenizer.from_file(str(DATA / "chars-model" / "tokenizer.json"))
    backend.add_special_tokens(SPECIAL)
    end = backend.token_to_id(ENDS[name])
    template = (DATA / "templates" / f"{name}.jinja").read_text()
    configs: dict[str, Any] = {"config": {"eos_token_id": end}, "generation_config": {}, "tokenizer_config": {}}
    return Tokenizer(backend, {"bos_token": "<|begin|>", "eos_token": ENDS[name]}, {"default": template}, configs)


@dataclass
class Call:
    policy: str
    request: ModelRequest
    response: ModelResponse | None = None


@dataclass
class Voice:
    """One policy's engine: says what it is told to, and lets others speak meanwhile."""

    policy: str
    tokenizer: Tokenizer
    calls: list[Call]
    lines: list[tuple[str, bool]] = field(default_factory=list)
    """What comes next, and whether it is cut off."""

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        call = Call(self.policy, request)
        self.calls.append(call)
        number = len(self.calls)
        text, cut = self.lines.pop(0) if self.lines else (f"word {number}", False)
        await asyncio.sleep(0)
        if text == "!":
            raise EpisodeError("engine", "crash")
        ids = self.tokenizer.encode(text) + ([] if cut and text else [self.tokenizer.eos_ids[0]])
        logprobs = [-0.25 * number - place / 8 for place in range(len(ids))]
        finish: Any = "length" if cut else "stop"
        call.response = ModelResponse(output_ids=ids, logprobs=logprobs, versions=[number] * len(ids), finish=finish)
        return call.response


@dataclass
class World:
    template: str
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        mine = tokenizer(self.template)
        self.voices = {policy: Voice(policy, mine, self.calls) for policy in POLICIES}
        generation = {"max_new_tokens": 64, "temperature": 1.0}
        self.context = WorkflowContext(dict.fromkeys(POLICIES, mine), POLICIES, generation=generation, context_length=1 << 20)
        self.histories = Histories(self.context)

    async def ask(self, messages: list[dict[str, Any]], policy: str = "solver", **more: Any) -> list[Said]:
        return await self.histories.reply(EngineGroup(self.voices), Asked(policy=policy, messages=messages, **more))

    def trajectory(self) -> Trajectory:
        team = Team("shared")
        for talk, origin in self.histories.parts:
            team.add(talk, parent=origin)
        found = team.episode(Score(1.0)).trajectory
        if found.segments:
            check_trajectory(found, POLICIES)
        return found

    def check(self) -> None:
        """Every answer stands in exactly one segment, behind exactly what the engine was sent, and nothing else is trained on."""
        trained = [one for segment in self.trajectory().segments for one in stretches(segment)]
        made = [
            (c.policy, c.request.input_ids, c.response.output_ids, c.response.logprobs, c.response.versions, c.request.temperature)
            for c in self.calls
            if c.response is not None
        ]
        assert sorted(map(repr, trained)) == sorted(map(repr, made))


def stretches(segment: Any) -> list[tuple[Any, ...]]:
    """(policy, all tokens before, sampled tokens, log-probs, versions, temperature) of each run of sampled tokens."""
    ids, mask, logprobs, versions = (array(getattr(segment, n)).tolist() for n in ("input_ids", "loss_mask", "logprobs", "versions"))
    owner = array(segment.policy_of_token).tolist() if segment.policy_of_token is not None else [0] * len(ids)
    edges = [i for i in range(len(mask) + 1) if (mask[i - 1] if i else 0) != (mask[i] if i < len(mask) else 0)]
    return [
        (segment.policies[owner[a]], ids[:a], ids[a:b], logprobs[a:b], versions[a:b], segment.temperature)
        for a, b in zip(edges[::2], edges[1::2], strict=True)
    ]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def written_back(said: Said, style: int) -> dict[str, Any]:
    """Our answer as one client or another sends it: arguments laid out anew, whitespace gone."""
    message = message_of(said)
    calls = [{**call, "arguments": json.dumps(json.loads(call["arguments"]), indent=style)} for call in message["tool_calls"]]
    return {"role": "assistant", "content": message["content"].strip() if style else message["content"], "tool_calls": calls}


answers = st.one_of(
    st.tuples(st.sampled_from(["yes", "  12 \n", "<think>hm</think>\n\n7", "a<b", "<think>lost", "", "STOP it"]), st.booleans()),
    st.just(('I add.\n<tool_call>\n{"name":  "add", "arguments": {"b": 2, "a": 1}}\n</tool_call>', False)),
    st.just(('<tool_call>{"name": "add", "arguments": {}}</tool_call><tool_call>{broken</tool_call>', False)),
    st.just(("!", False)),
)
steps = st.lists(
    st.fixed_dictionaries(
        {
            "do": st.sampled_from(["on", "on", "on", "again", "back", "new", "edit", "twice", "both"]),
            "branch": st.integers(0, 7),
            "policy": st.sampled_from(POLICIES),
            "temperature": st.sampled_from([1.0, 1.0, 1.0, 0.5]),
            "style": st.integers(0, 2),
            "says": answers,
            "stop": st.sampled_from([[], [], ["STOP"]]),
        }
    ),
    max_size=9,
)


@dataclass
class Branch:
    """A history that the agent holds, and the tokens that it stands for."""

    messages: list[dict[str, Any]]
    tokens: list[int]


async def play(world: World, plan: list[dict[str, Any]], tools: list[dict[str, Any]]) -> None:
    branches: list[Branch] = []
    for number, step in enumerate(plan):
        branch = branches[step["branch"] % len(branches)] if branches else Branch([], [])
        messages, known = list(branch.messages), list(branch.tokens)
        if step["do"] == "new" or not messages:
            messages, known = [{"role": "system", "content": "Sys"}], []
        if step["do"] == "back" and len(messages) > 3:
            messages, known = messages[: messages.index(next(m for m in messages if m["role"] == "assistant")) + 1], []
        if step["do"] == "edit" and messages[-1]["role"] == "assistant":
            messages[-1], known = {"role": "assistant", "content": f"not that {number}"}, []
        calls = messages[-1].get("tool_calls", [])
        results = [{"role": "tool", "content": f"r{number}", "tool_call_id": call["id"]} for call in calls]
        messages += results if results and step["do"] != "again" else [user("more" if step["do"] == "again" else f"more {number}")]
        world.voices[step["policy"]].lines.append(step["says"])
        generation = {"temperature": step["temperature"], "stop": step["stop"]}
        more: dict[str, Any] = {"policy": step["policy"], "tools": tools, "n": 2 if step["do"] == "twice" else 1, "generation": generation}
        first = len(world.calls)
        asked = [world.ask(messages, **more) for _ in range(2 if step["do"] == "both" else 1)]
        for found in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(found, EpisodeError):
                continue
            assert not isinstance(found, BaseException), found
            for said in found:
                mine = [c for c in world.calls[first:] if c.response is not None and c.response.logprobs == said.logprobs]
                (call,) = mine
                sent = call.request.input_ids
                assert sent[: len(known)] == known, "what was said goes on as the tokens that were sampled"
                branches.append(Branch([*messages, written_back(said, step["style"])], sent + said.ids))
        for voice in world.voices.values():
            voice.lines.clear()


@pytest.mark.parametrize("template", ENDS)
@settings(max_examples=25)
@given(plan=steps, tools=st.sampled_from([[], [ADD]]))
def test_every_sampled_token_is_trained_once_behind_what_the_engine_saw(
    template: str, plan: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> None:
    world = World(template)
    asyncio.run(play(world, plan, tools))
    world.check()


def test_a_tool_loop_keeps_thoughts_and_calls_as_they_were_sampled() -> None:
    world = World("qwen")
    text = '<think>\nI add.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"b":2,"a":1}}\n</tool_call>'
    world.voices["solver"].lines = [(text, False), ("3", False)]

    async def loop() -> None:
        (said,) = await world.ask([user("1+2?")], tools=[ADD])
        assert (said.text, said.thoughts, said.finish) == ("", "I add.", "tool_calls")
        assert json.loads(said.calls[0].arguments) == {"a": 1, "b": 2}
        back = [user("1+2?"), written_back(said, 1), {"role": "tool", "content": "3", "tool_call_id": said.calls[0].id}]
        (last,) = await world.ask(back, tools=[ADD])
        assert (last.text, last.finish) == ("3", "stop")

    asyncio.run(loop())
    world.check()
    (segment,) = world.trajectory().segments
    shown = tokenizer("qwen").decode(array(segment.input_ids).tolist(), skip_special=False)
    told = shown.partition("1+2?<|im_end|>\n")[2]
    result = "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
    assert told == f"<|im_start|>assistant\n{text}<|im_end|>\n{result}<|im_start|>assistant\n3<|im_end|>"
    assert (world.histories.forks, world.histories.rewritten) == (0, 0)


def asked_of(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "assistant" if place % 2 else "user", "content": text} for place, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("histories", "forks", "rewritten", "segments"),
    [
        ([("a",), ("a", "word 1", "b")], 0, 0, 1),
        ([("a",), ("a", " word 1\n", "b")], 0, 0, 1),
        ([("a",), ("a", "word 1", "b"), ("a", "word 1", "b")], 1, 0, 2),
        ([("a",), ("a", "another", "b")], 0, 1, 2),
        ([("a",), ("a", "word 1", "b"), ("a", "word 1", "b", "another", "c")], 1, 1, 2),
        ([("q", "shown", "a"), ("q", "shown", "b")], 0, 0, 2),
        ([("a",), ("a", "word 1", "b"), ("b", "word 2", "c")], 0, 1, 2),
    ],
)
def test_forks_and_rewritten_histories_are_counted(histories: list[tuple[str, ...]], forks: int, rewritten: int, segments: int) -> None:
    world = World("smollm2")

    async def talk() -> None:
        for history in histories:
            await world.ask(asked_of(*history))

    asyncio.run(talk())
    world.check()
    assert (world.histories.forks, world.histories.rewritten) == (forks, rewritten)
    assert len(world.trajectory().segments) == segments


def test_another_policy_goes_on_in_the_same_context_and_each_token_keeps_its_own() -> None:
    world = World("llama")

    async def talk() -> None:
        (plan,) = await world.ask([user("a")], "solver")
        await world.ask([user("a"), written_back(plan, 0), user("b")], "verifier")

    asyncio.run(talk())
    world.check()
    (segment,) = world.trajectory().segments
    assert segment.policies == POLICIES


def test_bare_text_goes_on_where_its_answer_ended_and_does_not_repeat_a_stop_text() -> None:
    world = World("llama")
    world.voices["solver"].lines = [("Act: add STOP", True), ("fine", False)]

    async def talk() -> None:
        (said,) = await world.ask([user("Q: 1+2\n")], bare=True, generation={"stop": ["STOP"]})
        assert (said.text, said.stop) == ("Act: add ", "STOP")
        await world.ask([user("Q: 1+2\nAct: add STOP 3\n")], bare=True)

    asyncio.run(talk())
    world.check()
    (segment,) = world.trajectory().segments
    assert tokenizer("llama").decode(array(segment.input_ids).tolist()) == "Q: 1+2\nAct: add STOP 3\nfine"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<think>\na\n</think>\n\nb", ("a", "b")),
        ("a</think>b", ("a", "b")),
        ("<think>a", ("a", "")),
        ("b", ("", "b")),
        ("b <think>", ("", "b <think>")),
    ],
)
def test_thoughts_are_told_from_what_stands_after_them(text: str, found: tuple[str, str]) -> None:
    assert split_thoughts(text) == found


def test_messages_are_compared_by_what_they_say() -> None:
    def call(arguments: str) -> dict[str, Any]:
        return {"role": "assistant", "content": "x ", "tool_calls": [{"id": "1", "name": "f", "arguments": arguments}]}

    same: Callable[[str, str], bool] = lambda a, b: key(call(a)) == key(call(b))  # noqa: E731
    assert same('{"a":1,"b":[2]}', '{ "b" : [ 2 ], "a" : 1 }')
    assert not same('{"a":1}', '{"a":2}')
    assert not same("{a", "{b")
    assert key(user("x")) != key(user("x "))
