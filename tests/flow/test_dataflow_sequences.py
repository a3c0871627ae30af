"""`unit: sequences` over real processes: what the trainer makes of groups that straddle two batches."""

from __future__ import annotations

import importlib.util
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from astraflow.trainer.algorithms.objective import Objective
from astraflow.trainer.batch import ragged
from astraflow.trainer.config import PPOConfig

_spec = importlib.util.spec_from_file_location("peers", Path(__file__).with_name("peers.py"))
assert _spec is not None
assert _spec.loader is not None
peers: Any = importlib.util.module_from_spec(_spec)
sys.modules["peers"] = peers
_spec.loader.exec_module(peers)

N, BATCH, STEPS = 4, 6, 6


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Any]:
    with peers.staged(tmp_path) as made:
        made.process.dataflow.buffer.unit = "sequences"
        yield made


def test_advantages_of_split_groups_are_those_of_whole_ones(stage: Any) -> None:
    stage.dataflow()
    stage.raas("r0")
    trainer = peers.Trainer(stage.url, batch_size=BATCH)
    trainer.ready()
    batches = []
    for step in range(STEPS):
        reply = trainer.step()
        assert len(reply.batch.trajectory_ids) == BATCH
        batches.append(reply.batch)
        if step == 2:
            stage.kill("dataflow")  # between the two halves of a group
            stage.dataflow()
    assert len(set(trainer.seen)) == len(trainer.seen) == STEPS * BATCH
    status = trainer.status().ledger
    assert status.trained == STEPS * BATCH
    assert status.made == status.trained + sum(status.dropped.values()) + sum(status.in_flight.values())

    rewards: dict[str, dict[int, float]] = defaultdict(dict)
    for batch in batches:
        rows = ragged(batch).rows
        for name, reward in zip(batch.trajectory_ids, rows["reward_shaped"], strict=True):
            lease_id, _, index = name.rpartition("/")
            rewards[lease_id][int(index)] = float(reward)
    whole = {lease_id for lease_id, found in rewards.items() if len(found) == N}
    split = {lease_id for batch in batches for lease_id in batch.group_ids if sum(lease_id in b.group_ids for b in batches) > 1}
    assert len(whole & split) >= 2, "groups that came in two batches"
    oracle = {
        "grpo": lambda r: (r - r.mean()) / (r.std(ddof=1) + 1e-4),
        "dr_grpo": lambda r: r - r.mean(),
        "rloo": lambda r: np.array([r[i] - np.delete(r, i).mean() for i in range(N)]),
    }
    checked = 0
    for estimator, formula in oracle.items():
        objective = Objective(PPOConfig(advantage=estimator), max_new_tokens=16)
        for batch in batches:
            work = ragged(batch)
            plan = objective.plan(work, None)
            for row, name in enumerate(batch.trajectory_ids):
                lease_id, _, index = name.rpartition("/")
                if lease_id in whole:
                    expected = formula(np.array([rewards[lease_id][i] for i in range(N)]))[int(index)]
                    tokens = (work.row_of_token == row) & plan.mask
                    np.testing.assert_allclose(plan.advantage[tokens], expected, rtol=1e-9)
                    checked += int(tokens.sum())
    assert checked == 3 * 4 * N * len(whole), "four sampled tokens per trajectory"


def test_a_damaged_ledger_ends_the_process_as_a_mistake_of_the_user_in_one_line(stage: Any) -> None:
    stage.process.train_dataset.loader = "addition"
    ledger = Path(stage.process.run_dir) / "ledger" / "ledger.sqlite"
    ledger.parent.mkdir(parents=True)
    ledger.write_bytes(b"half of something else" * 500)
    (stage.directory / "process.json").write_bytes(msgspec.json.encode(stage.process))
    child = stage.start("dataflow", "dataflow", str(stage.directory / "process.json"), "0")
    assert child.wait(60) == 2
    log = (stage.directory / "dataflow.log").read_text()
    (line,) = [line for line in log.splitlines() if "ledger.sqlite is damaged" in line]
    assert "start a new run directory" in line
    assert "Traceback" not in log
