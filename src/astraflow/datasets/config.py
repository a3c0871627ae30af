"""The dataset sections of an experiment."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]


class DatasetConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A data set as the configuration names it."""

    loader: str = "addition"
    """Registered name (`astraflow list datasets`) or `module:function`."""
    name: str = ""
    """Prefix of the task ids; empty = the loader's name."""
    path: str = ""
    """File or directory that the loader reads; relative to the working directory."""
    split: str = ""
    """For loaders that know splits; the same as `options.split`."""
    options: dict[str, Any] = {}
    """Options of the loader."""
    max_length: Positive | None = None
    """Longest prompt in tokens; sent with the lease, applied and counted by RaaS, which owns the tokenizer."""
    limit: Positive | None = None
    """Take the first this many tasks; None = all."""
    shuffle: bool = True
    """Draw in an order that depends on seed and epoch."""
    repeat: Positive | None = None
    """Epochs; None = without end."""


class ValidDatasetConfig(DatasetConfig, kw_only=True, forbid_unknown_fields=True):
    """A data set that is only evaluated on."""

    n_samples: Positive = 1
    """Samples per task; greedy decoding allows only 1 (numerics 20)."""
    generation: dict[str, Any] = {}
    """Overrides of the generation settings in evaluation."""
    workflow: str = ""
    """Name in `eval_workflows`; empty = the training workflow."""
