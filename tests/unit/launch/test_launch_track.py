"""Trackers get every line, and nobody waits for one."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from astraflow.config.experiment import Resolved, load_experiment
from astraflow.launch import track
from astraflow.launch.names import check_names
from astraflow.launch.track import Feed, checked, summary, tracking, unsent
from astraflow.lib.metrics import Metrics
from astraflow.lib.tracking import TRACKERS, TrackedRun
from astraflow.protocol.errors import ConfigError, Conflict, UserError

FLOW = Path(__file__).parents[2] / "flow"
LINES = "flow_tracker:Lines"


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FLOW))


def feed(run_dir: Path, ending: threading.Event, **options: Any) -> Feed:
    def about(kept: dict[str, str]) -> TrackedRun:
        return TrackedRun("r-1", "r", run_dir, {}, kept)

    return Feed(LINES, lambda: TRACKERS.resolve(LINES)(options), about, run_dir, ending)


def taken(run_dir: Path, name: str = "lines.jsonl") -> tuple[list[str], list[list[Any]]]:
    """(ids of every time that it was opened, lines)."""
    rows = [json.loads(line) for line in (run_dir / name).read_text().splitlines()]
    return [row["id"] for row in rows if isinstance(row, dict)], [row for row in rows if isinstance(row, list)]


def ended() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@contextmanager
def running(wanted: Feed) -> Iterator[None]:
    thread = threading.Thread(target=wanted.run, daemon=True)
    thread.start()
    yield
    wanted.ending.set()
    thread.join(60.0)
    assert not thread.is_alive()


def test_every_line_arrives_once_in_order_over_two_lives_that_know_the_same_id(tmp_path: Path) -> None:
    trainer, flow = Metrics(tmp_path, "trainer:m", tensorboard=False), Metrics(tmp_path, "dataflow", tensorboard=False)
    trainer.log(1, {"reward/mean": 0.5, "policy/grad_norm": float("nan")}, model="m", timeline=0)
    flow.log(1, {"rollout/tokens_mean_trained": 3}, model="m", over="interval")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"torn": \n[1]\n')
    first = feed(tmp_path, ended())
    first.run()
    assert summary(first).endswith(" 0 left, 2 broken lines dropped")
    with pytest.raises(Conflict, match="is fed by another process"):
        feed(tmp_path, ended())
    first.release()
    trainer.log(2, {"reward/mean": 0.75}, model="m", timeline=0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"half a line": ')  # its process is still writing
    feed(tmp_path, ended()).run()
    ids, lines = taken(tmp_path)
    assert len(ids) == 2
    assert len(set(ids)) == 1
    assert [[series, step, values] for series, step, _, values in lines] == [
        ["trainer:m", 1, {"reward/mean": 0.5}],
        ["dataflow/m/interval", 1, {"rollout/tokens_mean_trained": 3.0}],
        ["trainer:m", 2, {"reward/mean": 0.75}],
    ]


def test_a_tracker_that_fails_is_made_anew_and_gets_the_rest_and_no_key_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics(tmp_path, "dataflow", tensorboard=False)
    for step in range(5):
        metrics.log(step, {"rollout/made": step})
    caplog.set_level(logging.WARNING)
    wanted = feed(tmp_path, threading.Event(), fails=3)
    with running(wanted):
        end = time.monotonic() + 60.0
        while wanted.left_bytes and time.monotonic() < end:
            time.sleep(0.02)
    assert (wanted.failures, wanted.left_bytes) == (1, 0)
    ids, lines = taken(tmp_path)
    assert len(set(ids)) == 1
    assert [step for _, step, _, _ in lines] == [0, 1, 2, 0, 1, 2, 3, 4], "from its last written place on"
    assert "the service is away" in caplog.text
    assert "0123456789abcdef" not in caplog.text


def resolved(tmp_path: Path, *overrides: str) -> Resolved:
    recipe = tmp_path / "config.yaml"
    recipe.write_text(
        f"experiment: {{name: r, run_dir: '{tmp_path}'}}\nmodels: {{default: {{path: '{tmp_path}'}}}}\n"
        "train_dataset: {loader: addition}\nworkflow: {workflow: rlvr, reward: last_number}\ntrainer: {backend: local}\n"
        "trackers: {'flow_tracker:Hangs': {}, 'flow_tracker:Lines': {file: fine.jsonl}}\n"
    )
    return load_experiment([recipe], overrides)


def test_one_that_hangs_delays_neither_the_run_nor_the_others_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(track, "END_S", 3.0)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(FLOW), *filter(None, sys.path)]))
    experiment, said = resolved(tmp_path).experiment, list[str]()
    metrics = Metrics(tmp_path, "dataflow", tensorboard=False)
    with tracking(experiment, tmp_path, said.append):
        metrics.log(0, {"rollout/made": 1})
        end = time.monotonic() + 60.0
        while not (tmp_path / "lines.jsonl").exists() or not taken(tmp_path)[1] or not (tmp_path / "fine.jsonl").exists():
            assert time.monotonic() < end, (tmp_path / "logs" / "track.log").read_text()
            time.sleep(0.02)
        metrics.log(1, {"rollout/made": 2})
        left = time.monotonic()
    assert time.monotonic() - left < 30.0
    assert [step for _, step, _, _ in taken(tmp_path, "fine.jsonl")[1]] == [0, 1]
    assert list(unsent(experiment.trackers, tmp_path)) == ["flow_tracker:Hangs"]
    (line,) = said
    assert line.startswith("trackers.flow_tracker:Hangs: ")
    assert "are not sent; `astraflow track" in line


def test_without_trackers_nothing_is_started(tmp_path: Path) -> None:
    experiment = resolved(tmp_path).experiment
    experiment.trackers = {}
    with tracking(experiment, tmp_path, pytest.fail):
        assert not (tmp_path / "trackers").exists()


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("wandb", {"projct": "x"}, "trackers.wandb: tracker 'wandb' options.projct: unknown option (did you mean 'project'?)"),
        ("wandb", {"api_key": "k"}, "options.api_key: unknown option"),
        ("wandb", {"mode": "ofline"}, "options.mode: 'ofline' is not one of online, offline (did you mean 'offline'?)"),
        ("flow_tracker:Linse", {}, "flow_tracker:Linse: 'flow_tracker:Linse': flow_tracker has no 'Linse' (did you mean 'Lines'?)"),
    ],
)
def test_wrong_options_are_one_line_before_anything_starts(tmp_path: Path, name: str, options: dict[str, str], said: str) -> None:
    experiment = resolved(tmp_path).experiment
    experiment.trackers = {name: options}
    with pytest.raises(UserError) as caught:
        checked(experiment)
    assert said in str(caught.value)


def test_an_unknown_tracker_names_the_closest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trackers.wandbb: 'wandbb' is unknown; did you mean wandb\?"):
        check_names(resolved(tmp_path, "trackers.wandbb={}"))
