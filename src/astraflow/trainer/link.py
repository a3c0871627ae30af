"""The trainer's calls to Dataflow, each tried again until its deadline: Dataflow may be killed and come back at any line.

Dataflow keeps what it was told (the ledger), so repeating a call is harmless: a batch is named by its version, a notice for a
version that is known already is a duplicate. When the other side is a new process (`incarnation` changed) or knows us no more
(Conflict), the trainer attaches again at the version it holds, which moves no timeline. When another process has attached in its
place (Replaced) it ends: attaching again would only take the place back from the one that works.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from astraflow.lib.aio import Backoff
from astraflow.lib.wire import Identity
from astraflow.lib.wire_client import SyncClient
from astraflow.protocol.batch import BatchReply, BatchRequest
from astraflow.protocol.control import (
    EvalResult,
    EvalResultsRequest,
    NotifyVersion,
    NotifyVersionReply,
    Ready,
    ReadyReply,
    Shutdown,
)
from astraflow.protocol.errors import Conflict, DeadlinePassed, Replaced, Retryable
from astraflow.protocol.message import Message
from astraflow.protocol.routes import DataflowAPI, Route
from astraflow.trainer.config import DeadlineConfig

logger = logging.getLogger(__name__)
Q = TypeVar("Q", bound=Message)
P = TypeVar("P", bound=Message)

EVAL_POLL_S = 0.5
"""Pause between two looks at a running evaluation; it takes seconds at least."""
QUIET_S = 10.0
"""Pause between two lines in the log about the same wait."""


class DataflowLink:
    """Blocking calls of one trainer. `timeline` is the live one after `attach`."""

    def __init__(self, url: str, identity: Identity, deadlines: DeadlineConfig, draining: Callable[[], bool]):
        """`draining`: whether the trainer was told to end; waits for a dead Dataflow are then cut to `drain_s`."""
        self._client = SyncClient(url, identity)
        self._deadlines = deadlines
        self._draining = draining
        self._ready: Ready | None = None
        self._incarnation = ""
        self.timeline = 0
        self.reattached = 0
        """Times that the trainer attached again to a restarted Dataflow."""
        self._over = True
        """Nobody needs this trainer's weights: it never attached, or the run has ended."""

    def attach(self, ready: Ready) -> ReadyReply:
        """/ready; keeps the message for later re-attachments (its version, digest and checkpoint are then renewed)."""
        self._ready = ready
        reply = self._call(DataflowAPI.ready, ready)
        self._incarnation = reply.incarnation
        if reply.timeline != self.timeline:
            logger.info("attached at version %d on timeline %d", reply.version, reply.timeline)
        self.timeline = reply.timeline
        return reply

    def held(self, version: int, digest: str, checkpoint_version: int, sender_endpoint: str) -> None:
        """What a re-attachment shall announce from now on."""
        assert self._ready is not None, "held() before attach()"
        self._ready.version, self._ready.recovered_version = version, version
        self._ready.digest, self._ready.checkpoint_version = digest, checkpoint_version
        self._ready.sender_endpoint = sender_endpoint

    def _reattach(self, why: str) -> None:
        assert self._ready is not None, "a call before attach()"
        logger.warning("attaching again at version %d: %s", self._ready.version, why)
        self.reattached += 1
        self.attach(self._ready)

    def batch(self, model_id: str, version: int) -> BatchReply:
        """One long-poll of /batch for the batch that moves `version` on."""
        poll = self._deadlines.batch_poll_s
        while True:
            request = BatchRequest(model_id=model_id, timeline=self.timeline, version=version, wait_s=poll)
            try:
                reply = self._call(DataflowAPI.batch, request, extra_s=poll)
            except Replaced:
                raise
            except Conflict as refusal:
                self._reattach(str(refusal))
                continue
            if reply.incarnation != self._incarnation:
                self._reattach("Dataflow was restarted")
                if reply.kind != "batch" or reply.batch is None or reply.batch.timeline != self.timeline:
                    continue
            if reply.kind == "stale_timeline":
                self._reattach(reply.reason or "the timeline is dead")
                continue
            return reply

    def notify(self, notice: NotifyVersion) -> NotifyVersionReply:
        """/notify_version, sent until it is answered; a duplicate is harmless. The notice's timeline is stamped here."""
        notice.timeline = self.timeline
        try:
            reply = self._call(DataflowAPI.notify_version, notice)
        except Replaced:
            raise
        except Conflict as refusal:
            self._reattach(str(refusal))
            notice.timeline = self.timeline
            reply = self._call(DataflowAPI.notify_version, notice)
        if reply.incarnation != self._incarnation:
            self._reattach("Dataflow was restarted")
        return reply

    def wait_for_eval(self, model_id: str, version: int, eval_id: str, deadline_s: float) -> list[EvalResult]:
        """Results of one evaluation: `eval_id`, or any of this version when its id is not known (a lost reply).

        Raises DeadlinePassed; returns what there is, perhaps nothing, when no such evaluation runs, or when told to end.
        """
        end = time.monotonic() + deadline_s
        last_look = False
        while True:
            reply = self._call(DataflowAPI.eval_results, EvalResultsRequest(since=0))
            found = [r for r in reply.results if r.eval_id == eval_id or (not eval_id and _is_of(r, model_id, version))]
            running = eval_id in reply.running if eval_id else bool(reply.running)
            if not running and (found or last_look):
                return found
            last_look = not running  # the results may have been filed between the two halves of the reply
            if self._draining():
                logger.warning("told to end: evaluation of version %d is not waited for", version)
                return found
            if time.monotonic() >= end:
                raise DeadlinePassed(f"evaluation of version {version}: not finished within {deadline_s:g} s")
            time.sleep(EVAL_POLL_S)

    def shutdown(self, model_id: str, reason: str) -> None:
        """/shutdown of this trainer."""
        self._over = self._call(DataflowAPI.shutdown, Shutdown(model_id=model_id, reason=reason)).run_ended

    def stay(self, model_id: str, look: Callable[[], None]) -> None:
        """After /shutdown: wait until the run has ended, so that rollout services that join later still find this policy's weights.
        `look` is called between two polls. Ends early when told to end, when another process takes over, or by `stay_s`."""
        end = time.monotonic() + self._deadlines.stay_s
        poll = self._deadlines.batch_poll_s
        told = False
        while not self._over and not self._draining() and time.monotonic() < end:
            request = Shutdown(model_id=model_id, reason="done", wait_s=poll)
            try:
                reply = self._call(DataflowAPI.shutdown, request, extra_s=poll)
            except (Replaced, DeadlinePassed) as error:
                logger.warning("done, and leaving: %s", error)
                return
            self._over = reply.run_ended
            if not self._over and not told:
                logger.info("done; the sender stays until %s are done too", ", ".join(reply.waits_for))
                told = True
            look()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _call(self, route: Route[Q, P], request: Q, extra_s: float = 0.0) -> P:
        """Try until answered; a Dataflow that is down is called again for `dataflow_s` (`drain_s` when draining)."""
        begin = time.monotonic()
        backoff = Backoff()
        told = 0.0
        while True:
            try:
                return self._client.call(route, request, timeout_s=self._deadlines.call_s + extra_s)
            except Retryable as error:
                waited = time.monotonic() - begin
                limit = self._deadlines.drain_s if self._draining() else self._deadlines.dataflow_s
                if waited >= limit:
                    raise DeadlinePassed(f"{route.path}: no answer from Dataflow for {waited:.0f} s: {error}") from error
                if waited - told >= QUIET_S or told == 0.0:
                    logger.warning("%s: %s; trying again", route.path, error)
                    told = max(waited, 1e-3)
                time.sleep(min(backoff.next(), limit - waited))


def _is_of(result: EvalResult, model_id: str, version: int) -> bool:
    return model_id in result.versions and result.versions[model_id].version == version
