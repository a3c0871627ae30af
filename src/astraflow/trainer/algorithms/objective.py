"""One optimizer batch as a sum over tokens: advantages, each token's share of the denominator, and the loss of any slice of it.

Everything that depends on the whole batch (N, advantages, M2PO's bound) is fixed here in `plan`, before any forward pass; the
loss of a slice is then a plain sum, so micro-batches, packing and row order cannot change the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from astraflow.trainer.algorithms import ADVANTAGES, LOSSES
from astraflow.trainer.algorithms.advantage import gae_with_returns
from astraflow.trainer.algorithms.base import DEFAULT_DENOMINATOR, AdvantageFn, AdvantageInput, Bools, Floats, LossFn, LossInput
from astraflow.trainer.algorithms.losses import BATCH_MASKS, kl_loss
from astraflow.trainer.batch import RaggedBatch
from astraflow.trainer.config import PPOConfig
from astraflow.trainer.packing import PackedRows

TEACHER = "extra.teacher_logprobs"
"""Token column that the advantage `distill` reads."""


@dataclass
class StepPlan:
    """An optimizer batch, ready to be summed. N tokens, R rows."""

    batch: RaggedBatch
    mask: Bools
    """[N] tokens that carry loss."""
    advantage: Floats
    """[N], 0 off the mask."""
    share: Floats
    """[N] a token's weight in the loss: 1/N for token_mean; 0 off the mask."""
    compute: np.ndarray
    """int64, rows that need a forward pass."""
    ref: Floats | None
    """[N] reference log-probs; None without KL."""
    prox: Floats | None = None
    """[N] log-probs before the batch's first optimizer step; None = θ itself (one optimizer step per batch)."""
    masked: Bools | None = None
    """[N] tokens masked by a rule over the whole batch (M2PO)."""
    values: Floats | None = None
    """[N] the critic's values before the batch's first update; None without one."""
    returns: Floats | None = None
    """[N] what the critic learns."""

    @property
    def n_tokens(self) -> int:
        """Loss tokens of the batch, fixed before clip, M2PO or importance masks."""
        return int(self.mask.sum())

    def select(self, rows: np.ndarray) -> StepPlan:
        """The part on these rows (int64, ascending). Shares are not renewed: see `Objective.plan`."""
        token = np.isin(self.batch.row_of_token, rows)
        new_index = np.full(self.batch.n_rows, -1, dtype=np.int64)
        new_index[rows] = np.arange(len(rows))
        compute = new_index[self.compute]
        ref, prox, values, returns = (None if c is None else c[token] for c in (self.ref, self.prox, self.values, self.returns))
        return StepPlan(
            self.batch.select(rows),
            self.mask[token],
            self.advantage[token],
            self.share[token],
            compute[compute >= 0],
            ref,
            prox,
            values=values,
            returns=returns,
        )


@dataclass
class Sums:
    """Detached sums over tokens, turned into metrics at the end of a step."""

    values: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, **values: float) -> None:
        """Add to sums by name."""
        for name, value in values.items():
            self.values[name] = self.values.get(name, 0.0) + value

    def peak(self, name: str, value: float) -> None:
        """Keep the larger value."""
        self.maxima[name] = max(self.maxima.get(name, value), value)


class Objective:
    """Advantage, loss and denominator of a configuration."""

    def __init__(self, config: PPOConfig, max_new_tokens: int):
        """`max_new_tokens`: L_max of the constant denominator (numerics 8)."""
        self.config = config
        self.max_new_tokens = max_new_tokens
        self._advantage: AdvantageFn = ADVANTAGES.resolve(config.advantage)
        self._loss: LossFn = LOSSES.resolve(config.loss)
        self._mask_rule = BATCH_MASKS.get(config.loss)
        default = DEFAULT_DENOMINATOR.get(config.loss, DEFAULT_DENOMINATOR.get(config.advantage, "token_mean"))
        self.denominator = config.denominator or default

    def needs_prepass(self, optimizer_steps: int) -> bool:
        """Whether log-probs without gradients are needed before the loss: M2PO's bound, or prox over several optimizer steps."""
        return self._mask_rule is not None or optimizer_steps > 1

    def outline(self, batch: RaggedBatch) -> StepPlan:
        """The mask alone, every row to compute: for passes that advantages depend on."""
        mask = batch.loss_mask(self.config.truncated)
        return StepPlan(batch, mask, np.zeros(len(mask)), np.zeros(len(mask)), np.unique(batch.row_of_token[mask]), None)

    def plan(self, batch: RaggedBatch, ref: Floats | None = None, values: Floats | None = None) -> StepPlan:
        """Advantages and masks of the whole batch. `ref` [N]: reference log-probs, needed for KL terms; `values` [N]: the critic's.
        Raises UserError for a batch without the columns that the advantage needs.
        """
        mask = batch.loss_mask(self.config.truncated)
        behav = batch.tokens["logprobs"].astype(np.float64)
        teacher = batch.tokens.get(TEACHER)
        inputs = AdvantageInput(
            value=np.where(batch.rows["scored"], batch.rows["reward_shaped"].astype(np.float64), np.nan),
            group_mean=batch.rows["group_reward_mean"].astype(np.float64),
            group_std=batch.rows["group_reward_std"].astype(np.float64),
            group_size=batch.rows["group_size"].astype(np.int64),
            all_equal=batch.rows["reward_all_equal"].astype(bool),
            row=batch.row_of_token,
            mask=mask,
            kl=None if ref is None or self.config.kl_reward == 0 else np.where(mask, behav - ref, 0.0),
            config=self.config,
            values=values,
            teacher_gap=None if teacher is None else np.where(mask, teacher.astype(np.float64) - behav, 0.0),
        )
        advantage = np.asarray(self._advantage(inputs), dtype=np.float64)
        assert advantage.shape == mask.shape, f"advantage {self.config.advantage!r} gave {advantage.shape} for {mask.shape} tokens"
        plan = StepPlan(batch, mask, np.where(mask, advantage, 0.0), np.zeros(len(mask)), np.zeros(0, dtype=np.int64), ref)
        if values is not None:
            plan.values, plan.returns = values, gae_with_returns(inputs)[1]
        self.divide(plan)
        return plan

    def divide(self, plan: StepPlan) -> None:
        """Set shares and the rows to compute for the tokens of this optimizer batch (called again on each mini-batch)."""
        plan.share = self._shares(plan)
        moving = plan.mask & (plan.share > 0)
        if self.config.kl_loss == 0 and self.config.entropy == 0:
            moving &= plan.advantage != 0
        plan.compute = np.unique(plan.batch.row_of_token[moving])

    def _shares(self, plan: StepPlan) -> Floats:
        mask, row = plan.mask, plan.batch.row_of_token
        total = float(mask.sum())
        if total == 0:
            return np.zeros(len(mask))
        if self.denominator == "token_mean":
            return mask / total
        if self.denominator == "sequence_mean":
            lengths = np.bincount(row, weights=mask, minlength=plan.batch.n_rows)
            return np.where(mask, 1.0 / (np.maximum(lengths, 1) * np.count_nonzero(lengths))[row], 0.0)
        trajectories = len(np.unique(plan.batch.rows["trajectory_index"]))
        constant = self.config.denominator_tokens or float(trajectories * self.max_new_tokens)
        return mask / constant

    def fix_masks(self, plan: StepPlan, logp: Floats) -> None:
        """Apply the rule over the whole optimizer batch (M2PO) to log-probs [N] of the weights as they are now."""
        if self._mask_rule is None:
            return
        live = plan.mask & (plan.advantage != 0)
        behav = plan.batch.tokens["logprobs"].astype(np.float64)
        plan.masked = np.zeros(len(plan.mask), dtype=bool)
        plan.masked[live] = self._mask_rule((logp - behav)[live], plan.advantage[live], self.config)

    def loss(self, plan: StepPlan, packed: PackedRows, logp: torch.Tensor, entropy: torch.Tensor, sums: Sums) -> torch.Tensor:
        """Scalar loss of the packed rows: Σ share · token loss. logp, entropy: [M] with gradients."""
        flat = packed.flat
        like = logp.detach()

        def column(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values[flat])).to(like)

        share = column(plan.share)
        inputs = LossInput(
            logp=logp,
            behav=column(plan.batch.tokens["logprobs"]),
            prox=like if plan.prox is None else column(plan.prox),
            advantage=column(plan.advantage),
            row=packed.row.to(like.device),
            n_rows=packed.n_rows,
            config=self.config,
            masked=None if plan.masked is None else torch.from_numpy(plan.masked[flat]).to(like.device),
        )
        token = self._loss(inputs)
        total = (token.loss * share).sum()
        sums.add(policy=total.item())
        if self.config.kl_loss > 0:
            assert plan.ref is not None, "a KL loss needs reference log-probs"
            kl = (kl_loss(logp, column(plan.ref), self.config.kl_loss_kind) * share).sum()
            total = total + self.config.kl_loss * kl
            sums.add(kl=kl.item())
        if self.config.entropy > 0:
            total = total - self.config.entropy * (entropy * share).sum()
        _observe(sums, inputs, token.ratio, token.clipped, token.weight, entropy.detach())
        return total


def _observe(
    sums: Sums, inputs: LossInput, ratio: torch.Tensor, clipped: torch.Tensor, weight: torch.Tensor, entropy: torch.Tensor
) -> None:
    log_ratio = inputs.logp.detach() - inputs.behav
    raw = log_ratio.clamp(-20, 20).exp()
    sums.add(
        tokens=float(len(ratio)),
        ratio=ratio.sum().item(),
        clipped=clipped.sum().item(),
        entropy=entropy.sum().item(),
        log_ratio=log_ratio.sum().item(),
        log_ratio_abs=log_ratio.abs().sum().item(),
        weight=weight.sum().item(),
        raw=raw.sum().item(),
        raw_squared=raw.double().square().sum().item(),
        k3=(raw - 1 - log_ratio).sum().item(),
    )
    sums.peak("log_ratio_max", log_ratio.abs().max().item() if len(ratio) else 0.0)


def step_metrics(sums: Sums, n_tokens: int, optimizer_steps: int = 1) -> dict[str, float]:
    """Names of spec section 8. Means are over computed tokens; clip_frac is over all loss tokens of the batch, losses are means
    over its optimizer steps.
    """
    values = sums.values
    count = values.get("tokens", 0.0)
    loss = values.get("policy", 0.0) / optimizer_steps
    metrics = {"loss/policy": loss, "policy/loss_tokens": float(n_tokens), "policy/computed_tokens": count}
    if "kl" in values:
        metrics["loss/kl"] = values["kl"] / optimizer_steps
    if count:
        metrics |= {
            "policy/ratio": values["ratio"] / count,
            "policy/clip_frac": values["clipped"] / max(n_tokens, 1),
            "policy/entropy": values["entropy"] / count,
            "mismatch/log_ratio_mean": values["log_ratio"] / count,
            "mismatch/log_ratio_abs": values["log_ratio_abs"] / count,
            "mismatch/log_ratio_max": sums.maxima["log_ratio_max"],
            "mismatch/k3": values["k3"] / count,
            "mismatch/weight": values["weight"] / count,
            "mismatch/ess": values["raw"] ** 2 / max(values["raw_squared"] * count, 1e-30),
        }
    return metrics
