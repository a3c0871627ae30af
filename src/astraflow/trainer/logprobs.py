"""Log-probs and entropies of sampled tokens from hidden states, a block of vocabulary rows at a time."""

from __future__ import annotations

from typing import Any

import torch

from astraflow.trainer.linear import product

PIECE_BYTES = 16 * 1024 * 1024
"""Logits that are worked on at once, so that the passes over them stay in a cache."""


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    temperature: torch.Tensor,
    token_head: torch.Tensor,
    target: torch.Tensor,
    chunk_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log_softmax(hidden·Wᵀ/T) at `target`, and the entropy of that distribution, both float32 [M].

    hidden [P, H], weight [V, H] (the output embedding), temperature [P], token_head [M] (index into P), target [M].
    At most `chunk_bytes` of logits exist at once; when all fit they are kept for the backward pass, otherwise recomputed.
    """
    # tokens in the order of their predictions: a block of predictions then covers a slice of them
    order = torch.argsort(token_head, stable=True)
    logp, entropy = _TokenLogprobs.apply(hidden, weight, temperature, token_head[order], target[order], chunk_bytes)  # type: ignore[no-untyped-call]
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return logp[inverse], entropy[token_head]


class _TokenLogprobs(torch.autograd.Function):
    """logp [M] and entropy [P]; token_head is sorted."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        temperature: torch.Tensor,
        token_head: torch.Tensor,
        target: torch.Tensor,
        chunk_bytes: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = hidden.shape[0]
        size = max(1, min(chunk_bytes, PIECE_BYTES) // (4 * weight.shape[0]))
        bounds = torch.searchsorted(token_head, torch.arange(0, count + size, size, device=hidden.device)).tolist()
        logp = hidden.new_empty(len(target), dtype=torch.float32)
        log_z = hidden.new_empty(count, dtype=torch.float32)
        entropy = hidden.new_empty(count, dtype=torch.float32)
        keeps = any(ctx.needs_input_grad) and 4 * count * weight.shape[0] <= chunk_bytes
        kept: list[torch.Tensor] = []
        for block, low in enumerate(range(0, count, size)):
            high = min(low + size, count)
            log_p = _logits(hidden[low:high], weight, temperature[low:high])
            log_z[low:high] = torch.logsumexp(log_p, dim=-1)
            log_p -= log_z[low:high, None]
            first, last = bounds[block], bounds[block + 1]
            logp[first:last] = log_p[token_head[first:last] - low, target[first:last]]
            probs = log_p.exp()
            entropy[low:high] = -torch.linalg.vecdot(probs, log_p)
            if keeps:
                kept.append(probs)
        ctx.save_for_backward(hidden, weight, temperature, token_head, target, log_z, entropy, *kept)
        ctx.size, ctx.bounds = size, bounds
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_logp, grad_entropy = grads
        hidden, weight, temperature, token_head, target, log_z, entropy, *kept = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight: torch.Tensor | None = None
        per_head = torch.zeros_like(log_z).index_add(0, token_head, grad_logp)
        moves_entropy = bool(torch.any(grad_entropy))
        for block, low in enumerate(range(0, hidden.shape[0], ctx.size)):
            high = min(low + ctx.size, hidden.shape[0])
            # d logp[y]/dz = onehot(y) − p;  dH/dz = −p·(log p + H)
            if kept and not moves_entropy:
                grad = kept[block] * -per_head[low:high, None]
            else:
                log_p = _logits(hidden[low:high], weight, temperature[low:high]).sub_(log_z[low:high, None])
                factor = -per_head[low:high, None]
                if moves_entropy:
                    factor = factor - (log_p + entropy[low:high, None]) * grad_entropy[low:high, None]
                grad = log_p.exp_() * factor
            first, last = ctx.bounds[block], ctx.bounds[block + 1]
            grad.index_put_((token_head[first:last] - low, target[first:last]), grad_logp[first:last], accumulate=True)
            grad /= temperature[low:high, None]
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[low:high] = product(grad, weight.t())
            if needs_weight:
                part = product(grad.t(), hidden[low:high].t())
                grad_weight = part if grad_weight is None else grad_weight.add_(part)
        return grad_hidden, grad_weight, None, None, None, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """float32, in memory of their own."""
    return product(hidden, weight).float().div_(temperature[:, None])
