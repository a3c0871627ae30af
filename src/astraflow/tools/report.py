"""What a run did: one table, `report.json` and `report.png`, made from the files of its directory alone.

    observed.json   last answers of Dataflow and the rollout services, evaluations, events      (launch/watch.py)
    outcome.json    exit codes, restarts, what the supervisor saw                               (launch/local.py)
    metrics.jsonl   one line per step and process
    ledger/         the books: the last word on what was made, trained and dropped
    stall.json      who was stuck, if the run stalled                                           (dataflow/stall.py)

`python -m astraflow.tools.report RUN_DIR` makes the report of an earlier run again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.console import Console

from astraflow.dataflow.logbook import Logbook
from astraflow.dataflow.reasons import describe
from astraflow.dataflow.stall import StallReport, sentence
from astraflow.dataflow.stall_guard import REPORT as STALL
from astraflow.protocol.control import DataflowStatus, EvalResult, LedgerCounts, RaaSStatus
from astraflow.protocol.errors import ConfigError
from astraflow.tools.panel import SteadyConsole

T = TypeVar("T")
ACCURACY = "avg@"
WAIT, STEP = "time/wait_s", "time/step_s"


class Seen(msgspec.Struct, kw_only=True):
    """What is read of `observed.json`."""

    status: DataflowStatus | None = None
    instances: dict[str, RaaSStatus] = {}
    past_lives: list[RaaSStatus] = []
    evals: list[EvalResult] = []
    events: list[str] = []


class Ended(msgspec.Struct, kw_only=True):
    """What is read of `outcome.json`."""

    exit_code: int = 0
    failure: str = ""
    drained: bool = False
    wall_s: float = 0.0
    processes: dict[str, dict[str, Any]] = {}
    events: list[str] = []


class Syncs(msgspec.Struct, kw_only=True):
    """Weight transfers of all rollout services together."""

    full: int = 0
    full_bytes: int = 0
    delta: int = 0
    delta_bytes: int = 0
    fallbacks: int = 0
    failures: int = 0


class Curve(msgspec.Struct, kw_only=True):
    """A number over steps."""

    steps: list[int] = []
    values: list[float] = []


class Report(msgspec.Struct, kw_only=True):
    """`report.json`."""

    run_id: str
    exit_code: int
    failure: str
    drained: bool
    wall_s: float
    steps: dict[str, int]
    """Version reached, per policy."""
    rollouts: dict[str, int]
    """Rows (trajectory, policy): made, trained, dropped, in_flight, replayed."""
    dropped: dict[str, int]
    """By reason."""
    adds_up: bool
    """made = trained + dropped + in flight."""
    syncs: Syncs
    staleness: dict[str, dict[int, int]]
    """Policy → gap in versions → trained trajectories."""
    wait_share: dict[str, float]
    """Policy → share of the trainer's time spent waiting for a batch."""
    effective: dict[str, float] = {}
    """Policy → rows that carried a gradient as a share of the rows trained on (numerics 10)."""
    reward: dict[str, Curve]
    """Mean training reward per step."""
    evals: list[EvalResult]
    """As Dataflow told them."""
    accuracy: dict[str, Curve]
    """Average accuracy per evaluation set over versions, what the trainers noted included (the last one ends with the run)."""
    processes: dict[str, dict[str, Any]]
    flows: dict[str, dict[str, float]] = {}
    """Per policy, length and reward of what was generated against what was trained on, and groups spent per trained one."""
    stuck: list[str] = []
    """Who was stuck when the run stalled; empty = it did not."""
    restarts: dict[str, int] = {}
    """Whatever was started again, the children of services (engines, senders) among it."""
    events: list[str]


def started(run_dir: Path) -> bool:
    """Whether there is anything to report: the run made at least one rollout. The ledger knows it of a run too short to be seen."""
    try:
        found = books(run_dir)
    except ConfigError:  # there was one: the report says what became of it
        return True
    return found is not None and found[0].made > 0


def write(run_dir: Path, console: Console | None = None) -> Report:
    """Make report.json and report.png, print the table, and return the numbers. Raises ConfigError when there is no run."""
    report = build(run_dir)
    (run_dir / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    console = console or SteadyConsole(soft_wrap=True)
    show(report, console)
    try:
        draw(report, run_dir / "report.png")
    except ModuleNotFoundError as error:
        console.print(f"report.png is not drawn: {error.name} is not installed (pip install 'astraflow[train]')")
    return report


def build(run_dir: Path) -> Report:
    """The numbers of a run from its directory."""
    if not (run_dir / "observed.json").is_file():
        raise ConfigError(f"report {str(run_dir)!r}: not the directory of a run (it has no observed.json)")
    seen, ended = _read(run_dir / "observed.json", Seen), _read(run_dir / "outcome.json", Ended)
    rows = metric_rows(run_dir / "metrics.jsonl")
    status = seen.status
    flows: dict[str, dict[str, float]] = {}
    ledger, staleness = (status.ledger, status.staleness) if status else (None, {})
    unread, made = [], dict[str, int]()
    try:
        if (found := books(run_dir)) is not None:
            ledger, staleness, flows, made = found
    except ConfigError as error:
        unread = [f"{error}; rollouts are told as they were last seen"]
    stall = _stall(run_dir)
    dropped = dict(sorted(ledger.dropped.items())) if ledger else {}
    rollouts = {
        "made": ledger.made if ledger else 0,
        "trained": ledger.trained if ledger else 0,
        "dropped": sum(dropped.values()),
        "in_flight": sum(ledger.in_flight.values()) if ledger else 0,
        "replayed": ledger.replayed if ledger else 0,
    }
    return Report(
        run_id=status.run_id if status else run_dir.name,
        exit_code=ended.exit_code,
        failure=ended.failure,
        drained=ended.drained,
        wall_s=ended.wall_s,
        steps=versions(status, rows, made),
        rollouts=rollouts,
        dropped=dropped,
        adds_up=rollouts["made"] == rollouts["trained"] + rollouts["dropped"] + rollouts["in_flight"],
        syncs=count_syncs([*seen.past_lives, *seen.instances.values()]),
        staleness=staleness,
        wait_share=wait_shares(rows),
        effective=effective_shares(rows),
        reward=curves(rows, "reward/mean"),
        evals=seen.evals,
        accuracy=accuracies(seen.evals, rows),
        processes={**ended.processes, **senders(rows)},
        restarts=restarts(ended, seen, rows),
        flows=flows,
        stuck=[sentence(edge) for edge in stall.roots] if stall is not None else [],
        events=[*ended.events, *seen.events, *unread],
    )


def metric_rows(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl. One that a killed process or a full disk left torn costs its numbers, not the report."""
    rows = []
    for line in path.read_bytes().split(b"\n") if path.is_file() else []:
        try:
            row = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError:
            continue
        rows.append(row)
    return rows


def books(run_dir: Path) -> tuple[LedgerCounts, dict[str, dict[int, int]], dict[str, dict[str, float]], dict[str, int]] | None:
    """Counts, staleness histograms, flows and versions from the ledger's own tables; None when there is none."""
    if not (run_dir / "ledger" / "ledger.sqlite").is_file():
        return None
    with Logbook(run_dir) as log:
        return log.counts(), log.staleness(), log.flows(), log.versions()


def _stall(run_dir: Path) -> StallReport | None:
    try:
        return msgspec.json.decode((run_dir / STALL).read_bytes(), type=StallReport)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def count_syncs(lives: Iterable[RaaSStatus]) -> Syncs:
    """Sum over every process that ever served an instance."""
    total = Syncs()
    for life in lives:
        metrics = life.metrics
        total.full += int(metrics.get("weights/syncs_full", 0))
        total.full_bytes += int(metrics.get("weights/bytes_full", 0))
        total.delta += int(metrics.get("weights/syncs_delta", 0))
        total.delta_bytes += int(metrics.get("weights/bytes_delta", 0))
        total.fallbacks += int(metrics.get("weights/fallbacks", 0))
        total.failures += int(metrics.get("weights/failures", 0))
    return total


def policy_of(process: str) -> str | None:
    """`trainer-default` or `trainer:default` → `default`."""
    name = process.replace(":", "-", 1)
    return name.removeprefix("trainer-") if name.startswith("trainer-") else None


def curves(rows: Iterable[Mapping[str, Any]], name: str) -> dict[str, Curve]:
    """One trainer metric per policy over steps; a step done again after a restart counts as last done."""
    points: dict[str, dict[int, float]] = {}
    for row in rows:
        policy, value = policy_of(str(row.get("process", ""))), row.get("values", {}).get(name)
        if policy is not None and value is not None:
            points.setdefault(policy, {})[int(row["step"])] = float(value)
    return {policy: Curve(steps=sorted(at), values=[at[step] for step in sorted(at)]) for policy, at in points.items()}


def senders(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Exit code of each trainer's sender agent, as its trainer saw it; nobody saw it of a trainer that was killed."""
    codes = curves(rows, "weights/sender_exit_code")
    return {f"sender-{policy}": {"exit_codes": [int(curve.values[-1])]} for policy, curve in codes.items()}


def restarts(ended: Ended, seen: Seen, rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How often each process was started again: by the supervisor, or by the service whose child it is."""
    counts = {name: int(process["restarts"]) for name, process in ended.processes.items()}
    for policy, curve in curves(rows, "weights/sender_restarts").items():
        counts[f"sender-{policy}"] = int(max(curve.values))
    for life in [*seen.past_lives, *seen.instances.values()]:
        for model_id, engine in life.engines.items():
            name = f"engine {life.instance_id}/{model_id}"
            counts[name] = counts.get(name, 0) + engine.restarts
    return {name: count for name, count in counts.items() if count}


def wait_shares(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Share of each trainer's steps that was spent waiting for a batch; the first batch waits for the start and is left out."""
    waited: dict[str, float] = {}
    whole: dict[str, float] = {}
    seen: set[str] = set()
    for row in rows:
        policy, values = policy_of(str(row.get("process", ""))), row.get("values", {})
        if policy is None or values.get(WAIT) is None or values.get(STEP) is None:
            continue
        if policy not in seen:
            seen.add(policy)
            continue
        waited[policy] = waited.get(policy, 0.0) + values[WAIT]
        whole[policy] = whole.get(policy, 0.0) + values[STEP]
    return {policy: waited[policy] / whole[policy] for policy in waited if whole[policy] > 0}


def effective_shares(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Rows that carried a gradient as a share of all trained rows, per policy; zero-variance groups carry none (numerics 10)."""
    all_rows, live = list(rows), {}
    totals = curves(all_rows, "rollout/rows")
    for policy, curve in curves(all_rows, "policy/effective_rows").items():
        whole = sum(totals[policy].values) if policy in totals else 0.0
        if whole > 0:
            live[policy] = sum(curve.values) / whole
    return live


def versions(status: DataflowStatus | None, rows: Iterable[Mapping[str, Any]], made: Mapping[str, int]) -> dict[str, int]:
    """Newest version per policy; the last step may have come after the last look at Dataflow. `made`: what the ledger knows of, also of
    a trainer that writes no metrics here."""
    newest = {trainer.model_id: trainer.version for trainer in status.trainers} if status else {}
    newest |= {policy: max(newest.get(policy, 0), version) for policy, version in made.items()}
    for policy, curve in curves(rows, STEP).items():
        newest[policy] = max(newest.get(policy, 0), curve.steps[-1])
    return newest


def accuracies(evals: Iterable[EvalResult], rows: Iterable[Mapping[str, Any]]) -> dict[str, Curve]:
    """avg@n of every evaluation set, from Dataflow's answers and from the trainers' lines `eval/<set>/avg@n`."""
    points: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, value in row.get("values", {}).items():
            kind, _, rest = name.partition("/")
            dataset, _, metric = rest.rpartition("/")
            if kind == "eval" and metric.startswith(ACCURACY) and value is not None and policy_of(str(row.get("process", ""))) is not None:
                points.setdefault(dataset, {})[int(row["step"])] = float(value)
    for result in evals:
        found = next((value for name, value in result.metrics.items() if name.startswith(ACCURACY)), None)
        if found is not None:
            version = max((held.version for held in result.versions.values()), default=0)
            points.setdefault(result.dataset, {})[version] = found
    return {dataset: Curve(steps=sorted(at), values=[at[step] for step in sorted(at)]) for dataset, at in points.items()}


def show(report: Report, console: Console) -> None:
    """The final table."""
    console.print(f"\n{report.run_id}: {verdict(report)}", style="bold", highlight=False, markup=False, soft_wrap=True)
    for name, text in lines(report):
        console.print(f"{name:<22} {text}", highlight=False, markup=False, soft_wrap=True)


def verdict(report: Report) -> str:
    """How it ended, in a few words."""
    if report.failure:
        return f"FAILED: {report.failure}"
    took = f"after {report.wall_s:.0f} s"
    if report.exit_code:
        return f"ended {took}, but not every process with 0"
    return f"drained {took}" if report.drained else f"trained, {took}"


def lines(report: Report) -> list[tuple[str, str]]:
    """Rows of the table: a name and a text."""
    counts, syncs = report.rollouts, report.syncs
    out = [("versions", "  ".join(f"{policy} v{version}" for policy, version in report.steps.items()))]
    equation = f"made {counts['made']} = trained {counts['trained']} + dropped {counts['dropped']} + in flight {counts['in_flight']}"
    out.append(("rollouts", equation + ("  (adds up)" if report.adds_up else "  (DOES NOT ADD UP)")))
    out += [("stuck" if index == 0 else "", edge) for index, edge in enumerate(report.stuck)]
    out.append(("dropped", "  ".join(f"{reason} {count}" for reason, count in report.dropped.items()) or "none"))
    out += [("", f"{reason}: {describe(reason)}") for reason in report.dropped]
    for policy, flow in report.flows.items():
        out += flow_lines(policy, flow)
    for policy, share in report.effective.items():
        out.append((f"effective batch {policy}", f"{share:.0%} of the trained rows carried a gradient"))
    if counts["trained"]:
        out.append(("spent", f"{counts['made'] / counts['trained']:.2f} rollouts per trained one"))
    for policy, curve in report.reward.items():
        last = curve.values[-5:]
        out.append((f"reward {policy}", f"{curve.values[0]:.3f} at the first step, {sum(last) / len(last):.3f} over the last {len(last)}"))
    for dataset, curve in report.accuracy.items():
        points = zip(curve.steps, curve.values, strict=True)
        out.append((f"accuracy {dataset}", "  ".join(f"v{step} {value:.3f}" for step, value in points)))
    out.append(("weight syncs", f"full {syncs.full} ({size(syncs.full_bytes)})  delta {syncs.delta} ({size(syncs.delta_bytes)})"))
    if syncs.fallbacks or syncs.failures:
        out.append(("", f"deltas that fell back to full {syncs.fallbacks}  failed {syncs.failures}"))
    for policy, histogram in report.staleness.items():
        text = "  ".join(f"{gap}: {count}" for gap, count in sorted(histogram.items()))
        out.append((f"staleness {policy}", f"{text}   (versions behind: trained trajectories)"))
    for policy, share in report.wait_share.items():
        out.append((f"trainer wait {policy}", f"{share:.0%} of its time"))
    codes = "  ".join(f"{name} {' '.join(map(str, p['exit_codes'])) or '–'}" for name, p in report.processes.items())
    out.append(("exit codes", codes))
    out.append(("restarts", "  ".join(f"{name} {count}" for name, count in report.restarts.items()) or "none"))
    out += [("what happened" if index == 0 else "", event) for index, event in enumerate(report.events[-30:])]
    return out


def flow_lines(policy: str, flow: Mapping[str, float]) -> list[tuple[str, str]]:
    """What filters, staleness and evictions did to the data."""
    out = []
    for word, name in (("generated", "generated"), ("trained on", "trained")):
        tokens, reward = flow.get(f"rollout/tokens_mean_{name}"), flow.get(f"reward/mean_{name}")
        if tokens is not None and reward is not None:
            groups = f"{flow[f'rollout/groups_{name}']:.0f} groups"
            out.append((f"{word} {policy}", f"{groups}, {tokens:.1f} tokens and reward {reward:.3f} per rollout"))
    if (spent := flow.get("rollout/groups_per_trained_group")) is not None:
        out.append(("", f"{spent:.2f} groups for each one trained on; {flow['rollout/effective_groups']:.0f} had different rewards"))
    return out


def size(count: float) -> str:
    """Bytes for people, in powers of ten."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def draw(report: Report, target: Path) -> None:
    """report.png: reward, accuracy, staleness, and where the trainer's time went. Raises ModuleNotFoundError without matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(2, 2, figsize=(11, 7), constrained_layout=True)
    reward, accuracy, staleness, rows = axes.flat
    for policy, curve in report.reward.items():
        reward.plot(curve.steps, curve.values, marker=".", label=policy)
    reward.set(title="mean training reward", xlabel="version")
    for dataset, curve in report.accuracy.items():
        accuracy.plot(curve.steps, curve.values, marker="o", label=dataset)
    accuracy.set(title="evaluation accuracy", xlabel="version", ylim=(0, 1))
    gaps = sorted({gap for histogram in report.staleness.values() for gap in histogram})
    width = 0.8 / max(1, len(report.staleness))
    for index, (policy, histogram) in enumerate(report.staleness.items()):
        staleness.bar([gap + index * width for gap in gaps], [histogram.get(gap, 0) for gap in gaps], width, label=policy)
    staleness.set(title="staleness of trained trajectories", xlabel="versions behind", xticks=gaps)
    shares = report.wait_share
    rows.barh(list(shares), list(shares.values()), label="waiting for batches")
    rows.barh(list(shares), [1 - share for share in shares.values()], left=list(shares.values()), label="working")
    rows.set(title="trainer time", xlim=(0, 1))
    for axis in (reward, accuracy):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in axes.flat:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize="small")
    figure.suptitle(f"{report.run_id}: {verdict(report)}", fontsize="medium")
    figure.savefig(target, dpi=110)
    plt.close(figure)


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return kind()
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from None


def main(arguments: list[str]) -> int:
    """Report of an earlier run."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m astraflow.tools.report RUN_DIR\n")
        return 2
    write(Path(arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
