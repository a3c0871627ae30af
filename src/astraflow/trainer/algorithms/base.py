"""What advantages and losses take and give.

Shape legend: R rows (segments), N tokens of the batch, M loss tokens of one forward pass. Rows and tokens are flat columns;
`row` maps a token to its row. Nothing here knows about padding, packing, micro-batches or ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from astraflow.trainer.config import PPOConfig

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class AdvantageInput:
    """Rewards and stamped group statistics of a whole optimizer batch, in float64."""

    value: Floats
    """[R] `reward_shaped`: the segment's own credit plus its trajectory's shaping; NaN = unscored."""
    group_mean: Floats
    """[R] mean over the scored members of the row's group (numerics 7)."""
    group_std: Floats
    """[R] unbiased standard deviation over the scored members."""
    group_size: Ints
    """[R] scored members of the group."""
    all_equal: Bools
    """[R] every scored reward of the group is equal (rtol 1e-6)."""
    row: Ints
    """[N] row of each token."""
    mask: Bools
    """[N] tokens that carry loss."""
    kl: Floats | None
    """[N] k1 = log behav − log ref, detached; None without KL in the reward."""
    config: PPOConfig
    values: Floats | None = None
    """[N] the critic's values before the batch's first update; None without one."""
    teacher_gap: Floats | None = None
    """[N] log teacher − log behav, detached; None when the batch has no teacher log-probs."""


@dataclass(frozen=True)
class LossInput:
    """Loss tokens of whole rows, [M] each. Only `logp` and `entropy` carry gradients."""

    logp: torch.Tensor
    """log π_θ of the sampled token."""
    behav: torch.Tensor
    """log-prob at sampling time (numerics 2)."""
    prox: torch.Tensor
    """log-prob under the weights before the batch's first optimizer step."""
    advantage: torch.Tensor
    row: torch.Tensor
    """int64, 0 … n_rows − 1."""
    n_rows: int
    config: PPOConfig
    masked: torch.Tensor | None = None
    """bool: tokens that a rule over the whole optimizer batch masks (M2PO, numerics 15); None = no such rule."""


@dataclass(frozen=True)
class TokenLoss:
    """What a loss gives, [M] each; the caller multiplies by the token's share of the denominator and sums."""

    loss: torch.Tensor
    clipped: torch.Tensor
    """bool: the surrogate's gradient was cut by clip or mask."""
    ratio: torch.Tensor
    """Detached ratio that the surrogate used."""
    weight: torch.Tensor
    """Detached importance weight; ones without correction."""


AdvantageFn = Callable[[AdvantageInput], Floats]
LossFn = Callable[[LossInput], TokenLoss]

BatchMaskFn = Callable[[Floats, Floats, PPOConfig], Bools]
"""(log θ/behav, advantage, config) of all loss tokens of the optimizer batch → tokens to mask."""

DEFAULT_DENOMINATOR: dict[str, Any] = {"dr_grpo": "constant", "gspo": "sequence_mean"}
"""Denominators that belong to an estimator or loss (numerics 8, 14); all others: token_mean."""


def row_sum(values: torch.Tensor, row: torch.Tensor, n_rows: int) -> torch.Tensor:
    """Sums of `values` [M] per row, [n_rows]."""
    return torch.zeros(n_rows, dtype=values.dtype, device=values.device).index_add(0, row, values)


def row_mean(values: torch.Tensor, row: torch.Tensor, n_rows: int) -> torch.Tensor:
    """Means of `values` [M] per row, [n_rows]; 0 for a row without tokens."""
    counts = row_sum(torch.ones_like(values), row, n_rows).clamp(min=1)
    return row_sum(values, row, n_rows) / counts
