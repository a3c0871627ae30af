"""Rewards for the tests of the worker pool, imported by the workers as a plug-in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from astraflow.rewards.api import register_reward


@register_reward("hang_or_one")
def hang_or_one(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> Any:
    """Comes back twice on FORK; spins on HANG (SPAWN: with a child of its own, ESCAPE: with one in another session), dies
    on DIE, raises on RAISE, prints on PRINT; else what the data say, else 1."""
    if "SPAWN" in completions:
        child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        with open(data["pid_file"], "w") as file:
            file.write(str(child.pid))
    if "ESCAPE" in completions and os.fork() == 0:
        os.setsid()
        Path(data["pid_file"]).write_text(str(os.getpid()))
        signal.pause()
    if "FORK" in completions and os.fork() == 0:
        return 0.25
    while "HANG" in completions:
        pass
    if "DIE" in completions:
        os.kill(os.getpid(), signal.SIGKILL)
    if "RAISE" in completions:
        raise KeyError("a reward's own mistake")
    if "PRINT" in completions:
        print("x" * 100_000)  # noqa: T201
        sys.stdout.flush()
    if "INTEGER" in completions:
        return 10**400
    if "MEMORY" in completions:
        return len(bytearray(1 << 40))
    return data.get("value", 1.0)


@register_reward("inline_length", blocking=False)
def inline_length(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    return float(len(completions)) if completions != "RAISE" else 1 / 0
