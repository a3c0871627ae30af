"""`astraflow conformance raas URL`: the tool plays Dataflow and the sender of one policy.

The rollout service need not be registered anywhere; nobody else may give it work or weights meanwhile.
"""

from __future__ import annotations

import socket
import time
from typing import Any

from astraflow.dataflow.admission import examine
from astraflow.lib.net import http_url, reachable_host
from astraflow.protocol import control, rollout, weights
from astraflow.protocol.errors import BadMessage, Conflict
from astraflow.protocol.routes import RaaSAPI
from astraflow.tools.conformance import Failed, Skipped, check, expect, until
from astraflow.tools.conformance_sender import PlayedSender
from astraflow.tools.conformance_wire import Peer, WireSuite, error_reply

PROMPT_S = 2.0
"""What has to be answered at once is answered within this time, on a busy machine as well."""
QUIET_S = 1.0
"""So long nothing comes that must not come."""
LOAD_S = 30.0
TIMELINE = 3
"""Not 0, so that a service that does not listen is found out."""
WORKFLOW = "conformance"


class RaasSuite(WireSuite):
    """One run against one rollout service."""

    def __init__(self, url: str, token: str, host: str, *, model: str, workflow: str, reward: str) -> None:
        super().__init__(Peer(url, token), RaaSAPI.status, (RaaSAPI.cancel, rollout.CancelLeases(lease_ids=[])))
        self._host, self._model_dir = host, model
        self._spec = rollout.WorkflowSpec(workflow=workflow, reward=reward)
        self.model, self.timeline, self.version = "", TIMELINE, 0
        self._sender: PlayedSender | None = None
        self._silent: socket.socket | None = None
        self._count = 0
        self.first: rollout.Delivery | None = None

    def close(self) -> None:
        for owned in (self._sender, self._silent, self.peer):
            if owned is not None:
                owned.close()

    # --- Dataflow's calls -------------------------------------------------------------------------------------------------

    def _status(self) -> control.RaaSStatus:
        return self.peer.call(RaaSAPI.status)

    @property
    def sender(self) -> PlayedSender:
        assert self._sender is not None, "a check that needs weights without weights.loads"
        return self._sender

    def _lease(self, n: int = 2, *, lease_id: str = "", attempt: int = 1, workflow: str = WORKFLOW) -> rollout.Lease:
        self._count += 1
        return rollout.Lease(
            lease_id=lease_id or f"conformance-{self._count}", attempt=attempt, task_id=f"task-{self._count}", workflow_id=workflow,
            n_samples=n, data={"prompt": "2 + 3 =", "answer": "5"}, seed=self._count, deadline_s=LOAD_S * 2,
        )  # fmt: skip

    def _submit(self, *leases: rollout.Lease, lane: str = "") -> list[str]:
        reply = self.peer.call(RaaSAPI.eval_submit if lane else RaaSAPI.submit, rollout.Submit(leases=list(leases), lane=lane))
        ids = [verdict.lease_id for verdict in reply.verdicts]
        expect(ids == [lease.lease_id for lease in leases], f"verdicts for {ids}, not one per lease in their order")
        return [verdict.verdict for verdict in reply.verdicts]

    def _accepted(self, *leases: rollout.Lease, lane: str = "") -> None:
        verdicts = self._submit(*leases, lane=lane)
        expect(set(verdicts) == {"accepted"}, f"leases that fit were {', '.join(verdicts)}")

    def _pull(self, *ack: str, lane: str = "", wait_s: float = 0.0, most: int = 64) -> rollout.PullReply:
        request = rollout.Pull(ack=list(ack), max_items=most, wait_s=wait_s, lane=lane)
        return self.peer.call(RaaSAPI.eval_pull if lane else RaaSAPI.pull, request)

    def _held(self) -> dict[str, str]:
        return {held.lease_id: held.state for held in self.peer.call(RaaSAPI.leases).held}

    def _results(self, *leases: rollout.Lease, lane: str = "") -> dict[str, rollout.Delivery]:
        """The deliveries of these leases, not acknowledged."""
        wanted = {lease.lease_id for lease in leases}

        def come() -> dict[str, rollout.Delivery] | None:
            found = {delivery.lease_id: delivery for delivery in self._pull(lane=lane, wait_s=QUIET_S).deliveries}
            return found if wanted <= set(found) else None

        return until(f"results of {', '.join(sorted(wanted))}", come, LOAD_S * 2)

    def _forget(self) -> None:
        """Acknowledge whatever waits."""
        self._pull(*[delivery.delivery_id for delivery in self._pull().deliveries], most=0)

    def _notice(self, version: int, *, digest: str = "", timeline: int = -1, sender: str = "", wait_s: float = LOAD_S) -> Any:
        request = weights.NotifyRaaS(
            model_id=self.model, timeline=self.timeline if timeline < 0 else timeline, version=version,
            digest=digest or self.sender.digests.get(version, ""), sender_endpoint=sender or self.sender.endpoint, wait_s=wait_s,
        )  # fmt: skip
        return self.peer.call(RaaSAPI.notify_version, request)

    def _receipt(self, version: int) -> rollout.Serving:
        return rollout.Serving(timeline=self.timeline, version=version, digest=self.sender.digests[version])

    def _serves(self, version: int) -> None:
        found, wanted = self._status().serving.get(self.model), self._receipt(version)
        expect(found == wanted, f"/status says it serves {found}, expected {wanted}")

    # --- status -----------------------------------------------------------------------------------------------------------

    @check("status.ready", "the service becomes ready, and its slots add up in /status and /availability", "wire.answers")
    def ready(self) -> None:
        def up() -> control.RaaSStatus | None:
            status = self._status()
            expect(status.state != "error", f"state error: {status.message}")
            return status if status.state in ("idle", "ready") else None

        status = until("state idle or ready", up)
        expect(status.models, "/status names no model")
        self.model, self._slots = status.models[0], status.availability.total_slots
        for slots in (status.availability, self.peer.call(RaaSAPI.availability)):
            expect(slots.total_slots > 0, "no slots")
            fits = slots.free_slots <= slots.total_slots - slots.in_flight
            expect(fits, f"{slots.free_slots} free of {slots.total_slots}, and {slots.in_flight} run")
        expect(not self._held(), "it holds leases: it is not there for the test alone")

    @check("workflow.registers", "a workflow is registered under its id, again without effect", "status.ready")
    def registers(self) -> None:
        self._spec.policies = [self.model]
        request = rollout.RegisterWorkflow(workflow_id=WORKFLOW, spec=self._spec)
        counts = [self.peer.call(RaaSAPI.register_workflow, request).total_workflows for _ in range(2)]
        expect(counts[0] == counts[1], f"registered twice, and there are {counts[1]} instead of {counts[0]}")
        expect(WORKFLOW in self._status().workflows, "/status does not list it")

    @check("workflow.names_only", "unknown names are refused, and so is anything that names code", "status.ready")
    def names_only(self) -> None:
        for name in ("no_such_workflow", "os:getcwd", "subprocess:run", "../workflow"):
            spec = rollout.WorkflowSpec(workflow=name, reward=self._spec.reward, policies=[self.model])
            self.peer.refusal(f"workflow {name!r}", RaaSAPI.register_workflow, rollout.RegisterWorkflow(workflow_id="bad", spec=spec))
        expect("bad" not in self._status().workflows, "a workflow that was refused is registered")

    # --- weights ----------------------------------------------------------------------------------------------------------

    @check("weights.loads", "a notice makes the service pull and load exactly that version; the receipt says so", "status.ready")
    def loads(self) -> None:
        self._sender = PlayedSender(self._model_dir, self.model, self._host, self.peer.identity)
        self.sender.publish(0)
        reply = self._notice(0)
        expect(reply.state in ("loaded", "loading"), f"state {reply.state}: {reply.message}")
        until("the receipt of version 0", lambda: self._status().serving.get(self.model) == self._receipt(0), LOAD_S)
        until("/transfer_done with ok", lambda: self.sender.verified_transfers > 0, LOAD_S)

    @check("weights.repeats", "a notice of what is served is `current`; one of an unknown model is refused", "weights.loads")
    def repeats(self) -> None:
        expect(self._notice(0).state == "current", "the same notice again is not `current`")
        unknown = weights.NotifyRaaS(
            model_id="no-such-policy", timeline=self.timeline, version=0, digest="", sender_endpoint=self.sender.endpoint
        )
        self.peer.refusal("a notice of an unknown model", RaaSAPI.notify_version, unknown)

    @check("weights.failed_load", "what cannot be had under its version and digest is never served", "weights.loads")
    def failed_load(self) -> None:
        self.sender.publish(1)
        for what, version, digest in (("a version that the sender lacks", 7, ""), ("another digest", 1, "ab" * 16)):
            reply = self._notice(version, digest=digest or "cd" * 16, wait_s=QUIET_S)
            expect(reply.state in ("failed", "loading"), f"{what}: the notice was answered with {reply.state}")
            self._serves(0)

    @check("weights.next", "after a failure the next notice loads, by whatever way it travels", "weights.failed_load")
    def next_version(self) -> None:
        reply = self._notice(1)
        expect(reply.state != "failed", f"state failed: {reply.message}")
        until("the receipt of version 1", lambda: self._status().serving.get(self.model) == self._receipt(1), LOAD_S)
        self.version = 1
        before = self._notice(0)
        expect(before.state == "current", f"an older version of the same timeline: {before.state}")
        self._serves(1)

    @check("status.never_blocks", "a sender that hangs holds up neither /status and /availability nor another sender", "weights.next")
    def never_blocks(self) -> None:
        self._silent = socket.create_server((self._host, 0))  # takes connections and never says a word
        silent = http_url(reachable_host(self._host), self._silent.getsockname()[1])
        self.sender.publish(2)
        begin = time.monotonic()
        reply = self._notice(2, sender=silent, wait_s=0.0)
        expect(reply.state == "loading", f"a notice without wait, whose sender hangs: {reply.state}")
        calls: tuple[Any, ...] = (RaaSAPI.status, RaaSAPI.availability, RaaSAPI.leases)
        for _ in range(5):
            for route in calls:
                self.peer.call(route, timeout_s=PROMPT_S)
        seconds = time.monotonic() - begin
        expect(seconds < PROMPT_S * 4, f"16 calls took {seconds:.1f} s while a sender hung")
        self._serves(1)
        self._notice(2, wait_s=LOAD_S)
        until("version 2 from the sender that answers", lambda: self._status().serving.get(self.model) == self._receipt(2), LOAD_S)
        self.version = 2

    # --- leases and results -----------------------------------------------------------------------------------------------

    @check("submit.runs", "a lease is run once and comes back as one whole group", "workflow.registers", "weights.loads")
    def runs(self) -> None:
        lease = self._lease()
        self._accepted(lease)
        self.first = self._results(lease)[lease.lease_id]
        expect(self.first.attempt == 1, f"attempt {self.first.attempt}")
        self._lease_of_first = lease
        self._records = [t.record_ref for t in self._examine(self.first, lease).trajectories if t.record_ref]

    def _examine(self, delivery: rollout.Delivery, lease: rollout.Lease) -> rollout.Group:
        """What Dataflow asks for at its door, and that every token is stamped with what was served."""
        try:
            group = examine(bytes(delivery.group), lease.lease_id, delivery.attempt, lease.n_samples, [self.model], []).group
        except BadMessage as error:
            raise Failed(f"a malformed group: {error}") from None
        expect(group.task_id == lease.task_id, f"task {group.task_id!r}, leased was {lease.task_id!r}")
        errors = [f"{t.error.boundary}.{t.error.kind}: {t.error.message}" for t in group.trajectories if t.error]
        expect(not errors, f"trajectories failed: {errors[:1]}")
        span, wanted = group.versions.get(self.model), (self.timeline, self.version, self.version)
        found = None if span is None else (span.timeline, span.min, span.max)
        expect(found == wanted, f"stamped (timeline, min, max) {found}, served was {wanted}")
        return group

    @check("pull.redelivers", "a result that is not acknowledged is delivered again: same id, same bytes", "submit.runs")
    def redelivers(self) -> None:
        assert self.first is not None
        again = {delivery.delivery_id: bytes(delivery.group) for delivery in self._pull(wait_s=QUIET_S).deliveries}
        expect(self.first.delivery_id in again, f"delivery {self.first.delivery_id} was lost before it was acknowledged")
        expect(again[self.first.delivery_id] == bytes(self.first.group), "the same delivery with other bytes")

    @check("leases.lists", "/leases lists what runs and what waits to be acknowledged", "pull.redelivers")
    def lists(self) -> None:
        expect(self._held().get(self._lease_of_first.lease_id) == "done", f"a result that waits: /leases says {self._held()}")

    @check("submit.duplicate", "the same lease and attempt again is a duplicate, before and after its acknowledgement", "pull.redelivers")
    def duplicate(self) -> None:
        assert self.first is not None
        lease = self._lease_of_first
        expect(self._submit(lease) == ["duplicate"], "submitted again before it was acknowledged: not a duplicate")
        reply = self._pull(self.first.delivery_id)
        expect(not reply.deliveries, "still delivered although it is acknowledged")
        expect(not self._pull(self.first.delivery_id, "never-was").deliveries, "acknowledged twice")
        expect(lease.lease_id not in self._held(), "/leases still lists it")
        expect(self._submit(lease) == ["duplicate"], "submitted again after its acknowledgement: not a duplicate")
        expect(not self._pull(wait_s=QUIET_S).deliveries, "a duplicate was run")

    @check("pull.max_items", "/pull gives at most max_items, oldest first, and says how many more wait", "submit.runs")
    def max_items(self) -> None:
        leases = [self._lease(1) for _ in range(3)]
        self._accepted(*leases)
        until("three results", lambda: list(self._held().values()) == ["done"] * 3, LOAD_S * 2)
        reply = self._pull(most=1)
        expect(len(reply.deliveries) == 1, f"{len(reply.deliveries)} deliveries, asked for one")
        expect(reply.waiting == 2, f"two more wait, the reply says {reply.waiting}")
        expect(self._pull(most=1).deliveries[0].delivery_id == reply.deliveries[0].delivery_id, "another one comes first now")
        self._forget()

    @check("submit.refuses", "a lease of an unknown workflow is refused, beside others that run", "submit.runs")
    def refuses(self) -> None:
        good, bad = self._lease(1), self._lease(1, workflow="no-such-workflow")
        expect(self._submit(bad, good) == ["refused", "accepted"], "an unknown workflow and a good one: not refused, accepted")
        self._results(good)
        self._forget()

    @check("submit.capacity", "no more is accepted than there are free slots; the rest is over_capacity", "submit.runs")
    def capacity(self) -> None:
        free, n = self.peer.call(RaaSAPI.availability).free_slots, max(1, self._slots // 2)
        leases = [self._lease(n) for _ in range(free // n + 1)]
        verdicts = self._submit(*leases)
        taken = [lease for lease, verdict in zip(leases, verdicts, strict=True) if verdict == "accepted"]
        expect(len(taken) * n <= free, f"{len(taken) * n} samples accepted with {free} free slots")
        expect(taken and set(verdicts) <= {"accepted", "over_capacity"}, f"verdicts {verdicts}")
        self._results(*taken)
        self._forget()
        expect(self._submit(leases[-1]) == ["accepted"], "a lease that was over capacity is not taken later")
        self._results(leases[-1])
        self._forget()

    @check("submit.attempts", "a higher attempt supersedes a lower one; a lower one never runs again", "submit.runs")
    def attempts(self) -> None:
        first = self._lease(1)
        second = self._lease(1, lease_id=first.lease_id, attempt=2)
        self._accepted(first)
        self._accepted(second)

        def newer() -> Any:
            found = [delivery for delivery in self._pull(wait_s=QUIET_S).deliveries if delivery.lease_id == first.lease_id]
            return found if any(delivery.attempt == 2 for delivery in found) else None

        found = until("the result of attempt 2", newer, LOAD_S)
        expect([delivery.attempt for delivery in found] == [2], "the superseded attempt is delivered as well")
        expect(self._submit(first) == ["duplicate"], "the lower attempt is taken again")
        self._forget()

    @check("cancel.forgets", "a cancelled lease is stopped, never delivered, and its slots are free again", "submit.runs")
    def cancels(self) -> None:
        lease = self._lease(max(1, self._slots // 2))
        self._accepted(lease)
        self.peer.call(RaaSAPI.cancel, rollout.CancelLeases(lease_ids=[lease.lease_id]))
        expect(lease.lease_id not in self._held(), "/leases still lists it")
        until("its slots", lambda: self.peer.call(RaaSAPI.availability).in_flight == 0, LOAD_S)
        expect(not self._pull(wait_s=QUIET_S).deliveries, "its result was delivered")

    @check("reset.cancels", "/reset_training_engine cancels what runs and names it; nothing of it comes later", "submit.runs")
    def resets(self) -> None:
        lease = self._lease(max(1, self._slots // 2))
        self._accepted(lease)
        cancelled = self.peer.call(RaaSAPI.reset_training_engine, rollout.ResetEngine()).cancelled
        expect(set(cancelled) <= {lease.lease_id}, f"cancelled {cancelled}, which was not submitted")
        came = {delivery.lease_id for delivery in self._pull(wait_s=QUIET_S).deliveries}
        expect(bool(cancelled) != (lease.lease_id in came), f"cancelled {cancelled}, and delivered {sorted(came)}")
        self._forget()

    @check("record.reads", "/record gives what a trajectory's reference names; unknown references are 404", "submit.runs")
    def record(self) -> None:
        for path in ("/record/no-such-record", "/media/" + "0" * 64):
            error_reply(self.peer.raw("GET", path), f"GET {path}", 404)
        refs = self._records
        if not refs:
            raise Skipped("no trajectory names a record")
        response = self.peer.raw("GET", f"/record/{refs[0]}")
        expect(response.status_code == 200 and response.content, f"GET /record/{refs[0]}: HTTP {response.status_code}")

    # --- lanes ------------------------------------------------------------------------------------------------------------

    @check("eval.pins", "an open lane pins its versions: a newer one is loaded only when the lane has ended", "submit.runs")
    def pins(self) -> None:
        serving, lane = self._status().serving, "conformance-lane"
        other = {self.model: rollout.Serving(timeline=self.timeline, version=self.version + 5, digest="")}
        start = rollout.EvalStart(lane=lane, versions=other, deadline_s=LOAD_S)
        self.peer.refusal("a lane of versions that are not served", RaaSAPI.eval_start, start, Conflict)
        self.peer.call(RaaSAPI.eval_start, rollout.EvalStart(lane=lane, versions=serving, deadline_s=LOAD_S * 4))
        lease = self._lease(1)
        self._accepted(lease, lane=lane)
        digest = self.sender.publish(self.version + 1)
        reply = self._notice(self.version + 1, digest=digest, wait_s=QUIET_S)
        expect(reply.state == "loading", f"a newer version while a lane is open: {reply.state}")
        self._serves(self.version)
        expect(not self._pull().deliveries, "the lane's results come by /pull")
        delivery = self._results(lease, lane=lane)[lease.lease_id]
        self._examine(delivery, lease)
        self._pull(delivery.delivery_id, lane=lane)
        for _ in range(2):
            self.peer.call(RaaSAPI.eval_end, rollout.EvalEnd(lane=lane))
        until("the load that was put off", lambda: self._status().serving.get(self.model) == self._receipt(self.version + 1), LOAD_S)
        self.version += 1

    @check("timeline.rollback", "a notice of a new timeline is loaded, and results of the dead one are dropped", "submit.runs")
    def rollback(self) -> None:
        lease = self._lease(1)
        self._accepted(lease)
        until("a result", lambda: self._held().get(lease.lease_id) == "done", LOAD_S)
        self.timeline += 1
        self._notice(self.version)
        until("a receipt of the new timeline", lambda: self._status().serving.get(self.model) == self._receipt(self.version), LOAD_S)
        expect(not self._pull(wait_s=QUIET_S).deliveries, "a result of the dead timeline was delivered")
        late = self._notice(self.version, timeline=self.timeline - 1, wait_s=QUIET_S)
        expect(late.state != "loaded", "a late notice of the dead timeline was loaded")
        self._serves(self.version)

    # --- the end ----------------------------------------------------------------------------------------------------------

    @check("shutdown.ends", "/shutdown ends the process", "wire.answers")
    def ends(self) -> None:
        self.peer.call(RaaSAPI.shutdown, control.Shutdown(reason="conformance", deadline_s=1.0))
        until("its end", lambda: self.peer.gone(RaaSAPI.status))
