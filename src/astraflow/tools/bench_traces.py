"""Pairs of published weights, one optimizer step apart, for the bench of deltas.

`python -m astraflow.tools.bench_traces MODEL_DIR LR OLD.npy NEW.npy` makes one: SmolLM2 with fp32 masters, forward and backward on the
published bf16 words, AdamW on the quick start's loss (clipped policy gradient of sampled sums with group-normalised rewards, on-policy,
so that the ratio is 1). It runs in a process of its own, because torch and the optimizer's state need memory.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

Words = np.ndarray[Any, np.dtype[Any]]

STEPS, GROUPS, GROUP = 8, 4, 4
"""The pair is the last of so many steps: the moments of AdamW are warm. Rows of a batch: groups × members."""


def to_bf16(values: Words) -> Words:
    """float32 → bf16 words, rounded to nearest even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def synthetic(size: int, update: float, seed: int = 0) -> tuple[Words, Words]:
    """Normal weights of deviation 0.02 under normal updates of deviation `update`; 2.4e-7 changes about 1 % of the words."""
    rng = np.random.default_rng(seed)
    old, new = np.empty(size, np.uint16), np.empty(size, np.uint16)
    for start in range(0, size, 1 << 24):
        end = min(start + (1 << 24), size)
        masters = rng.standard_normal(end - start, dtype=np.float32) * np.float32(0.02)
        old[start:end] = to_bf16(masters)
        masters += rng.standard_normal(end - start, dtype=np.float32) * np.float32(update)
        new[start:end] = to_bf16(masters)
    return old, new


def smollm2(directory: Path, lr: float) -> tuple[Words, Words]:
    """Published words before and after the last step."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(str(directory))
    model: Any = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
    parameters = list(model.parameters())
    masters = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.AdamW(masters, lr=lr, betas=(0.9, 0.999), weight_decay=0.0)
    rng = np.random.default_rng(0)

    def publish() -> Words:
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master.to(torch.bfloat16))
        return np.concatenate([p.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).ravel() for p in parameters])

    old = new = publish()
    for _ in range(STEPS):
        ids, attention, mask, advantages = (torch.from_numpy(part) for part in _batch(tokenizer, rng))
        logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1].float()
        chosen = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
        ratio = torch.exp(chosen - chosen.detach())
        surrogate = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
        loss = -(surrogate * mask).sum() / mask.sum()
        torch.autograd.backward(loss)
        for parameter, master in zip(parameters, masters, strict=True):
            master.grad, parameter.grad = parameter.grad, None
        optimizer.step()
        old, new = new, publish()
    return old, new


def _batch(tokenizer: Any, rng: np.random.Generator) -> tuple[Words, Words, Words, Words]:
    """Token ids, attention mask, mask of the answers' positions (shifted), advantages: answers are right and wrong, as samples are."""
    rows, rewards = [], []
    for _ in range(GROUPS):
        a, b = (int(x) for x in rng.integers(1, 10, 2))
        chat = [{"role": "system", "content": "Answer with a number."}, {"role": "user", "content": f"{a} + {b} ="}]
        prompt = tokenizer.encode(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        for member in range(GROUP):
            answer = a + b if member % 2 else int(rng.integers(2, 19))
            rows.append((prompt, tokenizer.encode(f"{answer}<|im_end|>")))
            rewards.append(float(answer == a + b))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids, attention = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), np.int64)
    mask = np.zeros((len(rows), width - 1), np.float32)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[row, :end], attention[row, :end] = prompt + answer, 1
        mask[row, len(prompt) - 1 : end - 1] = 1
    grouped = np.array(rewards).reshape(GROUPS, GROUP)
    advantages = (grouped - grouped.mean(1, keepdims=True)) / (grouped.std(1, ddof=1, keepdims=True) + 1e-4)
    return ids, attention, mask, advantages.ravel().astype(np.float32)


def main(arguments: list[str]) -> int:
    """Write one pair."""
    directory, lr, old_path, new_path = arguments
    old, new = smollm2(Path(directory), float(lr))
    np.save(old_path, old)
    np.save(new_path, new)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
