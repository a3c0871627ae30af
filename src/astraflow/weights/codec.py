"""Which delta codecs this process can use, and loading their kernels ahead of time.

ranks-rans   16-bit words by compiled kernels (`codec_ranks`), in the settings fast and dense; needs numba
gaps-zstd    words of 16 and 32 bits by numpy (`codec_gaps`); everywhere, so that any two peers have a codec in common
"""

from __future__ import annotations

import importlib
import logging
import threading
from functools import lru_cache

log = logging.getLogger(__name__)

RANKS, GAPS = "ranks-rans", "gaps-zstd"


@lru_cache(maxsize=1)
def available() -> tuple[str, ...]:
    """Names of codecs, best first. Slow the first time: kernels are loaded, or compiled and kept (about five seconds)."""
    try:
        importlib.import_module("astraflow.weights.codec_ranks")
    except ImportError as error:
        log.warning("deltas are coded by numpy alone, larger and more slowly: %s", error)
        return (GAPS,)
    return (RANKS, GAPS)


def load_ahead() -> threading.Thread:
    """Begin loading in a thread, so that the first delta does not wait for it. The process does not end in the middle of it."""
    thread = threading.Thread(target=available, name="load codecs")
    thread.start()
    return thread


if __name__ == "__main__":  # `make setup`: compile once
    print("delta codecs:", *available())  # noqa: T201
