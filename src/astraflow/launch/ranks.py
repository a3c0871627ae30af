"""The ranks of one trainer on this machine: started together, ended together.

To whoever supervises it a trainer is one process, however many ranks it has: this one. It starts them as children, hands signals to
rank 0 (which drains and tells the others), and when one of them fails it ends the rest at once, because they could only wait for it.
Torch is theirs alone.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from astraflow.lib.proc import Child, describe_exit

LEAVE_S = 60.0
"""After rank 0 has ended in order: time for the others to end as well."""
LOOK_S = 0.02


def run_ranks(argv: Sequence[str], count: int) -> tuple[int, str]:
    """Run `count` ranks of one program; (exit code, what went wrong that no rank could say itself).

    Each finds its place in RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE, and the others through a file.
    """
    with tempfile.TemporaryDirectory(prefix="astraflow-ranks-") as directory:
        shared = {**os.environ, "ASTRAFLOW_RANKS_STORE": str(Path(directory) / "store")}
        shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        children: dict[int, Child] = {}
        try:
            for rank in range(count):
                env = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                children[rank] = Child(argv, env=env, name=f"rank {rank} of {count}")
            return _watch(children)
        finally:
            for child in children.values():
                child.signal(signal.SIGKILL)
            for child in children.values():
                child.wait(LEAVE_S)


def _watch(children: dict[int, Child]) -> tuple[int, str]:
    """Until all have ended, or one has failed."""
    pass_on = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in pass_on}
    if threading.current_thread() is threading.main_thread():
        for number in pass_on:
            signal.signal(number, lambda number, frame: children[0].signal(number))
    try:
        deadline = float("inf")
        while True:
            codes = {rank: code for rank, child in children.items() if (code := child.poll()) is not None}
            failed = {rank: code for rank, code in codes.items() if code != 0}
            if failed:
                # One that was killed is the cause of what the others say, if several have ended since the last look.
                rank = min(failed, key=lambda rank: (failed[rank] > 0, rank))
                code = failed[rank]
                return (1, f"{children[rank].name} {describe_exit(code)}; the others were ended") if code < 0 else (code, "")
            if len(codes) == len(children):
                return 0, ""
            if 0 in codes and deadline == float("inf"):
                deadline = time.monotonic() + LEAVE_S
            if time.monotonic() > deadline:
                late = ", ".join(child.name for rank, child in children.items() if rank not in codes)
                return 1, f"{late} did not end within {LEAVE_S:g} s of rank 0"
            time.sleep(LOOK_S)
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)
