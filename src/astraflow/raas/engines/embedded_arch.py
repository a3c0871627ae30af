"""What a model's config.json says, for the architectures that the embedded engine computes itself. Torch-free.

Llama, Mistral, Qwen2 and Qwen3 are one family: RMSNorm, rotary positions, grouped queries, SwiGLU; they differ in biases, in
per-head norms of queries and keys and in tied embeddings. Sources: transformers' model pages; rope scaling `linear` and `llama3`
as in transformers' modeling_rope_utils.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astraflow.protocol.errors import ConfigError

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
ROPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Architecture:
    """Sizes and switches of one model."""

    model_type: str
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope: dict[str, Any]
    """Scaling parameters; rope_type is one of `ROPES`."""
    context_length: int
    tied: bool
    """lm_head shares the embedding's words."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads

    def kv_token_bytes(self, item_size: int) -> int:
        """Keys and values of one token over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * item_size


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ConfigError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"model_dir: {path} does not exist") from None
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"model_dir: {path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"model_dir: {path} holds no JSON object")
    return value


def read_architecture(model_dir: Path) -> Architecture | None:
    """The model's architecture, or None when it is not of this family. Raises ConfigError for a broken config."""
    config = read_json(model_dir / "config.json")
    if config.get("model_type") not in FAMILY or unsupported(config):
        return None
    try:
        return _parse(config)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"model_dir: {model_dir / 'config.json'}: {error!r}") from None


def unsupported(config: dict[str, Any]) -> str:
    """Why this config is not computed here; empty = it is."""
    model_type = config.get("model_type")
    if model_type not in FAMILY:
        return f"model_type {model_type!r} (known: {', '.join(FAMILY)})"
    rope = _rope(config)
    if rope["rope_type"] not in ROPES:
        return f"rope_type {rope['rope_type']!r} (known: {', '.join(ROPES)})"
    if float(rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) or 1.0) != 1.0:
        return "partial_rotary_factor other than 1"
    if config.get("hidden_act", "silu") != "silu":
        return f"hidden_act {config['hidden_act']!r} (known: silu)"
    sliding = config.get("sliding_window") if config.get("use_sliding_window", model_type == "mistral") else None
    if sliding and sliding < config.get("max_position_embeddings", 0):
        return f"sliding_window {sliding} below the context length"
    return ""


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Both spellings: `rope_parameters` (transformers 5) and rope_theta + rope_scaling before."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    return rope


def _parse(config: dict[str, Any]) -> Architecture:
    kind = config["model_type"]
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    attention_bias = bool(config.get("attention_bias", False))
    rope = _rope(config)
    default_head_dim = 128 if kind == "qwen3" else int(config["hidden_size"]) // heads
    return Architecture(
        model_type=kind,
        vocab_size=int(config["vocab_size"]),
        hidden=int(config["hidden_size"]),
        intermediate=int(config["intermediate_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=int(config.get("head_dim") or default_head_dim),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope["rope_theta"]),
        rope=rope,
        context_length=int(config.get("max_position_embeddings", 2048)),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2" or attention_bias,
        o_bias=kind in ("llama", "qwen3") and attention_bias,
        mlp_bias=kind == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=kind == "qwen3",
    )


def inverse_frequencies(arch: Architecture) -> list[float]:
    """[head_dim / 2] angle per position of each rotary pair."""
    plain = [arch.rope_theta ** (-2 * i / arch.head_dim) for i in range(arch.head_dim // 2)]
    if arch.rope["rope_type"] == "default":
        return plain
    factor = float(arch.rope["factor"])
    if arch.rope["rope_type"] == "linear":
        return [value / factor for value in plain]
    low, high = float(arch.rope["low_freq_factor"]), float(arch.rope["high_freq_factor"])
    original = float(arch.rope["original_max_position_embeddings"])
    scaled: list[float] = []
    for value in plain:
        # llama3: long waves are divided by the factor, short ones kept, those between blended.
        smooth = (original * value / (2 * math.pi) - low) / (high - low)
        weight = min(max(smooth, 0.0), 1.0)
        scaled.append((1 - weight) * value / factor + weight * value)
    return scaled


def eos_ids(model_dir: Path) -> list[int]:
    """All end-of-sequence ids (case G17): generation_config.json first, then config.json."""
    for name in ("generation_config.json", "config.json"):
        path = model_dir / name
        if path.exists() and (value := read_json(path).get("eos_token_id")) is not None:
            return [int(item) for item in (value if isinstance(value, list) else [value])]
    return []
