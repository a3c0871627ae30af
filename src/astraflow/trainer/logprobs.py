"""Log-probs and entropies of sampled tokens from hidden states, a block of vocabulary rows at a time."""

from __future__ import annotations

from typing import Any

import torch


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
        size = max(1, chunk_bytes // (4 * weight.shape[0]))
        bounds = torch.searchsorted(token_head, torch.arange(0, count + size, size, device=hidden.device)).tolist()
        logp = hidden.new_empty(len(target), dtype=torch.float32)
        log_z = hidden.new_empty(count, dtype=torch.float32)
        entropy = hidden.new_empty(count, dtype=torch.float32)
        kept: list[torch.Tensor] = []
        for block, low in enumerate(range(0, count, size)):
            high = min(low + size, count)
            logits = _logits(hidden[low:high], weight, temperature[low:high])
            log_z[low:high] = torch.logsumexp(logits, dim=-1)
            first, last = bounds[block], bounds[block + 1]
            head = token_head[first:last]
            logp[first:last] = logits[head - low, target[first:last]] - log_z[head]
            probs = torch.exp(logits - log_z[low:high, None])
            entropy[low:high] = log_z[low:high] - torch.linalg.vecdot(probs, logits)
            if count <= size:
                kept.append(logits)
        ctx.save_for_backward(hidden, weight, temperature, token_head, target, log_z, entropy, *kept)
        ctx.size, ctx.bounds = size, bounds
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_logp, grad_entropy = grads
        hidden, weight, temperature, token_head, target, log_z, entropy, *kept = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight: torch.Tensor | None = None
        per_head = torch.zeros_like(log_z).index_add(0, token_head, grad_logp)
        for block, low in enumerate(range(0, hidden.shape[0], ctx.size)):
            high = min(low + ctx.size, hidden.shape[0])
            logits = kept[0] if kept else _logits(hidden[low:high], weight, temperature[low:high])
            log_p = logits - log_z[low:high, None]
            probs = log_p.exp()
            # d logp[y]/dz = onehot(y) − p;  dH/dz = −p·(log p + H)
            grad = probs * -per_head[low:high, None]
            if torch.any(grad_entropy):
                grad -= probs * (log_p + entropy[low:high, None]) * grad_entropy[low:high, None]
            first, last = ctx.bounds[block], ctx.bounds[block + 1]
            grad.index_put_((token_head[first:last] - low, target[first:last]), grad_logp[first:last], accumulate=True)
            grad /= temperature[low:high, None]
            grad = grad.to(hidden.dtype)
            grad_hidden[low:high] = grad @ weight
            part = grad.t() @ hidden[low:high]
            grad_weight = part if grad_weight is None else grad_weight.add_(part)
        return grad_hidden, grad_weight, None, None, None, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    return (hidden @ weight.t()).float() / temperature[:, None]
