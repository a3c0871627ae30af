"""Policy losses (numerics 12 to 15): [M] token columns in, [M] token losses out.

u = θ/prox, r = θ/behav, w = sg(prox/behav), all from log-probs. Denominators, masks of the batch and sums are the caller's.
"""

from __future__ import annotations

import numpy as np
import torch

from astraflow.trainer.algorithms.base import BatchMaskFn, Bools, Floats, LossInput, TokenLoss, row_mean, row_sum
from astraflow.trainer.config import PPOConfig

MAX_LOG_RATIO = 20.0
"""exp() of a log ratio stays finite in float32; beyond this a token is noise whatever its advantage."""


def ppo(inputs: LossInput) -> TokenLoss:
    """PPO clip: −min(rA, clip(r, 1 − ε_l, 1 + ε_h)A), r = θ/behav (arXiv 1707.06347, eq. 7), with dual clip for A < 0:
    min(loss, c|A|) (arXiv 1912.09729, eq. 5). With TIS or MIS set it is decoupled PPO: −w·min(uA, clip(u)A), u = θ/prox and
    w = sg(prox/behav) truncated or masked (arXiv 2110.00641, eq. 5).
    """
    config, advantage = inputs.config, inputs.advantage
    corrected = config.is_corrected
    ratio = exp(inputs.logp - (inputs.prox if corrected else inputs.behav))
    weight = importance_weight(inputs) if corrected else torch.ones_like(ratio)
    clipped_ratio = ratio.clamp(*config.clip)
    plain, bounded = -ratio * advantage, -clipped_ratio * advantage
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if config.dual_clip is not None:
        ceiling = config.dual_clip * advantage.abs()
        over = (advantage < 0) & (loss > ceiling)
        loss, clipped = torch.where(over, ceiling, loss), clipped | over
    return TokenLoss(weight * loss, (clipped | (weight == 0)).detach(), ratio.detach(), weight)


def m2po(inputs: LossInput) -> TokenLoss:
    """M2PO: −rA, r = θ/behav, with the tokens of S whose log²r exceeds m* masked; no other clip (arXiv 2510.01161).
    `masked` comes from `m2_mask` over the whole optimizer batch, so that packing and micro-batches cannot change it. Masked
    tokens stay in the denominator.
    """
    ratio = exp(inputs.logp - inputs.behav)
    masked = torch.zeros_like(ratio, dtype=torch.bool) if inputs.masked is None else inputs.masked
    loss = torch.where(masked, torch.zeros_like(ratio), -ratio * inputs.advantage)
    return TokenLoss(loss, masked, ratio.detach(), torch.ones_like(ratio))


def gspo(inputs: LossInput) -> TokenLoss:
    """GSPO: s = exp(mean over a row's loss tokens of log u), −min(sA, clip(s)A) per row, the same value on each of its tokens
    (arXiv 2507.18071, eq. 5, 7). Clip ranges are about 3e-4 and apply to u = θ/prox, never to θ/behav. A is constant per row.
    """
    config, advantage = inputs.config, inputs.advantage
    ratio = exp(row_mean(inputs.logp - inputs.prox, inputs.row, inputs.n_rows))[inputs.row]
    plain = -ratio * advantage
    bounded = -ratio.clamp(*config.clip) * advantage
    weight = importance_weight(inputs) if config.is_corrected else torch.ones_like(ratio)
    return TokenLoss(weight * torch.maximum(plain, bounded), (bounded > plain).detach(), ratio.detach(), weight)


def cispo(inputs: LossInput) -> TokenLoss:
    """CISPO: −sg(min(r, 1 + ε_h))·A·log θ, r = θ/behav: a clipped weight, never a cut gradient (arXiv 2506.13585, eq. 4, 5)."""
    ratio = exp(inputs.logp.detach() - inputs.behav)
    weight = ratio.clamp(max=inputs.config.clip[1])
    return TokenLoss(-weight * inputs.advantage * inputs.logp, ratio > weight, ratio, weight)


def sapo(inputs: LossInput) -> TokenLoss:
    """SAPO: −(4/τ)·σ(τ(r − 1))·A, r = θ/behav, τ larger for A ≤ 0 (arXiv 2511.20347): a soft gate instead of a clip."""
    config = inputs.config
    positive = torch.full_like(inputs.advantage, config.sapo_tau_positive)
    tau = torch.where(inputs.advantage > 0, positive, torch.full_like(inputs.advantage, config.sapo_tau_negative))
    ratio = exp(inputs.logp - inputs.behav)
    loss = -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * inputs.advantage
    return TokenLoss(loss, torch.zeros_like(ratio, dtype=torch.bool), ratio.detach(), torch.ones_like(ratio))


def sft(inputs: LossInput) -> TokenLoss:
    """−A·log θ, no ratio at all: with advantage `uniform` the cross-entropy of supervised fine-tuning, with others plain REINFORCE."""
    ones = torch.ones_like(inputs.logp)
    return TokenLoss(-inputs.advantage * inputs.logp, torch.zeros_like(ones, dtype=torch.bool), ones, ones)


def importance_weight(inputs: LossInput) -> torch.Tensor:
    """[M] detached w = prox/behav per token, or the product over the row's loss tokens; MIS zeroes weights outside
    [mis_low, mis_high], TIS truncates the rest at tis_c (numerics 13; fengyao.notion.site/off-policy-rl; arXiv 2110.00641).
    """
    config = inputs.config
    log_weight = (inputs.prox - inputs.behav).detach()
    if config.weight_level == "sequence":
        log_weight = row_sum(log_weight, inputs.row, inputs.n_rows)[inputs.row]
    weight = exp(log_weight)
    outside = torch.zeros_like(weight, dtype=torch.bool)
    if config.mis_low is not None:
        outside |= weight < config.mis_low
    if config.mis_high is not None:
        outside |= weight > config.mis_high
    if config.tis_c is not None:
        weight = weight.clamp(max=config.tis_c)
    return torch.where(outside, torch.zeros_like(weight), weight)


def m2_threshold(log_ratio: Floats, advantage: Floats, tau: float) -> float:
    """m* of M2PO: the largest m = log²r in S with mean{m' ∈ S: m' ≤ m} ≤ τ; −1 when none qualifies (all of S is masked),
    inf when S is empty. Exact: sorted, float64 cumulative sum, ties share a fate (numerics 15). Inputs are [M].
    """
    m = np.sort(np.square(log_ratio[in_m2_set(log_ratio, advantage)]))
    if m.size == 0:
        return float("inf")
    means = np.cumsum(m) / np.arange(1, m.size + 1)
    last_of_ties = np.append(m[1:] != m[:-1], True)
    qualified = np.flatnonzero(last_of_ties & (means <= tau))
    return float(m[qualified[-1]]) if qualified.size else -1.0


def m2_mask(log_ratio: Floats, advantage: Floats, config: PPOConfig) -> Bools:
    """[M] the tokens of S with log²r > m* (numerics 15)."""
    bound = m2_threshold(log_ratio, advantage, config.m2po_tau)
    return in_m2_set(log_ratio, advantage) & (np.square(log_ratio) > bound)


def in_m2_set(log_ratio: Floats, advantage: Floats) -> Bools:
    """S of M2PO, bool [M]: tokens that move further away from the behaviour policy."""
    return ((advantage > 0) & (log_ratio > 0)) | ((advantage < 0) & (log_ratio < 0))


def kl_loss(logp: torch.Tensor, ref: torch.Tensor, kind: str) -> torch.Tensor:
    """[M] KL estimate with gradient: k2 = d²/2, k3 = e^d − d − 1, d = log ref − log θ (numerics 12;
    joschu.net/blog/kl-approx). k1 is refused: its expected gradient is zero.
    """
    d = ref - logp
    if kind == "k2":
        return 0.5 * d.square()
    if kind == "k3":
        return exp(d) - d - 1
    raise ValueError(f"kl_loss_kind is {kind!r}, expected k2 or k3 (k1 as a loss has zero expected gradient)")


def exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp with its argument bounded to ±20."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


BATCH_MASKS: dict[str, BatchMaskFn] = {"m2po": m2_mask}
"""Losses with a rule over the whole optimizer batch; they cost one pass without gradients before each optimizer step."""
