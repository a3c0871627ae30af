"""The whole algorithm in one file: asynchronous GRPO with truncated importance sampling, without the system around it.

A small transformer (Qwen3's shape: RMSNorm, rotary positions, normalised queries and keys, SwiGLU) learns to write three digits
backwards from nothing but a reward. What AstraFlow does with services and processes happens here in one loop:

    rollout service     sample()          with the weights it last pulled, `lag` versions old; keeps its own log-probs
    Dataflow            Group             rewards, mean and deviation of the n samples of a prompt
    trainer             train_step()      fp32 masters, forward and backward on the published bf16 words
    weights             publish()         version v + 1 = masters rounded to bf16

Run: python examples/minimal_loop.py [--steps 300] [--lag 2] [--seed 0] [--no-correction]
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import deque
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIGITS, EQUALS, VOCAB = 10, 10, 11
N_DIGITS = 3
PROMPT_LENGTH, ANSWER_LENGTH = N_DIGITS + 1, N_DIGITS
WIDTH, HEADS, LAYERS = 64, 4, 2


# --- the model ----------------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-6)


def rotate(x_BHTD: Tensor) -> Tensor:
    """Rotary positions: each pair of channels turns by an angle that grows with the position."""
    length, depth = x_BHTD.shape[-2:]
    frequency = 10000.0 ** (-torch.arange(0, depth, 2) / depth)
    angle = torch.arange(length)[:, None] * frequency[None, :]
    a, b = x_BHTD.chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.q_norm, self.k_norm = RMSNorm(WIDTH // HEADS), RMSNorm(WIDTH // HEADS)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x_BTC)).chunk(3, dim=-1))
        q, k = rotate(self.q_norm(q)), rotate(self.k_norm(k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTC = x_BTC + self.out(mixed.transpose(1, 2).flatten(2))
        h = self.norm2(x_BTC)
        return x_BTC + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = RMSNorm(WIDTH)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.08)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits [B, T, V]; the output embedding is the input embedding."""
        x = self.embed(ids_BT)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embed.weight.t()


# --- rollouts -----------------------------------------------------------------------------------------------------------


@dataclass
class Rollouts:
    """B = prompts × samples rows; the rows of a group are adjacent."""

    ids_BT: Tensor
    """Prompt and answer."""
    behaviour_BA: Tensor
    """log-prob of each answer token under the weights that sampled it, at sampling time; never recomputed."""
    rewards_B: Tensor
    version: int


def draw_prompts(count: int, generator: torch.Generator) -> Tensor:
    """`count` prompts `abc=`."""
    digits = torch.randint(0, DIGITS, (count, N_DIGITS), generator=generator)
    return torch.cat([digits, torch.full((count, 1), EQUALS)], dim=1)


def reward(ids_BT: Tensor) -> Tensor:
    """Share of the answer's digits that are right: the prompt's digits backwards."""
    wanted = ids_BT[:, :N_DIGITS].flip(1)
    return (ids_BT[:, PROMPT_LENGTH:] == wanted).double().mean(dim=1)


@torch.no_grad()
def sample(model: Model, prompts: int, samples: int, version: int, generator: torch.Generator) -> Rollouts:
    """A group of `samples` answers per prompt at temperature 1, with the log-probs of the sampled tokens."""
    ids = draw_prompts(prompts, generator).repeat_interleave(samples, dim=0)
    behaviour = []
    for _ in range(ANSWER_LENGTH):
        logp = torch.log_softmax(model(ids)[:, -1], dim=-1)
        token = torch.multinomial(logp.exp(), 1, generator=generator)
        behaviour.append(logp.gather(1, token))
        ids = torch.cat([ids, token], dim=1)
    return Rollouts(ids, torch.cat(behaviour, dim=1), reward(ids), version)


@torch.no_grad()
def greedy_accuracy(model: Model, count: int, generator: torch.Generator) -> float:
    """Share of fresh prompts whose whole greedy answer is right."""
    ids = draw_prompts(count, generator)
    for _ in range(ANSWER_LENGTH):
        ids = torch.cat([ids, model(ids)[:, -1].argmax(-1, keepdim=True)], dim=1)
    return float((reward(ids) == 1).double().mean())


# --- the algorithm ------------------------------------------------------------------------------------------------------


def grpo_advantages(rewards_B: Tensor, samples: int, eps: float = 1e-4) -> Tensor:
    """A = (R − μ)/(σ + eps) within each group, unbiased σ, float64; a group of equal rewards has no signal: exactly 0."""
    groups = rewards_B.view(-1, samples)
    centred = groups - groups.mean(dim=1, keepdim=True)
    advantages = centred / (groups.std(dim=1, keepdim=True) + eps)
    equal = (groups.max(dim=1, keepdim=True).values - groups.min(dim=1, keepdim=True).values) <= 1e-6
    return torch.where(equal, 0.0, advantages).flatten()


def tis_loss(logp: Tensor, behaviour: Tensor, advantage: Tensor, cap: float | None, clip: float = 0.2) -> Tensor:
    """Decoupled PPO per token: −sg(min(prox/behav, C))·min(uA, clip(u)A), u = θ/prox. One optimizer step per batch: prox = sg(θ),
    so u = 1 in value and the weight is truncated importance sampling. `cap` None takes the stale samples as if they were fresh.
    """
    prox = logp.detach()
    weight = torch.exp(prox - behaviour).clamp(max=cap) if cap is not None else torch.ones_like(logp)
    u = torch.exp(logp - prox)
    return -weight * torch.minimum(u * advantage, u.clamp(1 - clip, 1 + clip) * advantage)


def publish(masters: list[Tensor], model: Model) -> None:
    """The next version: masters rounded to nearest even in bf16; the model computes on these words, as the engine does."""
    with torch.no_grad():
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.copy_(master.to(torch.bfloat16))


def train_step(
    model: Model, masters: list[Tensor], optimizer: torch.optim.Optimizer, batch: Rollouts, samples: int, cap: float | None
) -> dict[str, float]:
    """One optimizer step. Gradients of the bf16 words are applied to the fp32 masters (straight-through)."""
    advantages_B = grpo_advantages(batch.rewards_B, samples).float()
    logits = model(batch.ids_BT[:, :-1])[:, PROMPT_LENGTH - 1 :]
    logp_BA = torch.log_softmax(logits, dim=-1).gather(2, batch.ids_BT[:, PROMPT_LENGTH:, None]).squeeze(2)
    losses_BA = tis_loss(logp_BA, batch.behaviour_BA, advantages_B[:, None], cap)
    loss = losses_BA.sum() / losses_BA.numel()  # token mean over the whole batch, rows without signal included
    loss.backward()
    parameters = list(model.parameters())
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    for master, parameter in zip(masters, parameters, strict=True):
        master.grad, parameter.grad = parameter.grad, None
    optimizer.step()
    optimizer.zero_grad()
    publish(masters, model)
    ratio = (logp_BA.detach() - batch.behaviour_BA).abs()
    return {"loss": loss.item(), "log_ratio_max": ratio.max().item()}


def train(steps: int, lag: int, seed: int, cap: float | None, prompts: int = 32, samples: int = 8, lr: float = 1e-3) -> list[float]:
    """The loop; returns the mean reward of each batch."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model, engine = Model(), Model()
    masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=lr, weight_decay=0.0)
    publish(masters, model)
    snapshots: deque[dict[str, Tensor]] = deque(maxlen=lag + 1)
    rewards: list[float] = []
    for version in range(steps):
        snapshots.append({name: value.clone() for name, value in model.state_dict().items()})
        engine.load_state_dict(snapshots[0])  # what the rollout service pulled `lag` versions ago
        batch = sample(engine, prompts, samples, max(version - lag, 0), generator)
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (version + 1) / 5)
        metrics = train_step(model, masters, optimizer, batch, samples, cap)
        rewards.append(float(batch.rewards_B.mean()))
        if version % 20 == 0:
            stale = f"sampled by {batch.version:4d}, |log ratio| up to {metrics['log_ratio_max']:.2f}"
            say(f"version {version:4d}: reward {rewards[-1]:.3f} ({stale})")
    say(f"greedy accuracy on fresh prompts: {greedy_accuracy(model, 500, generator):.2f}")
    return rewards


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Exit code 0 when the reward rose."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lag", type=int, default=2, help="versions between the weights that sample and those that learn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-correction", action="store_true", help="take stale samples as if they were fresh")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    rewards = train(options.steps, options.lag, options.seed, None if options.no_correction else 2.0)
    window = max(1, min(10, len(rewards) // 4))
    first, last = math.fsum(rewards[:window]) / window, math.fsum(rewards[-window:]) / window
    say(f"reward {first:.3f} -> {last:.3f} in {time.monotonic() - began:.1f} s")
    return 0 if last > first else 1


if __name__ == "__main__":
    sys.exit(main())
