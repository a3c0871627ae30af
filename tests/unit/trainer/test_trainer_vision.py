"""Batches with images: the packed forward of a small vision-language model against one row at a time."""

from __future__ import annotations

import hashlib
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from astraflow.protocol.batch import Batch
from astraflow.protocol.errors import BadMessage, ConfigError
from astraflow.trainer.backends.local import LocalBackend
from astraflow.trainer.batch import RaggedBatch, ragged
from astraflow.trainer.config import OptimizerConfig, PackingConfig, PPOConfig, TrainEngineConfig
from astraflow.trainer.models import load_model
from astraflow.trainer.vision import Vision
from astraflow.weights.config import ModelConfig

IMAGE, START, END = 50, 51, 52
SIDES = {"a": (56, 56), "b": (84, 56), "c": (56, 56)}
TOKENS = {"a": 4, "b": 6, "c": 4}
"""A patch is 14 wide, and four of them are one token."""


def write_model(path: Path) -> None:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    torch.manual_seed(0)
    text = {
        "vocab_size": 60,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
    }
    sight = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32, "fullatt_block_indexes": [1]}
    special = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": 53}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=sight, **special)
    Qwen2_5_VLForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(path)
    Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}).save_pretrained(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vision") / "model"
    write_model(path)
    return path


def write_media(directory: Path) -> dict[str, str]:
    """Name → sha256; `directory` → where they lie."""
    names = {"directory": str(directory)}
    for number, (name, size) in enumerate(SIDES.items()):
        picture = Image.new("RGB", size, (40 * number, 90, 200 - 30 * number))
        ImageDraw.Draw(picture).ellipse((5 + 9 * number, 5, 40, 30), fill=(255, 80 * number, 0))
        data = io.BytesIO()
        picture.save(data, "PNG")
        names[name] = hashlib.sha256(data.getvalue()).hexdigest()
        (directory / names[name]).write_bytes(data.getvalue())
    return names


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_media(tmp_path_factory.mktemp("media"))


def prompt_of(images: str, text: list[int]) -> list[int]:
    """Token ids as RaaS expands them."""
    return [token for name in images for token in [START, *[IMAGE] * TOKENS[name], END]] + text


def batch_with(sample: Any, batch_of: Any, media: dict[str, str], groups: list[tuple[str, list[int]]]) -> RaggedBatch:
    """Groups of three answers; each row's images are those of its prompt."""
    rng = np.random.default_rng(0)
    made = [[sample(prompt_of(i, t), rng.integers(3, 9, n).tolist(), float(n % 2)) for n in (1, 2, 4)] for i, t in groups]
    batch: Batch = batch_of(made)
    batch = msgspec.structs.replace(batch, media=[[media[name] for name in images] for images, _ in groups for _ in range(3)])
    return ragged(batch)


def backend_of(model: Path, media: dict[str, str], max_nodes: int = 2048, **algorithm: Any) -> LocalBackend:
    config = TrainEngineConfig(
        algorithm=PPOConfig(**algorithm),
        optimizer=OptimizerConfig(lr=1e-2),
        packing=PackingConfig(max_nodes=max_nodes),
        media_dir=media["directory"],
    )
    return LocalBackend(config, ModelConfig(path=str(model)), "bfloat16", 5)


def one_by_one(backend: LocalBackend, batch: RaggedBatch, mask: np.ndarray) -> torch.Tensor:
    """Log-probs of the loss tokens by the model's own forward, a row at a time, with the model's own positions."""
    assert backend.vision is not None
    images = dict(zip(dict.fromkeys(n for row in batch.media for n in row), backend.vision.prepare(batch).images, strict=True))
    found = []
    for row in range(batch.n_rows):
        low, high = batch.offsets[row], batch.offsets[row + 1]
        ids = torch.from_numpy(batch.tokens["input_ids"][low:high].astype(np.int64))[None]
        own = [images[name] for name in batch.media[row]]
        seen = {"pixel_values": torch.cat([i.pixels for i in own]), "image_grid_thw": torch.stack([i.grid for i in own])} if own else {}
        output = backend.model(input_ids=ids, mm_token_type_ids=(ids == IMAGE).long(), **seen)
        logp = torch.log_softmax(output.logits[0].float(), -1)
        at = torch.from_numpy(np.flatnonzero(mask[low:high]))
        found.append(logp[at - 1, ids[0, at]])
    return torch.cat(found)


def gradients(backend: LocalBackend) -> torch.Tensor:
    found = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in backend._parameters])
    backend.model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("max_nodes", [2048, 20])
def test_packed_images_give_the_gradient_of_one_row_at_a_time(
    max_nodes: int, model: Path, media: dict[str, str], sample: Any, batch_of: Any
) -> None:
    backend = backend_of(model, media, max_nodes)
    assert backend.vision is not None
    groups = [("a", [5, 6]), ("c", [5, 6]), ("ab", [7]), ("", [5, 8]), ("ba", [7]), ("a", [9])]
    batch = batch_with(sample, batch_of, media, groups)
    outline = backend.objective.outline(backend.vision.prepare(batch))
    weights = torch.cos(torch.arange(float(outline.mask.sum())))
    expected = one_by_one(backend, batch, outline.mask)
    (expected * weights).sum().backward()
    wanted = gradients(backend)
    assert float(wanted.abs().max()) > 0.1
    place = np.cumsum(outline.mask) - 1
    for packed, _ in backend._rounds(outline, outline.compute):
        logp, _ = backend._forward(packed)
        torch.testing.assert_close(logp, expected[place[packed.flat]], rtol=1e-4, atol=1e-5)
        (logp * weights[place[packed.flat]]).sum().backward()
    found = gradients(backend)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-4)  # one element of 95,840 may lose more to another order of sums


def test_an_image_is_computed_once_per_pass_and_two_images_are_never_shared(
    model: Path, media: dict[str, str], sample: Any, batch_of: Any
) -> None:
    backend = backend_of(model, media)
    assert backend.vision is not None
    batch = backend.vision.prepare(batch_with(sample, batch_of, media, [("a", [5]), ("c", [5]), ("a", [6])]))
    outline = backend.objective.outline(batch)
    ((packed, _),) = backend._rounds(outline, outline.compute)
    assert len(packed.images) == 2
    assert int((packed.input_ids == IMAGE).sum()) == TOKENS["a"] + TOKENS["c"]
    batch = backend.vision.prepare(batch_with(sample, batch_of, media, [("ab", [5]), ("cb", [5])]))
    outline = backend.objective.outline(batch)
    ((packed, _),) = backend._rounds(outline, outline.compute)
    assert len(packed.images) == 4, "the second image of a row depends on the first"


def test_steps_move_the_vision_tower_too(model: Path, media: dict[str, str], sample: Any, batch_of: Any) -> None:
    backend = backend_of(model, media)
    before = {name: tensor.clone() for name, tensor in backend.published()}
    metrics = backend.train_step(batch_with(sample, batch_of, media, [("a", [5]), ("b", [6])]), lambda: None)
    assert metrics["policy/grad_norm"] > 0
    moved = [name for name, tensor in backend.published() if not torch.equal(tensor, before[name])]
    assert any("visual" in name for name in moved)
    assert any("language_model" in name for name in moved)


def test_images_that_do_not_fit_are_refused_by_name(
    model: Path, media: dict[str, str], sample: Any, batch_of: Any, tmp_path: Path, tiny_model: Any
) -> None:
    backend = backend_of(model, media)
    batch = batch_with(sample, batch_of, media, [("a", [5])])
    with pytest.raises(BadMessage, match=r"batch\.media\[0\]: its 1 images take 6 tokens, the row has 4"):
        backend.train_step(replace(batch, media=((media["b"],),) * 3), lambda: None)
    with pytest.raises(BadMessage, match=r"image .* is not in"):
        backend.train_step(replace(batch, media=(("0" * 64,),) * 3), lambda: None)
    (tmp_path / media["a"]).write_bytes(b"something else")
    with pytest.raises(BadMessage, match="does not hold what its name says"):
        Vision(backend.model, model, tmp_path).prepare(batch)
    with pytest.raises(ConfigError, match="qwen3 does not place images on three axes; expected a model of the Qwen-VL kind"):
        Vision(load_model(ModelConfig(path=str(tiny_model("qwen3"))), "sdpa"), model, tmp_path)
    text_only = LocalBackend(TrainEngineConfig(), ModelConfig(path=str(tiny_model("qwen3"))), "bfloat16", 5)
    with pytest.raises(BadMessage, match="reads text only"):
        text_only.train_step(batch, lambda: None)
