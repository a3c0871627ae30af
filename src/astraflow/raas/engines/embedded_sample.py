"""From logits to tokens: the processed distribution, its log-probs, and one uniform number per token.

A token is drawn by inverting the cumulative distribution with the number that belongs to its request and place, so equal logits
give equal tokens in any batch. Its log-prob is that of log_softmax(logits / T) over the whole vocabulary (numerics 2). With top_p or
top_k, which training refuses, the token comes from the cut distribution and its log-prob still from the whole one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 128
"""Tokens per partial sum: the cumulative sum runs over blocks, then inside the chosen one."""


@dataclass
class Draw:
    """What one row asks for."""

    temperature: float
    """> 0; for greedy rows only the log-prob depends on it."""
    uniform: float
    greedy: bool
    top_p: float
    top_k: int


@torch.inference_mode()
def sample(logits_BV: torch.Tensor, draws: list[Draw]) -> tuple[list[int], list[float]]:
    """Token and log-prob per row of float32 logits, which are overwritten. A row that is not finite gives a NaN log-prob."""
    temperatures = torch.tensor([draw.temperature for draw in draws], device=logits_BV.device)
    logits_BV.div_(temperatures.unsqueeze(1))
    # In place, because fresh memory for [64, 49152] costs as much as the arithmetic. The most likely token weighs exactly 1.
    weights_BV = logits_BV.sub_(logits_BV.amax(-1, keepdim=True)).exp_()
    sums_BN = _block_sums(weights_BV)
    total_B = sums_BN.sum(-1)
    tokens_B = _invert(weights_BV, sums_BN, total_B, [draw.uniform for draw in draws])
    for row, draw in enumerate(draws):
        if draw.greedy:
            tokens_B[row] = weights_BV[row].argmax()
        elif draw.top_p < 1.0 or draw.top_k > 0:
            cut = _cut(weights_BV[row], draw).unsqueeze(0)
            sums = _block_sums(cut)
            tokens_B[row] = _invert(cut, sums, sums.sum(-1), [draw.uniform])[0]
    # log(exp(x)) is exact to 1e-7 for every weight that float32 holds in full, and others are never drawn.
    logprobs_B = weights_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1).double().log() - total_B.log()
    return tokens_B.tolist(), logprobs_B.tolist()


def _blocks(weights_BV: torch.Tensor) -> torch.Tensor:
    rest = -weights_BV.shape[-1] % BLOCK
    padded = torch.nn.functional.pad(weights_BV, (0, rest)) if rest else weights_BV
    return padded.view(padded.shape[0], -1, BLOCK)


def _block_sums(weights_BV: torch.Tensor) -> torch.Tensor:
    """[B, N] in float64; the BLOCK addends of each sum in float32."""
    return _blocks(weights_BV).sum(-1).double()


def _invert(weights_BV: torch.Tensor, sums_BN: torch.Tensor, total_B: torch.Tensor, uniforms: list[float]) -> torch.Tensor:
    """First token whose cumulative weight exceeds uniform × total; never one of weight zero."""
    threshold_B1 = (torch.tensor(uniforms, dtype=torch.float64, device=total_B.device) * total_B).unsqueeze(1)
    ends_BN = sums_BN.cumsum(-1)
    block_B1 = torch.searchsorted(ends_BN, threshold_B1, right=True).clamp_(max=ends_BN.shape[1] - 1)
    before_B1 = ends_BN.gather(1, block_B1) - sums_BN.gather(1, block_B1)
    chosen = _blocks(weights_BV).gather(1, block_B1.unsqueeze(-1).expand(-1, -1, BLOCK)).squeeze(1).double()
    inside = torch.searchsorted(chosen.cumsum(-1), threshold_B1 - before_B1, right=True)
    # Rounding at a block's end may point behind its last token that can be drawn: step back to it.
    place = torch.arange(BLOCK, device=chosen.device)
    last = torch.where(chosen > 0, place, -1).amax(-1, keepdim=True)
    return (block_B1 * BLOCK + torch.minimum(inside, last).clamp_(min=0)).squeeze(1).clamp_(max=weights_BV.shape[1] - 1)


def _cut(weights_V: torch.Tensor, draw: Draw) -> torch.Tensor:
    """Zero outside the top_k most likely and the smallest set whose share reaches top_p."""
    order = weights_V.argsort(descending=True, stable=True)
    ranked = weights_V[order].double()
    share_before = (ranked.cumsum(0) - ranked) / ranked.sum()
    keep = share_before < draw.top_p
    keep[0] = True
    if draw.top_k > 0:
        keep[draw.top_k :] = False
    cut = torch.zeros_like(weights_V)
    cut[order[keep]] = weights_V[order[keep]]
    return cut
