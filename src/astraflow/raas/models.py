"""One served model: its engine, its tokenizer, and the gate that a weight load closes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from astraflow.lib.tokenizer import Tokenizer
from astraflow.protocol.rollout import Serving
from astraflow.raas.engines.base import Engine


class Gate:
    """New requests pass while it is open. Closing it is the pause of a load; requests that run are the engine's business."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()

    @property
    def closed(self) -> bool:
        """A load runs."""
        return not self._open.is_set()

    async def passed(self) -> None:
        """Wait while a load runs; the lease's deadline bounds the wait."""
        await self._open.wait()

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Closed for the length of the block; opens again however the block ends."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()


@dataclass
class ServedModel:
    model_id: str
    engine: Engine
    tokenizer: Tokenizer
    context_length: int
    """Tokens of prompt and answer together; 0 = not known."""
    gate: Gate = field(default_factory=Gate)
    withheld: bool = False
    """The engine may serve what the canary has not passed; `before` is the receipt meanwhile."""
    before: Serving | None = None

    @property
    def loaded(self) -> Serving | None:
        """The engine's own word: it changes only when the engine confirmed a load."""
        return self.engine.report().serving

    @property
    def serving(self) -> Serving | None:
        """The receipt: what the engine confirmed and the canary passed."""
        return self.before if self.withheld and self.loaded is not None else self.loaded
