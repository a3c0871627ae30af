"""Curators: which prompts are submitted."""

from __future__ import annotations

from typing import Any

from astraflow.dataflow.policies.base import GroupStats


class AcceptAll:
    """Every prompt."""

    def accepts(self, task_id: str, epoch: int) -> bool:
        return True

    def observe(self, policy: str, stats: GroupStats) -> None:
        return None

    def on_version(self, policy: str, version: int) -> None:
        return None

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        return None
