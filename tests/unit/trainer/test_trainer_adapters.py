"""LoRA: what is trained, forwarded, published and kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from astraflow.protocol.batch import Batch
from astraflow.protocol.errors import ConfigError
from astraflow.trainer.adapters import whole
from astraflow.trainer.backends.local import LocalBackend
from astraflow.trainer.batch import RaggedBatch, ragged
from astraflow.trainer.config import OptimizerConfig, PPOConfig, ReferenceConfig, TrainEngineConfig
from astraflow.trainer.models import load_model
from astraflow.weights.config import LoraConfig, ModelConfig, PublishedLora


def make(path: Path, published: PublishedLora = "merged", kl: float = 0.0, reference: str = "initial", **lora: object) -> LocalBackend:
    config = TrainEngineConfig(
        algorithm=PPOConfig(kl_loss=kl),
        optimizer=OptimizerConfig(lr=0.02),
        reference=ReferenceConfig(kind=reference),  # type: ignore[arg-type]
        max_steps=10,
    )
    model = ModelConfig(path=str(path), lora=LoraConfig(rank=4, alpha=8, **lora))  # type: ignore[arg-type]
    return LocalBackend(config, model, "bfloat16", 5, published)


def logprobs(backend: LocalBackend, batch: RaggedBatch) -> np.ndarray:
    outline = backend.objective.outline(batch)
    return backend.logprobs(outline, outline.compute)


@pytest.mark.parametrize("published", ["merged", "adapter"])
def test_only_adapters_move_and_the_model_computes_what_is_published(
    published: PublishedLora, tiny_model: Callable[[str], Path], tmp_path: Path, random_groups: Callable[..., Batch]
) -> None:
    backend = make(tiny_model("qwen3"), published)
    batch = ragged(random_groups(2))
    before = {name: whole(tensor).clone() for name, tensor in backend.published()}
    metrics = [backend.train_step(batch, lambda: None) for _ in range(3)]
    assert all(step["policy/grad_norm"] > 0 for step in metrics)
    after = {name: whole(tensor) for name, tensor in backend.published()}
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    if published == "merged":
        assert moved == {name for name in before if "_proj" in name}
        backend.export(tmp_path / "export")
        plain = LocalBackend(TrainEngineConfig(), ModelConfig(path=str(tmp_path / "export")), "bfloat16", 5)
        np.testing.assert_allclose(logprobs(backend, batch), logprobs(plain, batch), atol=1e-5)
        assert backend.tied == plain.tied
    else:
        assert moved == set(before)
        assert all(".lora_A." in name or ".lora_B." in name for name in before)
        for tensor in after.values():
            assert torch.equal(tensor, tensor.bfloat16().float()), "the forward pass uses the words that are published"


def test_the_gradient_of_an_adapter_is_that_of_autograd_through_the_sum(
    tiny_model: Callable[[str], Path], random_groups: Callable[..., Batch]
) -> None:
    batch = ragged(random_groups(5))
    found = []
    for published in ("merged", "adapter"):
        backend = make(tiny_model("llama"), published)  # type: ignore[arg-type]
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in backend._parameters:
                parameter.copy_((torch.randn_like(parameter) * 0.02).bfloat16())
        if backend._merged is not None:
            for layer in backend._merged._layers:  # without rounding, both are the same function
                a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
                layer.merged_words.copy_((layer.base_layer.weight + 2.0 * b @ a).detach())
        plan = backend.objective.plan(batch)
        for packed, _ in backend._rounds(plan, plan.compute):
            logp, _ = backend._forward(packed)
            (logp * torch.cos(torch.arange(len(logp)))).sum().backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in backend._parameters]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("published", ["merged", "adapter"])
def test_the_reference_is_the_model_without_its_adapters_and_costs_no_copy(
    published: PublishedLora, tiny_model: Callable[[str], Path], random_groups: Callable[..., Batch]
) -> None:
    backend = make(tiny_model("qwen3"), published, kl=0.1)
    batch = ragged(random_groups(3))
    initial = logprobs(backend, batch)
    for _ in range(2):
        backend.train_step(batch, lambda: None)
    trained = logprobs(backend, batch)
    assert np.abs(trained - initial).max() > 1e-3
    np.testing.assert_array_equal(backend._reference_logprobs(backend.objective.outline(batch)), initial)
    np.testing.assert_array_equal(logprobs(backend, batch), trained)
    assert not any(name.startswith("reference.") for name in backend.state().tensors)


def test_a_moving_reference_follows_the_adapters(tiny_model: Callable[[str], Path], random_groups: Callable[..., Batch]) -> None:
    backend = make(tiny_model("qwen3"), kl=0.1, reference="ema")
    batch = ragged(random_groups(3))
    initial = logprobs(backend, batch)
    backend.train_step(batch, lambda: None)
    trained = logprobs(backend, batch)
    moved = backend._reference_logprobs(backend.objective.outline(batch))
    assert 0 < np.abs(moved - initial).max() < np.abs(trained - initial).max()
    np.testing.assert_array_equal(logprobs(backend, batch), trained)


@pytest.mark.parametrize("published", ["merged", "adapter"])
def test_a_state_holds_adapters_only_and_continues_bit_for_bit(
    published: PublishedLora, tiny_model: Callable[[str], Path], random_groups: Callable[..., Batch]
) -> None:
    batches = [ragged(random_groups(seed)) for seed in range(4)]
    straight, first = make(tiny_model("qwen3"), published), make(tiny_model("qwen3"), published)
    first.load_state(straight.state().values, lambda tensors: [t.copy_(straight.state().tensors[n]) for n, t in tensors.items()])  # type: ignore[func-returns-value]
    for batch in batches:
        straight.train_step(batch, lambda: None)
    for batch in batches[:2]:
        first.train_step(batch, lambda: None)
    state = first.state()
    assert all("lora_" in name for name in state.tensors if name != "rng.torch")
    saved = {name: tensor.clone() for name, tensor in state.tensors.items()}
    values = json.loads(json.dumps(state.values))
    second = make(tiny_model("qwen3"), published)
    second.load_state(values, lambda tensors: [t.copy_(saved[n]) for n, t in tensors.items()])  # type: ignore[func-returns-value]
    for batch in batches[2:]:
        second.train_step(batch, lambda: None)
    for (name, a), (_, b) in zip(straight.published(), second.published(), strict=True):
        assert torch.equal(whole(a), whole(b)), name


def test_targets_that_no_layer_has_are_refused_by_name(tiny_model: Callable[[str], Path]) -> None:
    model = ModelConfig(path=str(tiny_model("qwen3")), lora=LoraConfig(targets=["q_prog"]))
    with pytest.raises(ConfigError, match=r"model\.lora\.targets: q_prog"):
        load_model(model, "tree")
    assert len(make(tiny_model("qwen3"), targets=["q_proj"])._parameters) == 2 * 2
