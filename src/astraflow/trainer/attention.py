"""Attention over a token tree (packing.py): each tile of queries sees its own ancestors only.

Nodes lie in depth-first order, so the ancestors of a run of nodes [low, high) are `j < low` with `low < end[j]`, and what else a node
of the run may see lies in the run. Cost is therefore nodes × (depth + tile) rather than the square of all nodes of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

TILE = 128
"""Queries per tile: half of a tile's square is computed in vain, but each tile costs calls."""
NAME = "astraflow_tree"


@dataclass(frozen=True)
class Tile:
    """Queries [low, high) and what they see."""

    low: int
    high: int
    keys: torch.Tensor
    """int64 [K], ascending: the ancestors of `low`, then low … high − 1."""
    mask: torch.Tensor
    """bool [high − low, K]."""


def tiles(end: torch.Tensor) -> list[Tile]:
    """Cut a tree into tiles. `end` int64 [T]: one past the last node of each subtree."""
    count, found = len(end), []
    nodes = torch.arange(count, device=end.device)
    for low in range(0, count, TILE):
        high = min(low + TILE, count)
        keys = torch.cat((torch.nonzero(end[:low] > low).flatten(), nodes[low:high]))
        query = nodes[low:high, None]
        found.append(Tile(low, high, keys, (keys[None, :] <= query) & (query < end[keys][None, :])))
    return found


class _TreeAttention(torch.autograd.Function):
    """q [1, G·n, T, D], k and v [1, G, T, D] → [1, G·n, T, D]. Outputs of tiles are computed again in the backward pass: nothing of
    the size of queries × keys is kept, and the gradients of keys are added in place."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cut: list[Tile], scale: float
    ) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.cut, ctx.scale = cut, scale
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for tile in cut:
            out[:, :, tile.low : tile.high] = _tile(*_parts(q, k, v, tile), tile, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        q, k, v = ctx.saved_tensors
        to_q, to_k, to_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for tile in ctx.cut:
            q_, k_, v_ = (part.detach().requires_grad_() for part in _parts(q, k, v, tile))
            with torch.enable_grad():
                out = _tile(q_, k_, v_, tile, ctx.scale)
            own, keys, values = torch.autograd.grad(out, (q_, k_, v_), grad[:, :, tile.low : tile.high])
            to_q[:, :, tile.low : tile.high] = own
            to_k.index_add_(2, tile.keys, keys)
            to_v.index_add_(2, tile.keys, values)
        return to_q, to_k, to_v, None, None


def _parts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q[:, :, tile.low : tile.high], k.index_select(2, tile.keys), v.index_select(2, tile.keys)


def _tile(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: Tile, scale: float) -> torch.Tensor:
    """The query heads of a key head become rows of its queries: keys are never repeated."""
    groups, shared = k.shape[1], q.shape[1] // k.shape[1]
    rows = q.reshape(1, groups, shared * q.shape[2], q.shape[3])
    out = scaled_dot_product_attention(rows, k, v, attn_mask=tile.mask.repeat(shared, 1), scale=scale)
    return out.view(q.shape)


def tree_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    tree: list[Tile] | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls in each layer: query [1, heads, T, D], key and value [1, key heads, T, D]. A call without
    a tree is one of the model's own, with a mask of its own."""
    if tree is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out: torch.Tensor = _TreeAttention.apply(query, key, value, tree, scale)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, tree_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
