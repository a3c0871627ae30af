"""Prefix-trie packing: same numbers as one row at a time, fewer tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from astraflow.protocol.batch import Batch
from astraflow.trainer import attention as attention_module
from astraflow.trainer.batch import RaggedBatch, pad, ragged
from astraflow.trainer.logprobs import token_logprobs
from astraflow.trainer.models import hidden_states, load_model, output_embedding, tied_names
from astraflow.trainer.packing import micro_batches, pack, schedule
from astraflow.weights.config import ModelConfig

Loss = Callable[[torch.Tensor, np.ndarray], torch.Tensor]


def weighted(logp: torch.Tensor, flat: np.ndarray) -> torch.Tensor:
    """A loss that treats every token differently."""
    weights = torch.from_numpy(np.cos(flat.astype(np.float64))).to(logp)
    return (weights * logp.exp() + weights.square() * logp).sum()


def padded_logprobs(model: Any, batch: RaggedBatch, side: str, mask: np.ndarray) -> tuple[torch.Tensor, np.ndarray]:
    """The plain way: every row in a rectangle, all logits."""
    rectangle = pad(batch, 0, "left" if side == "left" else "right")
    attention = torch.from_numpy(rectangle.attention_mask)
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=torch.from_numpy(rectangle.input_ids).long(), attention_mask=attention, position_ids=positions).logits
    temperature = torch.from_numpy(batch.rows["temperature"].copy())[:, None, None]
    logp = torch.log_softmax(logits.float() / temperature, -1)
    flat = np.flatnonzero(mask)
    row = batch.row_of_token[flat]
    width = rectangle.input_ids.shape[1]
    lengths = np.diff(batch.offsets)
    column = flat - batch.offsets[row] + (width - lengths[row] if side == "left" else 0)
    target = torch.from_numpy(batch.tokens["input_ids"][flat].astype(np.int64))
    return logp[torch.from_numpy(row), torch.from_numpy(column - 1), target], flat


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def packed_gradients(
    model: Any, batch: RaggedBatch, max_nodes: int, rows: np.ndarray | None = None, chunk: int = 1 << 20
) -> dict[str, torch.Tensor]:
    mask = batch.loss_mask()
    rows = np.arange(batch.n_rows) if rows is None else rows
    for members in micro_batches(batch, mask, rows, max_nodes):
        packed = pack(batch, mask, members)
        logp, _ = token_logprobs(
            hidden_states(model, packed), output_embedding(model), packed.head_temperature, packed.token_head, packed.target, chunk
        )
        weighted(logp, packed.flat).backward()
    return gradients(model)


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = 1e-6) -> None:
    scale = max(float(value.abs().max()) for value in a.values())
    assert a.keys() == b.keys()
    for name in a:
        assert float((a[name] - b[name]).abs().max()) <= tolerance * max(1.0, scale), name


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize(("attention", "tile"), [("sdpa", 0), ("eager", 0), ("tree", 7), ("tree", 128)])
def test_gradients_equal_the_padded_forward_of_every_row(
    kind: str,
    attention: str,
    tile: int,
    tiny_model: Callable[[str], Path],
    random_groups: Callable[..., Batch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_module, "TILE", tile)
    model = load_model(ModelConfig(path=str(tiny_model(kind))), "sdpa")
    batch = ragged(random_groups(3))
    mask = batch.loss_mask()
    expected = None
    for side in ("right", "left"):
        logp, flat = padded_logprobs(model, batch, side, mask)
        weighted(logp, flat).backward()
        found = gradients(model)
        if expected is not None:
            assert_close(expected, found)
        expected = found
    assert expected is not None
    model = load_model(ModelConfig(path=str(tiny_model(kind))), attention)
    assert_close(expected, packed_gradients(model, batch, 10_000))


def test_micro_batches_row_order_and_logit_chunks_do_not_change_gradients(
    tiny_model: Callable[[str], Path], random_groups: Callable[..., Batch]
) -> None:
    model = load_model(ModelConfig(path=str(tiny_model("qwen3"))), "tree")
    batch = ragged(random_groups(5, n_groups=6))
    whole = packed_gradients(model, batch, 10_000)
    for max_nodes in (1, 12, 30, 60):
        assert_close(whole, packed_gradients(model, batch, max_nodes))
    permuted = np.random.default_rng(0).permutation(batch.n_rows)
    assert_close(whole, packed_gradients(model, batch, 40, permuted))
    assert_close(whole, packed_gradients(model, batch, 40, chunk=4 * 40 * 3))


def test_every_distinct_prefix_is_computed_once(random_groups: Callable[..., Batch]) -> None:
    batch = ragged(random_groups(1, n_groups=5, n_samples=6))
    mask = batch.loss_mask()
    packed = pack(batch, mask, list(range(batch.n_rows)))
    prefixes = set()
    predicted = set()
    for row in range(batch.n_rows):
        low, high = batch.offsets[row], batch.offsets[row + 1]
        ids = batch.tokens["input_ids"][low:high].tolist()
        last = max(np.flatnonzero(mask[low:high]))
        prefixes |= {tuple(ids[:n]) for n in range(1, last + 1)}
        predicted |= {tuple(ids[:n]) for n in np.flatnonzero(mask[low:high])}
    assert len(packed.input_ids) == len(prefixes)
    assert len(packed.head_node) == len(predicted)
    mask_TT = packed.attention_mask()
    depth = packed.position_ids
    assert torch.equal(mask_TT.sum(1), depth + 1)  # every node sees exactly its ancestors and itself


def test_passes_respect_the_budget_and_group_boundaries(random_groups: Callable[..., Batch]) -> None:
    batch = ragged(random_groups(7, n_groups=8))
    mask = batch.loss_mask()
    passes = micro_batches(batch, mask, np.arange(batch.n_rows), 40)
    assert sorted(row for rows in passes for row in rows) == list(range(batch.n_rows))
    assert all(len(pack(batch, mask, rows).input_ids) <= 40 for rows in passes)
    groups = [set(batch.rows["group_index"][rows].tolist()) for rows in passes]
    assert sum(len(g) for g in groups) == 8, "a group that fits is not cut"
    assert len(passes) > 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("max_nodes", [20, 40, 10_000])
def test_ranks_get_equally_many_passes_of_about_the_same_size(ranks: int, max_nodes: int, random_groups: Callable[..., Batch]) -> None:
    batch = ragged(random_groups(3, n_groups=9, n_samples=6))
    mask = batch.loss_mask()
    plan = schedule(batch, mask, np.arange(batch.n_rows), max_nodes, ranks)
    assert sorted(row for passes in plan for rows in passes for row in rows) == list(range(batch.n_rows))
    assert len({len(passes) for passes in plan}) == 1
    sizes = np.array([[len(pack(batch, mask, rows).input_ids) if rows else 0 for rows in passes] for passes in plan])
    assert sizes.max() <= max_nodes
    assert sizes.sum(1).max() - sizes.sum(1).min() <= 20, "about two rows"
    shuffled = schedule(batch, mask, np.random.default_rng(0).permutation(batch.n_rows), max_nodes, ranks)
    assert [[sorted(rows) for rows in passes] for passes in shuffled] == [[sorted(rows) for rows in passes] for passes in plan]


def test_fewer_rows_than_ranks_leave_empty_passes(sample: Any, batch_of: Callable[..., Batch]) -> None:
    batch = ragged(batch_of([[sample([3, 4], [5, 6, 7], 0.0), sample([3, 4], [6], 1.0)]]))
    plan = schedule(batch, batch.loss_mask(), np.arange(2), 100, 4)
    assert sorted(row for passes in plan for rows in passes for row in rows) == [0, 1]
    assert [len(passes) for passes in plan] == [1, 1, 1, 1]
    assert schedule(batch, np.zeros_like(batch.loss_mask()), np.arange(2), 100, 3) == [[], [], []]


def test_rows_without_loss_tokens_cost_nothing(sample: Any, batch_of: Callable[..., Batch]) -> None:
    batch = ragged(batch_of([[sample([3, 4], [5], None), sample([3, 4], [6], 1.0)]]))
    mask = batch.loss_mask()
    assert micro_batches(batch, mask, np.arange(2), 100) == [[1]]


def test_chunked_logprobs_and_entropy_equal_log_softmax_and_so_do_their_gradients() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, dtype=torch.float64).float().requires_grad_()
    weight = torch.randn(11, 5).requires_grad_()
    temperature = torch.tensor([1.0, 0.6, 1.0, 2.0, 1.0, 0.7, 1.0])
    head = torch.tensor([6, 0, 0, 3, 2, 2, 5, 1, 4])
    target = torch.tensor([1, 0, 10, 4, 4, 5, 6, 7, 8])
    logits = hidden @ weight.t() / temperature[:, None]
    full = torch.log_softmax(logits, -1)
    expected, entropy = full[head, target], -(full.exp() * full).sum(-1)[head]
    coefficients = torch.arange(1.0, 10.0)
    expected_grads = torch.autograd.grad((expected * coefficients).sum() + (entropy * coefficients.flip(0)).sum(), [hidden, weight])
    for chunk in (1, 4 * 11 * 3, 1 << 20):
        logp, found = token_logprobs(hidden, weight, temperature, head, target, chunk)
        torch.testing.assert_close(logp, expected)
        torch.testing.assert_close(found, entropy)
        grads = torch.autograd.grad((logp * coefficients).sum() + (found * coefficients.flip(0)).sum(), [hidden, weight])
        torch.testing.assert_close(grads, expected_grads)


def test_temperature_belongs_to_the_distribution(case: Callable[[str], dict[str, Any]]) -> None:
    recorded = case("G15")
    logits = torch.tensor([recorded["input"]["logits"]])
    temperature = torch.tensor([recorded["input"]["temperature"]])
    # identity output embedding: hidden states are the logits
    found = [
        token_logprobs(logits, torch.eye(3), temperature, torch.zeros(1, dtype=torch.long), torch.tensor([token]), 1 << 20)[0].item()
        for token in range(3)
    ]
    np.testing.assert_allclose(found, recorded["expected"]["values"]["all_logprobs"], atol=1e-5)
    assert found[recorded["input"]["sampled_token"]] == pytest.approx(recorded["expected"]["values"]["logprob"], abs=1e-5)


def test_tied_names_point_to_the_published_tensor(tiny_model: Callable[[str], Path]) -> None:
    model = load_model(ModelConfig(path=str(tiny_model("llama"))), "sdpa")
    assert tied_names(model) == {"lm_head.weight": "model.embed_tokens.weight"}
