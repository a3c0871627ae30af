"""docs/metrics.md from the table of names (`protocol/metrics.py`)."""

from __future__ import annotations

import inspect

from astraflow.lib.prometheus import BUCKETS, LEFT_OUT, MAX_SERIES, PATH
from astraflow.protocol import metrics
from astraflow.protocol.metrics import METRICS, NAMESPACES, Metric

INTRO = f"""Where the numbers are:

- `<run_dir>/metrics.jsonl`: one line per step and process, `{{"time", "process", "step", "values": {{name: number}}}}` and tags: `model`,
  `timeline` of the policy; `over: "interval"` = since the last such line. `step` is the policy's version. The charts of the
  dashboard are drawn from it.
- `<run_dir>/tensorboard/<process>/[<tag>/…]`: the same for `tensorboard --logdir <run_dir>/tensorboard`. Always written.
- `GET {PATH}` of Dataflow, of every rollout service and of every trainer's sender agent, in Prometheus' text format: the column
  *Prometheus* below. Every series carries `process` (as in metrics.jsonl); a word in braces becomes a label. At most {MAX_SERIES}
  series per name; `{LEFT_OUT}` counts what is left out. Buckets of histograms: {", ".join(map(str, BUCKETS))}.
  Where a token is asked for, a scraper sends it as `authorization: {{type: Bearer, credentials_file: <run_dir>/token}}`.
- `metrics` in `GET /status` of Dataflow and of a rollout service; `steps` in that of Dataflow (the trainers' last steps).

The column *logged by* names kinds of processes: `dataflow`, `raas` (every rollout service), `trainer` (with its sender agent).
"""
COLUMNS = "| name | logged by | kind | unit | Prometheus | meaning |\n|---|---|---|---|---|---|"


def metrics_page() -> str:
    """Every name, by namespace."""
    summary = (inspect.getdoc(metrics) or "").partition("\n\n")[2]
    out = ["# The metrics\n", summary, "", INTRO]
    for namespace, about in NAMESPACES.items():
        out += [f"## `{namespace}/`\n", about, "", COLUMNS]
        out += [_row(metric) for metric in METRICS if metric.namespace == namespace]
        out.append("")
    return "\n".join(out).rstrip() + "\n"


def _row(metric: Metric) -> str:
    shown = f"`{metric.prometheus}`" if metric.shown_by else "–"
    if metric.shown_by and metric.shown_by != metric.by:
        shown += f" ({', '.join(metric.shown_by)})"
    meaning = metric.meaning + (f"; {metric.when}" if metric.when else "")
    name = f"`{metric.name}`" if metric.kind != "histogram" else "–"
    cells = [name, ", ".join(metric.by), metric.kind, metric.unit or "–", shown, meaning]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
