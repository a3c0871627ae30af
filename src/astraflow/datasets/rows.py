"""The boundary to other people's rows: whatever is wrong with a record is one BadRow that says which record of which file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from astraflow.lib.jsonl import BadRow
from astraflow.protocol.codec import fault_of
from astraflow.protocol.errors import UserError

Row = dict[str, Any]


def tasks_of(rows: Iterable[tuple[str, Row]], make: Callable[[str, Row], Row | None]) -> Iterator[Row]:
    """`make(where, row)` of every row; None leaves it out. Raises BadRow for a row that cannot be used, or whose task cannot be sent."""
    for where, row in rows:
        try:
            data = make(where, row)
        except UserError:
            raise
        except Exception as error:  # the boundary to rows of any origin: what they lack or hold in excess is told, not raised
            raise BadRow(f"{where}: {_reason(error)}") from None
        if data is not None:
            check_sendable(data, where)
            yield data


def readable(rows: Iterator[Row], path: object) -> Iterator[Row]:
    """The rows of a reader. Raises BadRow for whatever the reader meets: damaged archives, text of another encoding, endless nesting."""
    number = 0
    try:
        for number, row in enumerate(rows, start=1):  # noqa: B007  the boundary below tells it
            yield row
    except UserError:
        raise
    except Exception as error:  # the boundary to files of any origin, and to the libraries that unpack them
        raise BadRow(f"{path}: record {number + 1}: {_reason(error)}") from None


def check_sendable(data: Row, where: str) -> None:
    """Raises BadRow naming the field that could not be handed to a rollout service."""
    fault = fault_of(data)
    if fault:
        raise BadRow(f"{where}: {fault}")


def check_chat(messages: Any, where: str) -> None:
    """Raises BadRow unless it is a list of turns with `role` and `content` (or `tool_calls`)."""
    if not isinstance(messages, list) or not messages:
        raise BadRow(f"{where}: messages: expected at least one turn {{role, content}}, got {messages!r:.60}")
    for turn in messages:
        if not isinstance(turn, dict) or not isinstance(turn.get("role"), str) or not ("content" in turn or "tool_calls" in turn):
            raise BadRow(f"{where}: messages: {turn!r:.60} is no turn {{role, content}}")


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
