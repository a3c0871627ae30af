"""What data algorithms do to the tiny job: `make evidence ARGS=data-algorithms`, or `python -m astraflow.tools.algorithms_evidence`.

Every variant is `astraflow run recipes/tiny-sort.yaml` with its overrides, once per seed, one after the other. The numbers come from
each run's own ledger and report; they go to `evidence/data-algorithms.json`, with commit and machine, and from there into the table of
`docs/data-algorithms.md`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from astraflow.dataflow.logbook import Logbook
from astraflow.protocol.errors import UserError
from astraflow.tools.replay import as_logged, read_log
from astraflow.tools.report import Curve, Report, metric_rows
from astraflow.tools.report_evidence import commit, machine, say

RECIPE = "recipes/tiny-sort.yaml"
SEEDS = (0, 1, 2)
RUN_DEADLINE_S = 300.0
LAST_STEPS = 5
POLICY = "solver"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


@dataclass(frozen=True)
class Variant:
    """A row of the table."""

    name: str
    title: str
    overrides: tuple[str, ...]


VARIANTS = (
    Variant("keep_all", "baseline: `keep_all`, `accept_all`", ()),
    Variant("dynamic_sampling", "dynamic sampling: `filter_zero_adv`", ("dataflow.policies.filter=filter_zero_adv",)),
    Variant("greso", "`greso`", ("dataflow.policies.curator=greso",)),
    Variant(
        "greso_dynamic_sampling",
        "`greso` and `filter_zero_adv`",
        ("dataflow.policies.curator=greso", "dataflow.policies.filter=filter_zero_adv"),
    ),
    Variant("filter_solved", "`filter_solved`, `threshold: 0.8`", ("dataflow.policies.curator={name: filter_solved, threshold: 0.8}",)),
    Variant("replay", "replay of a quarter", ("dataflow.buffer.replay.ratio=0.25",)),
    Variant("edf_drop", "`edf`, `treatment: drop`", ("dataflow.buffer.treatment=drop", "dataflow.buffer.max_groups=32")),
    Variant(
        "fifo_drop",
        "`fifo`, `treatment: drop`",
        ("dataflow.buffer.treatment=drop", "dataflow.buffer.max_groups=32", "dataflow.buffer.order=fifo"),
    ),
)
"""Orders are compared where the queue runs over: paced, hardly anything grows stale and the order hardly matters."""


class Measured(msgspec.Struct, kw_only=True):
    """One run."""

    variant: str
    seed: int
    steps: int
    groups_made: int
    """That came back and came to an end."""
    groups_trained: int
    groups_replayed: int
    """Uses of groups that were trained on before."""
    rollouts_per_trained_group: float
    """Trajectories generated per group in a batch, replayed ones included."""
    rollouts_per_varied_group: float
    """… per group in a batch whose rewards differ."""
    dropped: dict[str, int]
    """Reason → groups."""
    skipped: int
    """Prompts that a curator did not want."""
    forced: int
    length_trained: float | None
    """Mean sampled tokens per trajectory."""
    length_dropped: float | None
    reward_trained: float | None
    reward_dropped: float | None
    reward_last: float
    """Mean training reward of the last steps."""
    heldout_first: float
    heldout_last: float
    """Average accuracy over 4 samples of tasks that are never trained on."""
    wall_s: float


class Evidence(msgspec.Struct, kw_only=True):
    """`evidence/data-algorithms.json`."""

    command: str
    date: str
    commit: str
    machine: dict[str, str | int | float | None]
    runs: list[Measured]


def measure(variant: Variant, seed: int, extra: Sequence[str] = ()) -> Measured:
    """One run in a scratch directory. Raises UserError when it did not end in good order."""
    with tempfile.TemporaryDirectory(prefix="astraflow-algorithms-") as scratch:
        run_dir = Path(scratch) / "run"
        argv = [sys.executable, "-m", "astraflow", "run", RECIPE, f"experiment.run_dir={run_dir}", f"experiment.seed={seed}"]
        done = subprocess.run(
            [*argv, *variant.overrides, *extra], timeout=RUN_DEADLINE_S, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        if done.returncode != 0 or not (run_dir / "report.json").is_file():
            raise UserError(f"evidence {variant.name} seed {seed}: the run ended with {done.returncode}: {done.stdout[-2000:].decode()}")
        return read(variant.name, seed, run_dir)


def read(variant: str, seed: int, run_dir: Path) -> Measured:
    """The numbers of a run from its directory."""
    report = msgspec.json.decode((run_dir / "report.json").read_bytes(), type=Report)
    (real,) = as_logged(read_log(run_dir))
    with Logbook(run_dir) as book:
        used = [(share.uses, share.stats is not None and not share.stats.all_equal) for share in book.shares("WHERE s.uses > 0")]
    in_batches = real.kept.groups + sum(uses for uses, _ in used)
    varied = real.kept.varied + sum(uses for uses, differs in used if differs)
    ended = real.seen.groups - real.under_way
    spent = real.kept.trajectories + real.dropped.trajectories
    numbers = [row["values"] for row in metric_rows(run_dir / "metrics.jsonl") if row.get("process") == "dataflow"]
    reward, heldout = report.reward[POLICY], report.accuracy["heldout"]
    return Measured(
        variant=variant,
        seed=seed,
        steps=report.steps[POLICY],
        groups_made=ended,
        groups_trained=real.kept.groups,
        groups_replayed=in_batches - real.kept.groups,
        rollouts_per_trained_group=spent / in_batches,
        rollouts_per_varied_group=spent / varied,
        dropped=real.reasons,
        skipped=int(max((values.get("rollout/curator_skipped", 0.0) for values in numbers), default=0.0)),
        forced=int(max((values.get("rollout/curator_forced", 0.0) for values in numbers), default=0.0)),
        length_trained=real.kept.length,
        length_dropped=real.dropped.length,
        reward_trained=real.kept.reward,
        reward_dropped=real.dropped.reward,
        reward_last=_last(reward),
        heldout_first=heldout.values[0],
        heldout_last=heldout.values[-1],
        wall_s=report.wall_s,
    )


def _last(curve: Curve) -> float:
    values = curve.values[-LAST_STEPS:]
    return sum(values) / len(values)


# --- the table --------------------------------------------------------------------------------------------------------------


def page(text: str, evidence: Evidence) -> str:
    """`docs/data-algorithms.md` with the table between its markers. Raises UserError when they are not there."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f"docs/data-algorithms.md: expected the markers {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table(evidence)}{END}{after}"


def table(evidence: Evidence) -> str:
    """One row per variant: means over the seeds, with the smallest and largest for what is noisy."""
    head = [
        "rollouts per trained group", "… per one with variance", "dropped of made", "length trained / dropped",
        "reward trained / dropped", "last training reward", "held-out accuracy",
    ]  # fmt: skip
    lines = [f"| | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    for variant in VARIANTS:
        runs = [run for run in evidence.runs if run.variant == variant.name]
        if runs:
            lines.append(f"| {variant.title} | {' | '.join(_cells(runs))} |")
    seeds = sorted({run.seed for run in evidence.runs})
    steps = ", ".join(str(count) for count in sorted({run.steps for run in evidence.runs}))
    first = [run.heldout_first for run in evidence.runs]
    machine_of = evidence.machine
    note = (
        f"Means over seeds {', '.join(map(str, seeds))} (smallest … largest); {steps} steps of 8 groups of 8 from 64 prompts; held-out"
        f" accuracy before training {sum(first) / len(first):.2f}. Measured {evidence.date} at commit {evidence.commit} on"
        f" {machine_of['cores']} cores ({machine_of['cpu']}) with `{evidence.command}`; every run: `evidence/data-algorithms.json`."
    )
    return "\n".join([*lines, "", note, ""])


def _cells(runs: Sequence[Measured]) -> list[str]:
    def mean(of: Callable[[Measured], float | None], digits: int) -> str:
        known = [value for run in runs if (value := of(run)) is not None]
        return f"{sum(known) / len(known):.{digits}f}" if known else "–"

    def spread(of: Callable[[Measured], float], digits: int) -> str:
        values = [of(run) for run in runs]
        return f"{sum(values) / len(values):.{digits}f} ({min(values):.{digits}f} … {max(values):.{digits}f})"

    dropped = sum(sum(run.dropped.values()) for run in runs) / max(sum(run.groups_made for run in runs), 1)
    return [
        mean(lambda run: run.rollouts_per_trained_group, 2),
        mean(lambda run: run.rollouts_per_varied_group, 2),
        f"{dropped:.0%}",
        f"{mean(lambda run: run.length_trained, 2)} / {mean(lambda run: run.length_dropped, 2)}",
        f"{mean(lambda run: run.reward_trained, 2)} / {mean(lambda run: run.reward_dropped, 2)}",
        spread(lambda run: run.reward_last, 2),
        spread(lambda run: run.heldout_last, 2),
    ]


def main(arguments: Sequence[str] = ()) -> int:
    """Measure all variants, or, with `--table`, write the table again from what is measured."""
    out, doc = Path("evidence") / "data-algorithms.json", Path("docs") / "data-algorithms.md"
    if list(arguments) not in ([], ["--table"]):
        sys.stderr.write("usage: python -m astraflow.tools.algorithms_evidence [--table]\n")
        return 2
    if not arguments:
        runs = []
        for seed in SEEDS:
            for variant in VARIANTS:
                runs.append(measure(variant, seed))
                say(f"ok   {variant.name} seed {seed}: {runs[-1].rollouts_per_trained_group:.2f} rollouts per trained group")
        evidence = Evidence(
            command="make evidence ARGS=data-algorithms",
            date=datetime.now(UTC).strftime("%Y-%m-%d"),
            commit=commit(),
            machine=machine(),
            runs=runs,
        )
        out.parent.mkdir(exist_ok=True)
        out.write_bytes(msgspec.json.format(msgspec.json.encode(evidence), indent=1) + b"\n")
    found = msgspec.json.decode(out.read_bytes(), type=Evidence)
    doc.write_text(page(doc.read_text(encoding="utf-8"), found), encoding="utf-8")
    say(f"wrote {doc}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
