"""The engine's parameters: HF names outside, fused matrices inside, loaded in place from safetensors.

q, k, v and gate, up are slices of one matrix each, so that a step makes four matrix products per layer instead of seven. Loading
checks every name, shape and dtype from the file's header before the first word is copied: a refused file changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors import safe_open

from astraflow.protocol.errors import LayoutMismatch
from astraflow.raas.engines.embedded_arch import Architecture, read_json

FLOATS = ("BF16", "F16", "F32")
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass
class Layer:
    """Parameters of one block; [out, in] matrices as torch's linear wants them."""

    norm_attention: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    norm_mlp: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class Weights:
    """All parameters, uninitialised until the first `load`."""

    def __init__(self, arch: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        self.arch = arch
        self.by_name: dict[str, torch.Tensor] = {}
        """HF name → the words to fill (a view into a fused matrix for q, k, v, gate, up)."""
        self._dtype, self._device = dtype, device
        self.embedding = self._new(EMBEDDING, arch.vocab_size, arch.hidden)
        self.head = self.embedding if arch.tied else self._new(HEAD, arch.vocab_size, arch.hidden)
        self.norm = self._new("model.norm.weight", arch.hidden)
        self.layers = [self._layer(f"model.layers.{index}.") for index in range(arch.layers)]

    def _new(self, name: str, *shape: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        self.by_name[name] = tensor
        return tensor

    def _fused(self, names: list[str], rows: list[int], *columns: int) -> torch.Tensor:
        whole = torch.empty((sum(rows), *columns), dtype=self._dtype, device=self._device)
        self.by_name.update(zip(names, torch.split(whole, rows), strict=True))
        return whole

    def _layer(self, prefix: str) -> Layer:
        arch = self.arch
        q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        attention = prefix + "self_attn."
        qkv = [attention + f"{part}_proj" for part in "qkv"]
        gate_up = [prefix + f"mlp.{part}_proj" for part in ("gate", "up")]
        qkv_rows, gate_up_rows = [q, kv, kv], [arch.intermediate] * 2
        return Layer(
            norm_attention=self._new(prefix + "input_layernorm.weight", arch.hidden),
            qkv=self._fused([name + ".weight" for name in qkv], qkv_rows, arch.hidden),
            qkv_bias=self._fused([name + ".bias" for name in qkv], qkv_rows) if arch.qkv_bias else None,
            q_norm=self._new(attention + "q_norm.weight", arch.head_dim) if arch.qk_norm else None,
            k_norm=self._new(attention + "k_norm.weight", arch.head_dim) if arch.qk_norm else None,
            o=self._new(attention + "o_proj.weight", arch.hidden, q),
            o_bias=self._new(attention + "o_proj.bias", arch.hidden) if arch.o_bias else None,
            norm_mlp=self._new(prefix + "post_attention_layernorm.weight", arch.hidden),
            gate_up=self._fused([name + ".weight" for name in gate_up], gate_up_rows, arch.hidden),
            gate_up_bias=self._fused([name + ".bias" for name in gate_up], gate_up_rows) if arch.mlp_bias else None,
            down=self._new(prefix + "mlp.down_proj.weight", arch.hidden, arch.intermediate),
            down_bias=self._new(prefix + "mlp.down_proj.bias", arch.hidden) if arch.mlp_bias else None,
        )

    @torch.inference_mode()
    def load(self, path: Path) -> None:
        """Fill every parameter from a safetensors file or an HF directory. Raises LayoutMismatch, having changed nothing."""
        with open_tensors(path) as files:
            check_layout({name: tuple(tensor.shape) for name, tensor in self.by_name.items()}, files, path)
            if self.arch.tied and HEAD in files and not _same_words(files, HEAD, EMBEDDING):
                raise LayoutMismatch(f"{path}: {HEAD} differs from {EMBEDDING}, but config.json ties them")
            for name, target in self.by_name.items():
                target.copy_(files[name].get_tensor(name))


def check_layout(wanted: dict[str, tuple[int, ...]], files: dict[str, Any], path: Path) -> None:
    """Names, shapes and dtypes, from headers only. Tied heads and rotary tables may be there besides."""
    missing = [name for name in wanted if name not in files]
    if missing:
        raise LayoutMismatch(f"{path}: {len(missing)} tensors are missing, first {missing[0]}")
    for name, shape in wanted.items():
        found = files[name].get_slice(name)
        if tuple(found.get_shape()) != shape:
            raise LayoutMismatch(f"{path}: {name} has shape {tuple(found.get_shape())}, expected {shape}")
        if found.get_dtype() not in FLOATS:
            raise LayoutMismatch(f"{path}: {name} has dtype {found.get_dtype()}, expected one of {', '.join(FLOATS)}")
    foreign = [name for name in files if name not in wanted and name != HEAD and not name.endswith(".inv_freq")]
    if foreign:
        raise LayoutMismatch(f"{path}: {len(foreign)} tensors that this model does not have, first {foreign[0]}")


def _same_words(files: dict[str, Any], one: str, other: str) -> bool:
    return torch.equal(files[one].get_tensor(one), files[other].get_tensor(other))


@contextmanager
def open_tensors(path: Path) -> Iterator[dict[str, Any]]:
    """Tensor name → open safetensors file that holds it; of a directory, all its shards. Raises LayoutMismatch for what is none."""
    with ExitStack() as stack:
        found: dict[str, Any] = {}
        for file in _files(path):
            try:
                opened = stack.enter_context(safe_open(file, framework="pt"))
            except (OSError, safetensors.SafetensorError) as error:
                raise LayoutMismatch(f"{file}: no readable safetensors file: {error}") from None
            found.update(dict.fromkeys(opened.keys(), opened))
        yield found


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    index = path / "model.safetensors.index.json"
    if index.exists():
        return sorted({path / name for name in read_json(index)["weight_map"].values()})
    return [path / "model.safetensors"]
