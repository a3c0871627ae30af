"""The embedded engine without a process around it: submit, step, load. One thread drives it; nothing here blocks on others.

    core = EmbeddedEngineCore(Init(model_dir="…", load_initial=True))
    core.submit("a", ModelRequest(…));  while core.busy: answers += core.step()

A step admits what fits, computes one plan (`embedded_batch.plan`), samples one token per sequence that is up to date, and
answers those that ended. A weight load happens between two steps, in place.
"""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path

import torch

from astraflow.lib.tokenizer import Tokenizer
from astraflow.protocol.errors import AstraFlowError, ConfigError, LayoutMismatch
from astraflow.raas.engines.embedded_arch import eos_ids, read_architecture
from astraflow.raas.engines.embedded_batch import Scheduler, Segment, Sequence, Slots, plan, uniform
from astraflow.raas.engines.embedded_cache import PrefixCache
from astraflow.raas.engines.embedded_hf import HFModel
from astraflow.raas.engines.embedded_model import Model
from astraflow.raas.engines.embedded_sample import Draw, sample
from astraflow.raas.engines.frames import Done, Failed, Init, Loaded, LoadFailed
from astraflow.workflows.api import ModelRequest, ModelResponse

Answer = Done | Failed
UNBOUNDED = 1 << 40
"""Tokens of a key-value store that does not exist (`embedded_hf`)."""
RATE_WINDOW_S = 10.0
"""Seconds of work over which tokens_per_s is taken."""


class EmbeddedEngineCore:
    """`options.threads` sets torch's intra-op threads for the whole process. Raises ConfigError for a model it cannot serve."""

    def __init__(self, options: Init) -> None:
        self.options = options
        if options.threads:
            torch.set_num_threads(options.threads)
        model_dir = Path(options.model_dir)
        self.device = _device(options.device)
        self.dtype = _dtype(options.dtype, self.device)
        arch = read_architecture(model_dir)
        self.model: Model | HFModel
        if arch is None:
            self.model = HFModel(model_dir, self.dtype, self.device)
            self.max_len = min(options.max_len or self.model.context_length, self.model.context_length)
        else:
            self.max_len = min(options.max_len or arch.context_length, arch.context_length)
            self.model = Model(arch, self.dtype, self.device, self.max_len)
        token_bytes = self.model.kv_token_bytes
        kv_tokens = options.kv_bytes // token_bytes if token_bytes else UNBOUNDED
        self.scheduler = Scheduler(Slots(options.max_slots, kv_tokens), options.max_queue)
        self.cache = self.make_cache(options.prefix_cache_bytes // token_bytes if token_bytes else 0)
        self.eos_ids = frozenset(eos_ids(model_dir) if options.eos_ids is None else options.eos_ids)
        self.timeline, self.version, self.digest = 0, -1, ""
        self.epoch = 0
        """Counts successful loads: the weights' part of every cache key, whatever versions and timelines are called."""
        self._spoiled = False
        """Logits were not finite under these weights, so keys may not be either."""
        self.counts: dict[str, float] = dict.fromkeys(COUNTERS, 0.0)
        self._tokenizer: Tokenizer | None = None
        self._rate: list[tuple[float, int]] = []
        """(seconds, sampled tokens) of the last steps."""
        if options.load_initial:
            loaded = self.load(str(model_dir), timeline=0, version=0, digest="")
            if isinstance(loaded, LoadFailed):
                raise ConfigError(f"model_dir: {loaded.message}")

    def make_cache(self, max_tokens: int) -> PrefixCache:
        return PrefixCache(max_tokens, copy=torch.clone)

    # --- requests ---------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """A step would compute something."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def submit(self, id: str, request: ModelRequest) -> Failed | None:
        """Queue a request. A refusal concerns this request only."""
        refusal = self._refusal(id, request)
        if refusal is None:
            stop_ids = self.eos_ids.union(request.stop_ids)
            sequence = Sequence(id, request, list(request.input_ids), len(request.input_ids), stop_ids, epoch=self.epoch)
            if self.scheduler.submit(sequence):
                return None
            refusal = Failed(id=id, kind="over_capacity", message=f"{self.options.max_queue} requests wait already (max_queue)")
        self.counts["failed"] += 1
        return refusal

    def _refusal(self, id: str, request: ModelRequest) -> Failed | None:
        if self.version < 0:
            return Failed(id=id, kind="not_loaded", message="no weights have been loaded yet")
        limit = len(request.input_ids) + request.max_new_tokens
        bad = [token for token in request.input_ids if not 0 <= token < self.model.vocab_size]
        problems = {
            f"request id {id!r} is running already": id in self.scheduler.by_id,
            "input_ids is empty": not request.input_ids,
            f"input_ids holds {bad[:3]}, outside the vocabulary of {self.model.vocab_size}": bool(bad),
            f"max_new_tokens {request.max_new_tokens} is below 1": request.max_new_tokens < 1,
            f"temperature {request.temperature} is not a finite number ≥ 0": not 0 <= request.temperature < math.inf,
            f"top_p {request.top_p} is not in (0, 1]": not 0 < request.top_p <= 1,
            f"top_k {request.top_k} is negative": request.top_k < 0,
        }
        for message, wrong in problems.items():
            if wrong:
                return Failed(id=id, kind="bad_request", message=message)
        if limit > self.max_len or not self.scheduler.slots.fits_ever(limit):
            room = min(self.max_len, self.scheduler.slots.kv_tokens)
            return Failed(id=id, kind="overlong", message=f"{len(request.input_ids)} + {request.max_new_tokens} tokens, room for {room}")
        return None

    def cancel(self, id: str) -> Failed | None:
        """Free its slot now. None when the id is not known (any more)."""
        sequence = self.scheduler.by_id.get(id)
        if sequence is None:
            return None
        self._release(sequence)
        self.counts["cancelled"] += 1
        return Failed(id=id, kind="cancelled", message="cancelled")

    # --- one step ---------------------------------------------------------------------------------------------------------

    def step(self) -> list[Answer]:
        """Admit, compute, sample; returns the requests that ended."""
        started = time.perf_counter()
        self._admit()
        segments = plan(self.scheduler.running, self.options.prefill_tokens)
        if not segments:
            return []
        logits = self.model.forward(segments)
        self._advance(segments)
        ending = [segment.ends for segment in segments if segment.ends]
        answers = self._sample(logits, ending) if ending else []
        self._rate.append((time.perf_counter() - started, sum(map(len, ending))))
        if sum(seconds for seconds, _ in self._rate) > RATE_WINDOW_S:
            self._rate.pop(0)
        return answers

    def _admit(self) -> None:
        admitted, resizes = self.scheduler.admit()
        for resize in resizes:
            self.model.kv.resize(resize)
        for sequence in admitted:
            sequence.epoch = self.epoch
        for _, same in itertools.groupby(admitted, key=lambda sequence: sequence.tokens):
            sequences = list(same)  # the samples of one prompt
            for start, end, words in self.cache.match(sequences[0].tokens, len(sequences[0].tokens) - 1):
                self.model.kv.write(sequences, start, end, words)
                for sequence in sequences:
                    sequence.computed = end
            self.counts["prefix_hit_tokens"] += sequences[0].computed * len(sequences)

    def _advance(self, segments: list[Segment]) -> None:
        for segment in segments:
            filling = segment.end <= segment.owner.prompt_length
            for sequence in segment.rows:
                sequence.computed = segment.end
            if filling:
                self.counts["prefill_tokens"] += segment.length
                self.counts["shared_tokens"] += segment.length * (len(segment.rows) - 1)
        for segment in segments:
            if segment.ends and segment.end == segment.owner.prompt_length:
                self._remember(segment.ends[0])
        self.counts["steps"] += 1

    def _remember(self, sequence: Sequence) -> None:
        """Offer what is computed of a sequence to later prompts: its siblings, its next turn."""
        tokens = sequence.tokens[: sequence.computed]
        self.cache.insert(tokens, sequence.epoch, lambda start, end: self.model.kv.read(sequence, start, end))

    def _sample(self, logits: torch.Tensor, ending: list[list[Sequence]]) -> list[Answer]:
        sequences = [sequence for group in ending for sequence in group]
        if len(sequences) > len(ending):  # samples of one prompt start from the same logits
            source = [row for row, group in enumerate(ending) for _ in group]
            logits = logits.index_select(0, torch.tensor(source, device=logits.device))
        tokens, logprobs = sample(logits, [_draw(sequence) for sequence in sequences])
        self.counts["generated_tokens"] += len(tokens)
        answers: list[Answer] = []
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            if not math.isfinite(logprob):
                self._spoiled = True
                message = f"logits are not finite under version {self.version} of timeline {self.timeline}"
                answers.append(self._fail(sequence, message))
                continue
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.versions.append(self.version)
            sequence.timeline = self.timeline if sequence.timeline is None else min(sequence.timeline, self.timeline)
            answer = self._ended(sequence, token)
            if answer is not None:
                answers.append(answer)
        return answers

    def _fail(self, sequence: Sequence, message: str) -> Failed:
        self.counts["failed"] += 1
        self._release(sequence)
        return Failed(id=sequence.id, kind="engine", message=message)

    def _ended(self, sequence: Sequence, token: int) -> Answer | None:
        if token not in sequence.stop_ids:
            try:
                stopped = bool(sequence.request.stop) and self._stop_text(sequence)
            except AstraFlowError as error:  # no usable tokenizer: this request cannot be served
                return self._fail(sequence, f"stop {sequence.request.stop!r}: {error}")
            if not stopped and len(sequence.tokens) < sequence.limit:
                return None
            finish = "stop" if stopped else "length"
        else:
            finish = "stop"
        if sequence.epoch == self.epoch:
            self._remember(sequence)
        self._release(sequence)
        response = ModelResponse(
            output_ids=sequence.output,
            logprobs=sequence.logprobs,
            versions=sequence.versions,
            finish="stop" if finish == "stop" else "length",
            timeline=sequence.timeline or 0,
        )
        return Done(id=sequence.id, response=response)

    def _stop_text(self, sequence: Sequence) -> bool:
        """The output ends a stop text with its last token. Only a tail is decoded: every token has at least one byte of text."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.load(self.options.model_dir)
        longest = max(len(stop.encode()) for stop in sequence.request.stop)
        tail = sequence.tokens[max(sequence.prompt_length, len(sequence.tokens) - longest - 8) :]
        text = self._tokenizer.decode(tail, skip_special=False)
        return any(stop in text for stop in sequence.request.stop)

    def _release(self, sequence: Sequence) -> None:
        move = self.scheduler.finish(sequence)
        if move is not None:
            self.model.kv.move(move)

    # --- weights ----------------------------------------------------------------------------------------------------------

    def load(self, path: str, *, timeline: int, version: int, digest: str) -> Loaded | LoadFailed:
        """Replace the weights in place. On failure the old ones are complete and go on serving, caches and all."""
        started = time.perf_counter()
        try:
            self.model.weights.load(Path(path))
        except LayoutMismatch as error:
            return LoadFailed(timeline=timeline, version=version, message=str(error))
        self.timeline, self.version, self.digest = timeline, version, digest
        self.epoch += 1
        self.cache.flush(self.epoch)
        if self._spoiled:
            self.model.kv.clean()
            self._spoiled = False
        keep = self.options.kv_on_update == "keep"
        self.counts["recomputed_tokens"] += self.scheduler.new_weights(self.epoch, keep=keep)
        seconds = time.perf_counter() - started
        self.counts["load_stall_ms"] = seconds * 1000
        return Loaded(timeline=timeline, version=version, digest=digest, seconds=seconds)

    def stats(self) -> dict[str, float]:
        """The numbers of `Pong.stats`."""
        slots = self.scheduler.slots
        worked = sum(seconds for seconds, _ in self._rate)
        return {
            **self.counts,
            "kv_use": slots.used_tokens / max(slots.kv_tokens, 1),
            "prefix_cache_use": self.cache.tokens / max(self.cache.max_tokens, 1),
            "tokens_per_s": sum(tokens for _, tokens in self._rate) / worked if worked else 0.0,
        }


COUNTERS = (
    "generated_tokens",
    "prefill_tokens",
    "prefix_hit_tokens",
    "shared_tokens",
    "recomputed_tokens",
    "steps",
    "load_stall_ms",
    "cancelled",
    "failed",
)


def _draw(sequence: Sequence) -> Draw:
    request = sequence.request
    greedy = request.greedy or request.temperature == 0
    return Draw(
        temperature=request.temperature or 1.0,
        uniform=uniform(request.seed, len(sequence.logprobs)),
        greedy=greedy,
        top_p=request.top_p,
        top_k=request.top_k,
    )


def _device(name: str) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError("engine.device cuda: torch sees no GPU; use cpu or auto")
    return torch.device("cuda" if name != "cpu" and available else "cpu")


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.float32 if name == "float32" else torch.bfloat16
