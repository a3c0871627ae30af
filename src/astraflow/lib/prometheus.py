"""`GET /metrics`: the numbers of a process in Prometheus' text format 0.0.4, named and typed by the table of `protocol/metrics.py`.

    # HELP astraflow_buffer_fresh_groups complete groups that wait to be served (groups)
    # TYPE astraflow_buffer_fresh_groups gauge
    astraflow_buffer_fresh_groups{process="dataflow",model="solver"} 3.0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from astraflow.protocol.metrics import METRICS, Metric, find

PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LEFT_OUT = "astraflow_left_out_series"
MAX_SERIES = 200
"""Series per family; a label whose values are made up while the run goes on must not fill the scraper's disk."""
MAX_LABEL = 120
"""Characters of a label's value."""
BUCKETS = (0, 1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Histogram:
    """Observations of whole numbers."""

    name: str
    """Of its row in the table."""
    labels: Mapping[str, str]
    counts: Mapping[int, int]
    """Value → how often."""

    def lines(self, family: str, labels: Mapping[str, str]) -> list[str]:
        """Cumulative buckets, sum and count."""
        total = sum(self.counts.values())
        out = []
        for limit in BUCKETS:
            below = sum(count for value, count in self.counts.items() if value <= limit)
            out.append(_line(f"{family}_bucket", {**labels, "le": f"{limit:g}"}, below))
        out.append(_line(f"{family}_bucket", {**labels, "le": "+Inf"}, total))
        out.append(_line(f"{family}_sum", labels, sum(value * count for value, count in self.counts.items())))
        return [*out, _line(f"{family}_count", labels, total)]


class Exposition:
    """What one process shows. A series that was shown once is shown for as long as it has a value."""

    def __init__(self, by: str, labels: Mapping[str, str], fill: Mapping[str, str] | None = None):
        """`by`: kind of process, `labels`: of every series, `fill`: for names that leave an optional part out."""
        self._by, self._labels, self._fill = by, dict(labels), dict(fill or {})
        self._known: dict[str, tuple[Metric, dict[str, str]] | None] = {}
        """Name → its row and labels; None = left out."""
        self._series: dict[str, int] = {}

    def text(self, numbers: Mapping[str, float], histograms: Iterable[Histogram] = ()) -> str:
        """The page. What the table does not declare, and what goes beyond `MAX_SERIES`, is counted instead of shown."""
        families: dict[Metric, list[str]] = {}
        left_out = 0
        for name, value in numbers.items():
            placed = self._place(name)
            if placed is None:
                left_out += 1
                continue
            metric, labels = placed
            families.setdefault(metric, []).append(_line(metric.prometheus, labels, value))
        for found in histograms:
            metric = next(each for each in METRICS if each.name == found.name and each.kind == "histogram")
            families.setdefault(metric, []).extend(found.lines(metric.prometheus, {**self._labels, **found.labels}))
        out = []
        for metric, lines in families.items():
            unit = f" ({metric.unit})" if metric.unit else ""
            help_text = f"{metric.meaning}{unit}".replace("\\", "\\\\").replace("\n", " ")
            out += [f"# HELP {metric.prometheus} {help_text}", f"# TYPE {metric.prometheus} {metric.kind}", *lines]
        out += [f"# HELP {LEFT_OUT} numbers of this process that are not on this page", f"# TYPE {LEFT_OUT} gauge"]
        out.append(_line(LEFT_OUT, self._labels, left_out))
        return "\n".join(out) + "\n"

    def _place(self, name: str) -> tuple[Metric, dict[str, str]] | None:
        if name in self._known:
            return self._known[name]
        if len(self._known) > MAX_SERIES * len(METRICS):
            return None
        metric = find(name, self._by)
        found = None
        if metric is not None and self._series.get(metric.name, 0) < MAX_SERIES:
            self._series[metric.name] = self._series.get(metric.name, 0) + 1
            match = metric.pattern.fullmatch(name)
            assert match is not None
            given = {key: value or self._fill.get(key, "") for key, value in match.groupdict().items()}
            found = metric, {**self._labels, **given}
        self._known[name] = found
        return found


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    number = "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf") if math.isinf(value) else repr(float(value))
    return f"{name}{{{shown}}} {number}"


def _escaped(text: str) -> str:
    printable = text[:MAX_LABEL].encode("utf-8", "replace").decode()  # a lone surrogate is no UTF-8
    return printable.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def route(show: Callable[[], str]) -> Route:
    """For `Server(extra_routes=…)`: behind the same token as every other route."""

    async def answer(request: Request) -> Response:
        return Response(show(), headers={"content-type": CONTENT_TYPE})

    return Route(PATH, answer)
