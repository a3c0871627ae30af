"""Filters: which complete groups are trained on (spec section 4)."""

from __future__ import annotations

from astraflow.dataflow.policies.base import GroupStats
from astraflow.protocol.errors import ConfigError


class KeepAll:
    """Every group; those without variance still move the version (numerics 10)."""

    def reject(self, policy: str, stats: GroupStats) -> str:
        return ""


class FilterZeroAdvantage:
    """Dynamic sampling (DAPO): drop groups whose rewards are all equal; the batch fills from later groups."""

    def reject(self, policy: str, stats: GroupStats) -> str:
        return "zero_variance" if stats.all_equal else ""


class RewardBand:
    """Keep groups whose mean reward (before shaping) lies in [low, high]."""

    def __init__(self, low: float, high: float) -> None:
        if not low <= high:
            raise ConfigError(f"dataflow.policies.filter: reward_band low {low} is above high {high}")
        self._low, self._high = low, high

    def reject(self, policy: str, stats: GroupStats) -> str:
        mean = sum(stats.values.values()) / max(len(stats.values), 1)
        return "" if self._low <= mean <= self._high else "reward_band"
