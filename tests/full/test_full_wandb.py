"""The real W&B client without a network: what it wrote is read from its own file."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from astraflow.launch.track import Feed
from astraflow.lib.metrics import Metrics
from astraflow.lib.tracking import TRACKERS, TrackedRun

KEY = "0123456789abcdef0123456789abcdef01234567"
HEADER, BLOCK = 7, 32768
pytestmark = pytest.mark.full


def records(path: Path) -> Iterator[bytes]:
    """Of a `.wandb` file: a LevelDB log (blocks of 32 KiB; checksum, length, type) behind seven bytes."""
    data, place, whole = path.read_bytes(), HEADER, b""
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


def test_two_lives_are_one_run_of_wandb_and_the_key_is_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    messages: Any = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    metrics = Metrics(tmp_path, "trainer:solver", tensorboard=False)
    ended = threading.Event()
    ended.set()

    def about(kept: dict[str, str]) -> TrackedRun:
        return TrackedRun("r-1", "two-policies", tmp_path, {"experiment": {"seed": 7}}, kept)

    for step in (1, 2):
        metrics.log(step, {"reward/mean": step / 4, "policy/grad_norm": float("nan")}, model="solver")
        feed = Feed("wandb", lambda: TRACKERS.get("wandb")({"project": "p", "mode": "offline"}), about, tmp_path, ended)
        feed.run()
        assert (feed.failures, feed.left_bytes) == (0, 0)
        feed.release()

    kept = json.loads((tmp_path / "trackers" / "wandb.json").read_text())["kept"]
    names, history, axes = set(), [], set()
    for path in sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for data in records(path):
            record = messages.Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                names.add((record.run.run_id, record.run.project, record.run.display_name))
            elif kind == "history":
                row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                history.append({name: value for name, value in row.items() if not name.startswith("_") and not name.endswith("/time")})
            elif kind == "metric" and record.metric.step_metric:
                axes.add((record.metric.glob_name, record.metric.step_metric))
    assert names == {(kept["id"], "p", "two-policies")}
    assert axes == {("trainer:solver/*", "trainer:solver/version")}
    assert history == [{"trainer:solver/reward/mean": step / 4, "trainer:solver/version": step} for step in (1, 2)]
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path
