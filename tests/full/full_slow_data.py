"""A data set that takes its time: it says that it is being loaded, and goes on only when told to."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from astraflow.datasets.config import DatasetConfig

WAIT_S = 120.0


def slow(config: DatasetConfig, seed: int) -> list[dict[str, Any]]:
    """Makes the file `options.begun` and waits until somebody removes it."""
    file = Path(config.options["begun"])
    file.write_text("")
    end = time.monotonic() + WAIT_S
    while file.exists() and time.monotonic() < end:
        time.sleep(0.05)
    return [{"prompt": "1", "answer": "1"}]
