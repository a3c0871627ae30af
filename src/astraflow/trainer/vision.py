"""Images in a batch, for models of the Qwen-VL kind: one run of image tokens per image, positions of three axes.

RaaS has put as many image tokens into a row as the image has features; here the bytes become pixels, and every token gets what the
packing needs to know: an identity (two images have the same token ids, and must not be shared) and its position. An image that
several rows of a pass begin with is computed once, like every other prefix.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from astraflow.protocol.errors import BadMessage, ConfigError
from astraflow.trainer.batch import Array, RaggedBatch
from astraflow.trainer.packing import IDENTITY, POSITIONS


@dataclass(frozen=True)
class Image:
    """One image as the vision tower takes it."""

    pixels: torch.Tensor
    """float32 [patches, patch size]."""
    grid: torch.Tensor
    """int64 [3]: patches along time, height and width."""
    tokens: int
    """Places that it takes in a row."""


class Vision:
    """Prepares batches for a vision-language model of the Qwen-VL kind: one run of tokens per image, positions of three axes."""

    def __init__(self, model: nn.Module, source: Path, media: Path):
        """`source`: the model's directory; `media`: where the original bytes lie under their sha256. Raises ConfigError without an image
        processor, and for models of another kind."""
        from transformers import AutoImageProcessor

        config: Any = model.config
        self._inner: Any = model.model
        if not hasattr(self._inner, "get_rope_index"):
            kind = f"{config.model_type} does not place images on three axes; expected a model of the Qwen-VL kind"
            raise ConfigError(f"model.path {str(source)!r}: {kind}")
        self._token = int(config.image_token_id)
        self._media = media
        try:
            load: Any = AutoImageProcessor.from_pretrained
            self._processor = load(source, backend="pil", local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path {str(source)!r}: no image processor: {error}") from None

    def prepare(self, batch: RaggedBatch) -> RaggedBatch:
        """The batch with its images, identities and positions. Raises BadMessage for images that are missing, damaged, or do not fit the
        image tokens of their row."""
        names = list(dict.fromkeys(name for row in batch.media for name in row))
        images = [self._image(name) for name in names]
        number = {name: index for index, name in enumerate(names)}
        identity = batch.tokens["input_ids"].astype(np.int64)
        positions = np.zeros((len(identity), 3), np.int64)
        for row in range(batch.n_rows):
            place = slice(int(batch.offsets[row]), int(batch.offsets[row + 1]))
            own = [number[name] for name in batch.media[row]] if batch.media else []
            self._row(row, identity[place], positions[place], own, images)
        return replace(batch, tokens=batch.tokens | {IDENTITY: identity, POSITIONS: positions}, images=tuple(images))

    def _row(self, row: int, identity: Array, positions: Array, own: list[int], images: list[Image]) -> None:
        """Fill in one row, in place."""
        is_image = identity == self._token
        ids = torch.from_numpy(identity.copy())[None]
        wanted = sum(images[index].tokens for index in own)
        if is_image.sum() != wanted:
            raise BadMessage(f"batch.media[{row}]: its {len(own)} images take {wanted} tokens, the row has {is_image.sum()} image tokens")
        grids = torch.stack([images[index].grid for index in own]) if own else None
        kinds = torch.from_numpy(is_image.astype(np.int64))[None]
        found, _ = self._inner.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grids)
        positions[:] = found[:, 0].t().numpy()
        identity[is_image] = np.repeat([-1 - index for index in own], [images[index].tokens for index in own])

    def _image(self, name: str) -> Image:
        from PIL import Image as Pillow
        from PIL import UnidentifiedImageError

        try:
            data = (self._media / name).read_bytes()
        except OSError as error:
            raise BadMessage(f"batch.media: image {name} is not in {self._media}: {error.strerror}") from None
        if hashlib.sha256(data).hexdigest() != name:
            raise BadMessage(f"batch.media: {self._media / name} does not hold what its name says")
        try:
            picture = Pillow.open(BytesIO(data)).convert("RGB")
        except (UnidentifiedImageError, OSError) as error:
            raise BadMessage(f"batch.media: image {name}: {error}") from None
        made = self._processor(images=[picture], return_tensors="pt")
        grid = made["image_grid_thw"][0]
        return Image(made["pixel_values"], grid, int(grid.prod()) // self._processor.merge_size**2)


def embedded_images(model: nn.Module, images: tuple[Image, ...], device: torch.device) -> dict[str, Any]:
    """What the model's forward is given for these images, in the order of their tokens."""
    pixels = torch.cat([image.pixels for image in images]).to(device)
    grids = torch.stack([image.grid for image in images]).to(device)
    inner: Any = model.model
    return {"mm_encoder_outputs": {"image": inner.get_image_features(pixels, grids, return_dict=True)}}


def idle_images(model: nn.Module, images: tuple[Image, ...], device: torch.device) -> torch.Tensor:
    """0, and gradients of 0 for the vision tower: where ranks gather its layers together, one without images in its pass computes some
    in vain."""
    leaves = tree_leaves(embedded_images(model, images, device))
    return torch.stack([leaf.sum() * 0.0 for leaf in leaves if isinstance(leaf, torch.Tensor)]).sum()
