"""What two rooms must agree on: log-probs of the engine and the trainer, statistics of Dataflow and the trainer's advantages."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.dataflow.admission import make_share
from astraflow.dataflow.collate import Item, collate
from astraflow.protocol import codec
from astraflow.protocol.batch import Batch
from astraflow.protocol.rollout import Trajectory
from astraflow.trainer.algorithms.objective import Objective
from astraflow.trainer.backends.local import LocalBackend
from astraflow.trainer.batch import ragged
from astraflow.trainer.config import PPOConfig, TrainEngineConfig
from astraflow.weights.config import ModelConfig
from astraflow.workflows.api import ModelRequest

sys.path.insert(0, str(Path(__file__).parents[2]))
from oracle import VOCABULARY, Published, finish

_spec = importlib.util.spec_from_file_location("groups_for_trainer", Path(__file__).parents[1] / "dataflow" / "groups.py")
assert _spec is not None
assert _spec.loader is not None
made = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(made)

GROUP_RELATIVE = ("grpo", "dr_grpo", "rloo")


def test_what_the_engine_has_sampled_has_ratio_one_in_the_trainer_at_any_temperature(
    tmp_path: Path, sample: Any, batch_of: Callable[..., Batch]
) -> None:
    """Case G15 and numerics 1: at lag 0 engine and trainer agree up to kernel noise; a trainer that leaves out T does not."""
    published = Published(tmp_path)
    published.models[0].save_pretrained(tmp_path / "model")
    core, rng = published.core(), np.random.default_rng(0)
    wanted = []
    for group in range(4):
        prompt, t = rng.integers(8, VOCABULARY, 6).tolist(), (0.6, 1.0)[group % 2]
        wanted += [ModelRequest(input_ids=prompt, max_new_tokens=6, temperature=t, seed=4 * group + s) for s in range(4)]
    for number, request in enumerate(wanted):
        assert core.submit(str(number), request) is None
    found = finish(core)
    rows = [
        sample(r.input_ids, found[str(i)].output_ids, float(i % 2), found[str(i)].logprobs, temperature=r.temperature)
        for i, r in enumerate(wanted)
    ]
    batch = ragged(batch_of([rows[low : low + 4] for low in range(0, len(rows), 4)]))
    backend = LocalBackend(TrainEngineConfig(), ModelConfig(path=str(tmp_path / "model")), "bfloat16", 6)
    metrics = backend.train_step(batch, lambda: None)
    assert metrics["policy/computed_tokens"] == 96
    assert metrics["mismatch/log_ratio_max"] < 1e-3
    assert metrics["policy/clip_frac"] == 0
    assert metrics["mismatch/ess"] == pytest.approx(1, abs=1e-3)
    batch.rows["temperature"] = np.ones(len(rows), np.float32)
    assert backend.train_step(batch, lambda: None)["mismatch/log_ratio_max"] > 0.1


credits = st.lists(st.sampled_from([None, 0.0, 0.25, 1.0]), min_size=1, max_size=3)
member = st.one_of(st.just("failed"), st.tuples(credits, st.sampled_from([None, 0.0, 1.0])))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(member, min_size=1, max_size=5), min_size=1, max_size=4))
def test_advantages_sum_to_zero_over_scored_trajectories_whatever_became_of_members_and_segments(groups: list[list[Any]]) -> None:
    """Numerics 7, 8: a trajectory's value is the mean of its segments' credits; each segment's advantage uses its own."""
    items = []
    for number, members in enumerate(groups):
        trajectories = []
        for index, one in enumerate(members):
            if one == "failed":
                trajectories.append(made.trajectory(index, None, error="crash"))
                continue
            segments = [made.segment([0] * (1 + k), credit={"m": credit}) for k, credit in enumerate(one[0])]
            segments.append(made.segment([0], policy="other"))
            trajectories.append(Trajectory(index=index, segments=segments, reward=one[1]))
        group = made.group(trajectories, f"g{number}")
        stats = make_share(group, "m", []).stats
        if stats is not None:
            items.append(Item(codec.encode(group), stats, False))
    if not items:
        return
    batch = ragged(collate(items, "m", 0, 0))
    mask = batch.loss_mask()
    for name in GROUP_RELATIVE:
        advantage = Objective(PPOConfig(advantage=name), 5).plan(batch).advantage
        row = [float(advantage[mask & (batch.row_of_token == r)].mean()) for r in range(batch.n_rows)]
        trajectory = batch.rows["trajectory_index"]
        for number in np.unique(batch.rows["group_index"]):
            mine = np.flatnonzero(batch.rows["group_index"] == number)
            means = [np.mean([row[r] for r in mine if trajectory[r] == t]) for t in np.unique(trajectory[mine])]
            assert len(means) == batch.rows["group_size"][mine[0]]
            assert abs(sum(means)) < 1e-9, name
            values = [np.mean(batch.rows["credit"][mine][trajectory[mine] == t]) for t in np.unique(trajectory[mine])]
            assert np.ptp(values) > 1e-6 or not any(row[r] for r in mine), "equal rewards: exactly 0"
