"""Measure what the README and the issues claim, and keep it: `make evidence`, or `python -m astraflow.tools.report_evidence [JOB …]`.

Each job is one `astraflow run` with fixed overrides; its numbers, the commit and the machine go to `evidence/<job>.json`.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from astraflow.lib.registry import Registry
from astraflow.protocol.errors import UserError
from astraflow.tools.report import Curve, Report

JOB_DEADLINE_S = 1800.0
SEEDS, SEEDS_MEAN = (0, 1, 2), 0.65
K = 20
"""Steps at each end of a curve that are compared: single steps are noisy."""


@dataclass(frozen=True)
class Job:
    """One run, and what its report must show: name of a condition → whether it holds."""

    recipe: str
    overrides: tuple[str, ...]
    conditions: Mapping[str, Callable[[Report], bool]]


class Kept(msgspec.Struct):
    """What is read of `evidence/<job>.json`."""

    report: Report


def heldout(report: Report) -> Curve:
    return report.accuracy["heldout"]


def gains(report: Report) -> dict[str, float]:
    """Per policy: how many standard errors the mean reward of the last K steps lies above that of the first K."""
    found = {}
    for policy, curve in report.reward.items():
        first, last = curve.values[:K], curve.values[-K:]
        error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / K)
        found[policy] = (statistics.mean(last) - statistics.mean(first)) / max(error, 1e-9)
    return found


def last_reward(report: Report) -> float:
    values = report.reward["default"].values[-5:]
    return sum(values) / len(values)


SOUND: dict[str, Callable[[Report], bool]] = {
    "every process ended with 0": lambda report: report.exit_code == 0 and all(p["exit_codes"] == [0] for p in report.processes.values()),
    "made = trained + dropped + in flight": lambda report: report.adds_up,
}
LEARNS: dict[str, Callable[[Report], bool]] = {
    **SOUND,
    "held-out accuracy before <= .25": lambda report: heldout(report).values[0] <= 0.25,
    "held-out accuracy after >= .55": lambda report: heldout(report).values[-1] >= 0.55,
    "mean training reward of the last five steps >= .85": lambda report: last_reward(report) >= 0.85,
    "no sample over max_staleness": lambda report: max(report.staleness["default"], default=0) <= 2,
    "run <= 6 minutes": lambda report: report.wall_s <= 360,
}
RISES: dict[str, Callable[[Report], bool]] = {
    **SOUND,
    "every policy's reward over the last 20 steps is > 2 standard errors above the first 20's": lambda r: min(gains(r).values()) > 2,
}
JOBS: dict[str, Job] = {
    **{f"quickstart-seed{seed}": Job("recipes/quickstart.yaml", (f"experiment.seed={seed}",), LEARNS) for seed in SEEDS},
    "quickstart-shuffled": Job(
        "recipes/quickstart.yaml",
        ("train_dataset.options.shuffle_answers=true",),
        {**SOUND, "held-out accuracy within +.15 of before": lambda report: heldout(report).values[-1] <= heldout(report).values[0] + 0.15},
    ),
    "gsm8k-3-steps": Job("recipes/gsm8k-smollm2.yaml", ("trainer.max_steps=3",), {**SOUND, "run < 6 minutes": lambda r: r.wall_s < 360}),
    **{f"multi-turn-seed{seed}": Job("recipes/tiny-multi-turn.yaml", (f"experiment.seed={seed}",), RISES) for seed in SEEDS},
    **{f"two-policies-seed{seed}": Job("recipes/tiny-two-policies.yaml", (f"experiment.seed={seed}",), RISES) for seed in SEEDS},
    "tiny-two-policies": Job("recipes/tiny-two-policies.yaml", (), {**SOUND, "run <= 4 minutes": lambda r: r.wall_s <= 240}),
}

STUDIES = Registry(
    "evidence studies",
    {
        "data-algorithms": "astraflow.tools.algorithms_evidence:main",
        "staleness": "astraflow.tools.staleness_evidence:main",
        "soak": "astraflow.tools.soak_evidence:main",
        "e2e": "astraflow.tools.peer_evidence:main",
    },
)
"""Jobs of many runs: functions that measure, write their own file and return 0 when what they must show holds."""


def measure(name: str, job: Job, out: Path) -> bool:
    """Run a job in a scratch directory and keep its numbers; whether all its conditions hold."""
    with tempfile.TemporaryDirectory(prefix="astraflow-evidence-") as scratch:
        run_dir = Path(scratch) / "run"
        argv = [sys.executable, "-m", "astraflow", "run", job.recipe, f"experiment.run_dir={run_dir}", *job.overrides]
        code = subprocess.run(argv, timeout=JOB_DEADLINE_S, check=False).returncode
        if not (run_dir / "report.json").is_file():
            raise UserError(f"evidence {name}: the run ended with {code} and made no report")
        report = msgspec.json.decode((run_dir / "report.json").read_bytes(), type=Report)
        shown = {condition: holds(report) for condition, holds in job.conditions.items()}
        kept = {
            "job": name,
            "command": f"astraflow run {job.recipe} {' '.join(job.overrides)}".strip(),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "commit": commit(),
            "machine": machine(),
            "shows": shown,
            "report": {**msgspec.to_builtins(report), "events": report.events[-50:]},
        }
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
        shutil.copyfile(run_dir / "report.png", out / f"{name}.png")
    for condition, holds in shown.items():
        say(f"{'ok  ' if holds else 'FAIL'} {name}: {condition}")
    return all(shown.values())


def mean_over_seeds(out: Path) -> float | None:
    """Mean final held-out accuracy of the quick start over its seeds; None while one of them is not measured."""
    final = []
    for seed in SEEDS:
        path = out / f"quickstart-seed{seed}.json"
        if not path.is_file():
            return None
        final.append(heldout(msgspec.json.decode(path.read_bytes(), type=Kept).report).values[-1])
    return sum(final) / len(final)


def commit() -> str:
    """Commit of the checkout; marked when there are changes that it does not hold (other than the evidence itself)."""
    done = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    same = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", ".", ":(exclude)evidence"], check=False)
    return (done.stdout.strip() or "unknown") + ("" if same.returncode == 0 else "-dirty")


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    model = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.processor())
    memory_kb = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {"cpu": model, "cores": os.cpu_count(), "memory_gib": round(memory_kb / 2**20, 1), "python": platform.python_version()}


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(names: list[str]) -> int:
    """Exit status 0 when everything measured holds."""
    known = [*JOBS, *STUDIES.names()]
    for name in names:
        if name not in known:
            sys.stderr.write(f"evidence: {name!r} is no job; known: {', '.join(known)}\n")
            return 2
    if not names:
        names = [name for name in known if name != "e2e" or "TRL_PYTHON" in os.environ]
        say(f"not measured, because TRL_PYTHON is not set: {', '.join(set(known) - set(names)) or 'nothing'}")
    shown = [measure(name, JOBS[name], Path("evidence")) for name in names if name in JOBS]
    shown += [STUDIES.get(name)() == 0 for name in names if name not in JOBS]
    mean = mean_over_seeds(Path("evidence"))
    if mean is not None:
        shown.append(mean >= SEEDS_MEAN)
        say(f"{'ok  ' if shown[-1] else 'FAIL'} quickstart: mean held-out accuracy over seeds {mean:.3f}, expected >= {SEEDS_MEAN}")
    return 0 if all(shown) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
