"""An observer inside the processes of a run, loaded as a plug-in: writes down what a rollout service was told to forget.

What it writes is compared with the ledger afterwards, which knows nothing of it. One line per write call, so that a kill -9 loses
at most the line that was not begun. Rows are named by what they hold, so that the same tokens are found again in a batch.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from astraflow.protocol import codec
from astraflow.protocol.rollout import Delivery, Group
from astraflow.raas.outbox import Outbox

DIRECTORY = "OBSERVED_DIR"
"""Environment variable: where the observers of a run write."""
GO = "go"
"""File in that directory: the last step of a RememberingBackend waits for it, so that no kill comes after the end of its run."""
Array = npt.NDArray[Any]


def note(name: str, line: dict[str, Any]) -> None:
    """Append one line to `<directory>/<name>.jsonl`."""
    directory = Path(os.environ[DIRECTORY])
    directory.mkdir(exist_ok=True)
    file = os.open(directory / f"{name}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
    finally:
        os.close(file)


def row_name(input_ids: Array, logprobs: Array, own: Array) -> str:
    """Name of a row by its tokens and the log-probs of those that the policy sampled: random enough to be unique."""
    state = hashlib.blake2b(np.ascontiguousarray(input_ids, dtype=np.int32).tobytes(), digest_size=12)
    state.update(np.ascontiguousarray(logprobs[own.astype(bool)], dtype=np.float32).tobytes())
    return state.hexdigest()


def rows_of(delivery: Delivery) -> dict[str, list[str]]:
    """Policy → names of the rows of a delivered group."""
    rows: dict[str, list[str]] = {}
    for trajectory in codec.decode(bytes(delivery.group), Group).trajectories:
        for segment in trajectory.segments:
            for policy in segment.policies:
                name = row_name(codec.array(segment.input_ids), codec.array(segment.logprobs), codec.array(segment.loss_mask))
                rows.setdefault(policy, []).append(name)
    return rows


def watch_acknowledgements() -> None:
    """From now on every delivery that an outbox forgets because Dataflow acknowledged it is written down."""
    forget = Outbox.acknowledge

    def acknowledge(self: Outbox, delivery_ids: list[str]) -> list[Delivery]:
        gone = forget(self, delivery_ids)
        for delivery in gone:
            note("acknowledged", {"lease": delivery.lease_id, "attempt": delivery.attempt, "rows": rows_of(delivery)})
        return gone

    Outbox.acknowledge = acknowledge  # type: ignore[method-assign]


if "raas" in sys.argv:
    watch_acknowledgements()
