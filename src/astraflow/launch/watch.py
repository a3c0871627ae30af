"""What a run looks like from outside: polls Dataflow and the rollout services and keeps the last answers for panel and report.

A thread of its own, so that a service that is slow or gone never delays the supervisor. It only reads; a lost poll is repeated.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec

from astraflow.launch.rundir import write_json
from astraflow.lib.wire import Identity
from astraflow.lib.wire_client import SyncClient
from astraflow.protocol.control import DataflowStatus, EvalResult, EvalResultsRequest, InstanceInfo, RaaSStatus
from astraflow.protocol.errors import AstraFlowError
from astraflow.protocol.routes import DataflowAPI, RaaSAPI

CALL_S = 3.0
"""A status answer takes milliseconds; a service that needs longer is busy dying or starting, and is asked again."""
KEEP_EVENTS = 5000


class Observed(msgspec.Struct, kw_only=True):
    """The last answers; written to `<run_dir>/observed.json` so that a report can be made again later."""

    status: DataflowStatus | None = None
    status_age_s: float = 0.0
    instances: dict[str, RaaSStatus] = {}
    """Newest status of every rollout service ever seen."""
    past_lives: list[RaaSStatus] = []
    """Last status of each earlier process of an instance: its counters are part of the run."""
    evals: list[EvalResult] = []
    events: list[str] = []
    """Dataflow's events, over its restarts."""
    error: str = ""
    """Why the last poll failed; empty = it did not."""


class Watch:
    """Polls until `close`. `observed()` is a snapshot."""

    def __init__(self, url: str, identity: Identity, run_dir: Path, poll_s: float) -> None:
        self._dataflow = SyncClient(url, identity)
        self._identity, self._run_dir, self._poll_s = identity, run_dir, poll_s
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._seen = Observed()
        self._answered_at = time.monotonic()
        self._incarnation = ""
        self._next_eval = 0
        self._eval_ids: set[tuple[str, str]] = set()
        self._clients: dict[str, SyncClient] = {}
        self._thread = threading.Thread(target=self._loop, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def observed(self) -> Observed:
        """A consistent copy of what is known now."""
        with self._lock:
            age_s = time.monotonic() - self._answered_at
            return Observed(
                status=self._seen.status,
                status_age_s=age_s,
                instances=dict(self._seen.instances),
                past_lives=list(self._seen.past_lives),
                evals=list(self._seen.evals),
                events=list(self._seen.events),
                error=self._seen.error,
            )

    def close(self) -> Observed:
        """Stop polling, write `observed.json`, and return the last snapshot."""
        self._ended.set()
        self._thread.join(timeout=3 * CALL_S)
        for client in (self._dataflow, *self._clients.values()):
            client.close()
        last = self.observed()
        write_json(self._run_dir / "observed.json", last)
        return last

    def _loop(self) -> None:
        while not self._ended.wait(self._poll_s):
            self._poll()

    def _poll(self) -> None:
        try:
            status = self._dataflow.call(DataflowAPI.status, timeout_s=CALL_S)
            self._note_status(status)
            request = EvalResultsRequest(since=self._next_eval)
            results = self._dataflow.call(DataflowAPI.eval_results, request, timeout_s=CALL_S)
            self._next_eval = results.next
            self._note_evals(results.results)
        except AstraFlowError as error:
            with self._lock:
                self._seen.error = str(error)
            return
        for instance in status.instances:
            if instance.state != "gone":
                self._poll_instance(instance)

    def _poll_instance(self, instance: InstanceInfo) -> None:
        try:
            if instance.url not in self._clients:
                self._clients[instance.url] = SyncClient(instance.url, self._identity)
            answer = self._clients[instance.url].call(RaaSAPI.status, timeout_s=CALL_S)
        except AstraFlowError:
            return  # Dataflow's own heartbeat judges it; the last answer stays for the report
        with self._lock:
            before = self._seen.instances.get(answer.instance_id)
            if before is not None and before.incarnation != answer.incarnation:
                self._seen.past_lives.append(before)
            self._seen.instances[answer.instance_id] = answer

    def _note_status(self, status: DataflowStatus) -> None:
        with self._lock:
            if status.incarnation != self._incarnation:
                self._incarnation, self._next_eval = status.incarnation, 0
            old = self._seen.status.events if self._seen.status is not None else []
            same = self._seen.status is not None and self._seen.status.incarnation == status.incarnation
            self._seen.events += _news(old, status.events) if same else status.events
            del self._seen.events[KEEP_EVENTS:]  # the first ones: what a panel has printed keeps its place
            self._seen.status, self._seen.error = status, ""
            self._answered_at = time.monotonic()

    def _note_evals(self, results: list[EvalResult]) -> None:
        with self._lock:
            for result in results:
                if (result.eval_id, result.dataset) not in self._eval_ids:
                    self._eval_ids.add((result.eval_id, result.dataset))
                    self._seen.evals.append(result)


def _news(old: list[str], new: list[str]) -> list[str]:
    """Events of `new` after the longest end of `old` that `new` still holds (the list is bounded at its start)."""
    for start in range(len(old) + 1):
        kept = old[start:]
        if new[: len(kept)] == kept:
            return new[len(kept) :]
    return new
