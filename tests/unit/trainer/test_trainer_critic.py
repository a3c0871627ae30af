"""The critic: GAE and value loss against loops over tokens, and whole steps on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.protocol.batch import Batch
from astraflow.protocol.errors import ConfigError, UserError
from astraflow.trainer.algorithms.advantage import gae_recursion
from astraflow.trainer.algorithms.critic import value_loss
from astraflow.trainer.algorithms.objective import TEACHER, Objective
from astraflow.trainer.backends.local import LocalBackend
from astraflow.trainer.batch import ragged
from astraflow.trainer.config import CriticConfig, OptimizerConfig, PackingConfig, PPOConfig, TrainEngineConfig
from astraflow.weights.config import ModelConfig


def brute_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """One row: the sum of the definition, every term written out."""
    n = len(rewards)
    delta = [rewards[t] + gamma * (values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
    advantages = [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 1000), st.floats(0, 1), st.floats(0, 1))
def test_gae_runs_over_own_tokens_only_and_equals_the_sum_of_its_definition(
    lengths: list[int], seed: int, gamma: float, lam: float
) -> None:
    rng = np.random.default_rng(seed)
    row = np.repeat(np.arange(len(lengths)), [2 * n + 1 for n in lengths])
    mask = np.zeros(len(row), dtype=bool)
    for index, n in enumerate(lengths):  # n own tokens somewhere among 2n + 1, tool output in between
        mask[rng.permutation(np.flatnonzero(row == index))[:n]] = True
    rewards, values = rng.normal(size=len(row)), rng.normal(size=len(row))  # values off the mask are noise that must not enter
    advantages, returns = gae_recursion(rewards, values, mask, row, gamma, lam)
    assert not advantages[~mask].any()
    assert not returns[~mask].any()
    for index in range(len(lengths)):
        mine = np.flatnonzero(mask & (row == index))
        expected = brute_gae(rewards[mine].tolist(), values[mine].tolist(), gamma, lam)
        np.testing.assert_allclose(advantages[mine], expected[0], atol=1e-12)
        np.testing.assert_allclose(returns[mine], expected[1], atol=1e-12)


def test_the_value_loss_is_the_larger_of_the_plain_and_the_clipped_one() -> None:
    rng = np.random.default_rng(0)
    values, old, returns = (rng.normal(size=40) for _ in range(3))
    new = torch.tensor(values, requires_grad=True)
    losses, cut = value_loss(new, torch.tensor(old), torch.tensor(returns), 0.3)
    losses.sum().backward()
    assert new.grad is not None
    for i, (v, o, r) in enumerate(zip(values, old, returns, strict=True)):
        bounded = o + min(max(v - o, -0.3), 0.3)
        assert losses[i].item() == pytest.approx(0.5 * max((v - r) ** 2, (bounded - r) ** 2))
        assert bool(cut[i]) == ((bounded - r) ** 2 > (v - r) ** 2)
        slope = v - r if not cut[i] else (bounded - r if abs(v - o) < 0.3 else 0.0)
        assert new.grad[i].item() == pytest.approx(slope)


def make(path: Path, max_nodes: int = 2048, **options: float) -> LocalBackend:
    config = TrainEngineConfig(
        algorithm=PPOConfig(advantage="gae", kl_reward=0.0),
        optimizer=OptimizerConfig(lr=1e-3),
        critic=CriticConfig(lr=3e-3, value_clip=10.0),
        packing=PackingConfig(max_nodes=max_nodes),
        max_steps=50,
        **options,  # type: ignore[arg-type]
    )
    return LocalBackend(config, ModelConfig(path=str(path)), "bfloat16", 5)


def test_a_critic_learns_what_the_return_is(tiny_model: Callable[[str], Path], random_groups: Callable[..., Batch]) -> None:
    backend = make(tiny_model("qwen3"))
    batch = ragged(random_groups(1))
    steps = [backend.train_step(batch, lambda: None) for _ in range(25)]
    assert steps[0]["policy/value_explained"] == pytest.approx(0, abs=1e-9), "values are 0 at first"
    assert steps[-1]["loss/value"] < 0.3 * steps[0]["loss/value"]
    assert steps[-1]["policy/value_explained"] > 0.5


def test_values_and_their_step_do_not_depend_on_micro_batches(
    tiny_model: Callable[[str], Path], random_groups: Callable[..., Batch]
) -> None:
    batch = ragged(random_groups(2))
    found = []
    for max_nodes in (2048, 15):
        backend = make(tiny_model("qwen3"), max_nodes)
        for _ in range(2):
            backend.train_step(batch, lambda: None)
        assert backend.critic is not None
        outline = backend.objective.outline(batch)
        found.append(backend.critic.values(outline, backend._rounds(outline, outline.compute)))
    assert np.abs(found[0]).max() > 0
    np.testing.assert_allclose(found[0], found[1], atol=2e-5)


def test_a_value_does_not_depend_on_the_temperature_of_sampling(
    tiny_model: Callable[[str], Path], random_groups: Callable[..., Batch], case: Callable[[str], dict[str, Any]]
) -> None:
    recorded = case("G15")
    backend, batch = make(tiny_model("qwen3")), ragged(random_groups(2))
    assert backend.critic is not None
    torch.nn.init.constant_(dict(backend.critic.named)["value_head.bias"], recorded["input"]["critic_value"])
    batch.rows["temperature"] = np.full(batch.n_rows, recorded["input"]["temperature"], np.float32)
    outline = backend.objective.outline(batch)
    values = backend.critic.values(outline, backend._rounds(outline, outline.compute))
    assert set(values[outline.mask]) == {recorded["expected"]["values"]["critic_value_used"]}


def test_the_state_of_a_run_without_a_critic_is_refused(tiny_model: Callable[[str], Path]) -> None:
    state = LocalBackend(TrainEngineConfig(), ModelConfig(path=str(tiny_model("qwen3"))), "bfloat16", 5).state()
    with pytest.raises(ConfigError, match=r"it holds no critic, which trainer\.algorithm\.advantage 'gae' needs"):
        make(tiny_model("qwen3")).load_state(state.values, state.fill)


def test_minibatches_learn_the_returns_of_the_whole_batch(
    tiny_model: Callable[[str], Path], random_groups: Callable[..., Batch]
) -> None:
    backend = make(tiny_model("qwen3"), minibatches=2)
    metrics = backend.train_step(ragged(random_groups(2)), lambda: None)
    assert metrics["loss/value"] > 0


def test_a_critic_continues_bit_for_bit(tiny_model: Callable[[str], Path], random_groups: Callable[..., Batch]) -> None:
    batches = [ragged(random_groups(seed)) for seed in range(4)]
    straight, first, second = (make(tiny_model("qwen3")) for _ in range(3))
    for batch in batches:
        straight.train_step(batch, lambda: None)
    for batch in batches[:2]:
        first.train_step(batch, lambda: None)
    saved = {name: tensor.clone() for name, tensor in first.state().tensors.items()}
    values = json.loads(json.dumps(first.state().values))
    second.load_state(values, lambda tensors: [t.copy_(saved[n]) for n, t in tensors.items()])  # type: ignore[func-returns-value]
    for batch in batches[2:]:
        second.train_step(batch, lambda: None)
    assert straight.critic is not None
    assert second.critic is not None
    for name, tensor in straight.critic.tensors().items():
        assert torch.equal(tensor, second.critic.tensors()[name]), name


def test_advantages_name_the_column_that_they_miss(random_groups: Callable[..., Batch]) -> None:
    batch = ragged(random_groups(0))
    with pytest.raises(UserError, match=r"no column extra\.teacher_logprobs"):
        Objective(PPOConfig(advantage="distill"), 5).plan(batch)
    with pytest.raises(UserError, match="needs the values of a critic"):
        Objective(PPOConfig(advantage="gae"), 5).plan(batch)


def test_distillation_pulls_each_token_towards_the_teacher(random_groups: Callable[..., Batch]) -> None:
    batch = ragged(random_groups(0))
    teacher = np.random.default_rng(0).normal(-2, 1, len(batch.row_of_token)).astype(np.float32)
    batch.tokens[TEACHER] = teacher
    plan = Objective(PPOConfig(advantage="distill"), 5).plan(batch)
    for token in range(len(teacher)):
        expected = float(teacher[token]) - float(batch.tokens["logprobs"][token]) if batch.tokens["loss_mask"][token] else 0.0
        assert plan.advantage[token] == pytest.approx(expected, abs=1e-6)


def test_supervised_fine_tuning_is_the_mean_cross_entropy(tiny_model: Callable[[str], Path], random_groups: Callable[..., Batch]) -> None:
    config = TrainEngineConfig(algorithm=PPOConfig(advantage="uniform", loss="sft"), optimizer=OptimizerConfig(lr=1e-3), max_steps=9)
    backend = LocalBackend(config, ModelConfig(path=str(tiny_model("qwen3"))), "bfloat16", 5)
    batch = ragged(random_groups(3))
    outline = backend.objective.outline(batch)
    before = backend.logprobs(outline, outline.compute)
    metrics = [backend.train_step(batch, lambda: None) for _ in range(5)]
    assert metrics[0]["loss/policy"] == pytest.approx(-before[outline.mask].mean(), rel=1e-5)
    assert metrics[0]["policy/effective_rows"] == batch.n_rows, "rows of equal rewards are trained on as well"
    assert metrics[-1]["loss/policy"] < metrics[0]["loss/policy"]
