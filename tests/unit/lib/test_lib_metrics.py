from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from astraflow.lib.jsonl import read_jsonl
from astraflow.lib.metrics import Counter, Mean, Metrics
from astraflow.lib.tensorboard import crc32c


def test_each_log_is_one_line_with_step_process_and_tags(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, "trainer:default")
    metrics.log(3, {"loss": 0.5, "reward/mean": 1}, model="default")
    metrics.log(4, {"loss": float("nan"), "kl": float("inf")})
    metrics.close()
    metrics.log(5, {"loss": 1.0})
    metrics.close()
    first, second = read_jsonl(tmp_path / "metrics.jsonl")
    assert first["time"] > 1e9
    assert {key: first[key] for key in ("process", "step", "model")} == {"process": "trainer:default", "step": 3, "model": "default"}
    assert first["values"] == {"loss": 0.5, "reward/mean": 1.0}
    assert second["values"] == {"loss": None, "kl": None}
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_several_processes_append_to_one_file(tmp_path: Path) -> None:
    writers = [Metrics(tmp_path, f"raas{index}", tensorboard=False) for index in range(4)]

    def write(metrics: Metrics) -> None:
        for step in range(50):
            metrics.log(step, {f"value/{name}": float(name) for name in range(50)})
        metrics.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, writers))
    rows = list(read_jsonl(tmp_path / "metrics.jsonl"))
    assert len(rows) == 200
    assert [row["step"] for row in rows if row["process"] == "raas2"] == list(range(50))


def test_tensorboard_reads_the_event_file(tmp_path: Path) -> None:
    loader: Any = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    metrics = Metrics(tmp_path, "trainer:default")
    metrics.log(0, {"reward/mean": 0.25, "größe": -2.0})
    metrics.log(1 << 33, {"reward/mean": 0.5, "broken": float("nan")})
    metrics.close()
    (path,) = (tmp_path / "tensorboard" / "trainer_default").iterdir()
    read: list[tuple[int, str, float]] = []
    for event in loader.RawEventFileLoader(str(path)).Load():
        parsed = loader.event_pb2.Event.FromString(event)
        read += [(parsed.step, value.tag, value.simple_value) for value in parsed.summary.value]
    assert read == [(0, "reward/mean", 0.25), (0, "größe", -2.0), (1 << 33, "reward/mean", 0.5)]


def test_crc32c_has_its_published_check_value() -> None:
    assert crc32c(b"123456789") == 0xE3069283


def test_counters_grow_and_means_leave_unscored_values_out() -> None:
    counter = Counter()
    counter.add("dropped/stale")
    counter.add("dropped/stale", 2)
    assert counter["dropped/stale"] == 3
    assert counter["dropped/other"] == 0
    assert counter.values() == {"dropped/stale": 3.0}

    mean = Mean()
    mean.add("reward", 1.0)
    mean.add("reward", 0.0, weight=3)
    mean.add("reward", None)
    mean.add("reward", float("nan"))
    mean.add("nothing", None)
    assert mean.take() == {"reward": 0.25}
    assert mean.take() == {}
