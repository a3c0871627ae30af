"""A trainer whose steps take a known time, loaded by runs of tests/flow as `system_backend:ScheduledBackend`."""

from __future__ import annotations

import time
from collections.abc import Callable

from astraflow.trainer.backends.local import LocalBackend
from astraflow.trainer.batch import RaggedBatch

STEP_S = 0.5
"""Long against one rollout of the scripted engine, so that what is admitted at a notice is finished within the next step."""


class ScheduledBackend(LocalBackend):
    """Trains as `local` does, then computes for nothing until the step has taken STEP_S; tells when it began and ended."""

    def train_step(self, batch: RaggedBatch, before_update: Callable[[], None]) -> dict[str, float]:
        begin, started = time.time(), time.monotonic()
        values = super().train_step(batch, before_update)
        time.sleep(max(0.0, STEP_S - (time.monotonic() - started)))
        return values | {"schedule/begin": begin, "schedule/end": time.time()}
