"""Datasets: loaders that give tasks. Torch-free; used by Dataflow."""

from __future__ import annotations

from astraflow.lib.registry import Registry

DATASETS = Registry(
    "datasets",
    {
        "addition": "astraflow.datasets.procedural:addition",
        "digits": "astraflow.datasets.procedural:digits",
        "gsm8k": "astraflow.datasets.math:gsm8k",
        "jsonl": "astraflow.datasets.files:jsonl",
        "reasoning_gym": "astraflow.datasets.procedural:reasoning_gym",
    },
)
"""Loader name → function `(DatasetConfig, seed) -> iterable of data dicts`, loaded when chosen."""

register_dataset = DATASETS.register
"""Decorator: `@register_dataset("mine")` on a loader of a plug-in module."""
