"""Rewards of generated tasks."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import xxhash

from astraflow.rewards.text import answer_of


def reasoning_gym(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], gym: dict[str, Any], **data: Any
) -> float:
    """The set's own score of an answer, 0 … 1. `gym` names the entry (see the loader); it is made again here, in the worker.

    What stands between the last <answer> tags is the answer; without tags, the whole text after </think>.
    """
    source = _dataset(gym["name"], gym["seed"], gym["size"], json.dumps(gym["config"], sort_keys=True))
    entry = gym.get("entry") or source[gym["index"]]
    if xxhash.xxh3_64_hexdigest(entry["question"].encode()) != gym["question"]:
        raise ValueError(f"reasoning-gym {gym['name']!r}: entry {gym['index']} differs here from the loader's (another version?)")
    return float(source.score_answer(answer_of(completions), entry))


@lru_cache(maxsize=8)
def _dataset(name: str, seed: int, size: int, settings: str) -> Any:
    import reasoning_gym as gym  # type: ignore[import-untyped,unused-ignore]

    return gym.create_dataset(name, seed=seed, size=size, **json.loads(settings))


def _warm_up() -> None:
    import reasoning_gym  # noqa: F401  seconds to a minute: not on the first sample's deadline


reasoning_gym.warm_up = _warm_up  # type: ignore[attr-defined]
