"""The table of names agrees with itself."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from astraflow.protocol.metrics import DATAFLOW, METRICS, NAMESPACES, RAAS, TRAINER, find, kind_of

SPEC = "reward/ rollout/ buffer/ staleness/ loss/ policy/ mismatch/ weights/ raas/ time/ perf/ eval/"


def test_every_name_belongs_to_a_namespace_of_the_specification_and_is_told_once_per_process() -> None:
    assert [f"{name}/" for name in NAMESPACES] == SPEC.split()
    assert {metric.namespace for metric in METRICS} == set(NAMESPACES)
    once = Counter((metric.name, by) for metric in METRICS for by in metric.by)
    assert max(once.values()) == 1, once.most_common(3)
    for metric in METRICS:
        assert metric.meaning, metric.name
        assert set(metric.by) <= {DATAFLOW, RAAS, TRAINER}
        assert set(metric.shown_by) <= set(metric.by)


def test_a_family_has_one_row_per_process_and_the_shape_that_prometheus_wants() -> None:
    shown = Counter((metric.prometheus, by) for metric in METRICS for by in metric.by if by in metric.shown_by)
    assert max(shown.values()) == 1, [family for family, count in shown.items() if count > 1]
    for metric in METRICS:
        assert re.fullmatch(r"astraflow_[a-z0-9]+(_[a-zA-Z0-9]+)*", metric.prometheus), metric.prometheus
        assert metric.prometheus.endswith("_total") == (metric.kind == "counter")
        assert len(set(metric.labels)) == len(metric.labels)
        assert not {"le", "process"} & set(metric.labels)


@pytest.mark.parametrize(
    ("name", "process", "row", "labels"),
    [
        ("rollout/dropped/error:workflow.own kind", "dataflow", "rollout/dropped/{reason}", {"reason": "error:workflow.own kind"}),
        ("weights/pull_s/solver", "raas-3", "weights/pull_s[/{model}]", {"model": "solver"}),
        ("weights/pull_s", "raas-3", "weights/pull_s[/{model}]", {"model": None}),
        ("weights/streamed_bytes", "trainer:solver", "weights/streamed_bytes", {}),
        ("weights/full_bytes", "trainer:solver", "weights/{mode}_bytes", {"mode": "full"}),
        ("raas/error/tool/time_out", "guest", "raas/error/{boundary}/{kind}", {"boundary": "tool", "kind": "time_out"}),
        ("raas/engine/steps", "raas-0", "raas/engine/steps[/{model}]", {"model": None}),
        ("raas/engine/mine", "raas-0", "raas/engine/{own}[/{model}]", {"own": "mine", "model": None}),
        ("rollout/mine", "raas-0", "rollout/{own}", {"own": "mine"}),
        ("eval/a/b/avg@4", "dataflow", "eval/{dataset}/avg@{n}", {"dataset": "a/b", "n": "4"}),
        ("reward/mean", "raas-0", None, {}),
    ],
)
def test_a_logged_name_is_found_under_its_row(name: str, process: str, row: str | None, labels: dict[str, str | None]) -> None:
    metric = find(name, kind_of(process))
    assert (metric.name if metric is not None else None) == row
    if metric is not None:
        match = metric.pattern.fullmatch(name)
        assert match is not None
        assert match.groupdict() == labels
