"""Datasets: loaders that give tasks. Torch-free; used by Dataflow."""

from __future__ import annotations

from astraflow.lib.registry import Registry

DATASETS = Registry(
    "datasets",
    {
        "addition": "astraflow.datasets.procedural:addition",
        "aime24": "astraflow.datasets.math:aime24",
        "aime25": "astraflow.datasets.math:aime25",
        "amc23": "astraflow.datasets.math:amc23",
        "amc24": "astraflow.datasets.math:amc24",
        "csv": "astraflow.datasets.files:table",
        "dapo": "astraflow.datasets.math:dapo",
        "deepcoder": "astraflow.datasets.code:deepcoder",
        "deepscaler": "astraflow.datasets.math:deepscaler",
        "digits": "astraflow.datasets.procedural:digits",
        "gsm8k": "astraflow.datasets.math:gsm8k",
        "human_eval": "astraflow.datasets.code:human_eval",
        "jsonl": "astraflow.datasets.files:table",
        "livecodebench": "astraflow.datasets.code:livecodebench",
        "math500": "astraflow.datasets.math:math500",
        "minerva": "astraflow.datasets.math:minerva",
        "olympiadbench": "astraflow.datasets.math:olympiadbench",
        "parquet": "astraflow.datasets.files:table",
        "reasoning_gym": "astraflow.datasets.procedural:reasoning_gym",
    },
)
"""Loader name → function `(DatasetConfig, seed) -> iterable of data dicts`, loaded when chosen."""

register_dataset = DATASETS.register
"""Decorator: `@register_dataset("mine")` on a loader of a plug-in module."""
