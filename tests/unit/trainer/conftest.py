"""Batches and tiny models for the trainer's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from astraflow.protocol.batch import FINISH_CODES, Batch
from astraflow.protocol.codec import column


@dataclass
class Sample:
    """One trajectory of one segment."""

    prompt: list[int]
    answer: list[int]
    reward: float | None
    logprobs: list[float] = field(default_factory=list)
    finish: str = "stop"
    temperature: float = 1.0


def make_batch(groups: Sequence[Sequence[Sample]], version: int = 0) -> Batch:
    """A batch as Dataflow serves it: statistics over scored members, unbiased deviation."""
    samples = [(g, s) for g, members in enumerate(groups) for s in members]
    stats = {}
    for g, members in enumerate(groups):
        scored = np.array([s.reward for s in members if s.reward is not None])
        mean = float(scored.mean()) if scored.size else 0.0
        std = float(scored.std(ddof=1)) if scored.size > 1 else 0.0
        stats[g] = (mean, std, scored.size, bool(scored.size == 0 or np.allclose(scored, scored[0], rtol=1e-6, atol=0)))
    lengths = [len(s.prompt) + len(s.answer) for _, s in samples]
    mask = np.concatenate([[0] * len(s.prompt) + [1] * len(s.answer) for _, s in samples])
    logprobs = np.concatenate([[0.0] * len(s.prompt) + (s.logprobs or [-1.0] * len(s.answer)) for _, s in samples])
    rewards = np.array([np.nan if s.reward is None else s.reward for _, s in samples])
    group = [g for g, _ in samples]
    return Batch(
        model_id="default",
        timeline=0,
        version=version,
        offsets=column(np.concatenate(([0], np.cumsum(lengths))), "int64"),
        tokens={
            "input_ids": column(np.concatenate([s.prompt + s.answer for _, s in samples]), "int32"),
            "loss_mask": column(mask, "uint8"),
            "logprobs": column(logprobs, "float32"),
            "versions": column(np.where(mask == 1, version, -1), "int32"),
        },
        rows={
            "rewards": column(rewards, "float32"),
            "reward_shaped": column(rewards, "float64"),
            "credit": column(rewards, "float64"),
            "temperature": column([s.temperature for _, s in samples], "float32"),
            "group_index": column(group, "int64"),
            "trajectory_index": column(np.arange(len(samples)), "int64"),
            "segment_index": column(np.zeros(len(samples), dtype=int), "int64"),
            "group_reward_mean": column([stats[g][0] for g in group], "float64"),
            "group_reward_std": column([stats[g][1] for g in group], "float64"),
            "group_size": column([stats[g][2] for g in group], "int64"),
            "reward_all_equal": column([stats[g][3] for g in group], "bool"),
            "n_segments": column(np.ones(len(samples), dtype=int), "int64"),
            "min_version": column(np.full(len(samples), version), "int32"),
            "max_version": column(np.full(len(samples), version), "int32"),
            "finish": column([FINISH_CODES.index(s.finish) for _, s in samples], "uint8"),
            "scored": column(np.isfinite(rewards), "bool"),
            "replayed": column(np.zeros(len(samples), dtype=bool), "bool"),
            "prompt_length": column([len(s.prompt) for _, s in samples], "int32"),
        },
        group_ids=[f"lease-{g}" for g in range(len(groups))],
        prompt_ids=[f"task-{g}" for g in range(len(groups))],
        trajectory_ids=[f"trajectory-{i}" for i in range(len(samples))],
    )


def random_batch(seed: int, n_groups: int = 4, n_samples: int = 4, vocab: int = 40, version: int = 0) -> Batch:
    """Groups that share a template, ragged answers, some equal prefixes, behaviour log-probs around −log(vocab)."""
    rng = np.random.default_rng(seed)
    template = rng.integers(3, vocab, 5).tolist()
    groups = []
    for _ in range(n_groups):
        prompt = template + rng.integers(3, vocab, int(rng.integers(2, 5))).tolist()
        members = []
        for _ in range(n_samples):
            answer = rng.integers(3, 6, int(rng.integers(1, 6))).tolist()  # few tokens: prefixes coincide
            logprobs = (-np.log(vocab) + rng.normal(0, 0.3, len(answer))).tolist()
            members.append(Sample(prompt, answer, float(rng.integers(0, 3)) / 2, logprobs))
        groups.append(members)
    return make_batch(groups, version)


def write_tiny_model(path: Path, kind: str = "qwen3", vocab: int = 40, seed: int = 0) -> Path:
    """A tiny random causal language model as a HF directory with bf16 words."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.2,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=8)) if kind == "qwen3" else LlamaForCausalLM(LlamaConfig(**shape))
    model.to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_model("qwen3" | "llama")`: a HF directory, made once per session."""
    made: dict[str, Path] = {}

    def get(kind: str = "qwen3") -> Path:
        if kind not in made:
            made[kind] = write_tiny_model(tmp_path_factory.mktemp("models") / kind, kind)
        return made[kind]

    return get


@pytest.fixture(scope="session")
def sample() -> type[Sample]:
    return Sample


@pytest.fixture(scope="session")
def batch_of() -> Callable[..., Batch]:
    return make_batch


@pytest.fixture(scope="session")
def random_groups() -> Callable[..., Batch]:
    return random_batch
