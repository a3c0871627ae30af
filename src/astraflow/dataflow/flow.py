"""Pure core: length and reward of what was generated against what was trained on, per model.

Generated is counted when a complete scored group is at the door, whatever becomes of it; trained when a batch is committed.
Neither is derived from the other, so that what filters, staleness and evictions do to the data can be seen (spec section 9,
fault 15).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from astraflow.dataflow.buffer import Entry
from astraflow.dataflow.policies.base import GroupStats


@dataclass(frozen=True)
class Sums:
    """Over groups."""

    groups: int = 0
    trajectories: int = 0
    """Scored ones."""
    tokens: float = 0.0
    """Own sampled tokens of the scored trajectories."""
    reward: float = 0.0
    """Raw values of the scored trajectories."""
    varied: int = 0
    """Groups whose rewards differ: only they carry a gradient where members are compared."""

    def plus(self, groups: int, trajectories: int, tokens: float, reward: float, varied: bool) -> Sums:
        return Sums(
            self.groups + groups,
            self.trajectories + trajectories,
            self.tokens + tokens,
            self.reward + reward,
            self.varied + groups * int(varied),
        )

    def minus(self, earlier: Sums) -> Sums:
        return Sums(
            self.groups - earlier.groups,
            self.trajectories - earlier.trajectories,
            self.tokens - earlier.tokens,
            self.reward - earlier.reward,
            self.varied - earlier.varied,
        )


@dataclass
class Flow:
    """One model, since this process started."""

    spent: int = 0
    """Groups that came back, the unscored and malformed ones too."""
    generated: Sums = field(default_factory=Sums)
    trained: Sums = field(default_factory=Sums)
    _told: tuple[int, Sums, Sums] = (0, Sums(), Sums())

    def came(self, stats: GroupStats | None) -> None:
        """A group is at the door; None = no member of it is scored."""
        self.spent += 1
        if stats is not None:
            self.generated = self.generated.plus(1, stats.size, stats.loss_tokens, sum(stats.values.values()), not stats.all_equal)

    def committed(self, entries: Iterable[Entry]) -> None:
        """Fresh groups of a batch that was trained on; a group that was cut counts with its last part."""
        for entry in entries:
            groups = int(entry.completes)
            self.trained = self.trained.plus(groups, entry.rows, entry.loss_tokens, entry.raw_mean * entry.rows, not entry.all_equal)

    def totals(self) -> dict[str, float]:
        """Means since this process started."""
        return numbers(self.spent, self.generated, self.trained)

    def interval(self) -> dict[str, float]:
        """Means since the last call; empty when nothing came and nothing was trained."""
        spent, generated, trained = self._told
        self._told = (self.spent, self.generated, self.trained)
        return numbers(self.spent - spent, self.generated.minus(generated), self.trained.minus(trained))


def numbers(spent: int, generated: Sums, trained: Sums) -> dict[str, float]:
    """Metrics by name; what has nothing to be a mean of is left out."""
    values: dict[str, float] = {}
    for word, sums in (("generated", generated), ("trained", trained)):
        if sums.trajectories:
            values[f"rollout/tokens_mean_{word}"] = sums.tokens / sums.trajectories
            values[f"reward/mean_{word}"] = sums.reward / sums.trajectories
    if spent or trained.groups:
        values["rollout/groups_generated"] = float(spent)
        values["rollout/groups_trained"] = float(trained.groups)
        values["rollout/effective_groups"] = float(trained.varied)
    if trained.groups:
        values["rollout/groups_per_trained_group"] = spent / trained.groups
    return values
