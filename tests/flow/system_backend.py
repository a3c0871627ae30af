"""Backends of trainers in runs of tests/flow, loaded as `system_backend:…`: one with a known pace, one that remembers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from system_observer import DIRECTORY, GO, note, row_name

from astraflow.trainer.backends.base import TrainState
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


class RememberingBackend(LocalBackend):
    """Trains as `local` does and remembers on what: the list is part of its checkpoint, so that it goes back with the weights and
    tells at the end what the final weights were made of. Beside that every step is written down when it begins."""

    lineage: list[dict[str, Any]] | None = None

    def train_step(self, batch: RaggedBatch, before_update: Callable[[], None]) -> dict[str, float]:
        tokens = batch.tokens
        rows = [
            row_name(*(tokens[name][start:end] for name in ("input_ids", "logprobs", "loss_mask")))
            for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)
        ]
        step = {"policy": batch.model_id, "timeline": batch.timeline, "version": batch.version, "rows": rows}
        note(f"steps-{batch.model_id}", step | {"trajectories": len(np.unique(batch.rows["trajectory_index"]))})
        while batch.version == self.config.max_steps - 1 and not (Path(os.environ[DIRECTORY]) / GO).exists():
            time.sleep(0.02)
        values = super().train_step(batch, before_update)
        self.lineage = [*(self.lineage or []), step]
        return values

    def state(self) -> TrainState:
        state = super().state()
        state.values["lineage"] = self.lineage or []
        return state

    def load_state(self, values: dict[str, Any], fill: Callable[[dict[str, torch.Tensor]], None]) -> None:
        super().load_state(values, fill)
        self.lineage = list(values["lineage"])

    def export(self, path: Path) -> None:
        super().export(path)
        note(f"lineage-{path.name}", {"steps": self.lineage or []})
