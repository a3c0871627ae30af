"""A HF model directory as a torch module, and back."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from astraflow.protocol.errors import ConfigError
from astraflow.trainer.adapters import add_adapters, whole
from astraflow.trainer.linear import use_fast_products
from astraflow.trainer.packing import PackedRows
from astraflow.weights.config import ModelConfig
from astraflow.weights.lora import PREFIX, LowRank

UNSUPPORTED_HEADS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Settings that change logits after the output embedding; the chunked head does not apply them."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
)


def load_model(config: ModelConfig, attention: str) -> nn.Module:
    """The causal language model in `config.path` (with adapters as `config.lora` says), fp32, in training mode. Raises ConfigError for
    what cannot be trained here.
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]

    if not (Path(config.path) / "config.json").is_file():
        raise ConfigError(f"model.path {config.path!r}: no config.json there; expected a Hugging Face model directory")
    try:
        architecture = AutoConfig.from_pretrained(config.path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path {config.path!r}: config.json names no model that transformers knows: {error}") from None
    for name, value in config.options.items():
        if not hasattr(architecture, name):
            raise ConfigError(f"model.options.{name}: {type(architecture).__name__} has no such field")
        setattr(architecture, name, value)
    text = architecture.get_text_config()
    for name in UNSUPPORTED_HEADS:
        if getattr(text, name, None) not in (None, 1, 1.0):
            raise ConfigError(f"model.path {config.path!r}: {name} is set, which this trainer does not apply to logits")
    if getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True):
        raise ConfigError(f"model.path {config.path!r}: sliding-window attention is not supported by prefix packing")
    from astraflow.trainer import attention as tree  # transformers takes its time to load

    kind: Any = tree.NAME if attention == "tree" else attention
    family: Any = AutoModelForCausalLM
    if has_vision(architecture):
        family, kind = AutoModelForImageTextToText, {"": kind, "text_config": kind, "vision_config": "sdpa"}
    try:
        model: nn.Module = family.from_pretrained(
            config.path, config=architecture, dtype=torch.float32, attn_implementation=kind, local_files_only=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:  # RuntimeError: shapes that the options have changed
        raise ConfigError(f"model.path {config.path!r}: the weights cannot be loaded: {error}") from None
    if config.lora is not None:
        model = add_adapters(model, config.lora)
    use_fast_products(model)
    return model.train()


def has_vision(architecture: Any) -> bool:
    """Whether a model of this configuration reads images."""
    return getattr(architecture, "vision_config", None) is not None


def tied_names(model: nn.Module) -> dict[str, str]:
    """Tied name → the name whose tensor holds the bytes, as `named_parameters()` lists it."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for internal, parameter in model.named_parameters(remove_duplicate=False):
        name = internal.removeprefix(PREFIX).replace(".base_layer.", ".")  # as a model with adapters is published
        holder = first.setdefault(id(parameter), name)
        if holder != name:
            tied[name] = holder
    return tied


def hidden_states(model: nn.Module, packed: PackedRows) -> torch.Tensor:
    """Hidden states [P, H] of the predictions of a token tree."""
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    options = _attention(str(decoder.config._attn_implementation), packed)
    idle: torch.Tensor | float = 0.0
    if packed.images or packed.idle_images:
        from astraflow.trainer.vision import embedded_images, idle_images

        if packed.images:
            decoder = model.model  # the vision tower stands before the decoder
            options |= embedded_images(model, packed.images, packed.input_ids.device)
        else:  # before the decoder as well: ranks gather layers in one order, forwards and backwards
            idle = idle_images(model, packed.idle_images, packed.input_ids.device)
    output = decoder(input_ids=packed.input_ids[None], position_ids=packed.position_ids.unsqueeze(-2), use_cache=False, **options)
    states: torch.Tensor = output.last_hidden_state[0][packed.head_node]
    return states + idle if packed.idle_images else states


def _attention(kind: str, packed: PackedRows) -> dict[str, Any]:
    """What a decoder is told about who sees whom: a mask [1, 1, T, T], or tiles (transformers passes on a mask of four axes, and
    would make its own without one)."""
    from astraflow.trainer import attention as tree

    if kind == tree.NAME:
        return {"attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool), "tree": tree.tiles(packed.end)}
    mask = packed.attention_mask()
    if kind == "eager":
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)  # eager attention adds its mask
    return {"attention_mask": mask[None, None]}


def output_embedding(model: nn.Module) -> torch.Tensor:
    """The [V, H] matrix that turns hidden states into logits. Raises ConfigError for a head with a bias."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    if getattr(head, "bias", None) is not None:
        raise ConfigError("the model's output embedding has a bias, which this trainer does not apply")
    weight: torch.Tensor = head.weight
    return weight


def export_hf(named: Iterable[tuple[str, torch.Tensor | LowRank]], source: Path, target: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a plain HF directory atomically: weights in `dtype`, configuration and tokenizer files of `source`."""
    from safetensors.torch import save_file

    staging = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    tensors = {name: whole(tensor).detach().to(dtype).contiguous() for name, tensor in named}
    save_file(tensors, staging / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((source / "config.json").read_text(encoding="utf-8"))
    settings.pop("torch_dtype", None)
    settings["dtype"] = str(dtype).removeprefix("torch.")
    (staging / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, staging / name)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(staging, target)
