"""After every load: are the engine's log-probs those of the words that were published?

    load confirmed ─▶ the engine answers fixed prompts ─▶ `reference` computes the same tokens from the staged file ─▶ difference
                       below the limit: the receipt moves on │ above: the receipt is taken back, and with it all work

An engine can confirm a load and still serve something else (a server that keeps the old head of a tied model, a prefix cache that
was not emptied); only its log-probs show it. The reference is computed here, not by the trainer: the staged file has the published
digest, so that this checks exactly the engine, works with foreign trainers, and needs no word of theirs. (Whether trainer and engine
agree is `mismatch/*`.) It is asked through the engine's one call, so every kind of engine is checked the same way.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from astraflow.lib.aio import deadline, in_daemon_thread, one_line
from astraflow.lib.metrics import Counter
from astraflow.protocol.errors import AstraFlowError, LayoutMismatch
from astraflow.raas.config import CanaryConfig
from astraflow.raas.engines.base import Engine, EngineError, Weights
from astraflow.raas.engines.embedded_arch import read_architecture
from astraflow.raas.reference import Reference
from astraflow.workflows.api import ModelRequest, ModelResponse

log = logging.getLogger(__name__)

PROMPTS = (8, 12, 16, 24)
"""Lengths in tokens. Several, so that one early end of sequence leaves enough to compare; the engine gets them at once."""
NEW_TOKENS = 8
TRIES = 3
"""For an engine whose process dies meanwhile."""
LIMIT_FLOAT32, LIMIT_OTHER = 1e-3, 0.5
"""Largest difference that is still kernel noise, in nats. Measured on SmolLM2-135M: noise of the embedded engine 2e-5 in float32 and
0.19 in bf16; with one bf16 step in 0.3 % (2 %) of the words, the old words are off by 0.010 (0.08), the old head alone by 0.0025 (0.10).
So float32 shows one missed version; other dtypes show only what is grossly wrong, or has been left behind for many versions."""


@dataclass(frozen=True)
class Verdict:
    """What a check found."""

    complaint: str = ""
    """Why the engine must not be used; empty = passed, or not checked."""
    metrics: dict[str, float] = field(default_factory=dict)
    """`raas/canary/max_error`, `raas/canary/mean_error` (|Δ log-prob| over the tokens, nats) and `raas/canary/seconds`."""


class Canary:
    """The check of one model. `counts`: `raas/canary/passed`, `raas/canary/failed`, `raas/canary/unchecked`."""

    def __init__(
        self, engine: Engine, model_dir: Path, vocab_size: int, context_length: int, dtype: str, config: CanaryConfig, counts: Counter
    ) -> None:
        self._engine, self._config, self._counts = engine, config, counts
        self._limit = config.max_error or (LIMIT_FLOAT32 if dtype == "float32" else LIMIT_OTHER)
        arch = read_architecture(model_dir)
        self._reference = None if arch is None else Reference(arch)
        self._prompts = prompts(vocab_size if arch is None else min(vocab_size, arch.vocab_size), context_length)
        self._serial = 0
        self.note = ""
        """Why the newest weights were not checked; for status."""

    async def check(self, weights: Weights) -> Verdict:
        """At most `deadline_s` long; an engine or a reference that cannot be asked in time is no complaint, but it is counted."""
        every = self._config.every
        if not every or weights.version % every or not self._engine.report().has_model:
            return Verdict()
        started, self.note = time.monotonic(), ""
        try:
            verdict = await deadline(self._checked(weights), self._config.deadline_s, f"canary of version {weights.version}")
        except EngineError as error:
            verdict = Verdict(f"canary of version {weights.version}: {one_line(error)}")
        except (AstraFlowError, OSError, ValueError) as error:
            self.note = f"version {weights.version} was not checked: {one_line(error)}"
            log.warning("canary: %s", self.note)
            self._counts.add("raas/canary/unchecked")
            return Verdict()
        self._counts.add("raas/canary/failed" if verdict.complaint else "raas/canary/passed")
        verdict.metrics["raas/canary/seconds"] = time.monotonic() - started
        return verdict

    async def _checked(self, weights: Weights) -> Verdict:
        if self._reference is None:
            raise LayoutMismatch("its architecture has no reference here")
        answers = await asyncio.gather(*(self._ask(prompt, number) for number, prompt in enumerate(self._prompts)))
        stamps = {(answer.timeline, version) for answer in answers for version in answer.versions}
        if stamps != {(weights.timeline, weights.version)}:
            return Verdict(f"canary of version {weights.version}: its tokens are stamped {sorted(stamps)} (timeline, version)")
        rows = [prompt + answer.output_ids for prompt, answer in zip(self._prompts, answers, strict=True)]
        stop = threading.Event()
        work = partial(self._reference.log_probs, Path(weights.path), rows, [len(prompt) for prompt in self._prompts], stop)
        try:
            wanted = np.concatenate(await in_daemon_thread(work, "canary"))
        finally:
            stop.set()
        found = np.array([value for answer in answers for value in answer.logprobs])
        errors = np.abs(found - wanted)
        worst = float(errors.max()) if np.isfinite(errors).all() else float("inf")
        what = f"log-probs differ from the published words by up to {worst:.4g} (limit {self._limit:g})"
        metrics = {"raas/canary/max_error": worst, "raas/canary/mean_error": float(errors.mean())}
        return Verdict("" if worst <= self._limit else f"canary of version {weights.version}: {what}", metrics)

    async def _ask(self, prompt: list[int], number: int) -> ModelResponse:
        for left in reversed(range(TRIES)):
            self._serial += 1
            request = ModelRequest(request_id=f"canary/{self._serial}", input_ids=prompt, max_new_tokens=NEW_TOKENS, seed=number)
            try:
                return await self._engine.agenerate(request)
            except EngineError as error:
                if not left or not error.retryable:
                    raise
        raise AssertionError("the last try returns or raises")


def prompts(vocab_size: int, context_length: int) -> list[list[int]]:
    """Token ids spread over the vocabulary, the same in every process; as many prompts as fit into the context, at least one."""
    room = context_length - NEW_TOKENS if context_length else max(PROMPTS)
    lengths = [length for length in PROMPTS if length <= room] or [max(1, room)]
    spread = [(position * 2654435761) % vocab_size for position in range(1, sum(lengths) + 1)]
    return [[spread.pop() for _ in range(length)] for length in lengths]
