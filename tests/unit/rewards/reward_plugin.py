"""Rewards for the tests of the worker pool, imported by the workers as a plug-in."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from astraflow.rewards.api import register_reward


@register_reward("hang_or_one")
def hang_or_one(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> Any:
    """Spins on HANG, dies on DIE, raises on RAISE, prints on PRINT; else what the data say, else 1."""
    while "HANG" in completions:
        pass
    if "DIE" in completions:
        os.kill(os.getpid(), signal.SIGKILL)
    if "RAISE" in completions:
        raise KeyError("a reward's own mistake")
    if "PRINT" in completions:
        print("x" * 100_000)  # noqa: T201
        sys.stdout.flush()
    if "MEMORY" in completions:
        return len(bytearray(1 << 40))
    return data.get("value", 1.0)


@register_reward("inline_length", blocking=False)
def inline_length(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    return float(len(completions)) if completions != "RAISE" else 1 / 0
