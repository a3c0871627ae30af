"""Losses against a brute force: loops over tokens in float64, derivatives by central differences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.trainer.algorithms import LOSSES
from astraflow.trainer.algorithms.base import LossInput, TokenLoss
from astraflow.trainer.algorithms.losses import importance_weight, kl_loss, m2_mask, m2_threshold
from astraflow.trainer.config import PPOConfig

Tokens = dict[str, list[float]]


def tokens(seed: int, n: int = 24, rows: int = 4) -> Tokens:
    """Random log-probs, advantages of both signs and zeros; rows are contiguous."""
    rng = np.random.default_rng(seed)
    behav = rng.normal(-1.5, 0.5, n)
    return {
        "behav": behav.tolist(),
        "prox": (behav + rng.normal(0, 0.4, n)).tolist(),
        "logp": (behav + rng.normal(0, 0.5, n)).tolist(),
        "advantage": (rng.normal(0, 1, n) * (rng.random(n) > 0.1)).tolist(),
        "row": sorted(rng.integers(0, rows, n).tolist()),
    }


def built(data: Tokens, config: PPOConfig, masked: Sequence[bool] | None = None) -> tuple[torch.Tensor, TokenLoss]:
    column = {name: torch.tensor(values, dtype=torch.float64) for name, values in data.items() if name != "row"}
    logp = column.pop("logp").requires_grad_()
    row = torch.tensor(data["row"], dtype=torch.int64)
    inputs = LossInput(
        logp=logp,
        behav=column["behav"],
        prox=column["prox"],
        advantage=column["advantage"],
        row=row,
        n_rows=int(row.max()) + 1,
        config=config,
        masked=None if masked is None else torch.tensor(masked),
    )
    return logp, LOSSES.get(config.loss)(inputs)


def brute_weight(data: Tokens, config: PPOConfig, i: int) -> float:
    log_w = data["prox"][i] - data["behav"][i]
    if config.weight_level == "sequence":
        log_w = sum(data["prox"][j] - data["behav"][j] for j in range(len(data["row"])) if data["row"][j] == data["row"][i])
    w = math.exp(log_w)
    if config.mis_low is not None and w < config.mis_low:
        return 0.0
    if config.mis_high is not None and w > config.mis_high:
        return 0.0
    return min(w, config.tis_c) if config.tis_c is not None else w


def clip_of(config: PPOConfig) -> tuple[float, float]:
    low, high = (3e-4, 4e-4) if config.loss == "gspo" else (0.2, 0.2)
    return low if config.clip_low is None else config.clip_low, high if config.clip_high is None else config.clip_high


def brute_surrogate(ratio: float, a: float, config: PPOConfig) -> float:
    low, high = clip_of(config)
    bounded = min(max(ratio, 1 - low), 1 + high)
    loss = -min(ratio * a, bounded * a)
    if config.dual_clip is not None and a < 0:
        loss = min(loss, config.dual_clip * abs(a))
    return loss


def brute(data: Tokens, config: PPOConfig, logp: list[float], frozen: list[float], masked: Sequence[bool] | None) -> list[float]:
    """Token losses; `frozen` stands where the formula stops gradients."""
    out = []
    corrected = config.tis_c is not None or config.mis_low is not None or config.mis_high is not None
    for i, a in enumerate(data["advantage"]):
        r, u = math.exp(logp[i] - data["behav"][i]), math.exp(logp[i] - data["prox"][i])
        if config.loss == "ppo":
            out.append(brute_weight(data, config, i) * brute_surrogate(u, a, config) if corrected else brute_surrogate(r, a, config))
        elif config.loss == "m2po":
            out.append(0.0 if masked is not None and masked[i] else -r * a)
        elif config.loss == "gspo":
            mine = [j for j in range(len(logp)) if data["row"][j] == data["row"][i]]
            s = math.exp(sum(logp[j] - data["prox"][j] for j in mine) / len(mine))
            weight = brute_weight(data, config, i) if corrected else 1.0
            low, high = clip_of(config)
            out.append(weight * -min(s * a, min(max(s, 1 - low), 1 + high) * a))
        elif config.loss == "cispo":
            out.append(-min(math.exp(frozen[i] - data["behav"][i]), 1 + clip_of(config)[1]) * a * logp[i])
        elif config.loss == "sapo":
            tau = config.sapo_tau_positive if a > 0 else config.sapo_tau_negative
            out.append(-4 / tau / (1 + math.exp(-tau * (r - 1))) * a)
        elif config.loss == "sft":
            out.append(-a * logp[i])
    return out


CONFIGS = [
    PPOConfig(),
    PPOConfig(clip_high=0.28),
    PPOConfig(dual_clip=1.5),
    PPOConfig(tis_c=2.0),
    PPOConfig(tis_c=1.1, dual_clip=2.0),
    PPOConfig(tis_c=1.2, weight_level="sequence"),
    PPOConfig(mis_low=0.8, mis_high=1.2),
    PPOConfig(mis_low=0.5, mis_high=1.5, weight_level="sequence"),
    PPOConfig(loss="m2po"),
    PPOConfig(loss="gspo", clip_low=3e-2, clip_high=4e-2),
    PPOConfig(loss="gspo", clip_low=3e-2, clip_high=4e-2, tis_c=2.0),
    PPOConfig(loss="gspo"),
    PPOConfig(loss="cispo"),
    PPOConfig(loss="sapo"),
    PPOConfig(loss="sft"),
]


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_every_loss_and_its_gradient_equal_the_brute_force(config: PPOConfig) -> None:
    for seed in range(4):
        data = tokens(seed)
        masked = None
        if config.loss == "m2po":
            gap = np.array(data["logp"]) - np.array(data["behav"])
            masked = m2_mask(gap, np.array(data["advantage"]), config).tolist()
        logp, found = built(data, config, masked)
        frozen = data["logp"]
        np.testing.assert_allclose(found.loss.detach().numpy(), brute(data, config, frozen, frozen, masked), rtol=1e-10, atol=1e-12)
        shares = np.cos(np.arange(len(frozen))) + 2
        (found.loss * torch.from_numpy(shares)).sum().backward()
        assert logp.grad is not None
        for i in range(len(frozen)):
            step = 1e-6
            sides = []
            for sign in (1, -1):
                moved = list(frozen)
                moved[i] += sign * step
                sides.append(float(np.dot(brute(data, config, moved, frozen, masked), shares)))
            assert logp.grad[i].item() == pytest.approx((sides[0] - sides[1]) / (2 * step), rel=1e-4, abs=1e-6)


def test_at_lag_zero_every_ratio_is_one_nothing_is_clipped_and_the_gradients_agree() -> None:
    data = tokens(1)
    data["behav"] = data["prox"] = data["logp"]
    gradients = []
    decoupled = [PPOConfig(tis_c=2.0), PPOConfig(mis_low=0.5, mis_high=2.0)]
    for config in (PPOConfig(), *decoupled, PPOConfig(loss="m2po"), PPOConfig(loss="cispo")):
        logp, found = built(data, config, [False] * len(data["row"]) if config.loss == "m2po" else None)
        assert not found.clipped.any()
        np.testing.assert_allclose(found.ratio.numpy(), 1.0, atol=1e-12)
        np.testing.assert_allclose(found.weight.numpy(), 1.0, atol=1e-12)
        found.loss.sum().backward()
        assert logp.grad is not None
        gradients.append(logp.grad)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-12, atol=1e-12)


def test_with_one_optimizer_step_decoupled_ppo_is_truncated_importance_sampling() -> None:
    data = tokens(2)
    data["prox"] = data["logp"]
    logp, found = built(data, PPOConfig(tis_c=2.0))
    found.loss.sum().backward()
    behav, a = np.array(data["behav"]), np.array(data["advantage"])
    expected = -np.minimum(np.exp(np.array(data["logp"]) - behav), 2.0) * a
    assert logp.grad is not None
    np.testing.assert_allclose(logp.grad.numpy(), expected, rtol=1e-10)


def test_ratios_that_overflow_stay_finite() -> None:
    data = tokens(3)
    data["logp"] = [x + 1e4 for x in data["logp"]]
    for config in CONFIGS:
        logp, found = built(data, config)
        found.loss.sum().backward()
        assert logp.grad is not None
        assert torch.isfinite(found.loss).all(), config
        assert torch.isfinite(logp.grad).all(), config


def brute_m2(log_ratio: list[float], advantage: list[float], tau: float) -> list[bool]:
    """Definition of numerics 15: try every candidate m*."""
    inside = [i for i, (x, a) in enumerate(zip(log_ratio, advantage, strict=True)) if (a > 0 and x > 0) or (a < 0 and x < 0)]
    best = -1.0
    for candidate in {log_ratio[i] ** 2 for i in inside}:
        below = [log_ratio[i] ** 2 for i in inside if log_ratio[i] ** 2 <= candidate]
        if sum(below) / len(below) <= tau:
            best = max(best, candidate)
    return [i in inside and log_ratio[i] ** 2 > best for i in range(len(log_ratio))]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([-0.5, -0.25, -0.125, 0.0, 0.125, 0.25, 0.5, 1.0]), st.sampled_from([-1.0, 0.0, 2.0])), max_size=12),
    st.sampled_from([1e-4, 0.01, 0.05, 0.3]),
)
def test_m2po_masks_exactly_what_the_definition_says_ties_included(pairs: list[tuple[float, float]], tau: float) -> None:
    log_ratio, advantage = [x for x, _ in pairs], [a for _, a in pairs]
    found = m2_mask(np.array(log_ratio, dtype=float), np.array(advantage, dtype=float), PPOConfig(loss="m2po", m2po_tau=tau))
    assert found.tolist() == brute_m2(log_ratio, advantage, tau)


def test_m2po_masks_all_of_the_set_when_no_value_qualifies_and_nothing_outside_it() -> None:
    log_ratio, advantage = np.array([1.0, 2.0, -3.0, -2.0]), np.array([1.0, 1.0, 1.0, -1.0])
    assert m2_threshold(log_ratio, advantage, 0.01) == -1
    assert m2_mask(log_ratio, advantage, PPOConfig(loss="m2po")).tolist() == [True, True, False, True]
    assert m2_threshold(np.array([]), np.array([]), 0.01) == math.inf
    # a tie over the bound: both go, though one of them alone would pass
    tied = np.array([0.0, 0.12, 0.12])
    assert m2_mask(tied, np.array([1.0, 1.0, 1.0]), PPOConfig(loss="m2po", m2po_tau=0.012)).tolist() == [False, True, True]


def test_importance_weights_per_sequence_use_the_sum_over_its_tokens() -> None:
    data = tokens(5)
    config = PPOConfig(tis_c=100.0, weight_level="sequence")
    behav, prox = torch.tensor(data["behav"]), torch.tensor(data["prox"])
    row = torch.tensor(data["row"])
    inputs = LossInput(prox, behav, prox, prox, row, int(row.max()) + 1, config)
    for r, w in zip(data["row"], importance_weight(inputs).tolist(), strict=True):
        mine = [i for i, x in enumerate(data["row"]) if x == r]
        assert w == pytest.approx(math.exp(sum(data["prox"][i] - data["behav"][i] for i in mine)), rel=1e-5)


def test_kl_estimates_have_the_right_sign_and_value(case: Callable[[str], dict[str, Any]]) -> None:
    recorded = case("G14")
    logp = torch.tensor(recorded["input"]["logp"], dtype=torch.float64)
    ref = torch.tensor(recorded["input"]["ref_logp"], dtype=torch.float64)
    for kind in ("k2", "k3"):
        np.testing.assert_allclose(kl_loss(logp, ref, kind).numpy(), recorded["expected"]["values"][kind], atol=1e-6)
    for refused in ("k1", "k4"):
        with pytest.raises(ValueError, match="k2 or k3"):
            kl_loss(logp, ref, refused)
        with pytest.raises(ValueError, match="k2 or k3"):
            PPOConfig(kl_loss_kind=refused)


def test_stale_behaviour_gives_the_on_policy_gradient_in_expectation_exactly() -> None:
    """Enumerate all sequences of length 2 over 3 tokens: Σ_y q(y)·grad(loss with θ/q) = Σ_y p(y)·grad(on-policy loss)."""
    rng = np.random.default_rng(0)
    theta = torch.tensor(rng.normal(size=(4, 3)))  # first token, and the second given each first
    stale = torch.tensor(rng.normal(size=(4, 3)))
    reward = {y: float(rng.normal()) for y in itertools.product(range(3), repeat=2)}

    def gradient(behaviour: torch.Tensor, config: PPOConfig, sequence_weight: bool, overwritten: bool = False) -> torch.Tensor:
        parameters = theta.clone().requires_grad_()
        logq, logp = torch.log_softmax(behaviour, -1), torch.log_softmax(parameters, -1)
        total = torch.zeros((), dtype=torch.float64)
        for (a, b), value in reward.items():
            behav = torch.stack([logq[0, a], logq[1 + a, b]])
            current = torch.stack([logp[0, a], logp[1 + a, b]])
            advantage, row = torch.full((2,), value, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
            told = current.detach() if overwritten else behav
            inputs = LossInput(current, told, current.detach(), advantage, row, 1, config)
            assert sequence_weight == (config.weight_level == "sequence")
            total = total + behav.sum().exp().detach() * LOSSES.get("ppo")(inputs).loss.sum()
        return torch.autograd.grad(total, parameters)[0]

    unbiased = PPOConfig(tis_c=1e9, weight_level="sequence")
    on_policy = gradient(theta, unbiased, True)
    torch.testing.assert_close(gradient(stale, unbiased, True), on_policy, rtol=0, atol=1e-12)
    wrong = gradient(stale, PPOConfig(tis_c=1e9), False)  # token weights leave out the other token: biased, visibly
    assert float((wrong - on_policy).abs().max()) > 1e-3
    fresh = gradient(stale, unbiased, True, overwritten=True)  # the mistake of numerics 2: prox in the place of behav
    assert float((fresh - on_policy).abs().max()) > 1e-3
