"""Advantages: from stamped group statistics to one number per token, in float64 (numerics 7, 8, 12).

Every function takes an `AdvantageInput` (R rows, N tokens) and returns A [N], zero off the mask and on unscored rows.
With KL in the reward each token has the reward −β·k1 and the row's estimate falls on its last loss token; A is the sum of
rewards from the token on (γ = 1), so KL enters after group normalisation.
"""

from __future__ import annotations

import numpy as np

from astraflow.protocol.errors import UserError
from astraflow.trainer.algorithms.base import AdvantageInput, Bools, Floats, Ints

WHITEN_EPS = 1e-8


def grpo(inputs: AdvantageInput) -> Floats:
    """GRPO, A = (R − μ)/(σ + eps) with the unbiased σ; 0 exactly for equal rewards. Source: arXiv 2402.03300, eq. in 4.1.2."""
    estimate = (inputs.value - inputs.group_mean) / (inputs.group_std + inputs.config.std_eps)
    return to_tokens(inputs, no_signal_is_zero(inputs, estimate))


def dr_grpo(inputs: AdvantageInput) -> Floats:
    """Dr.GRPO, A = R − μ; goes with the denominator B·L_max. Source: arXiv 2503.20783, section 3.2."""
    return to_tokens(inputs, no_signal_is_zero(inputs, inputs.value - inputs.group_mean))


def rloo(inputs: AdvantageInput) -> Floats:
    """RLOO, A = n/(n − 1)·(R − μ): the baseline is the mean of the others. Source: arXiv 2402.14740, eq. 8."""
    n = inputs.group_size.astype(np.float64)
    estimate = n / np.maximum(n - 1, 1) * (inputs.value - inputs.group_mean)
    return to_tokens(inputs, no_signal_is_zero(inputs, estimate))


def reinforce_pp(inputs: AdvantageInput) -> Floats:
    """REINFORCE++: token returns whitened over all loss tokens of the batch; keeps n = 1. Source: arXiv 2501.03262, eq. 8, 9."""
    return whiten(to_tokens(inputs, inputs.value), inputs)


def reinforce_pp_baseline(inputs: AdvantageInput) -> Floats:
    """REINFORCE++ with the group mean subtracted first, then whitened. Source: arXiv 2501.03262, section 3.2."""
    return whiten(to_tokens(inputs, inputs.value - inputs.group_mean), inputs)


def gae(inputs: AdvantageInput) -> Floats:
    """GAE over the policy's loss tokens with the critic's values, whitened over the batch; keeps n = 1. Source: arXiv 1506.02438."""
    return whiten(gae_with_returns(inputs)[0], inputs)


def distill(inputs: AdvantageInput) -> Floats:
    """On-policy distillation, A = log teacher − log behav per token: its expectation under the policy is the gradient of the reverse
    KL from policy to teacher. Rewards are not used. Source: arXiv 2306.13649, eq. 4 with the reverse KL, as a policy gradient.
    """
    if inputs.teacher_gap is None:
        raise UserError("algorithm.advantage is 'distill', but the batch has no column extra.teacher_logprobs")
    return np.where(_live(inputs), inputs.teacher_gap, 0.0)


def uniform(inputs: AdvantageInput) -> Floats:
    """A = 1 on every loss token of scored rows: with loss `sft` it is supervised fine-tuning."""
    return _live(inputs).astype(np.float64)


def reward(inputs: AdvantageInput) -> Floats:
    """Plain REINFORCE: A = R, no baseline. For tests of the estimators and for rewards that are already advantages."""
    return to_tokens(inputs, inputs.value)


def no_signal_is_zero(inputs: AdvantageInput, estimate: Floats) -> Floats:
    """[R] with exact zeros where the group has equal rewards or fewer than two scored members (numerics 7)."""
    silent = inputs.all_equal | (inputs.group_size < 2)
    return np.where(silent, 0.0, estimate)


def token_rewards(estimate: Floats, kl: Floats, mask: Bools, row: Ints, coefficient: float) -> Floats:
    """[N] rewards per token: −β·k1 on loss tokens, plus the row's estimate [R] on its last loss token; 0 off the mask."""
    rewards = np.where(mask, -coefficient * kl, 0.0)
    positions = np.flatnonzero(mask)
    is_last = np.append(row[positions][1:] != row[positions][:-1], True) if positions.size else np.zeros(0, dtype=bool)
    last = positions[is_last]
    rewards[last] += estimate[row[last]]
    return rewards


def gae_with_returns(inputs: AdvantageInput) -> tuple[Floats, Floats]:
    """(advantages before whitening, returns that the critic learns) [N]: the row's value as the reward of its last loss token, KL in
    the reward on each. Raises UserError without values.
    """
    if inputs.values is None:
        raise UserError("algorithm.advantage is 'gae', which needs the values of a critic")
    live, config = _live(inputs), inputs.config
    kl = np.zeros(len(live)) if inputs.kl is None else np.where(live, inputs.kl, 0.0)
    rewards = token_rewards(np.nan_to_num(inputs.value), kl, live, inputs.row, config.kl_reward)
    return gae_recursion(rewards, inputs.values, live, inputs.row, config.gamma, config.lam)


def gae_recursion(rewards: Floats, values: Floats, mask: Bools, row: Ints, gamma: float, lam: float) -> tuple[Floats, Floats]:
    """(advantages, returns) [N], 0 off the mask: A_t = δ_t + γλ·A_(t+1), δ_t = r_t + γ·V_(t+1) − V_t over the loss tokens of a row,
    V = 0 after the last; returns A + V. All rows at once, one pass over positions (arXiv 1506.02438, eq. 16).
    """
    advantages, returns = np.zeros_like(values), np.zeros_like(values)
    tokens = np.flatnonzero(mask)
    if not tokens.size:
        return advantages, returns
    _, first, which = np.unique(row[tokens], return_index=True, return_inverse=True)
    position = np.arange(len(tokens)) - first[which]
    shape = (len(first), int(position.max()) + 2)
    r, v, a = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    r[which, position], v[which, position] = rewards[tokens], values[tokens]
    for t in range(shape[1] - 2, -1, -1):
        a[:, t] = r[:, t] + gamma * v[:, t + 1] - v[:, t] + gamma * lam * a[:, t + 1]
    # behind a row's last token r, v and a are 0, so its own recursion begins there
    advantages[tokens] = a[which, position]
    returns[tokens] = advantages[tokens] + values[tokens]
    return advantages, returns


def _live(inputs: AdvantageInput) -> Bools:
    """[N] loss tokens of scored rows."""
    return inputs.mask & np.isfinite(inputs.value)[inputs.row]


def to_tokens(inputs: AdvantageInput, estimate: Floats) -> Floats:
    """Spread [R] estimates over the loss tokens [N]; with KL in the reward, reward-to-go of `token_rewards`."""
    live = _live(inputs)
    estimate = np.where(np.isfinite(inputs.value), estimate, 0.0)
    if inputs.kl is None or inputs.config.kl_reward == 0:
        return np.where(live, estimate[inputs.row], 0.0)
    rewards = token_rewards(estimate, np.where(live, inputs.kl, 0.0), live, inputs.row, inputs.config.kl_reward)
    return np.where(live, reward_to_go(rewards, inputs.row), 0.0)


def reward_to_go(rewards: Floats, row: Ints) -> Floats:
    """[N] sum of a row's rewards from each token to the row's end (γ = 1). Tokens of a row are contiguous."""
    out = np.empty_like(rewards)
    starts = np.flatnonzero(np.append(True, row[1:] != row[:-1])) if row.size else np.zeros(0, dtype=np.int64)
    for low, high in zip(starts, np.append(starts[1:], row.size), strict=True):
        out[low:high] = np.cumsum(rewards[low:high][::-1])[::-1]
    return out


def whiten(advantages: Floats, inputs: AdvantageInput) -> Floats:
    """Subtract the mean and divide by the population standard deviation over the scored loss tokens of the batch."""
    live = _live(inputs)
    if not live.any():
        return np.zeros_like(advantages)
    values = advantages[live]
    out = np.zeros_like(advantages)
    out[live] = (values - values.mean()) / np.sqrt(max(float(values.var()), WHITEN_EPS))
    return out
