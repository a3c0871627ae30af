from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from astraflow.lib.tokenizer import NO_LIMIT, Tokenizer, flat_ids
from astraflow.protocol.errors import ConfigError, UserError

CHATML = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message.role == 'odd' %}{{ raise_exception('role odd is not taken') }}{% endif %}\n"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>{{ '\\n' }}\n"
    "    {% if loop.index > 20 %}{% break %}{% endif %}\n"
    "{% endfor %}\n"
    "{% if tools %}{{ tools | tojson }}{% endif %}\n"
    "{% if add_generation_prompt %}{% generation %}<|im_start|>assistant\n{% endgeneration %}{% endif %}"
)
SPECIAL = ["<unk>", "<s>", "<pad>", "<|im_start|>", "<|im_end|>"]


def write_model(directory: Path, template: str | None = CHATML, **tokenizer_config: Any) -> Path:
    """A small byte-level model directory whose tokenizer adds <s> by default."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(["2 + 2 = 4 user assistant system <b> größe"] * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.enable_truncation(8)
    backend.enable_padding(length=12, pad_id=2, pad_token="<pad>")
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": "<s>", "__type": "AddedToken"},
        "eos_token": "<|im_end|>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": 64,
        **tokenizer_config,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "2 + 2 ="}],
    [
        {"role": "system", "content": "  Add.\n"},
        {"role": "user", "content": "<b> & \"größe\" 'x'"},
        {"role": "assistant", "content": "4", "tool_calls": None},
        {"role": "user", "content": "\u2028emoji 🙂"},
    ],
    [{"role": "user", "content": str(index)} for index in range(30)],
]
TOOLS = [{"type": "function", "function": {"name": "größe", "description": "<b> & 'x'", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("prompt", [True, False])
def test_conversations_become_the_same_tokens_as_in_transformers(
    model_dir: Path, messages: list[dict[str, Any]], tools: list[Any] | None, prompt: bool
) -> None:
    reference = _reference(model_dir)
    ours = Tokenizer.load(model_dir)
    options: dict[str, Any] = {"tools": tools, "add_generation_prompt": prompt}
    assert ours.render(messages, tools, prompt) == reference.apply_chat_template(messages, tokenize=False, **options)
    ids = ours.chat(messages, tools, prompt)
    assert ids == flat_ids(reference.apply_chat_template(messages, return_dict=True, **options))
    assert ids == flat_ids(reference.apply_chat_template(messages, return_dict=False, **options))
    assert ids == flat_ids(reference.apply_chat_template([messages], return_dict=True, **options))
    assert ids == flat_ids(reference.apply_chat_template(messages, return_tensors="np", return_dict=True, **options))
    assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, skip_special=False) == reference.decode(ids)


_loaded: dict[Path, Any] = {}


def _reference(model_dir: Path) -> Any:
    if model_dir not in _loaded:
        from transformers import AutoTokenizer

        _loaded[model_dir] = AutoTokenizer.from_pretrained(model_dir)
    return _loaded[model_dir]


@given(st.text(max_size=60))
def test_text_survives_encoding_and_decoding(model_dir: Path, text: str) -> None:
    tokenizer = _ours(model_dir)
    if not any(token in text for token in SPECIAL):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def _ours(model_dir: Path) -> Tokenizer:
    key = model_dir / "ours"
    if key not in _loaded:
        _loaded[key] = Tokenizer.load(model_dir)
    return _loaded[key]  # type: ignore[no-any-return]


def test_limits_left_in_the_file_neither_cut_nor_pad(model_dir: Path) -> None:
    tokenizer = Tokenizer.load(model_dir)
    ids = tokenizer.encode("a b c d e f g h i j k l m n o p")
    assert len(ids) > 12
    assert 2 not in ids
    assert len(tokenizer.encode("a")) == 1


def test_bos_stands_in_front_exactly_once(tmp_path: Path, case: Callable[[str], dict[str, Any]]) -> None:
    g19 = case("G19")
    template = g19["input"]["tokenizer_stub"]["template"].replace("{user}", "{{ messages[0].content }}")
    tokenizer = Tokenizer.load(write_model(tmp_path, template))
    text = tokenizer.render([{"role": "user", "content": g19["input"]["user"]}])
    for ids in (
        tokenizer.chat([{"role": "user", "content": g19["input"]["user"]}]),
        tokenizer.encode(text, add_special=True),
        tokenizer.encode("hi", add_special=True),
    ):
        assert ids[0] == tokenizer.bos_id == g19["expected"]["values"]["leading_ids"][0]
        assert ids.count(1) == g19["expected"]["values"]["bos_count"]
    assert tokenizer.encode("hi") == tokenizer.encode("hi", add_special=True)[1:]


class Stub(dict[str, Any]):
    """Like a BatchEncoding: a mapping whose keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@pytest.mark.parametrize(
    "value",
    [
        [1, 5, 6],
        (1, 5, 6),
        [[1, 5, 6]],
        {"input_ids": [1, 5, 6], "attention_mask": [1, 1, 1]},
        {"input_ids": [[1, 5, 6]]},
        Stub(input_ids=[1, 5, 6]),
        np.array([1, 5, 6]),
        np.array([[1, 5, 6]], dtype=np.int32),
        [np.int64(1), np.int64(5), np.int64(6)],
        [np.array([1, 5, 6])],
    ],
)
def test_every_return_type_of_a_template_gives_one_flat_list(value: Any) -> None:
    ids = flat_ids(value)
    assert ids == [1, 5, 6]
    assert all(type(item) is int for item in ids)


@pytest.mark.parametrize(
    "value",
    [
        *("156", b"156", None, 7, [[1], [2]], ["input_ids", "attention_mask"], ["x"], [1, "5"]),
        *([1.0, 2.0], [True], {"ids": [1]}, [1, None], [[[1], [2]]], {1: 2}, np.array([1.0]), {"input_ids": None}),
    ],
)
def test_anything_else_is_refused_in_words(value: Any) -> None:
    with pytest.raises(UserError, match="token ids"):
        flat_ids(value)


def test_no_ids_are_an_empty_list() -> None:
    assert flat_ids([]) == []
    assert flat_ids({"input_ids": []}) == []
    assert flat_ids([[]]) == []


def test_all_end_ids_count_each_once(tmp_path: Path, case: Callable[[str], dict[str, Any]]) -> None:
    eos = case("G17")["input"]["eos_ids"]
    write_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": eos[1], "max_position_embeddings": 32}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_ids == (2, 7, 4)
    assert tokenizer.token_id("<|im_end|>") == 4
    assert tokenizer.pad_id == 2
    assert tokenizer.context_length == 32


def test_a_model_without_a_pad_token_pads_with_its_end_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_model(tmp_path, pad_token=None, model_max_length=1e30))
    assert tokenizer.eos_ids == (4,)
    assert tokenizer.pad_id == 4
    assert tokenizer.context_length == NO_LIMIT
    assert tokenizer.vocab_size >= 261


def test_text_parts_of_composed_models_are_read(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 9, "max_position_embeddings": 16}}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_ids == (9, 4)
    assert tokenizer.context_length == 16


def test_templates_come_from_the_file_or_the_config_and_tools_pick_theirs(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "x"}]
    entry = [{"name": "default", "template": "D{{ messages[0].content }}"}, {"name": "tool_use", "template": "T{{ tools | length }}"}]
    listed = Tokenizer.load(write_model(tmp_path / "listed", None, chat_template=entry))
    assert listed.render(messages) == "Dx"
    assert listed.render(messages, TOOLS) == "T1"
    plain = Tokenizer.load(write_model(tmp_path / "plain", None, chat_template="P{{ mood }}"))
    assert plain.render(messages, mood="!") == "P!"
    both = Tokenizer.load(write_model(tmp_path / "both", "F", chat_template="C"))
    assert both.render(messages) == "F"
    assert both.has_chat_template
    none = Tokenizer.load(write_model(tmp_path / "none", None))
    assert not none.has_chat_template
    with pytest.raises(UserError, match=r"chat_template\.jinja"):
        none.chat(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system role') }}",
        "{{ messages[0].content.no.where }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages + 1 }}",
        "{{ messages | tojson(indent='x', separators=3) }}",
    ],
)
def test_a_template_that_refuses_or_misbehaves_is_a_user_error(tmp_path: Path, template: str) -> None:
    with pytest.raises(UserError, match="chat template"):
        Tokenizer.load(write_model(tmp_path, template)).render([{"role": "user", "content": "x"}])


def test_a_template_that_does_not_parse_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chat template"):
        Tokenizer.load(write_model(tmp_path, "{% for %}")).render([])


def test_hashes_follow_content_not_layout(tmp_path: Path) -> None:
    first = write_model(tmp_path / "a")
    again = write_model(tmp_path / "b", CHATML + " ")
    text = json.loads((again / "tokenizer.json").read_text())
    text["truncation"] = text["padding"] = None
    (again / "tokenizer.json").write_text(json.dumps(text, indent=7, sort_keys=True))
    a, b = Tokenizer.load(first), Tokenizer.load(again)
    assert a.hash == b.hash
    assert len(a.hash) == 32
    assert a.template_hash != b.template_hash
    assert a.template_hash == Tokenizer.load(first).template_hash
    text["model"]["vocab"]["brandnew"] = len(text["model"]["vocab"])
    (again / "tokenizer.json").write_text(json.dumps(text))
    assert Tokenizer.load(again).hash != a.hash


def test_what_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path / "nowhere")
    write_model(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"config\.json.*list"):
        Tokenizer.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
