"""The local backend: whole steps on a tiny model."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from astraflow.protocol.batch import Batch
from astraflow.protocol.errors import ConfigError
from astraflow.trainer.algorithms.objective import Objective, Sums
from astraflow.trainer.backends.local import LocalBackend, over_steps
from astraflow.trainer.batch import RaggedBatch, ragged
from astraflow.trainer.config import OptimizerConfig, PackingConfig, PPOConfig, ReferenceConfig, TrainEngineConfig
from astraflow.trainer.packing import micro_batches, pack
from astraflow.weights.config import ModelConfig

Make = Callable[..., LocalBackend]
ALGORITHMS = [
    PPOConfig(),
    PPOConfig(tis_c=2.0, clip_high=0.28),
    PPOConfig(tis_c=1.5, weight_level="sequence", denominator="sequence_mean"),
    PPOConfig(advantage="dr_grpo"),
    PPOConfig(advantage="reinforce_pp", entropy=0.01),
    PPOConfig(loss="m2po", m2po_tau=0.05),
    PPOConfig(loss="gspo", clip_low=3e-4, clip_high=4e-4, tis_c=2.0),
    PPOConfig(loss="cispo"),
    PPOConfig(kl_loss=0.1, kl_reward=0.05),
    PPOConfig(advantage="rloo", mis_low=0.27, mis_high=1.9, weight_level="sequence"),
    PPOConfig(advantage="reinforce_pp_baseline", loss="sapo", kl_loss=0.1, kl_loss_kind="k2"),
    PPOConfig(advantage="uniform", loss="sft"),
]


@pytest.fixture
def make(tiny_model: Callable[[str], Path]) -> Make:
    def build(algorithm: PPOConfig | None = None, dtype: str = "bfloat16", kind: str = "qwen3", **options: Any) -> LocalBackend:
        optimizer = options.pop("optimizer", OptimizerConfig(lr=1e-3))
        config = TrainEngineConfig(algorithm=algorithm or PPOConfig(), optimizer=optimizer, max_steps=10, **options)
        return LocalBackend(config, ModelConfig(path=str(tiny_model(kind))), dtype, max_new_tokens=5)

    return build


def gradient(backend: LocalBackend, batch: RaggedBatch, max_nodes: int) -> torch.Tensor:
    """Gradient of one optimizer step, without the step."""
    plan = backend.objective.plan(batch, None)
    if backend.reference is not None:
        with backend.reference.active(backend._parameters):
            ref = backend.logprobs(plan, np.unique(batch.row_of_token[plan.mask]))
        plan = backend.objective.plan(batch, ref - 0.1 * plan.mask)
    if backend.objective.needs_prepass(1):
        backend.objective.fix_masks(plan, backend.logprobs(plan, plan.compute))
    for rows in micro_batches(batch, plan.mask, plan.compute, max_nodes):
        packed = pack(batch, plan.mask, rows)
        backend.objective.loss(plan, packed, *backend._forward(packed), Sums()).backward()
    found = torch.cat([p.grad.flatten() for p in backend._parameters if p.grad is not None])
    for parameter in backend._parameters:
        parameter.grad = None
    return found


def permuted(batch: RaggedBatch, seed: int) -> RaggedBatch:
    """The same rows in another order, token columns moved along."""
    order = np.random.default_rng(seed).permutation(batch.n_rows)
    pieces = [np.arange(batch.offsets[r], batch.offsets[r + 1]) for r in order]
    token = np.concatenate(pieces)
    lengths = [len(piece) for piece in pieces]
    return RaggedBatch(
        batch.model_id,
        batch.timeline,
        batch.version,
        np.concatenate(([0], np.cumsum(lengths))),
        {name: values[token] for name, values in batch.tokens.items()},
        {name: values[order] for name, values in batch.rows.items()},
        np.repeat(np.arange(len(order)), lengths),
        batch.n_groups,
        batch.n_trajectories,
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: f"{a.advantage}-{a.loss}-{a.denominator}-{a.kl_loss}")
def test_micro_batches_and_row_order_do_not_change_the_gradient(
    algorithm: PPOConfig, make: Make, random_groups: Callable[..., Batch]
) -> None:
    backend = make(algorithm)
    batch = ragged(random_groups(11, n_groups=6))
    whole = gradient(backend, batch, 10_000)
    assert float(whole.abs().max()) > 0
    for other in (gradient(backend, batch, 30), gradient(backend, batch, 1), gradient(backend, permuted(batch, 0), 50)):
        assert float((whole - other).abs().max()) <= 1e-6 * max(1.0, float(whole.abs().max()))


def on_policy(backend: LocalBackend, batch: Batch) -> RaggedBatch:
    """The batch with the backend's own log-probs as behaviour."""
    view = ragged(batch)
    plan = Objective(PPOConfig(), 5).plan(view, None)
    logp = backend.logprobs(plan, np.arange(view.n_rows)).astype(np.float32)
    return RaggedBatch(
        view.model_id,
        view.timeline,
        view.version,
        view.offsets,
        view.tokens | {"logprobs": logp},
        view.rows,
        view.row_of_token,
        4,
        view.n_trajectories,
    )


def test_at_lag_zero_ratios_are_one_nothing_is_clipped_and_four_losses_have_one_gradient(
    make: Make, random_groups: Callable[..., Batch]
) -> None:
    batch = on_policy(make(), random_groups(4))
    gradients = []
    for algorithm in (PPOConfig(), PPOConfig(tis_c=2.0), PPOConfig(loss="m2po"), PPOConfig(mis_low=0.5, mis_high=2.0)):
        backend = make(algorithm)
        gradients.append(gradient(backend, batch, 10_000))
        metrics = backend.train_step(batch, lambda: None)
        assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-3)
        assert metrics["mismatch/log_ratio_max"] < 1e-3
        assert metrics["policy/clip_frac"] == 0
        assert metrics["mismatch/ess"] == pytest.approx(1, abs=1e-3)
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-4, atol=1e-6)


def test_mismatch_numbers_are_those_of_a_loop_over_tokens(make: Make, random_groups: Callable[..., Batch]) -> None:
    batch, backend = ragged(random_groups(4)), make(PPOConfig(tis_c=1.1))
    plan = backend.objective.plan(batch, None)
    logp = backend.logprobs(plan, plan.compute)
    metrics = backend.train_step(batch, lambda: None)
    gaps = [float(logp[t] - batch.tokens["logprobs"][t]) for t in np.flatnonzero(plan.mask) if batch.row_of_token[t] in plan.compute]
    ratios = [math.exp(gap) for gap in gaps]
    n = len(gaps)
    expected = {
        "policy/computed_tokens": n,
        "mismatch/log_ratio_mean": sum(gaps) / n,
        "mismatch/log_ratio_abs": sum(map(abs, gaps)) / n,
        "mismatch/log_ratio_max": max(map(abs, gaps)),
        "mismatch/k3": sum(r - 1 - gap for r, gap in zip(ratios, gaps, strict=True)) / n,
        "mismatch/weight": sum(min(r, 1.1) for r in ratios) / n,
        "mismatch/ess": sum(ratios) ** 2 / (n * sum(r * r for r in ratios)),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert expected["mismatch/ess"] < 0.95
    assert expected["mismatch/weight"] < sum(ratios) / n


def test_the_model_computes_on_the_published_words_and_gradients_reach_the_masters(make: Make, random_groups: Callable[..., Batch]) -> None:
    backend = make(optimizer=OptimizerConfig(lr=1e-4))
    for _ in range(3):
        backend.train_step(ragged(random_groups(2)), lambda: None)
        for (_, published), master in zip(backend.published(), backend.masters, strict=True):
            assert torch.equal(published, master.detach().to(torch.bfloat16).float())
    assert any(not torch.equal(p, m) for (_, p), m in zip(backend.published(), backend.masters, strict=True))


def test_small_updates_add_up_in_the_masters_until_a_word_moves(make: Make, random_groups: Callable[..., Batch]) -> None:
    backend = make(optimizer=OptimizerConfig(lr=1e-6))
    before = [p.clone() for _, p in backend.published()]
    masters = [m.detach().clone() for m in backend.masters]
    backend.train_step(ragged(random_groups(2)), lambda: None)
    changed = sum(int((p != b).sum()) for (_, p), b in zip(backend.published(), before, strict=True))
    total = sum(b.numel() for b in before)
    assert sum(int((m.detach() != b).sum()) for m, b in zip(backend.masters, masters, strict=True)) > total / 2
    assert changed < total / 10


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"forward_masters": True}])
def test_masters_can_be_forwarded_themselves(options: dict[str, Any], make: Make, random_groups: Callable[..., Batch]) -> None:
    backend = make(**options)
    backend.train_step(ragged(random_groups(2)), lambda: None)
    assert all(p.data_ptr() == m.data_ptr() for (_, p), m in zip(backend.published(), backend.masters, strict=True))


def test_without_any_advantage_the_weights_stay_moments_included(
    make: Make, sample: Any, batch_of: Callable[..., Batch], random_groups: Callable[..., Batch]
) -> None:
    backend = make(optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1))
    backend.train_step(ragged(random_groups(1)), lambda: None)  # moments that would push on
    before = [m.detach().clone() for m in backend.masters]
    metrics = backend.train_step(ragged(batch_of([[sample([3, 4], [5, 6], 1.0) for _ in range(4)]])), lambda: None)
    assert metrics["policy/skipped_updates"] == 1
    assert metrics["perf/nodes"] == 0
    assert backend.position == 2, "the schedule stays a function of the version"
    assert all(torch.equal(m, b) for m, b in zip(backend.masters, before, strict=True))


def test_zero_advantage_rows_stay_in_the_denominator(make: Make, sample: Any, batch_of: Callable[..., Batch]) -> None:
    informative = [sample([3, 4], [5, 6], 1.0, [-3.0, -3.0]), sample([3, 4], [7, 6], 0.0, [-3.0, -3.0])]
    silent = [sample([3, 9], [5, 6, 7, 8], 1.0, [-3.0] * 4) for _ in range(2)]
    backend = make()
    alone, diluted = ragged(batch_of([informative])), ragged(batch_of([informative, silent]))
    assert len(backend.objective.plan(diluted, None).compute) == 2
    torch.testing.assert_close(gradient(backend, diluted, 10_000), gradient(backend, alone, 10_000) * 4 / 12, rtol=1e-5, atol=1e-6)


def test_denominators_are_those_of_the_definitions(sample: Any, batch_of: Callable[..., Batch]) -> None:
    batch = ragged(batch_of([[sample([3], [4, 5, 6], 1.0), sample([3], [4], 0.0)], [sample([3], [5, 5], 1.0), sample([3], [6], None)]]))
    shares = {}
    for name in ("token_mean", "sequence_mean", "constant"):
        plan = Objective(PPOConfig(denominator=name), 5).plan(batch, None)
        shares[name] = plan.share[batch.loss_mask()].tolist()
    assert shares["token_mean"] == pytest.approx([1 / 6] * 6)
    assert shares["sequence_mean"] == pytest.approx([1 / 9] * 3 + [1 / 3] + [1 / 6] * 2)
    assert shares["constant"] == pytest.approx([1 / 20] * 6)
    assert Objective(PPOConfig(advantage="dr_grpo"), 5).denominator == "constant"
    assert Objective(PPOConfig(loss="gspo"), 5).denominator == "sequence_mean"


def test_several_optimizer_steps_use_the_weights_before_the_first_as_proximal_policy(
    make: Make, random_groups: Callable[..., Batch]
) -> None:
    batch = ragged(random_groups(6))
    backend = make(PPOConfig(tis_c=2.0), minibatches=2, epochs=2)
    seen: list[float] = []
    metrics = backend.train_step(batch, lambda: seen.append(1.0))
    assert len(seen) == 4
    assert backend.position == 4
    assert metrics["policy/ratio"] != pytest.approx(1, abs=1e-6), "θ moved away from prox"
    once = make(PPOConfig(tis_c=2.0)).train_step(batch, lambda: None)
    assert once["policy/ratio"] == 1.0, "one step per batch: prox is θ"


def test_numbers_of_several_optimizer_steps_are_told_as_one() -> None:
    first = {"policy/lr": 1.0, "policy/grad_norm": 3.0, "policy/skipped_updates": 1.0}
    second = {"policy/lr": 2.0, "policy/grad_norm": 2.0, "policy/skipped_updates": 1.0}
    perf = {"perf/micro_batches": 1.0, "perf/nodes": 5.0, "perf/row_tokens": 9.0}
    merged = over_steps([first | perf, second | perf])
    assert merged == {"policy/lr": 2.0, "policy/grad_norm": 3.0, "policy/skipped_updates": 2.0} | {k: 2 * v for k, v in perf.items()}
    unbounded = over_steps([first | perf, second | perf | {"policy/grad_norm": float("nan")}])
    assert math.isnan(unbounded["policy/grad_norm"])


def test_an_unbounded_gradient_leaves_everything_as_it_was(make: Make, sample: Any, batch_of: Callable[..., Batch]) -> None:
    backend = make()
    before = [m.detach().clone() for m in backend.masters]
    batch = ragged(batch_of([[sample([3, 4], [5], 1e30), sample([3, 4], [6], -1e30)]]))
    batch.rows["reward_all_equal"] = np.array([False, False])
    batch.rows["group_reward_std"] = np.array([1e-30, 1e-30])
    metrics = backend.train_step(batch, lambda: None)
    assert metrics["policy/skipped_updates"] == 1
    assert all(torch.equal(m, b) for m, b in zip(backend.masters, before, strict=True))


@pytest.mark.parametrize("kind", ["initial", "ema"])
def test_a_step_continues_bit_for_bit_from_its_state(kind: str, make: Make, random_groups: Callable[..., Batch]) -> None:
    options = {
        "algorithm": PPOConfig(kl_loss=0.1, tis_c=2.0),
        "optimizer": OptimizerConfig(lr=1e-3, schedule="cosine", warmup_steps=2, weight_decay=0.01),
        "reference": ReferenceConfig(kind=kind),
    }
    batches = [ragged(random_groups(seed)) for seed in range(6)]
    straight = make(**options)
    for batch in batches:
        straight.train_step(batch, lambda: None)
    first = make(**options)
    for batch in batches[:3]:
        first.train_step(batch, lambda: None)
    state = first.state()
    second = make(**options)
    second.load_state(state.values, state.fill)
    for batch in batches[3:]:
        second.train_step(batch, lambda: None)
    expected, found = straight.state(), second.state()
    assert expected.values == found.values
    assert expected.tensors.keys() == found.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(tensor, found.tensors[name]), name


def test_the_state_of_another_model_is_refused_by_name(make: Make, tmp_path: Path) -> None:
    state = make().state()
    state.tensors["master.model.norm.weight"] = torch.zeros(7)
    with pytest.raises(ConfigError, match=r"master.model.norm.weight is \(7,\)"):
        make().load_state(state.values, state.fill)


def test_an_exported_directory_loads_as_the_published_model(make: Make, tmp_path: Path, random_groups: Callable[..., Batch]) -> None:
    backend = make()
    backend.train_step(ragged(random_groups(2)), lambda: None)
    backend.export(tmp_path / "out")
    again = LocalBackend(TrainEngineConfig(), ModelConfig(path=str(tmp_path / "out")), "bfloat16", 5)
    for (name, a), (other, b) in zip(backend.published(), again.published(), strict=True):
        assert name == other
        assert torch.equal(a, b)


def test_settings_that_cannot_work_are_refused(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tis_c"):
        PPOConfig(loss="m2po", tis_c=2.0)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        LocalBackend(TrainEngineConfig(), ModelConfig(path=str(tmp_path)), "bfloat16", 5)
    (tmp_path / "config.json").write_text('{"model_type": "nosuch"}')
    with pytest.raises(ConfigError, match="names no model that transformers knows"):
        LocalBackend(TrainEngineConfig(), ModelConfig(path=str(tmp_path)), "bfloat16", 5)
    with pytest.raises(ValueError, match="known"):
        make(PPOConfig(loss="pppo"))


def test_checkpointed_gradients_are_the_same(make: Make, random_groups: Callable[..., Batch]) -> None:
    batch = ragged(random_groups(9))
    plain = gradient(make(), batch, 10_000)
    torch.testing.assert_close(gradient(make(gradient_checkpointing=True), batch, 10_000), plain, rtol=1e-5, atol=1e-7)


def test_eager_attention_and_chunked_logits_give_the_same_step(make: Make, random_groups: Callable[..., Batch]) -> None:
    batch = ragged(random_groups(9))
    plain = gradient(make(), batch, 10_000)
    other = gradient(make(packing=PackingConfig(attention="eager", head_chunk_bytes=4 * 40 * 3)), batch, 10_000)
    torch.testing.assert_close(other, plain, rtol=1e-4, atol=1e-6)
