"""A run may be long: what Dataflow keeps in memory and payloads on disk do not grow with the trajectories that went through it."""

from __future__ import annotations

import gc
import importlib.util
from collections import deque
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from astraflow.dataflow.config import DataflowProcess
from astraflow.dataflow.shelf import RATE_WINDOW_S

_spec = importlib.util.spec_from_file_location("dataflow_bench", Path(__file__).with_name("bench.py"))
assert _spec is not None
assert _spec.loader is not None
bench: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(bench)

NOT_FOLLOWED = (ModuleType, type, FunctionType, MethodType, BuiltinFunctionType)
BATCHES = 70
"""More than the barrier keeps digests of (64)."""
ROOM = {"Meter": RATE_WINDOW_S * 4}
"""What may grow beyond the first half and why: a second of a slow machine is one list of three numbers, up to a minute of them."""


def kept(root: Any) -> dict[str, int]:
    """Elements of all containers that are reachable, by the type that holds them."""
    seen: set[int] = set()
    found: dict[str, int] = {}
    stack = [(root, type(root).__name__)]
    while stack:
        thing, owner = stack.pop()
        if id(thing) in seen or isinstance(thing, NOT_FOLLOWED):
            continue
        seen.add(id(thing))
        if isinstance(thing, deque) and thing.maxlen is not None:
            continue
        if isinstance(thing, dict | list | set | tuple | deque):
            found[owner] = found.get(owner, 0) + len(thing)
        elif type(thing).__module__.startswith("astraflow"):
            owner = type(thing).__name__
        stack += [(other, owner) for other in gc.get_referents(thing)]
    return found


def test_nothing_grows_with_the_number_of_trajectories(tmp_path: Path) -> None:
    def change(process: DataflowProcess) -> None:
        process.dataflow.ledger.segment_bytes = 1000
        process.dataflow.buffer.replay.ratio, process.dataflow.buffer.replay.size = 0.5, 3
        process.dataflow.policies.filter = "filter_zero_adv"

    async def scene() -> None:
        run = await bench.Bench(tmp_path, n_tasks=5, change=change).start()
        sizes, files, version = [], [], 0
        for _ in range(2):
            for _ in range(BATCHES):
                while (reply := await run.ask(version)).batch is None:
                    for number, lease_id in enumerate(await run.lease()):
                        await run.deliver(lease_id, [1.0, 1.0] if number % 5 == 4 else [1.0, 0.0], version)
                version += 1
                await run.train(version, checkpoint=version - 1)
                run.serves(version)
            gc.collect()
            assert reply.batch is not None
            del reply
            sizes.append(kept(run.service))
            files.append(len(list(tmp_path.rglob("segment-*.bin"))))
        before, after = sizes
        grown = {name: (before.get(name, 0), count) for name, count in after.items()}
        assert {name: sizes for name, sizes in grown.items() if sizes[1] > sizes[0] + ROOM.get(name, 8)} == {}
        assert files[1] <= files[0] + 2
        assert run.shelf.ledger.snapshot.trained >= 2 * BATCHES
        run.close()

    bench.run(scene)
