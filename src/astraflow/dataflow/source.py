"""Pure core: which task comes next. Epoch-wise draws, so that the draw counts of any two tasks differ by at most 1 (case G25)
unless curators choose among them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from astraflow.datasets.api import Task

Wants = Callable[[str, int], bool]
"""(task id, tasks looked at before this one) → whether it is to be submitted."""
FORCED_AFTER = 256
"""Tasks refused in a row until the next one is taken unasked: a run whose curators want nothing goes on, visibly, and no call
looks at more tasks than this."""


class SourceState(msgspec.Struct, kw_only=True):
    """Position in the data set; the order within an epoch follows from the seed, chance from the counts."""

    epoch: int = 0
    position: int = 0
    """Next place within the epoch's order."""
    drawn: int = 0
    """Tasks handed out in all."""
    skipped: int = 0
    """Tasks that the curators did not want."""
    forced: int = 0
    """Tasks handed out unasked; they are in `drawn` too."""
    refused_in_row: int = 0


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

    def restore(self, state: SourceState) -> None:
        """Go on there; with a data set that is smaller now, its next epoch begins."""
        if state.position >= len(self.tasks):
            state.position, state.epoch = 0, state.epoch + 1
        self.state = state

    @property
    def looked(self) -> int:
        """Tasks looked at in all, wanted or not: the number of the next draw."""
        return self.state.drawn + self.state.skipped

    def draw(self, wants: Wants) -> Draw | None:
        """The next task that is wanted, or that follows `FORCED_AFTER` refusals in a row; None at the end of the data."""
        state = self.state
        while not self.exhausted:
            number, draw = self.looked, self._advance()
            forced = state.refused_in_row >= FORCED_AFTER
            if forced or wants(draw.task.task_id, number):
                state.drawn += 1
                state.forced += forced
                state.refused_in_row = 0
                return draw
            state.skipped += 1
            state.refused_in_row += 1
        return None

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
