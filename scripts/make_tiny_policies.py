"""Make `assets/tiny/{solver,verifier}`: two half-million-parameter policies that half know how to sort digits.

    python scripts/make_tiny_policies.py [OUT]

The solver turns `s3142>` into `1234`, the verifier answers `s3142=1234>` with y or n. Both are Qwen3-shaped, share one character
tokenizer, and end up imitating demonstrations of which most (solver) or many (verifier) are wrong: sampled at temperature 1 they
repeat those mistakes as often, and reinforcement learning has something to take away within some thirty steps. (Policies that
are merely stopped early are as bad but learn ten times slower.) About one minute of one core; the checkpoints are committed.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM

from astraflow.datasets.procedural import held_out
from astraflow.tools.smollm2 import to_bf16, write_safetensors

CHARACTERS = ["<pad>", "<bos>", "<eos>", "\n", *map(chr, range(32, 127))]
PAD, EOS = 0, 2
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '>' }}{% endfor %}"
WRONG = {"solver": 0.60, "verifier": 0.36}
"""Share of wrong demonstrations, in the second phase: the first one teaches the task from right ones, which is much faster."""
LENGTHS = (3, 6)
RIGHT_STEPS, WRONG_STEPS = {"solver": 200, "verifier": 350}, 80
BATCH, LEARNING_RATE, CHECK_EVERY = 128, 1e-3, 25

Example = tuple[str, str]
"""What is given, and what is learnt (an end token follows it)."""
Maker = Callable[[random.Random, float], Example]


def config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(CHARACTERS),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=PAD,
        dtype="bfloat16",
    )


def digits(rng: random.Random) -> str:
    """A string of the training split of `astraflow.datasets.procedural:digits`."""
    while True:
        text = "".join(rng.choice("0123456789") for _ in range(rng.randint(*LENGTHS)))
        if not held_out(text):
            return text


def spoil(text: str, rng: random.Random) -> str:
    """A near miss of a sorted string: two digits swapped, one changed, or one lost."""
    while True:
        out, i, j = list(text), rng.randrange(len(text)), rng.randrange(len(text))
        kind = rng.random()
        if kind < 0.4:
            out[i], out[j] = out[j], out[i]
        elif kind < 0.8:
            out[i] = rng.choice("0123456789")
        else:
            del out[i]
        if "".join(out) != text:
            return "".join(out)


def solver_example(rng: random.Random, wrong: float) -> Example:
    """Half of them second attempts: the feedback turn of `solve_and_verify` must not be news to the policy."""
    text = digits(rng)
    right = "".join(sorted(text))
    learnt = spoil(right, rng) if rng.random() < wrong else right
    if rng.random() < 0.5:
        return f"s{text}>", learnt
    first = spoil(right, rng) if rng.random() < 0.8 else right
    return f"s{text}>{first}<eos>?>", learnt


def verifier_example(rng: random.Random, wrong: float) -> Example:
    text = digits(rng)
    right = "".join(sorted(text))
    given, truth = (right, "y") if rng.random() < 0.5 else (spoil(right, rng), "n")
    return f"s{text}={given}>", ("n" if truth == "y" else "y") if rng.random() < wrong else truth


def ids(text: str) -> list[int]:
    out: list[int] = []
    for part in text.split("<eos>"):
        out += [CHARACTERS.index(char) for char in part] + [EOS]
    return out[:-1]


def batch(make: Maker, wrong: float, rng: random.Random, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, T] padded on the right and labels with −100 where nothing is learnt."""
    rows = [(ids(given), [*ids(learnt), EOS]) for given, learnt in (make(rng, wrong) for _ in range(size))]
    width = max(len(given) + len(learnt) for given, learnt in rows)
    tokens = torch.full((size, width), PAD)
    labels = torch.full((size, width), -100)
    for i, (given, learnt) in enumerate(rows):
        tokens[i, : len(given) + len(learnt)] = torch.tensor(given + learnt)
        labels[i, len(given) : len(given) + len(learnt)] = torch.tensor(learnt)
    return tokens, labels


@torch.no_grad()
def sampled_accuracy(model: Qwen3ForCausalLM, make: Maker, rng: random.Random, size: int = 256) -> float:
    """Probability of the right answer at temperature 1, averaged: token by token under the teacher, so one forward does."""
    tokens, labels = batch(make, 0.0, rng, size)
    probabilities = torch.log_softmax(model(tokens).logits[:, :-1].float(), -1)
    wanted = labels[:, 1:]
    own = probabilities.gather(-1, wanted.clamp(min=0)[..., None])[..., 0] * (wanted >= 0)
    return float(own.sum(-1).exp().mean())


def train(name: str, make: Maker, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    rng, judge = random.Random(seed), random.Random(seed + 1)
    model = Qwen3ForCausalLM(config()).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    for step in range(1, RIGHT_STEPS[name] + WRONG_STEPS + 1):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, step / 50)
        tokens, labels = batch(make, WRONG[name] if step > RIGHT_STEPS[name] else 0.0, rng, BATCH)
        loss = model(tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % CHECK_EVERY == 0:
            accuracy = sampled_accuracy(model, make, judge)
            print(f"{name} step {step}: loss {loss.item():.3f} accuracy {accuracy:.3f}", file=sys.stderr)  # noqa: T201
    return model


def tokenizer() -> Tokenizer:
    """One token per character; a tokenizers file that any reader of HF directories understands."""
    made = Tokenizer(models.WordLevel({char: i for i, char in enumerate(CHARACTERS)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(CHARACTERS[:3])
    return made


def save(model: Qwen3ForCausalLM, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    words = {name: to_bf16(tensor.detach().numpy()) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    write_safetensors(out / "model.safetensors", words)
    model.config.architectures = ["Qwen3ForCausalLM"]
    content = {key: value for key, value in model.config.to_dict().items() if key not in ("transformers_version", "_name_or_path")}
    files = {
        "config.json": {**content, "dtype": "bfloat16", "rope_theta": 10000.0},
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": PAD},
        "tokenizer_config.json": {
            "bos_token": "<bos>",
            "chat_template": TEMPLATE,
            "eos_token": "<eos>",
            "model_max_length": 256,
            "pad_token": "<pad>",
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    }
    for name, entries in files.items():
        (out / name).write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    tokenizer().save(str(out / "tokenizer.json"), pretty=False)


def main() -> None:
    torch.set_num_threads(1)
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "assets" / "tiny"
    for seed, (name, make) in enumerate({"solver": solver_example, "verifier": verifier_example}.items()):
        save(train(name, make, seed), out / name)


if __name__ == "__main__":
    main()
