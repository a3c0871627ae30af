"""Data sets that are computed: no download, the same tasks for the same options everywhere."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import xxhash

from astraflow.datasets.api import Options
from astraflow.datasets.config import DatasetConfig
from astraflow.lib.registry import closest
from astraflow.protocol.errors import ConfigError, UserError

SHOTS = [(2, 2), (5, 1)]
SPLITS = ("train", "heldout")


def addition(config: DatasetConfig, seed: int) -> Iterator[dict[str, Any]]:
    """One-digit addition behind two solved examples in the chat: 61 ordered pairs to train on, 20 held out.

    Held out are the pairs whose product is 2 modulo 4, both orders of each. Options: `split` (train, heldout), and
    `shuffle_answers`: the control experiment, in which the training answers are permuted so that none stays with its question and
    the reward says nothing about addition.
    """
    options = Options(config)
    split = options.take("split", "train", SPLITS)
    shuffled = options.take("shuffle_answers", False)
    options.done()
    if shuffled and split != "train":
        raise ConfigError("dataset 'addition' options.shuffle_answers: only for split 'train'; the held-out pairs measure")
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10) if (a * b % 4 == 2) == (split == "heldout")]
    answers = [a + b for a, b in pairs]
    if shuffled:
        answers = _derange(answers, random.Random(seed))
    opening = [{"role": "system", "content": "Add."}]
    for a, b in SHOTS:
        opening += [{"role": "user", "content": f"{a} + {b} ="}, {"role": "assistant", "content": str(a + b)}]
    for (a, b), answer in zip(pairs, answers, strict=True):
        yield {"messages": [*opening, {"role": "user", "content": f"{a} + {b} ="}], "answer": str(answer)}


def _derange(values: list[int], rng: random.Random) -> list[int]:
    """A permutation of one cycle (Sattolo): every entry moves."""
    out = list(values)
    for last in range(len(out) - 1, 0, -1):
        other = rng.randrange(last)
        out[last], out[other] = out[other], out[last]
    return out


def _sorted(text: str) -> str:
    return "".join(sorted(text))


def _reversed(text: str) -> str:
    return text[::-1]


TASKS = {"sort": ("s", _sorted), "reverse": ("r", _reversed)}


def digits(config: DatasetConfig, seed: int) -> Iterator[dict[str, Any]]:
    """Digit strings to sort or reverse, for models of half a million parameters: `s3142` → `1234`.

    Options: `task` (sort, reverse), `min_len`, `max_len`, `n` (distinct tasks), `seed` (default: the experiment's), `split`: a
    string belongs to `heldout` (one fifth) or `train` by its hash, so the two never meet.
    """
    options = Options(config)
    task = options.take("task", "sort", tuple(TASKS))
    split = options.take("split", "train", SPLITS)
    low, high = options.take("min_len", 3), options.take("max_len", 6)
    count = options.take("n", 1024)
    rng = random.Random(options.take("seed", seed))
    options.done()
    if count < 1:
        raise ConfigError(f"dataset 'digits' options.n: {count}, expected at least 1")
    if not 1 <= low <= high <= 32:
        raise ConfigError(f"dataset 'digits' options.min_len/max_len: {low}/{high}, expected 1 ≤ min_len ≤ max_len ≤ 32")
    letter, solve = TASKS[task]
    seen: set[str] = set()
    for _ in range(50 * count):  # short strings run out: better fewer tasks than an endless search
        if len(seen) == count:
            return
        text = "".join(rng.choice("0123456789") for _ in range(rng.randint(low, high)))
        if text not in seen and held_out(text) == (split == "heldout"):
            seen.add(text)
            yield {"prompt": letter + text, "answer": solve(text)}
    raise ConfigError(f"dataset 'digits' options.n: {count} distinct tasks of {low} to {high} digits in split {split!r} do not exist")


def held_out(text: str) -> bool:
    """One string in five, the same ones in every process."""
    return xxhash.xxh3_64_intdigest(text.encode()) % 5 == 0


UNREPEATABLE = {"isomorphic_strings", "polynomial_multiplication", "ransom_note"}
"""Sets of reasoning-gym 0.1.25 whose entries depend on Python's hash seed, so on the process; what they score by is plain JSON."""


def reasoning_gym(config: DatasetConfig, seed: int) -> Iterator[dict[str, Any]]:
    """Any set of reasoning-gym. Options: `task` (its name), `size`, `seed`, `config` (the set's own settings).

    A task carries how to make its entry again rather than the entry, whose metadata need not survive the wire (those of
    `UNREPEATABLE` carry the entry); the reward `reasoning_gym` makes it in its worker process. Import is slow, so it happens here.
    """
    options = Options(config)
    name = options.take("task", "leg_counting")
    size = options.take("size", 500)
    chosen = options.take("seed", seed)
    settings = options.take("config", {})
    options.done()
    if size < 1:
        raise ConfigError(f"dataset 'reasoning_gym' options.size: {size}, expected at least 1")
    try:
        import reasoning_gym as gym  # type: ignore[import-untyped,unused-ignore]
        from reasoning_gym.factory import DATASETS as known  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise UserError("dataset 'reasoning_gym' needs the package: pip install reasoning-gym") from None
    if name not in known:
        raise ConfigError(
            f"dataset 'reasoning_gym' options.task: {name!r} is unknown{closest(name, list(known))}; known: {', '.join(sorted(known))}"
        )
    try:
        entries = gym.create_dataset(name, seed=chosen, size=size, **settings)
    except (TypeError, AssertionError, ValueError) as error:
        raise ConfigError(f"dataset 'reasoning_gym' options.config for {name!r}: {type(error).__name__}: {error}") from None
    for index in range(size):
        entry = entries[index]
        digest = xxhash.xxh3_64_hexdigest(entry["question"].encode())
        gym_of: dict[str, Any] = {"name": name, "seed": chosen, "size": size, "index": index, "config": settings, "question": digest}
        if name in UNREPEATABLE:
            gym_of["entry"] = json.loads(json.dumps(entry))
        yield {"prompt": entry["question"], "answer": None if entry["answer"] is None else str(entry["answer"]), "gym": gym_of}
