"""Pure core: which task comes next. Epoch-wise draws, so that the draw counts of any two tasks differ by at most 1 (case G25)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from astraflow.dataflow.policies.base import Curator
from astraflow.datasets.api import Task


class SourceState(msgspec.Struct, kw_only=True):
    """Position in the data set; the order within an epoch follows from the seed."""

    epoch: int = 0
    position: int = 0
    """Next place within the epoch's order."""
    drawn: int = 0
    """Tasks handed out in all."""
    skipped: int = 0
    """Tasks that the curator did not want."""


@dataclass(frozen=True)
class Draw:
    """One task, drawn."""

    task: Task
    index: int
    """Place in the data set."""
    epoch: int


@lru_cache(maxsize=4)
def _order(size: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
    order = list(range(size))
    if shuffle:
        random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


class TaskSource:
    """Draws tasks; `state` is all there is to persist."""

    def __init__(self, tasks: Sequence[Task], seed: int, *, shuffle: bool = True, epochs: int | None = None):
        """`epochs` None = without end."""
        assert len(tasks) > 0, "a data set without tasks"
        self.tasks, self.state = tasks, SourceState()
        self._seed, self._shuffle, self._epochs = seed, shuffle, epochs

    @property
    def exhausted(self) -> bool:
        return self._epochs is not None and self.state.epoch >= self._epochs

    def draw(self, curator: Curator) -> Draw | None:
        """The next task that the curator wants; None at the end of the data.

        A curator that refuses a whole epoch gets its first refused task taken all the same: the run must not spin.
        """
        refused: Draw | None = None
        for _ in range(len(self.tasks)):
            if self.exhausted:
                return None
            draw = self._advance()
            if curator.accepts(draw.task.task_id, draw.epoch):
                self.state.drawn += 1
                return draw
            self.state.skipped += 1
            refused = refused or draw
        if refused is not None:
            self.state.drawn += 1
            self.state.skipped -= 1
        return refused

    def find(self, index: int, task_id: str) -> Task | None:
        """The task of a recovered lease; None when the data set no longer has it at this place."""
        if 0 <= index < len(self.tasks) and self.tasks[index].task_id == task_id:
            return self.tasks[index]
        return None

    def _advance(self) -> Draw:
        state = self.state
        index = _order(len(self.tasks), self._seed, state.epoch, self._shuffle)[state.position]
        draw = Draw(self.tasks[index], index, state.epoch)
        state.position += 1
        if state.position == len(self.tasks):
            state.position, state.epoch = 0, state.epoch + 1
        return draw
