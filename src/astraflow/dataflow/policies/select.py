"""Orders of the queue and choices of the replay."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol


class Queued(Protocol):
    """What orders and selections read of a queued group."""

    @property
    def min_version(self) -> int: ...

    @property
    def arrival(self) -> int: ...

    @property
    def spread(self) -> float:
        """Standard deviation of its shaped values."""
        ...


def earliest_deadline_first(entry: Queued) -> tuple[int, int]:
    """Nearest to its expiry first; ties by arrival (numerics 18)."""
    return (entry.min_version, entry.arrival)


def first_in_first_out(entry: Queued) -> tuple[int, int]:
    """By arrival."""
    return (entry.arrival, 0)


def latest(entries: Sequence[Queued], count: int, rng: random.Random) -> list[int]:
    """Indices of the newest entries."""
    return sorted(range(len(entries)), key=lambda i: -entries[i].arrival)[:count]


def uniform(entries: Sequence[Queued], count: int, rng: random.Random) -> list[int]:
    """A sample without repetition."""
    return rng.sample(range(len(entries)), min(count, len(entries)))


def prioritised(entries: Sequence[Queued], count: int, rng: random.Random) -> list[int]:
    """Largest reward spread first: those groups carry the largest advantages; ties at random."""
    return sorted(range(len(entries)), key=lambda i: (-entries[i].spread, rng.random()))[:count]
