"""The canary's own forward against Hugging Face, for every architecture it knows, and what it makes of other files."""

from __future__ import annotations

import random
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from astraflow.protocol.errors import Conflict, LayoutMismatch
from astraflow.raas import reference
from astraflow.raas.engines.embedded_arch import read_architecture
from astraflow.raas.reference import Reference

sys.path.insert(0, str(Path(__file__).parents[2]))
from oracle import MODELS, VOCABULARY, Published

GO_ON = threading.Event()


def of(published: Published) -> Reference:
    arch = read_architecture(published.directory)
    assert arch is not None
    return Reference(arch)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt2"])
@pytest.mark.parametrize("block", [1 << 24, 100])
def test_log_probs_equal_a_hugging_face_forward(tmp_path: Path, name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "BLOCK_WORDS", block)
    published, generator = Published(tmp_path, name), random.Random(0)
    rows = [[generator.randrange(VOCABULARY) for _ in range(length)] for length in (2, 30, 170)]
    firsts = [1, 20, 3]
    found = of(published).log_probs(Path(published.paths[0]), rows, firsts, GO_ON)
    logits = torch.log_softmax(published.log_probs(0, rows), -1)
    for row, first, mine, all_logits in zip(rows, firsts, found, logits, strict=True):
        wanted = [all_logits[t - 1, row[t]].item() for t in range(first, len(row))]
        assert mine.shape == (len(row) - first,)
        assert np.abs(mine - np.array(wanted)).max() < 1e-4


def test_other_float_words_are_read_and_other_files_are_refused(tmp_path: Path) -> None:
    published, ask = Published(tmp_path, "qwen3"), ([[3, 4, 5]], [1], GO_ON)
    words = load_file(published.paths[0])
    bf16 = of(published).log_probs(Path(published.paths[0]), *ask)[0]
    for name, dtype in (("wide", torch.float32), ("half", torch.float16)):
        save_file({key: value.to(dtype) for key, value in words.items()}, tmp_path / name)
        assert np.abs(of(published).log_probs(tmp_path / name, *ask)[0] - bf16).max() < 0.01
    save_file({key: value for key, value in words.items() if "layers.1.mlp.up" not in key}, tmp_path / "gap")
    (tmp_path / "text").write_text("no tensors at all")
    (tmp_path / "empty").touch()
    for name, why in (("gap", "no tensor model.layers.1.mlp.up_proj.weight"), ("text", "safetensors"), ("empty", "safetensors")):
        with pytest.raises(LayoutMismatch, match=why):
            of(published).log_probs(tmp_path / name, *ask)


def test_a_forward_that_nobody_waits_for_ends_within_a_layer(tmp_path: Path) -> None:
    published, stop = Published(tmp_path, "qwen3"), threading.Event()
    stop.set()
    with pytest.raises(Conflict, match="given up"):
        of(published).log_probs(Path(published.paths[0]), [[3, 4, 5]], [1], stop)
