"""An engine without a model, for tests of everything around it: same seeds, same tokens; every delay and fault on request.

What is not scripted is real: tokens come from the model's tokenizer, each token carries the version that was loaded when it was
"sampled" (so a load in the middle of a sequence shows), and a load reads the staged file and checks its digest.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from astraflow.lib.registry import import_attr
from astraflow.protocol.control import EngineStatus
from astraflow.protocol.errors import ConfigError
from astraflow.protocol.rollout import Serving
from astraflow.protocol.weights import TensorMeta
from astraflow.raas.engines.base import EngineError, EngineReport, EngineSetup, Piece, Weights, generate_through_aborts, typed_options
from astraflow.weights.layout import HEADER_KEY, Layout, digest
from astraflow.workflows.api import ModelRequest, ModelResponse

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""


class Line(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One answer, exactly."""

    text: str | None = None
    """Encoded with the model's tokenizer; `finish: stop` appends its end token."""
    tokens: list[int] | None = None
    """Used as they are."""
    logprobs: list[float] | None = None
    finish: Literal["stop", "length", "abort"] = "stop"


class ScriptedOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`raas.engine.options` of kind `scripted`."""

    start_s: Annotated[float, Meta(ge=0)] = 0.0
    token_s: Annotated[float, Meta(ge=0)] = 0.0
    """Time per token."""
    load_s: Annotated[float, Meta(ge=0)] = 0.0
    """Time per weight load; tokens stand still meanwhile."""
    solver: str = "arithmetic"
    """How the right answer is found in the prompt: a name of SOLVERS or `module:attr`, text → answer or None."""
    correct: Annotated[float, Meta(ge=0, le=1)] = 0.3
    """Probability of the right answer at version 0 …"""
    correct_per_version: float = 0.05
    """… and what each version adds, up to `correct_max`."""
    correct_max: Annotated[float, Meta(ge=0, le=1)] = 0.95
    choices: list[str] = []
    """Answers to choose from at random where the solver finds none; empty = random tokens."""
    answer_tokens: Annotated[int, Meta(ge=1)] = 4
    """Length of a random answer, its end token not counted."""
    script: list[Line] = []
    """Exact answers, one per try in the order of arrival; after the last one the solver takes over."""
    script_repeats: bool = False
    """Begin the script again instead."""
    aborts: bool = False
    """A load interrupts what runs (as some servers do); it is asked for again with the tokens so far."""
    initial: bool = False
    """Serve version 0 of timeline 0, without a digest, before any load."""
    verify: bool = True
    """Check the digest of staged files."""
    fail_loads: list[int] = []
    """Versions whose next load fails; each entry once."""
    fail_requests: list[int] = []
    """Numbers (from 0) of requests that fail as if the engine's process had died."""
    stuck_requests: list[int] = []
    """Numbers of requests that never end by themselves."""


class ScriptedEngine:
    """In the RaaS process itself."""

    def __init__(self, setup: EngineSetup) -> None:
        """Raises ConfigError for options that do not exist."""
        self.options = typed_options(setup.config, ScriptedOptions)
        self._setup = setup
        self._solve = _solver(self.options.solver)
        self._serving = Serving(timeline=0, version=0, digest="") if self.options.initial else None
        self._status = EngineStatus(kind="scripted", state="starting")
        self._still = asyncio.Event()
        self._still.set()
        self._epoch = 0
        self._line = 0
        self._requests = 0
        self._fail_loads = list(self.options.fail_loads)
        self.seen: list[ModelRequest] = []
        """Every try, in order, at most 10,000: what tests look at."""

    async def start(self) -> None:
        await asyncio.sleep(self.options.start_s)
        self._status.state = "ready"

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        number, self._requests = self._requests, self._requests + 1
        self._status.running += 1
        try:
            if number in self.options.fail_requests:
                raise EngineError("crash", f"scripted failure of request {number}", retryable=True)
            if number in self.options.stuck_requests:
                await asyncio.Event().wait()
            return await generate_through_aborts(self._piece, request)
        finally:
            self._status.running -= 1

    async def load(self, weights: Weights) -> None:
        self._status.state = "loading"
        self._still.clear()
        try:
            found = await asyncio.to_thread(read_digest, Path(weights.path)) if self.options.verify else weights.digest
            await asyncio.sleep(self.options.load_s)
            if weights.version in self._fail_loads:
                self._fail_loads.remove(weights.version)
                raise EngineError("load_failed", f"scripted failure of version {weights.version}")
            if weights.digest and found != weights.digest:
                raise EngineError("load_failed", f"{weights.path}: digest {found}, expected {weights.digest}")
            self._serving = Serving(timeline=weights.timeline, version=weights.version, digest=found)
            self._epoch += 1
        finally:
            self._still.set()
            self._status.state = "ready"

    def report(self) -> EngineReport:
        metrics = {"requests": float(self._requests)}
        return EngineReport(status=self._status, serving=self._serving, metrics=metrics, has_model=False)

    async def close(self) -> None:
        self._status.state = "error"

    # --- one try ------------------------------------------------------------------------------------------------------------

    async def _piece(self, request: ModelRequest) -> Piece:
        await self._still.wait()
        if self._serving is None:
            raise EngineError("not_loaded", "no weights have been loaded yet")
        if len(self.seen) < 10_000:
            self.seen.append(request)
        tokens, finish, logprobs = self._plan(request, self._serving.version)
        piece = Piece(output_ids=[], logprobs=[], versions=[], finish=finish, timeline=self._serving.timeline)
        epoch = self._epoch
        for token, logprob in zip(tokens, logprobs, strict=True):
            if self.options.token_s:
                await asyncio.sleep(self.options.token_s)
            await self._still.wait()
            if self.options.aborts and epoch != self._epoch:
                piece.finish = "abort"
                break
            piece.output_ids.append(token)
            piece.logprobs.append(logprob)
            piece.versions.append(self._serving.version)
        return piece

    def _plan(self, request: ModelRequest, version: int) -> tuple[list[int], Literal["stop", "length", "abort"], list[float]]:
        """Tokens of this try, within its budget, and how it ends."""
        rng = random.Random(request.seed)
        line = self._next_line()
        finish: Literal["stop", "length", "abort"] = "stop" if line is None else line.finish
        tokens = self._answer(request, version, rng) if line is None else self._tokens(line)
        logprobs = list(line.logprobs) if line is not None and line.logprobs is not None else [-rng.uniform(0.05, 2.0) for _ in tokens]
        if len(tokens) > request.max_new_tokens:
            tokens, logprobs, finish = tokens[: request.max_new_tokens], logprobs[: request.max_new_tokens], "length"
        return tokens, finish, logprobs

    def _next_line(self) -> Line | None:
        script = self.options.script
        if not script or (self._line >= len(script) and not self.options.script_repeats):
            return None
        self._line += 1
        return script[(self._line - 1) % len(script)]

    def _tokens(self, line: Line) -> list[int]:
        if line.tokens is not None:
            return list(line.tokens)
        end = self._setup.eos_ids[:1] if line.finish == "stop" else []
        return self._setup.tokenizer.encode(line.text or "") + end

    def _answer(self, request: ModelRequest, version: int, rng: random.Random) -> list[int]:
        options, tokenizer = self.options, self._setup.tokenizer
        right = self._solve(tokenizer.decode(request.input_ids))
        chance = max(options.correct, min(options.correct_max, options.correct + options.correct_per_version * version))
        if right is None and options.choices:
            body = tokenizer.encode(rng.choice(options.choices))
        elif right is not None:
            hit = chance >= 0.5 if request.greedy else rng.random() < chance
            body = tokenizer.encode(right if hit else _wrong(right, rng))
        else:
            ends = set(self._setup.eos_ids)
            ordinary = [token for token in range(min(tokenizer.vocab_size, 4096)) if token not in ends] or [0]
            body = [rng.choice(ordinary) for _ in range(options.answer_tokens)]
        return body + self._setup.eos_ids[:1]


def _wrong(right: str, rng: random.Random) -> str:
    if right in _OPPOSITE:
        return _OPPOSITE[right]
    if re.fullmatch(r"\d{1,6}", right) and not right.startswith("0"):
        return str(int(right) + rng.choice([1, 2, 3]))
    return right[::-1] if right[::-1] != right else right + right[:1]


_OPPOSITE = {"y": "n", "n": "y"}
_TASK = re.compile(r"(?P<a>\d+) \+ (?P<b>\d+) =|\b(?P<kind>[sr])(?P<digits>\d+)(?:=(?P<claim>\d*))?")


def arithmetic(prompt: str) -> str | None:
    """The last task in the text: `a + b =`, `s3142` (sort the digits), `r3142` (reverse them), `s3142=1234` (is that right: y or n)."""
    found = list(_TASK.finditer(prompt))
    if not found:
        return None
    task = found[-1]
    if task["kind"] is None:
        return str(int(task["a"]) + int(task["b"]))
    right = "".join(sorted(task["digits"])) if task["kind"] == "s" else task["digits"][::-1]
    return right if task["claim"] is None else "y" if task["claim"] == right else "n"


SOLVERS: dict[str, Callable[[str], str | None]] = {"arithmetic": arithmetic, "none": lambda prompt: None}


def _solver(name: str) -> Callable[[str], str | None]:
    if ":" in name:
        return import_attr(name)  # type: ignore[no-any-return]
    if name not in SOLVERS:
        raise ConfigError(f"raas.engine.options.solver: {name!r} is unknown; known: {', '.join(SOLVERS)}, or module:attr")
    return SOLVERS[name]


def read_digest(path: Path) -> str:
    """Digest of a staged safetensors file, from its own bytes. Raises EngineError for what is no such file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            (size,) = struct.unpack_from("<Q", data)
            if size > min(MAX_HEADER_BYTES, len(data) - 8):
                raise ValueError(f"a header of {size} bytes in a file of {len(data)}")
            table = json.loads(data[8 : 8 + size])
            layout = _layout(table)
            with memoryview(data) as whole, whole[8 + size :] as body:
                if len(body) < layout.size_bytes:
                    raise ValueError(f"{len(body)} bytes of tensors, the header names {layout.size_bytes}")
                return digest(layout, body)
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise EngineError("load_failed", f"{path}: {error}") from None


def _layout(table: dict[str, dict[str, object]]) -> Layout:
    """Published tensors in the order of their bytes; names that repeat a tied tensor are no part of the digest."""
    metadata = table.get(HEADER_KEY, {})
    tied = json.loads(str(metadata.get("astraflow.tied", "{}")))
    rows = []
    for name, entry in table.items():
        if name != HEADER_KEY and name not in tied:
            start, end = msgspec.convert(entry["data_offsets"], tuple[int, int])
            shape = msgspec.convert(entry["shape"], tuple[int, ...])
            rows.append(TensorMeta(name=name, shape=shape, dtype=str(entry["dtype"]), offset=start, size_bytes=end - start))
    return Layout(tuple(sorted(rows, key=lambda row: row.offset)))
