"""What off-policy losses make of stale samples: `make evidence ARGS=staleness`, or `python -m astraflow.tools.staleness_evidence`.

A transformer of 50,000 parameters learns from nothing to write three digits backwards, in one process: samples come from the weights of
`lag` versions ago, batches go through the trainer's own local backend with two optimizer steps each, so that the proximal policy is
neither the behaviour nor the current one. Lags 0, 2, 8 and 32 × five losses × five seeds, and a mutant that takes the proximal policy
for the behaviour policy. Numbers with 95 % confidence intervals over seeds go to `evidence/staleness.json`, whatever they say.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from astraflow.tools.report_evidence import commit, machine, say
from astraflow.tools.rows import rows_of
from astraflow.trainer.batch import RaggedBatch
from astraflow.trainer.config import OptimizerConfig, PPOConfig, TrainEngineConfig
from astraflow.weights.config import ModelConfig

LAGS, SEEDS, STEPS = (0, 2, 8, 32), (0, 1, 2, 3, 4), 200
PROMPTS, SAMPLES, LENGTH = 12, 8, 3
EQUALS, VOCABULARY = 10, 11
LEARNING_RATE = 1e-3
LOOK = 5
"""Every so many steps, the last one included, the distance to the sampling policy is measured, which costs a forward pass."""
LAST = 20
"""Steps in the final mean reward."""
T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Samples → 97.5 % quantile of Student's t with one degree of freedom less."""
LOSSES = {
    "clip": PPOConfig(),
    "tis": PPOConfig(tis_c=2.0),
    "decoupled": PPOConfig(tis_c=1e6),
    "m2po": PPOConfig(loss="m2po", m2po_tau=0.04),
    "cispo": PPOConfig(loss="cispo"),
}
"""`decoupled` weighs by prox/behav without a bound that matters, `tis` truncates it at 2 (numerics 13)."""
MUTANT = "prox for behav"
"""Clip, with behaviour log-probs overwritten by recomputed ones: the mistake of numerics 2."""


class Measured(msgspec.Struct, kw_only=True):
    """One run."""

    loss: str
    lag: int
    seed: int
    reward: list[float]
    """Mean per step."""
    clipped: float
    """Share of loss tokens whose gradient was cut, mean over the steps."""
    ess: float
    """Effective sample size over samples, of the ratios θ/behav that the loss was told; mean over the steps."""
    log_ratio: float
    """Mean |log θ/behav| against the log-probs at sampling time, whatever the loss was told."""


class Cell(msgspec.Struct, kw_only=True):
    """A loss at a lag: mean and half the width of the 95 % interval over seeds."""

    loss: str
    lag: int
    reward: tuple[float, float]
    """Of the last steps."""
    area: tuple[float, float]
    """Mean reward over all steps: how fast it learned."""
    clipped: tuple[float, float]
    ess: tuple[float, float]
    log_ratio: tuple[float, float]


def measure(loss: str, lag: int, seed: int, steps: int = STEPS) -> Measured:
    """Train once."""
    import torch

    from astraflow.trainer.backends.local import LocalBackend

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    config = TrainEngineConfig(
        algorithm=LOSSES.get(loss, LOSSES["clip"]),
        optimizer=OptimizerConfig(lr=LEARNING_RATE, warmup_steps=5),
        minibatches=2,
        max_steps=steps,
    )
    with tempfile.TemporaryDirectory(prefix="astraflow-staleness-") as directory:
        write_model(Path(directory), seed)
        backend = LocalBackend(config, ModelConfig(path=directory), "bfloat16", LENGTH)
        sampler = LocalBackend(config, ModelConfig(path=directory), "bfloat16", LENGTH).model
    generator = torch.Generator().manual_seed(seed)
    kept: deque[dict[str, Any]] = deque(maxlen=lag + 1)
    found = Measured(loss=loss, lag=lag, seed=seed, reward=[], clipped=0.0, ess=0.0, log_ratio=0.0)
    for version in range(steps):
        kept.append({name: value.clone() for name, value in backend.model.state_dict().items()})
        sampler.load_state_dict(kept[0])
        batch = sample(sampler, rng, generator, max(version - lag, 0))
        if (steps - 1 - version) % LOOK == 0:
            found.log_ratio += _distance(backend, batch) / -(-steps // LOOK)
        if loss == MUTANT:
            outline = backend.objective.outline(batch)
            batch.tokens["logprobs"][:] = backend.logprobs(outline, outline.compute)
        metrics = backend.train_step(batch, lambda: None)
        found.reward.append(float(batch.rows["rewards"].mean()))
        found.clipped += metrics.get("policy/clip_frac", 0.0) / steps
        found.ess += metrics.get("mismatch/ess", 1.0) / steps
    return found


def write_model(directory: Path, seed: int) -> None:
    """A random model of Llama's shape."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=16,
        tie_word_embeddings=True,
        initializer_range=0.08,
    )
    LlamaForCausalLM(shape).save_pretrained(directory)


def sample(model: Any, rng: np.random.Generator, generator: Any, version: int) -> RaggedBatch:
    """A batch of the model's own answers at temperature 1, with their log-probs; reward = share of digits in their place."""
    import torch

    digits = rng.integers(0, 10, (PROMPTS, LENGTH))
    prompts = np.concatenate((digits, np.full((PROMPTS, 1), EQUALS)), axis=1)
    ids = torch.from_numpy(prompts).repeat_interleave(SAMPLES, 0)
    chosen = []
    with torch.no_grad():
        for _ in range(LENGTH):
            logp = torch.log_softmax(model(input_ids=ids).logits[:, -1], -1)
            token = torch.multinomial(logp.exp(), 1, generator=generator)
            chosen.append(logp.gather(1, token))
            ids = torch.cat((ids, token), 1)
    answers = ids[:, LENGTH + 1 :].numpy().reshape(PROMPTS, SAMPLES, LENGTH)
    rewards = (answers == digits[:, None, ::-1]).mean(2)
    return rows_of(prompts.tolist(), answers.tolist(), rewards, torch.cat(chosen, 1).numpy().ravel(), version)


def _distance(backend: Any, batch: RaggedBatch) -> float:
    outline = backend.objective.outline(batch)
    gap = backend.logprobs(outline, outline.compute) - batch.tokens["logprobs"]
    return float(np.abs(gap[outline.mask]).mean())


def cells(runs: Iterable[Measured]) -> list[Cell]:
    """Means and intervals, losses and lags in order of appearance."""
    groups: dict[tuple[str, int], list[Measured]] = {}
    for run in runs:
        groups.setdefault((run.loss, run.lag), []).append(run)
    return [
        Cell(
            loss=loss,
            lag=lag,
            reward=interval([statistics.fmean(run.reward[-LAST:]) for run in group]),
            area=interval([statistics.fmean(run.reward) for run in group]),
            clipped=interval([run.clipped for run in group]),
            ess=interval([run.ess for run in group]),
            log_ratio=interval([run.log_ratio for run in group]),
        )
        for (loss, lag), group in groups.items()
    ]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval (Student's t; nan for a single value)."""
    half = T_975[len(values)] * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return statistics.fmean(values), half


def shown(found: Sequence[Cell]) -> dict[str, bool]:
    """What the mutant shows at the largest lag, interval against interval."""
    at = {cell.loss: cell for cell in found if cell.lag == LAGS[-1]}
    wrong, right = at[MUTANT], at["tis"]

    def above(a: tuple[float, float], b: tuple[float, float]) -> bool:
        return a[0] - a[1] > b[0] + b[1]

    return {
        "the mutant is told of no staleness where there is": above(wrong.ess, right.ess),
        "the mutant strays further from the policy that sampled": above(wrong.log_ratio, right.log_ratio),
        "the mutant's last reward is below that of tis": above(right.reward, wrong.reward),
    }


def table(found: Sequence[Cell]) -> str:
    """Markdown."""
    head = ["loss", "lag", f"reward of the last {LAST} steps", "mean reward", "clipped or masked", "effective sample size", "log ratio"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for cell in found:
        numbers = [f"{mean:.3f} ± {half:.3f}" for mean, half in (cell.reward, cell.area, cell.clipped, cell.ess, cell.log_ratio)]
        lines.append(f"| {cell.loss} | {cell.lag} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def main() -> int:
    """Measure everything, one process per core; exit status 0 when the mutant is visibly wrong (its reward is told, not demanded)."""
    jobs = [*product((*LOSSES, MUTANT), LAGS, SEEDS)]
    runs = []
    with ProcessPoolExecutor() as pool:
        for run in pool.map(measure, *zip(*jobs, strict=True)):
            runs.append(run)
            say(f"{run.loss}, lag {run.lag}, seed {run.seed}: reward {statistics.fmean(run.reward[-LAST:]):.3f}")
    found = cells(runs)
    say(table(found))
    shows = shown(found)
    kept = {
        "job": "staleness",
        "command": "make evidence ARGS=staleness",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": machine(),
        "shows": shows,
        "cells": found,
        "runs": runs,
    }
    (Path("evidence") / "staleness.json").write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
    return 0 if all(list(shows.values())[:2]) else 1


if __name__ == "__main__":
    sys.exit(main())
