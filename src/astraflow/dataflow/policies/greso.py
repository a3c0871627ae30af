"""GRESO: skip prompts that are likely to give a group without variance again (arXiv 2506.02177; numerics 19)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from astraflow.dataflow.policies.base import GroupStats
from astraflow.dataflow.policies.memory import Memory, Share
from astraflow.protocol.errors import ConfigError

Kind = Literal["easy", "hard"]
KINDS: tuple[Kind, Kind] = ("easy", "hard")


class Odds(msgspec.Struct):
    """Of one policy: what a prompt's streak costs it, and the groups since its last version."""

    p: dict[str, float]
    groups: int = 0
    without_variance: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    """Kind → groups."""


class Greso:
    """Per (policy, prompt) the streak z of groups without variance and its kind: easy = all right, hard = all wrong.

    A prompt is submitted with probability max(p_kind^z, floor_kind). At each new version after the warm-up p_kind falls by delta_p
    if the share of such groups among all since the last version is at least alpha_kind, and else rises by it; without a
    group since then nothing moves. The floors are an addition of the public implementation.
    """

    def __init__(
        self,
        p_easy: Share = 0.5,
        p_hard: Share = 0.5,
        alpha_easy: Share = 0.083,
        alpha_hard: Share = 0.167,
        delta_p: Share = 0.01,
        p_min: Share = 0.01,
        p_max: Share = 0.99,
        floor_easy: Share = 0.10,
        floor_hard: Share = 0.40,
        correct_threshold: float = 0.5,
        warmup_epochs: Annotated[int, Meta(ge=0)] = 1,
    ) -> None:
        self._start: dict[str, float] = {"easy": p_easy, "hard": p_hard}
        for kind, value in self._start.items():
            if not p_min <= value <= p_max:
                raise ConfigError(f"option p_{kind}: {value:g}, expected p_min ({p_min:g}) to p_max ({p_max:g})")
        self._alpha, self._delta = {"easy": alpha_easy, "hard": alpha_hard}, delta_p
        self._low, self._high = p_min, p_max
        self._floor = {"easy": floor_easy, "hard": floor_hard}
        self._threshold, self._warmup = correct_threshold, warmup_epochs
        self._odds: dict[str, Odds] = {}
        self._streaks = Memory[tuple[int, str]]()
        """(z, kind of the streak)."""

    def probability(self, policy: str, task_id: str) -> float:
        """Of being submitted."""
        z, kind = self._streaks.get(policy, task_id) or (0, "")
        return 1.0 if z == 0 else max(self._of(policy).p[kind] ** z, self._floor[kind])

    def wants(self, policy: str, task_id: str, chance: float) -> bool:
        return chance < self.probability(policy, task_id)

    def observe(self, policy: str, stats: GroupStats) -> None:
        kind, odds = self._kind(stats), self._of(policy)
        z, before = self._streaks.get(policy, stats.task_id) or (0, "")
        odds.groups += 1
        if kind:
            odds.without_variance[kind] += 1
        self._streaks.put(policy, stats.task_id, (0, "") if not kind else (z + 1 if kind == before else 1, kind))

    def on_version(self, policy: str, version: int, epoch: int) -> None:
        odds = self._of(policy)
        if odds.groups and epoch >= self._warmup:
            for kind in KINDS:
                share = odds.without_variance[kind] / odds.groups
                step = -self._delta if share >= self._alpha[kind] else self._delta
                odds.p[kind] = min(max(odds.p[kind] + step, self._low), self._high)
        odds.groups, odds.without_variance = 0, dict.fromkeys(KINDS, 0)

    def state(self) -> dict[str, Any]:
        return {policy: msgspec.to_builtins(odds) for policy, odds in self._odds.items()}

    def changed(self) -> list[tuple[str, str, Any]]:
        return self._streaks.changed()

    def restore(self, state: dict[str, Any], prompts: Iterable[tuple[str, str, Any]]) -> None:
        self._odds = msgspec.convert(state, dict[str, Odds])
        self._streaks.restore((policy, task_id, (int(z), str(kind))) for policy, task_id, (z, kind) in prompts)

    def _of(self, policy: str) -> Odds:
        if policy not in self._odds:
            self._odds[policy] = Odds(p=dict(self._start))
        return self._odds[policy]

    def _kind(self, stats: GroupStats) -> str:
        """Empty = the group has variance, or too few scored members to have any."""
        if stats.size < 2 or not stats.all_equal:
            return ""
        right = stats.right(self._threshold)
        return "easy" if right == stats.size else "hard" if right == 0 else ""
