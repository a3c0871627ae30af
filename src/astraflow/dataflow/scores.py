"""Pure: numbers of an evaluation (numerics 20, case G39)."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb


def pass_at_k(n: int, c: int, k: int) -> float | None:
    """Unbiased 1 − C(n−c, k)/C(n, k) of n samples with c right; None when n < k. Source: arXiv 2107.03374."""
    if n < k:
        return None
    return 1.0 - comb(n - c, k) / comb(n, k)


def eval_metrics(rewards: Sequence[Sequence[float | None]], n_samples: int, threshold: float, ks: Sequence[int]) -> dict[str, float | None]:
    """Means over tasks. `rewards`: per task the samples' rewards, None = missing or failed: counted as wrong, n unchanged.

    `avg@n` is the share of right samples (reward ≥ threshold), `reward/mean` the mean over samples that have a reward.
    """
    right = [sum(1 for r in samples if r is not None and r >= threshold) for samples in rewards]
    known = [r for samples in rewards for r in samples if r is not None]
    tasks = max(len(rewards), 1)
    metrics: dict[str, float | None] = {f"avg@{n_samples}": sum(right) / (tasks * n_samples)}
    for k in ks:
        values = [pass_at_k(n_samples, c, k) for c in right]
        metrics[f"pass@{k}"] = None if any(v is None for v in values) or not values else sum(v for v in values if v is not None) / tasks
    metrics["reward/mean"] = sum(known) / len(known) if known else None
    return metrics
