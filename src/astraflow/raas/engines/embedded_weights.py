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
import torch.nn.functional as F
from safetensors import safe_open

from astraflow.protocol.errors import LayoutMismatch
from astraflow.raas.engines.embedded_arch import Architecture, read_json

FLOATS = ("BF16", "F16", "F32")
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
PACK_TOKENS = 64
"""Batch that the packed order of a matrix is chosen for. Measured: the same order for 64 and 2,048 tokens, and no worse for one."""


class Linear:
    """x [T, in] → x · Wᵀ + b [T, out], W being several HF matrices one below the other.

    fp32 on a CPU goes through oneDNN, which uses AVX-512 on every maker's chips: torch's default there (MKL) was 2.4× slower on an
    AMD EPYC. oneDNN's own order of the words saves it from sorting them at each call: 15 % at 64 tokens, 30 % at 8 (measured).
    """

    def __init__(self, rows: list[int], weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.rows, self.weight, self.bias = rows, weight, bias
        known = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        self.onednn = weight.device.type == "cpu" and weight.dtype == torch.float32 and known
        self.packed = True
        """No words have come since the last sorting: it waits for the first use, so that a load is nothing but a copy."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.onednn:
            if not self.packed:
                self.weight, self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, PACK_TOKENS), True
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return]
        return F.linear(x, self.weight, self.bias)

    def fill(self, parts: Iterator[torch.Tensor]) -> None:
        """Take new words, one tensor [rows, in] per HF matrix."""
        if self.onednn and self.packed:
            self.weight, self.packed = torch.empty(self.weight.shape), False
        for target, words in zip(torch.split(self.weight, self.rows), parts, strict=True):
            target.copy_(words)


@dataclass
class Layer:
    """Parameters of one block."""

    norm_attention: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    norm_mlp: torch.Tensor
    gate_up: Linear
    down: Linear


class Weights:
    """All parameters, uninitialised until the first `load`."""

    def __init__(self, arch: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        self.arch = arch
        self.shapes: dict[str, tuple[int, ...]] = {}
        """HF name → shape, of everything that a file must hold."""
        self._dtype, self._device = dtype, device
        self._plain: dict[str, torch.Tensor] = {}
        """HF name → the words to fill."""
        self._matrices: list[tuple[list[str], Linear]] = []
        self.embedding = self._new(EMBEDDING, arch.vocab_size, arch.hidden)
        self.norm = self._new("model.norm.weight", arch.hidden)
        if arch.tied:  # these words also serve as a table, so they keep their plain order
            self.head = Linear([arch.vocab_size], self.embedding, None)
        else:
            self.head = self._linear([HEAD.removesuffix(".weight")], [arch.vocab_size], arch.hidden, False)
        self.layers = [self._layer(f"model.layers.{index}.") for index in range(arch.layers)]

    def _new(self, name: str, *shape: int) -> torch.Tensor:
        self.shapes[name] = shape
        self._plain[name] = self._empty(*shape)
        return self._plain[name]

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _linear(self, names: list[str], rows: list[int], columns: int, bias: bool) -> Linear:
        linear = Linear(rows, self._empty(sum(rows), columns), self._empty(sum(rows)) if bias else None)
        self._matrices.append(([name + ".weight" for name in names], linear))
        self.shapes.update((f"{name}.weight", (count, columns)) for name, count in zip(names, rows, strict=True))
        if linear.bias is not None:
            biases = dict(zip((name + ".bias" for name in names), torch.split(linear.bias, rows), strict=True))
            self._plain.update(biases)
            self.shapes.update((name, tuple(words.shape)) for name, words in biases.items())
        return linear

    def _layer(self, prefix: str) -> Layer:
        arch = self.arch
        q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return Layer(
            norm_attention=self._new(prefix + "input_layernorm.weight", arch.hidden),
            qkv=self._linear([attention + f"{part}_proj" for part in "qkv"], [q, kv, kv], arch.hidden, arch.qkv_bias),
            q_norm=self._new(attention + "q_norm.weight", arch.head_dim) if arch.qk_norm else None,
            k_norm=self._new(attention + "k_norm.weight", arch.head_dim) if arch.qk_norm else None,
            o=self._linear([attention + "o_proj"], [arch.hidden], q, arch.o_bias),
            norm_mlp=self._new(prefix + "post_attention_layernorm.weight", arch.hidden),
            gate_up=self._linear([mlp + f"{part}_proj" for part in ("gate", "up")], [arch.intermediate] * 2, arch.hidden, arch.mlp_bias),
            down=self._linear([mlp + "down_proj"], [arch.hidden], arch.intermediate, arch.mlp_bias),
        )

    @torch.inference_mode()
    def load(self, path: Path) -> None:
        """Fill every parameter from a safetensors file or an HF directory. Raises LayoutMismatch, having changed nothing."""
        with open_tensors(path) as files:
            check_layout(self.shapes, files, path)
            if self.arch.tied and HEAD in files and not _same_words(files, HEAD, EMBEDDING):
                raise LayoutMismatch(f"{path}: {HEAD} differs from {EMBEDDING}, but config.json ties them")
            for name, target in self._plain.items():
                target.copy_(files[name].get_tensor(name))
            for names, linear in self._matrices:
                linear.fill(files[name].get_tensor(name) for name in names)


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
