"""Log-probs of tokens under the words of a staged safetensors file, in plain numpy: what the canary holds an engine against.

A computation of its own, straight from the file: whatever an engine did while it loaded (a head left behind, a tensor skipped, an
old prefix kept) is not repeated here. Matrices pass through in blocks, so that it needs neither torch nor a second copy of the
model: about 200 MB at most, and one reading of the file. Formulas: transformers' modeling_llama, _qwen2, _qwen3 (float32).
"""

from __future__ import annotations

import json
import math
import mmap
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from astraflow.protocol.errors import Conflict, LayoutMismatch
from astraflow.raas.engines.embedded_arch import Architecture, inverse_frequencies

Floats = npt.NDArray[np.float32]

BLOCK_WORDS = 16 << 20
"""Words of a matrix that are widened at a time: 64 MB."""
WORDS: dict[str, type[np.generic]] = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}


class StagedFile:
    """Tensors of a safetensors file as float32; the mapping ends with the object. Raises LayoutMismatch for what is no such file."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            (size,) = struct.unpack_from("<Q", self._data)
            self._start = 8 + size
            self._table: dict[str, Any] = json.loads(self._data[8 : self._start])
        except (OSError, ValueError, struct.error) as error:
            raise LayoutMismatch(f"{path}: no readable safetensors file: {error}") from None
        self._path = path

    def __contains__(self, name: str) -> bool:
        return name in self._table

    def shape(self, name: str) -> list[int]:
        if name not in self._table:
            raise LayoutMismatch(f"{self._path}: no tensor {name}")
        return [int(extent) for extent in self._table[name]["shape"]]

    def rows(self, name: str, start: int = 0, end: int | None = None) -> Floats:
        """[end − start, …] of a tensor, copied out of the file and widened."""
        shape, entry = self.shape(name), self._table[name]
        if entry["dtype"] not in WORDS:
            raise LayoutMismatch(f"{self._path}: {name} has dtype {entry['dtype']}, expected one of {', '.join(WORDS)}")
        width, word = math.prod(shape[1:]), np.dtype(WORDS[entry["dtype"]])
        end = shape[0] if end is None else min(end, shape[0])
        offset = self._start + entry["data_offsets"][0] + start * width * word.itemsize
        words = np.frombuffer(self._data, word, (end - start) * width, offset)
        wide = (words.astype(np.uint32) << 16).view(np.float32) if word == np.uint16 else words.astype(np.float32)
        return wide.reshape(end - start, *shape[1:])


class Reference:
    """One architecture; `log_probs` as often as wanted. Blocking and heavy: call it in a thread."""

    def __init__(self, arch: Architecture) -> None:
        self.arch = arch
        self._frequencies = np.array(inverse_frequencies(arch), np.float32)

    def log_probs(self, path: Path, sequences: Sequence[Sequence[int]], firsts: Sequence[int], stop: threading.Event) -> list[Floats]:
        """Per sequence, log softmax(logits) of its tokens from position `first` on, each given those before it: [length − first].

        Raises LayoutMismatch for a file that is not this model's, Conflict when `stop` was set meanwhile.
        """
        file = StagedFile(path)
        with np.errstate(over="ignore"):  # exp(−gate) of a gate far below 0
            ids = [token for sequence in sequences for token in sequence]
            x = np.concatenate([file.rows("model.embed_tokens.weight", token, token + 1) for token in ids])
            lengths = [len(sequence) for sequence in sequences]
            for layer in range(self.arch.layers):
                x = self._layer(file, f"model.layers.{layer}.", x, lengths)
                if stop.is_set():
                    raise Conflict("the forward was given up")
            x = self._norm(x, file.rows("model.norm.weight"))
            starts = np.cumsum([0, *lengths[:-1]])
            wanted = [start + t for start, first, length in zip(starts, firsts, lengths, strict=True) for t in range(first, length)]
            found = self._head(file, x[np.array(wanted) - 1], [ids[position] for position in wanted])
        return np.split(found, np.cumsum([length - first for first, length in zip(firsts, lengths, strict=True)])[:-1])

    def _layer(self, file: StagedFile, prefix: str, x: Floats, lengths: Sequence[int]) -> Floats:
        h = self._norm(x, file.rows(prefix + "input_layernorm.weight"))
        x = x + self._attention(file, prefix + "self_attn.", h, lengths)
        h = self._norm(x, file.rows(prefix + "post_attention_layernorm.weight"))
        gate, up = (linear(file, f"{prefix}mlp.{name}_proj", h) for name in ("gate", "up"))
        return x + linear(file, prefix + "mlp.down_proj", gate / (1 + np.exp(-gate)) * up)

    def _attention(self, file: StagedFile, prefix: str, h: Floats, lengths: Sequence[int]) -> Floats:
        arch = self.arch
        heads = (("q", arch.heads), ("k", arch.kv_heads), ("v", arch.kv_heads))
        q, k, v = (linear(file, f"{prefix}{name}_proj", h).reshape(len(h), count, arch.head_dim) for name, count in heads)
        if arch.qk_norm:
            q, k = (self._norm(part, file.rows(f"{prefix}{name}_norm.weight")) for name, part in (("q", q), ("k", k)))
        out, start = np.empty((len(h), arch.heads * arch.head_dim), np.float32), 0
        for length in lengths:
            rows = slice(start, start + length)
            out[rows] = self._attend(q[rows], k[rows], v[rows]).reshape(length, -1)
            start += length
        return linear(file, prefix + "o_proj", out)

    def _attend(self, q: Floats, k: Floats, v: Floats) -> Floats:
        """One sequence: q [T, heads, d], k and v [T, kv_heads, d] → [T, heads, d]."""
        angles = np.arange(len(q), dtype=np.float32)[:, None] * self._frequencies
        turn = np.concatenate([angles, angles], axis=1)[:, None]
        q, k = (part * np.cos(turn) + _rotated(part) * np.sin(turn) for part in (q, k))
        k, v = (np.repeat(part, self.arch.group, axis=1) for part in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.float32(math.sqrt(self.arch.head_dim))
        scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed: Floats = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)
        return mixed

    def _norm(self, x: Floats, weight: Floats) -> Floats:
        normed: Floats = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + np.float32(self.arch.norm_eps)) * weight
        return normed

    def _head(self, file: StagedFile, x: Floats, tokens: Sequence[int]) -> Floats:
        """[rows] log-prob of each row's token."""
        logits = linear(file, "model.embed_tokens" if self.arch.tied else "lm_head", x)
        top = logits.max(-1)
        return np.asarray(logits[np.arange(len(tokens)), tokens] - top - np.log(np.exp(logits - top[:, None]).sum(-1)), np.float32)


def linear(file: StagedFile, name: str, x: Floats) -> Floats:
    """x [rows, in] times the [out, in] matrix `name.weight`, plus its bias where there is one."""
    width = file.shape(name + ".weight")
    out, step = np.empty((len(x), width[0]), np.float32), max(1, BLOCK_WORDS // width[1])
    for start in range(0, width[0], step):
        out[:, start : start + step] = x @ file.rows(name + ".weight", start, start + step).T
    return out + file.rows(name + ".bias") if name + ".bias" in file else out


def _rotated(x: Floats) -> Floats:
    half = x.shape[-1] // 2
    return np.concatenate([-x[..., half:], x[..., :half]], axis=-1)
