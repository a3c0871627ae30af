"""Curves: thinned out without losing an extreme, and the same whether they are read at once or bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from astraflow.dashboard.live import transfers
from astraflow.dashboard.series import POINTS, Series
from astraflow.lib.metrics import Metrics
from astraflow.protocol.control import Availability, RaaSStatus


def whole(series: Series) -> dict[tuple[str, str], list[list[float]]]:
    """Every curve from its beginning."""
    while (found := series.since(0))["more"]:
        pass
    return {(curve["chart"], curve["label"]): curve["points"] for curve in found["curves"]}


def joined(known: dict[tuple[str, str], list[list[float]]], news: dict[str, Any]) -> None:
    """What charts.js does with an answer."""
    for curve in news["curves"]:
        key, points = (curve["chart"], curve["label"]), curve["points"]
        old = [] if curve["whole"] else known.get(key, [])
        known[key] = [list(point) for point in [*(point for point in old if point[0] < points[0][0]), *points]]


def test_a_hundred_thousand_rows_become_some_hundred_points_that_keep_mean_and_extremes(tmp_path: Path) -> None:
    values = [((number * 7919) % 1000) / 1000 for number in range(100_000)]
    values[54_321] = 50.0
    line = '{"time":%d.0,"process":"trainer:m","step":%d,"model":"m","values":{"reward/mean":%.3f}}\n'
    (tmp_path / "metrics.jsonl").write_text("".join(line % (1000 + n, n, value) for n, value in enumerate(values)))
    points = whole(Series(tmp_path))["reward", "m mean"]
    assert POINTS / 2 <= len(points) <= POINTS
    assert max(point[4] for point in points) == 50.0
    assert min(point[3] for point in points) == 0.0
    full = points[:-1]
    per = points[1][0] - points[0][0]
    counted = values[: int(per) * len(full)]
    assert sum(point[2] for point in full) / len(full) == pytest.approx(sum(counted) / len(counted))
    assert (points[-1][1], points[-1][5]) == (99_999.0, 99_999)


def test_reading_bit_by_bit_gives_the_same_curves(tmp_path: Path) -> None:
    trainer, raas, flow = (Metrics(tmp_path, name, tensorboard=False) for name in ("trainer:m", "raas-0", "dataflow"))
    series, known, row = Series(tmp_path), dict[tuple[str, str], list[list[float]]](), 0
    for number in range(1500):
        k3 = float("nan") if number % 3 else 0.5
        trainer.log(number, {"reward/mean": number / 10, "mismatch/k3": k3, "perf/wait_share": 0.25}, model="m")
        if number % 5 == 0:
            raas.log(0, {"raas/slots": 8.0, "weights/size_bytes/m": 2e6 + number, "weights/pull_s/m": 0.5})
            raas.log(0, {"raas/slots": 8.0, "weights/size_bytes/m": 2e6 + number, "weights/pull_s/m": 0.5})
            flow.log(number, {"buffer/in_flight_trajectories": 6.0, "rollout/dropped/stale": number, "eval/set/avg@4": 0.5})
            flow.log(number, {"rollout/tokens_per_s": 7.0}, model="m")
        if number % 37 == 0:
            news = series.since(row)
            row = news["row"]
            joined(known, news)
    news = series.since(row)
    joined(known, news)
    assert known == {key: [list(point) for point in points] for key, points in whole(Series(tmp_path)).items()}
    assert series.since(news["row"])["curves"] == [], "nothing new, nothing sent"
    assert set(known) == {
        ("reward", "m mean"), ("mismatch", "m k3"), ("wait", "m wait_share"), ("idle", "idle"), ("drops", "stale"), ("eval", "set/avg@4"),
        ("size", "raas-0 m"), ("speed", "raas-0 m"),
    }  # fmt: skip
    assert {point[2] for point in known["idle", "idle"]} == {0.25}
    assert len(known["size", "raas-0 m"]) == 300, "a transfer that is told twice counts once"
    assert known["speed", "raas-0 m"][0][2] == pytest.approx(4.0)


def test_a_line_that_is_being_written_is_waited_for_and_a_broken_one_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    series = Series(tmp_path)
    assert series.since(0)["row"] == 0, "no file yet"
    good = json.dumps({"time": 1.0, "process": "trainer:m", "step": 1, "values": {"reward/mean": 1.0}})
    path.write_text("broken\n" + good[:20])
    assert (series.since(0)["row"], series.since(0)["broken_lines"]) == (0, 1)
    path.write_text("broken\n" + good + "\n")
    assert series.since(0)["row"] == 1
    path.write_text(good + "\n")
    news = series.since(5)
    assert news["row"] == 1, "the file was begun anew"
    assert news["curves"][0]["whole"]


def test_a_service_with_one_model_names_no_model_and_its_transfers_are_shown_all_the_same(tmp_path: Path) -> None:
    numbers = {"weights/size_bytes": 2e6, "weights/pull_s": 0.5, "weights/load_s": 0.1}
    raas = Metrics(tmp_path, "raas-0", tensorboard=False)
    raas.log(0, numbers)
    assert {key: points[0][2] for key, points in whole(Series(tmp_path)).items()} == {
        ("size", "raas-0 weights"): 2.0, ("speed", "raas-0 weights"): 4.0,
    }  # fmt: skip
    places = Availability(total_slots=1, free_slots=1, in_flight=0, outbox=0)
    status = RaaSStatus(
        instance_id="raas-0", state="idle", availability=places, models=["m"], serving={}, engines={}, workflows=[], metrics=numbers
    )
    (row,) = transfers(status)
    assert (row["model"], row["size_bytes"], row["load_s"], row["bytes_per_s"]) == ("m", 2e6, 0.1, 4e6)
