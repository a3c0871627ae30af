"""The I/O of `stall`: looks every second whether anything moved, writes the report, and lets the service end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from astraflow.dataflow.shelf import Shelf, log
from astraflow.dataflow.stall import StallReport, StallWatch, as_text, make_report
from astraflow.dataflow.waits import WaitBook
from astraflow.protocol.batch import WaitEdge
from astraflow.protocol.control import DataflowStatus

LOOK_S = 1.0
WRITE_S = 10.0
"""A disk that does not take the report must not keep the run from ending."""
REPORT, REPORT_TEXT = "stall.json", "stall.txt"


class StallGuard:
    """One per service; `run` is its supervised task. Apart from the janitor, which may itself wait for the disk."""

    def __init__(self, shelf: Shelf, book: WaitBook) -> None:
        self._shelf, self._book = shelf, book
        self._watch = StallWatch(shelf.process.dataflow.stall_s, shelf.clock())
        self._joined: set[tuple[str, str]] = set()
        """(instance, incarnation) ever seen: one that leaves moves nothing."""

    @property
    def idle_s(self) -> float:
        """Since anything moved."""
        return self._watch.idle_s(self._shelf.clock())

    def edges(self) -> list[WaitEdge]:
        """Who waits for whom, longest first."""
        return self._book.edges(self._watch.left_s(self._shelf.clock()))

    def clear(self) -> None:
        """A new life: the report of an earlier one is about that."""
        for name in (REPORT, REPORT_TEXT):
            (Path(self._shelf.process.run_dir) / name).unlink(missing_ok=True)

    async def run(self, status: Callable[[], DataflowStatus], end: Callable[[str], None]) -> None:
        """Until the run is stalled: then the report is written and `end` called with one line."""
        while not self.look():
            await asyncio.sleep(LOOK_S)
        report = make_report(status(), self.idle_s, self._watch.limit_s or 0.0)
        log.warning("%s", report.summary)
        try:
            async with asyncio.timeout(WRITE_S):
                await asyncio.to_thread(self._write, report)
        except (OSError, TimeoutError) as error:
            log.error("the report of the stall could not be written: %s", error or "the disk does not answer")
        end(report.summary)

    def look(self) -> bool:
        """True when nothing has moved for too long."""
        self._book.edges()
        return self._watch.look(self._marks(), self._shelf.clock())

    def _marks(self) -> tuple[object, ...]:
        """Equal to the last ones exactly when nothing moved."""
        shelf = self._shelf
        self._joined.update((key, instance.record.incarnation) for key, instance in shelf.pool.instances.items())
        versions = tuple((m, s.timeline, s.version, s.registered, s.done) for m, s in shelf.barrier.models.items())
        paused_at = shelf.clock() if shelf.paused else 0.0  # never the same twice: somebody wants it to stand still
        return shelf.ledger.snapshot, versions, len(self._book.evals.results), len(self._joined), paused_at

    def _write(self, report: StallReport) -> None:
        directory = Path(self._shelf.process.run_dir)
        for name, data in ((REPORT_TEXT, as_text(report).encode()), (REPORT, msgspec.json.format(msgspec.json.encode(report), indent=1))):
            scratch = directory / f".{name}.new"
            scratch.write_bytes(data)
            scratch.replace(directory / name)
