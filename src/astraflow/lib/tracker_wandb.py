"""Weights & Biases. The key comes from `WANDB_API_KEY` or `wandb login`, never from a configuration.

    trackers: {wandb: {project: my-agents, mode: offline}}     # `wandb sync <run_dir>/wandb/offline-run-*` sends it later
One run of W&B per run of ours, also over restarts and `--resume`. A curve is `<series>/<name>`, its x axis `<series>/version`.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import secrets
from collections.abc import Mapping
from typing import Any

from astraflow.lib.options import Options
from astraflow.lib.tracking import TrackedRun
from astraflow.protocol.errors import ConfigError

MODES = ("online", "offline")


class Wandb:
    """Options: `project`, `entity` (empty = the key's own), `mode`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        known = Options("tracker 'wandb'", options)
        self._project: str = known.take("project", "astraflow")
        self._entity: str = known.take("entity", "")
        self._mode: str = known.take("mode", "online", MODES)
        known.done()
        found = importlib.util.find_spec("wandb")
        if found is None or found.origin is None:  # a mere directory of this name is what W&B itself leaves behind
            raise ConfigError("tracker 'wandb': the package wandb is not installed; pip install 'astraflow[wandb]'")
        self._run: Any = None
        self._series: set[str] = set()

    def open(self, run: TrackedRun) -> None:
        wandb = importlib.import_module("wandb")
        run.kept.setdefault("id", secrets.token_hex(4))
        quiet = {"x_disable_stats": True, "x_disable_meta": True, "disable_git": True, "disable_code": True}  # numbers, and nothing else
        settings = wandb.Settings(console="off", silent=True, **quiet)
        self._run = wandb.init(
            project=self._project,
            entity=self._entity or None,
            mode=self._mode,
            id=run.kept["id"],
            name=run.name,
            resume="allow" if self._mode == "online" else None,  # offline the id alone says it
            dir=str(run.run_dir),
            config=dict(run.config),
            settings=settings,
        )

    def log(self, series: str, step: int, time_s: float, values: Mapping[str, float]) -> None:
        if series not in self._series:
            self._series.add(series)
            self._run.define_metric(f"{series}/*", step_metric=f"{series}/version")
        finite = {f"{series}/{name}": value for name, value in values.items() if math.isfinite(value)}
        self._run.log({**finite, f"{series}/version": step, f"{series}/time": time_s})

    def close(self) -> None:
        self._run.finish()
