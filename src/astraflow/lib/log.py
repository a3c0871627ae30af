"""Logging of one process: standard error, and its own file in the run directory."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

QUIET = ("httpx", "httpcore", "uvicorn", "uvicorn.error", "asyncio", "hpack")
"""Libraries that write a line per request; only their warnings are of interest."""

ERROR_MARK = "astraflow: error: "
"""In front of the one line of a mistake on standard error; a supervisor looks for it in the logs of its children."""


def setup_logging(process: str, path: Path | str | None = None, level: str | int = "INFO") -> None:
    """Send the log of this process to standard error and, when given, to `path` (appended). Replaces earlier handlers.

    Lines: time, level, process, logger, text. Call it once, first thing in a process's main.
    """
    line = logging.Formatter(f"%(asctime)s %(levelname)-7s {process.replace('%', '%%')} %(name)s: %(message)s")
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(path, mode="a", encoding="utf-8"))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        old.close()
    for handler in handlers:
        handler.setFormatter(line)
        root.addHandler(handler)
    root.setLevel(level)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
