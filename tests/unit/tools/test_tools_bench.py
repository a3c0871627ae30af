"""The parts of the benches that can be wrong without anybody noticing: verification, and what is made of the numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console

from astraflow.dataflow.admission import examine
from astraflow.dataflow.collate import Item, collate
from astraflow.protocol import codec
from astraflow.protocol.batch import Batch
from astraflow.protocol.errors import UnknownName
from astraflow.protocol.rollout import Lease, Serving
from astraflow.tools import bench, bench_dataflow
from astraflow.tools.bench_dataflow import BATCH, GROUP, PayloadWrong, Trainer, growth
from astraflow.tools.bench_peers import MODEL, contents, encoded_group, keys, rewards

TOKENS, SEED, VERSION = 16, 7, 5


def trainer() -> Trainer:
    found: Any = Trainer(client=None, dataflow=None, tokens=TOKENS, seed=SEED, max_staleness=2, version=VERSION)  # type: ignore[arg-type]
    return found


def batch(number: Callable[[int], int] = lambda i: i, version: Callable[[int], int] = lambda i: VERSION - i % 3) -> Batch:
    """A right one unless told otherwise: groups `number(i)`, made under `version(i)`."""
    items = []
    for i in range(BATCH // GROUP):
        lease = Lease(
            lease_id=f"abc-{number(i):07d}", task_id="t", workflow_id="w", n_samples=GROUP, data={}, seed=SEED * 1_000_003 + number(i)
        )
        data = encoded_group(lease, Serving(timeline=0, version=version(i), digest=""), TOKENS)
        (share,) = examine(data, lease.lease_id, 1, GROUP, [MODEL], []).shares
        assert share.stats is not None
        items.append(Item(data, share.stats, False))
    return collate(items, MODEL, 0, VERSION)


def test_a_batch_that_is_what_the_peers_made_passes_once() -> None:
    one = trainer()
    one._verify(batch())
    one._verify(batch(lambda i: i + 1000))
    with pytest.raises(PayloadWrong, match="trained before"):
        one._verify(batch(lambda i: i + 1000 + (i == 7) * 32 - (i == 8)))


@pytest.mark.parametrize("family", ["tokens", "rows"])
def test_one_wrong_value_in_any_column_is_noticed(family: str) -> None:
    right = batch()
    for name in getattr(right, family):
        wrong = msgspec.msgpack.decode(codec.encode(right), type=Batch)
        values = codec.array(getattr(wrong, family)[name]).copy()
        values[37] = not values[37] if values.dtype == bool else values[37] + 1
        getattr(wrong, family)[name] = codec.column(values, getattr(wrong, family)[name].dtype)
        with pytest.raises(PayloadWrong):
            trainer()._verify(wrong)


def test_groups_that_are_too_old_split_or_of_another_name_are_noticed() -> None:
    with pytest.raises(PayloadWrong, match="staleness"):
        trainer()._verify(batch(version=lambda i: VERSION - 3))
    twice = batch(lambda i: max(i, 1))
    with pytest.raises(PayloadWrong, match="trained before"):
        trainer()._verify(twice)
    other = batch()
    other.trajectory_ids[3], other.trajectory_ids[4] = other.trajectory_ids[4], other.trajectory_ids[3]
    with pytest.raises(PayloadWrong, match="members"):
        trainer()._verify(other)
    other = batch()
    other.version += 1
    with pytest.raises(PayloadWrong, match="name"):
        trainer()._verify(other)


def test_no_two_trajectories_have_the_same_contents() -> None:
    key = keys(np.repeat(np.arange(500), 8), np.tile(np.arange(8), 500), np.repeat(np.arange(4), 1000))
    ids, logprobs = contents(key, 64)
    assert len({row.tobytes() for row in ids}) == len({row.tobytes() for row in logprobs}) == 4000
    assert ids.min() >= 0
    assert ids.max() < 2**15
    assert (logprobs[:, :8] == 0).all()
    assert (logprobs <= 0).all()
    assert np.array_equal(rewards(key).astype(np.float32).astype(np.float64), rewards(key))
    assert len(set(rewards(key).tolist())) > 2000
    assert not np.array_equal(contents(keys([1], [0], [0]), 64)[0], contents(keys([1], [0], [1]), 64)[0]), "the version is part of it"


def test_growth_is_that_of_the_last_half_and_one_sample_decides_nothing() -> None:
    level = [10] * 50 + [100] * 50
    assert growth(level) == 0.0
    level[-1] = 1000
    assert growth(level) == 0.0
    assert growth([100] * 50 + [100 + i for i in range(50)]) == pytest.approx(147 / 102 - 1)
    assert growth([5, 5]) == 0.0


def test_a_bench_is_shown_and_written_with_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = bench.Outcome({"fast": 12.5, "slow": 2.0}, {"fast": bench.Limit(at_least=10), "slow": bench.Limit(at_most=1)}, {"n": 3})
    monkeypatch.setattr(bench, "BENCHES", bench.Registry("benchmarks", {}))
    bench.BENCHES.register("two")(lambda quick, say: outcome)
    console = Console(record=True, width=80)
    assert bench.run("two", tmp_path / "new" / "out.json", False, console) is outcome
    shown = console.export_text()
    assert "≥ 10" in shown
    assert "≤ 1" in shown
    assert (shown.count("yes"), shown.count("no ")) == (1, 1)
    written = json.loads((tmp_path / "new" / "out.json").read_text())
    assert written["bench"] == "two"
    assert written["results"] == outcome.results
    assert written["checked"] == {"n": 3}
    assert set(written["machine"]) == {"cores", "cpu", "python", "commit"}
    with pytest.raises(UnknownName, match="benchmark 'tow' is unknown"):
        bench.run("tow", None, True, console)


def test_every_result_of_the_dataflow_bench_has_its_limit() -> None:
    assert set(bench_dataflow.LIMITS) == {
        "trajectories_per_s_512", "trajectories_per_s_4096", "cpu_s_per_1000_512", "batch_ms_p50_512", "batch_ms_p50_4096",
        "ledger_cost", "rss_growth",
    }  # fmt: skip
    assert bench.BENCHES.names() == ["dataflow", "engine", "train", "weights"]
