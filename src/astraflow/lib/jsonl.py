"""JSON lines. Only \\n separates records: U+2028, U+2029, U+0085 and form feeds are text (case G33)."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from astraflow.protocol.errors import UserError

log = logging.getLogger(__name__)


class BadRow(UserError):
    """A record that is not a JSON object; names file and line."""


def read_jsonl(path: Path | str) -> Iterator[dict[str, Any]]:
    """The records of a UTF-8 file, one JSON object a line; blank lines carry nothing.

    A last line without newline counts when it is whole; a half-written one (a process died in the middle of it) is skipped
    with a warning. Any other broken line raises BadRow naming file and line, after the earlier records were yielded.
    A file that cannot be opened raises UserError naming it.
    """
    try:
        file = Path(path).open("rb")  # noqa: SIM115  closed by the `with` below
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    with file:  # bytes: iterating splits on \n alone
        for number, line in enumerate(file, start=1):
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not text.strip():
                continue
            try:
                yield _record(text)
            except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
                if not line.endswith(b"\n"):
                    log.warning("%s:%d: half-written last line skipped (%s)", path, number, error)
                    return
                raise BadRow(f"{path}:{number}: {error}") from None


def _record(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return value


def append_jsonl(path: Path | str, rows: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> None:
    """Append one record or several with a single write. A half-written last line of a process that died is cut off first.

    Writers of this function hold the file's advisory lock, so none takes another's unfinished write for a dead one's.
    """
    records = [rows] if isinstance(rows, Mapping) else list(rows)
    data = b"".join(json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8") + b"\n" for record in records)
    if not data:
        return
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        append_bytes(descriptor, _mend_tail(descriptor, path) + data)
    finally:
        os.close(descriptor)


def append_bytes(descriptor: int, data: bytes) -> None:
    """Write all of `data` to a descriptor opened with O_APPEND: one call, so that lines of several processes do not mix."""
    written = os.write(descriptor, data)
    while written < len(data):  # only a full disk or a signal gets here
        written += os.write(descriptor, data[written:])


def _mend_tail(descriptor: int, path: Path | str) -> bytes:
    """Make the file end at a record boundary; returns the newline that a whole last record still lacks."""
    size = os.fstat(descriptor).st_size
    if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
        return b""
    start, block = size, 65536
    while start > 0:
        low = max(0, start - block)
        found = os.pread(descriptor, start - low, low).rfind(b"\n")
        if found >= 0:
            start = low + found + 1
            break
        start = low
    tail = os.pread(descriptor, size - start, start)
    try:
        _record(tail)
    except ValueError:
        log.warning("%s: half-written last line cut off (%d bytes)", path, len(tail))
        os.ftruncate(descriptor, start)
        return b""
    return b"\n"
