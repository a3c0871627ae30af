"""Pure core: the chosen curators together, their chance, and what of their knowledge is not written yet.

A prompt is submitted iff *some* live model wants it, because one rollout serves them all; a model wants it iff *every* chosen
curator does, by what it knows of this model and prompt. Chance is a hash of (seed, curator, number of the draw): the draws that the
source has persisted are the whole state of the generator, and all models of a draw share it, so that a prompt is submitted
with the largest of the models' probabilities.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import xxhash

from astraflow.dataflow.journal import Learned, PromptRow
from astraflow.dataflow.policies.base import Curator, GroupStats

META = "curators"
"""Key of the curators' small states among the ledger's named ones."""


def chance(seed: int, name: str, number: int) -> float:
    """Uniform in [0, 1)."""
    return (xxhash.xxh3_64_intdigest(f"{seed}:{name}:{number}".encode()) >> 11) * 2.0**-53


class Curation:
    """One per run."""

    def __init__(self, curators: Mapping[str, Curator], seed: int = 0) -> None:
        self._curators, self._seed = dict(curators), seed

    def wants(self, models: Sequence[str], task_id: str, number: int) -> bool:
        """`models`: the live ones that the workflow serves. `number`: tasks looked at before this one."""
        chances = {name: chance(self._seed, name, number) for name in self._curators}
        return any(all(curator.wants(model, task_id, chances[name]) for name, curator in self._curators.items()) for model in models)

    def observe(self, model: str, stats: GroupStats) -> None:
        """One complete scored group of one model."""
        for curator in self._curators.values():
            curator.observe(model, stats)

    def learned(self) -> Learned:
        """What was observed since the last call, to be written with the groups that were observed."""
        rows = [
            PromptRow(name, policy, task_id, msgspec.msgpack.encode(value))
            for name, curator in self._curators.items()
            for policy, task_id, value in curator.changed()
        ]
        return Learned(rows, self.meta())

    def moved(self, model: str, version: int, epoch: int) -> dict[str, bytes]:
        """A new version; returns what is to be written with it."""
        for curator in self._curators.values():
            curator.on_version(model, version, epoch)
        return self.meta()

    def meta(self) -> dict[str, bytes]:
        """The small states; nothing when there are none."""
        states = {name: state for name, curator in self._curators.items() if (state := curator.state())}
        return {META: msgspec.msgpack.encode(states)} if states else {}

    def restore(self, meta: Mapping[str, bytes], prompts: Iterable[PromptRow]) -> None:
        """After a restart. What other curators left in the ledger stays there."""
        states: dict[str, Any] = msgspec.msgpack.decode(meta[META]) if META in meta else {}
        known: dict[str, list[tuple[str, str, Any]]] = {name: [] for name in self._curators}
        for row in prompts:
            if row.curator in known:
                known[row.curator].append((row.policy, row.task_id, msgspec.msgpack.decode(row.state)))
        for name, curator in self._curators.items():
            curator.restore(states.get(name, {}), known[name])
