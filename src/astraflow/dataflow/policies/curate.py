"""Curators that look at one prompt at a time: which prompts are submitted (spec section 4)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from astraflow.dataflow.policies.base import GroupStats
from astraflow.dataflow.policies.memory import Decay, PassRates, Rated, Share


class AcceptAll:
    """Every prompt."""

    def wants(self, policy: str, task_id: str, chance: float) -> bool:
        return True

    def observe(self, policy: str, stats: GroupStats) -> None:
        return None

    def on_version(self, policy: str, version: int, epoch: int) -> None:
        return None

    def state(self) -> dict[str, Any]:
        return {}

    def changed(self) -> list[tuple[str, str, Any]]:
        return []

    def restore(self, state: dict[str, Any], prompts: Iterable[tuple[str, str, Any]]) -> None:
        return None


class FilterSolved(Rated):
    """Prompts whose pass rate is below `threshold`, and those never measured (numerics 19)."""

    def __init__(self, threshold: Share = 0.95, decay: Decay = 0.9, correct_threshold: float = 0.5) -> None:
        super().__init__(PassRates(decay, correct_threshold))
        self._threshold = threshold

    def wants(self, policy: str, task_id: str, chance: float) -> bool:
        rate = self._rates.rate(policy, task_id)
        return rate is None or rate < self._threshold
