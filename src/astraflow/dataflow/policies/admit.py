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
            raise ConfigError(f"low {low:g} is above high {high:g}")
        self._low, self._high = low, high

    def reject(self, policy: str, stats: GroupStats) -> str:
        return "" if self._low <= stats.raw_mean <= self._high else "reward_band"


class CompleteOnly:
    """Drop groups with a member that failed or has no score; without this filter what is scored is trained on."""

    def reject(self, policy: str, stats: GroupStats) -> str:
        return "" if stats.size == stats.n_samples else "partial"
