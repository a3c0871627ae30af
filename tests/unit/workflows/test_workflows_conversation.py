from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from astraflow.lib.tokenizer import flat_ids
from astraflow.protocol.codec import array
from astraflow.protocol.errors import UserError
from astraflow.workflows.api import EpisodeError, WorkflowContext
from astraflow.workflows.conversation import Conversation, fill, messages_of


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def columns(segment: Any) -> tuple[list[Any], ...]:
    return tuple(array(getattr(segment, name)).tolist() for name in ("input_ids", "loss_mask", "logprobs", "versions"))


def test_one_turn_is_prompt_then_sampled_tokens_with_their_logprobs_and_versions(context, script, tokenizer):
    engine = script("12")
    talk = Conversation(context(), "default", [user("s21")])
    assert asyncio.run(talk.answer(engine)) == "12"
    ids, mask, logprobs, versions = columns(talk.segments()[0])
    assert engine.requests[0].input_ids == tokenizer.encode("s21>")
    assert ids == [*tokenizer.encode("s21>12"), 2]
    assert mask == [0, 0, 0, 0, 1, 1, 1]
    assert logprobs == [0, 0, 0, 0, -0.25, -0.5, -0.75]
    assert versions == [-1, -1, -1, -1, 1, 1, 1]
    assert talk.segments()[0].temperature == 0.7
    assert engine.requests[0].max_new_tokens == 8


def test_what_is_trained_on_is_what_was_sent_turn_after_turn(context, script, tokenizer):
    engine = script("12", "21", "7")
    talk = Conversation(context(), "default", [user("s21")])

    async def play() -> None:
        await talk.answer(engine)
        talk.say(user("no"))
        await talk.answer(engine)
        talk.say(user("no"), user("really"))
        await talk.answer(engine)

    asyncio.run(play())
    (segment,) = talk.segments()
    ids, mask, _, versions = columns(segment)
    for request in engine.requests:
        assert request.input_ids == ids[: len(request.input_ids)]
    assert tokenizer.decode(ids, skip_special=False) == "s21>12<eos>no>21<eos>no>really>7<eos>"
    assert [tokenizer.decode([i]) for i, m in zip(ids, mask, strict=True) if m] == ["1", "2", "", "2", "1", "", "7", ""]
    assert [v for v in versions if v >= 0] == [1, 1, 1, 2, 2, 2, 3, 3]
    assert talk.broken == 0


def test_a_cut_off_answer_gets_the_turn_s_end_as_context(context, script, tokenizer):
    engine = script("12…", "3")
    talk = Conversation(context(), "default", [user("s21")])

    async def play() -> None:
        await talk.answer(engine)
        assert talk.finish == "length"
        talk.say(user("go"))
        await talk.answer(engine)

    asyncio.run(play())
    ids, mask, _, _ = columns(talk.segments()[0])
    assert tokenizer.decode(ids, skip_special=False) == "s21>12<eos>go>3<eos>"
    assert mask[4:7] == [1, 1, 0], "the end token was not sampled"


def test_a_template_that_rewrites_the_past_starts_a_new_segment_and_is_counted(context, script, tokenizer):
    class Forgetful:
        """Leaves out all but the last answer, as templates do with thoughts."""

        eos_ids, encode, decode, has_chat_template = tokenizer.eos_ids, tokenizer.encode, tokenizer.decode, True

        def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
            shown = [m["content"] if m["role"] == "user" else "*" for m in messages]
            return ">".join(shown) + ">"

        def chat(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> list[int]:
            return tokenizer.encode(self.render(messages))

    engine = script("12", "21")
    plain: WorkflowContext = context()
    talk = Conversation(replace(plain, tokenizers={"default": Forgetful()}), "default", [user("s21")])

    async def play() -> None:
        await talk.answer(engine)
        talk.say(user("no"))
        await talk.answer(engine)

    asyncio.run(play())
    first, second = talk.segments()
    assert talk.broken == 1
    assert second.parent == 0
    assert first.parent is None
    assert columns(first)[0] == [*tokenizer.encode("s21>12"), 2]
    assert columns(second)[0] == [*tokenizer.encode("s21>*>no>21"), 2]
    assert engine.requests[1].input_ids == tokenizer.encode("s21>*>no>")
    assert sum(columns(second)[1]) == 3, "the first answer is not trained on twice"


def test_a_turn_without_answer_leaves_no_tail(context, script):
    engine = script("12", EpisodeError("prompt", "overlong"))
    talk = Conversation(context(), "default", [user("s21")])

    async def play() -> None:
        await talk.answer(engine)
        talk.say(user("no"))
        with pytest.raises(EpisodeError):
            await talk.answer(engine)

    asyncio.run(play())
    assert columns(talk.segments()[0])[1] == [0, 0, 0, 0, 1, 1, 1]


def test_a_prompt_as_long_as_the_context_sends_nothing(context, script):
    engine = script("1")
    talk = Conversation(replace(context(), context_length=4), "default", [user("s21")])
    with pytest.raises(EpisodeError) as caught:
        asyncio.run(talk.answer(engine))
    assert (caught.value.boundary, caught.value.kind) == ("prompt", "overlong")
    assert engine.requests == []
    assert talk.segments() == []


def test_an_engine_whose_columns_disagree_is_an_engine_error(context, script):
    class Broken:
        async def agenerate(self, request: Any) -> Any:
            response = await script("1").agenerate(request)
            response.versions.pop()
            return response

    talk = Conversation(context(), "default", [user("s21")])
    with pytest.raises(EpisodeError, match="lengths") as caught:
        asyncio.run(talk.answer(Broken()))
    assert caught.value.boundary == "engine"


@pytest.mark.parametrize("shape", ["list", "mapping", "nested"])
def test_any_shape_of_a_template_s_ids_gives_the_same_prompt_with_one_bos(context, script, tokenizer, case, shape):
    stub = case("G19")["input"]["tokenizer_stub"]

    class Stub:
        """The case's tokenizer: its template writes the BOS, its encoder would add another."""

        eos_ids, decode, has_chat_template = tokenizer.eos_ids, tokenizer.decode, True

        def encode(self, text: str, add_special: bool = False) -> list[int]:
            ids = [stub["bos_id"] if part == "<s>" else ord(part) for part in text.replace("<s>", "\0").replace("\0", "\x01")]
            return [stub["bos_id"], *map(int, ids)] if add_special else list(map(int, ids))

        def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
            return stub["template"].format(user=messages[0]["content"])

        def chat(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> Any:
            ids = [stub["bos_id"], *map(ord, self.render(messages).removeprefix("<s>"))]
            return {"list": ids, "mapping": {"input_ids": ids, "attention_mask": [1] * len(ids)}, "nested": np.array([ids])}[shape]

    engine = script("1")
    talk = Conversation(replace(context(), tokenizers={"default": Stub()}), "default", [user(case("G19")["input"]["user"])])
    asyncio.run(talk.answer(engine))
    sent = engine.requests[0].input_ids
    assert sent == [1, *map(ord, "[U]hi[A]")]
    assert sent.count(1) == case("G19")["expected"]["values"]["bos_count"]
    assert columns(talk.segments()[0])[0][: len(sent)] == sent
    assert flat_ids(sent) == sent


def test_a_base_model_without_a_template_gets_the_bare_text(context, script, tokenizer):
    class Bare:
        eos_ids, encode, decode, has_chat_template = tokenizer.eos_ids, tokenizer.encode, tokenizer.decode, False

    engine = script("12", "3")
    talk = Conversation(replace(context(), tokenizers={"default": Bare()}), "default", [user("s21 is ")])

    async def play() -> None:
        await talk.answer(engine)
        talk.say(user(" and "))
        await talk.answer(engine)

    asyncio.run(play())
    assert tokenizer.decode(columns(talk.segments()[0])[0], skip_special=False) == "s21 is 12<eos> and 3<eos>"


def test_a_task_opens_with_its_messages_or_its_prompt_in_the_template():
    given = [user("x")]
    opened = messages_of({"messages": given, "prompt": "unused"})
    assert opened == given
    assert opened[0] is not given[0], "an episode must not write into the task"
    assert messages_of({"prompt": "2+2", "unit": "m"}, "Q: {prompt} in {unit}", "Be brief.") == [
        {"role": "system", "content": "Be brief."},
        user("Q: 2+2 in m"),
    ]
    with pytest.raises(EpisodeError, match="messages"):
        messages_of({"answer": "4"})
    with pytest.raises(UserError, match="nothing"):
        fill("{nothing}", {"prompt": "x"})
