"""The version oracle (numerics): every token of the engine recomputed under the published words of its own stamp, by Hugging Face.

Tiny random models whose words are bf16, so that a forward in float32 uses exactly what was published. For unit and GPU tests.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from astraflow.raas.engines.embedded_core import EmbeddedEngineCore
from astraflow.raas.engines.frames import Done, Init, Loaded
from astraflow.workflows.api import ModelRequest, ModelResponse

VOCABULARY = 131
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "eos_token_id": [2, 7],
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.25}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "llama biases, llama3 rope": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e6})),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
    "qwen3 tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)),
}


class Published:
    """Weight versions of one model: staged bf16 files, and Hugging Face models on exactly these words."""

    def __init__(self, directory: Path, name: str = "qwen3", versions: int = 1) -> None:
        torch.manual_seed(0)
        self.directory = directory
        self.models: list[PreTrainedModel] = []
        self.paths: list[str] = []
        for version in range(versions):
            model = MODELS[name]().eval()
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    if "bias" in key or "norm" in key:
                        parameter.add_(torch.randn_like(parameter) * 0.3)
                    parameter.copy_(parameter.bfloat16())
            words = {key: parameter.detach().bfloat16().clone() for key, parameter in model.named_parameters()}
            path = directory / f"v{version}.safetensors"
            save_file(words, path)
            self.models.append(model)
            self.paths.append(str(path))
        self.models[0].config.save_pretrained(directory)

    def core(self, load: bool = True, make: type[EmbeddedEngineCore] = EmbeddedEngineCore, **options: Any) -> EmbeddedEngineCore:
        defaults: dict[str, Any] = {"max_slots": 32, "eos_ids": [], "threads": 1, "device": "cpu"}
        core = make(Init(model_dir=str(self.directory), **{**defaults, **options}))
        if load:
            self.load(core, 0)
        return core

    def load(self, core: EmbeddedEngineCore, version: int) -> None:
        answer = core.load(self.paths[version], timeline=1, version=version, digest=f"d{version}")
        assert isinstance(answer, Loaded), answer

    @torch.inference_mode()
    def log_probs(self, version: int, rows: list[list[int]]) -> torch.Tensor:
        """[rows, longest] logits of a right-padded batch; causal, so padding changes nothing before it."""
        width = max(map(len, rows))
        return self.models[version](torch.tensor([row + [0] * (width - len(row)) for row in rows])).logits


def finish(core: EmbeddedEngineCore, steps: int = 10_000) -> dict[str, Any]:
    """Up to so many steps; the answers by id, a response or the Failed frame."""
    answers: dict[str, Any] = {}
    while core.busy and steps:
        steps -= 1
        answers.update({answer.id: answer.response if isinstance(answer, Done) else answer for answer in core.step()})
    return answers


def worst_error(published: Published, done: list[tuple[ModelRequest, ModelResponse]], stamps: Callable[[list[int]], list[int]]) -> float:
    """Largest difference between a token's log-prob and that of a forward with the words of its stamp (numerics 2, 3)."""
    return errors(published, done, stamps).max().item()


def errors(
    published: Published, done: list[tuple[ModelRequest, ModelResponse]], stamps: Callable[[list[int]], list[int]]
) -> torch.Tensor:
    """The same for every token."""
    found = [torch.zeros(1)]
    for version in range(len(published.models)):
        rows = [(request, response) for request, response in done if version in stamps(response.versions)]
        if not rows:
            continue
        logits = published.log_probs(version, [request.input_ids + response.output_ids for request, response in rows])
        for (request, response), row in zip(rows, logits, strict=True):
            first = len(request.input_ids) - 1
            wanted = torch.log_softmax(row[first : first + len(response.output_ids)] / request.temperature, -1)
            wanted = wanted.gather(1, torch.tensor(response.output_ids)[:, None])[:, 0]
            mine = torch.tensor([stamp == version for stamp in stamps(response.versions)])
            found.append((wanted - torch.tensor(response.logprobs))[mine].abs())
    return torch.cat(found)


def rollouts(core: EmbeddedEngineCore, published: Published) -> list[tuple[ModelRequest, ModelResponse]]:
    """Two waves of 15 groups of 8 with one template; version 1 comes in the middle of the first, version 2 between them."""
    generator = random.Random(1)
    template = [generator.randrange(VOCABULARY) for _ in range(24)]
    requests: dict[str, ModelRequest] = {}
    answers: dict[str, Any] = {}
    for wave in range(2):
        for group in range(15):
            for sample in range(8):
                prompt = [*template, *range(3 + group, 9 + group)]
                seed = (wave * 15 + group) * 8 + sample
                temperature = (0.7, 1.0, 1.3)[seed % 3]
                requests[str(seed)] = ModelRequest(input_ids=prompt, max_new_tokens=6 + seed % 9, temperature=temperature, seed=seed)
                assert core.submit(str(seed), requests[str(seed)]) is None
        answers |= finish(core, steps=12 if wave == 0 else 10_000)
        if wave == 0:
            assert len(core.scheduler.running) > 20, "the load comes in the middle of sequences"
            published.load(core, 1)
            answers |= finish(core)
            published.load(core, 2)
    return [(requests[key], answers[key]) for key in requests]
