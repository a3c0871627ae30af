"""Logging of one process: standard error, and its own file in the run directory."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

QUIET = ("httpx", "httpcore", "uvicorn", "uvicorn.error", "asyncio", "hpack")
"""Libraries that write a line per request; only their warnings are of interest."""

ERROR_MARK = "astraflow: error: "
"""In front of the one line of a mistake on standard error; a supervisor looks for it in the logs of its children."""


CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f\u2028\u2029]")


class OneRecord(logging.Formatter):
    """What a peer sent begins no line of its own and moves no terminal: further lines are indented, control characters spelled out."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = CONTROL.sub(lambda found: ascii(found[0])[1:-1], record.message).replace("\n", "\n    ")
        return super().formatMessage(record)


def setup_logging(process: str, path: Path | str | None = None, level: str | int = "INFO") -> None:
    """Send the log of this process to standard error and, when given, to `path` (appended). Replaces earlier handlers.

    Lines: time, level, process, logger, text. Call it once, first thing in a process's main.
    """
    line = OneRecord(f"%(asctime)s %(levelname)-7s {process.replace('%', '%%')} %(name)s: %(message)s")
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(path, mode="a", encoding="utf-8", errors="backslashreplace"))
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
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # a warning per broken request would let anybody fill the disk
