"""Rewards: functions that score a completion. Torch-free; blocking ones run in killable worker processes."""

from __future__ import annotations

from astraflow.lib.registry import Registry

REWARDS = Registry(
    "rewards",
    {
        "f1": "astraflow.rewards.text:f1",
        "human_eval": "astraflow.rewards.code:human_eval",
        "livecodebench": "astraflow.rewards.code:livecodebench",
        "math_verify": "astraflow.rewards.math_verify:math_verify",
        "exact_match": "astraflow.rewards.text:exact_match",
        "last_number": "astraflow.rewards.text:last_number",
        "reasoning_gym": "astraflow.rewards.procedural:reasoning_gym",
    },
)
"""Reward name → function `(prompt, completions, prompt_ids, completion_ids, **data) -> float | None`, loaded when chosen."""
