"""Shapers: what is added to a trajectory's value before group statistics (numerics 7 and 11)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from astraflow.protocol.errors import ConfigError


class Unshaped:
    """Rewards as they are."""

    def bonus(self, loss_tokens: int, finish: str) -> float:
        return 0.0


class Overlong:
    """DAPO's soft penalty, for every trajectory by its length, truncated or not: factor · clip((max − tail − len)/tail, −1, 0)."""

    def __init__(self, max_len: int, tail: int, factor: Annotated[float, Meta(ge=0)] = 1.0) -> None:
        if not 0 < tail <= max_len:
            raise ConfigError(f"tail {tail}: expected 1 to max_len ({max_len})")
        self._max_len, self._tail, self._factor = max_len, tail, factor

    def bonus(self, loss_tokens: int, finish: str) -> float:
        return self._factor * min(max((self._max_len - self._tail - loss_tokens) / self._tail, -1.0), 0.0)
