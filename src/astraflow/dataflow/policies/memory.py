"""What curators remember per (policy, prompt), and which of it is not in the ledger yet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Generic, TypeVar

from msgspec import Meta

from astraflow.dataflow.policies.base import GroupStats

V = TypeVar("V")
Share = Annotated[float, Meta(ge=0, le=1)]
"""An option between 0 and 1."""
Decay = Annotated[float, Meta(ge=0, lt=1)]
"""Weight of what is known already, against the newest group."""


class Memory(Generic[V]):
    """(policy, task) → what is known. Grows with the prompts that were observed, at most the data set per policy."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], V] = {}
        self._changed: set[tuple[str, str]] = set()

    def get(self, policy: str, task_id: str) -> V | None:
        return self._known.get((policy, task_id))

    def put(self, policy: str, task_id: str, value: V) -> None:
        self._known[(policy, task_id)] = value
        self._changed.add((policy, task_id))

    def changed(self) -> list[tuple[str, str, Any]]:
        """As a curator's `changed`."""
        changed, self._changed = sorted(self._changed), set()
        return [(policy, task_id, self._known[(policy, task_id)]) for policy, task_id in changed]

    def restore(self, entries: Iterable[tuple[str, str, V]]) -> None:
        self._known = {(policy, task_id): value for policy, task_id, value in entries}
        self._changed = set()


class PassRates:
    """Debiased moving average of the share of right members per (policy, prompt) (numerics 19).

    m ← decay · m + (1 − decay) · share; after n groups the rate is m / (1 − decay^n), so that the first group counts in full.
    Kept as the two weighted sums whose quotient that is: then shares that are all 1 make exactly 1.
    """

    def __init__(self, decay: float, correct_threshold: float) -> None:
        self._decay, self._threshold = decay, correct_threshold
        self.memory = Memory[tuple[float, float]]()
        """(weighted right shares, weights)."""

    def rate(self, policy: str, task_id: str) -> float | None:
        """None = never measured."""
        found = self.memory.get(policy, task_id)
        return None if found is None else found[0] / found[1]

    def observe(self, policy: str, stats: GroupStats) -> None:
        share = stats.right(self._threshold) / stats.size
        right, weight = self.memory.get(policy, stats.task_id) or (0.0, 0.0)
        self.memory.put(policy, stats.task_id, (self._decay * right + share, self._decay * weight + 1.0))

    def restore(self, prompts: Iterable[tuple[str, str, Any]]) -> None:
        self.memory.restore((policy, task_id, (float(right), float(weight))) for policy, task_id, (right, weight) in prompts)


class Rated:
    """What curators that go by pass rates have in common: all but the decision."""

    def __init__(self, rates: PassRates) -> None:
        self._rates = rates

    def observe(self, policy: str, stats: GroupStats) -> None:
        self._rates.observe(policy, stats)

    def on_version(self, policy: str, version: int, epoch: int) -> None:
        return None

    def state(self) -> dict[str, Any]:
        return {}

    def changed(self) -> list[tuple[str, str, Any]]:
        return self._rates.memory.changed()

    def restore(self, state: dict[str, Any], prompts: Iterable[tuple[str, str, Any]]) -> None:
        self._rates.restore(prompts)
