"""`astraflow conformance dataflow URL`: the tool plays every expected trainer and two rollout services.

The Dataflow must be a fresh one that nobody else talks to: no trainer has attached, no rollout service is in its pool.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import xxhash

from astraflow.lib.net import free_port, http_url, reachable_host
from astraflow.lib.wire import MSGPACK, decode_body
from astraflow.protocol import control
from astraflow.protocol.batch import Batch, BatchReply, BatchRequest
from astraflow.protocol.codec import array, encode
from astraflow.protocol.errors import AstraFlowError, Conflict, Replaced
from astraflow.protocol.routes import DataflowAPI, RaaSAPI
from astraflow.tools.conformance import Failed, Skipped, check, expect, until
from astraflow.tools.conformance_pool import DAMAGES, PlayedRaaS
from astraflow.tools.conformance_wire import Host, Peer, WireSuite

SLOTS_IN_GROUPS = 8
LONG_POLL_S = 5.0


class DataflowSuite(WireSuite):
    """One run against one Dataflow."""

    def __init__(self, url: str, token: str, host: str, batch_size: int) -> None:
        """`host`: address for the rollout services that the tool plays; `batch_size`: 0 = what /config says."""
        nobody = control.DeregisterRaaS(instance_id="conformance-nobody")
        super().__init__(Peer(url, token), DataflowAPI.status, (DataflowAPI.deregister_raas, nobody))
        self._host = Host(self.peer.identity, host)
        self._batch_size, self._asked_size = 0, batch_size
        self._max_staleness: int | None = None
        self.models: list[str] = []
        self.version: dict[str, int] = {}
        self.timeline: dict[str, int] = {}
        self.raas: dict[str, PlayedRaaS] = {}
        self.urls: dict[str, str] = {}
        self.served: dict[str, set[str]] = {}
        """Model → trajectories of batches that were committed."""

    def close(self) -> None:
        self._host.close()
        self.peer.close()

    # --- what the trainers say --------------------------------------------------------------------------------------------

    @property
    def model(self) -> str:
        return self.models[0]

    def _status(self) -> control.DataflowStatus:
        return self.peer.call(DataflowAPI.status)

    def _digest(self, model: str, version: int) -> str:
        return xxhash.xxh3_128_hexdigest(f"{model} {self.timeline[model]} {version}".encode())

    def _ready(self, model: str, peer: Peer | None = None, recovered: int | None = None, size: int = 0) -> control.ReadyReply:
        version = self.version.get(model, 0) if recovered is None else recovered
        request = control.Ready(
            model_id=model, train_batch_size=size or self._batch_size, sender_endpoint=self._sender, version=version,
            digest=self._digest(model, version), recovered_version=recovered,
        )  # fmt: skip
        return (peer or self.peer).call(DataflowAPI.ready, request)

    def _ask(self, version: int | None = None, *, model: str = "", timeline: int | None = None, wait_s: float = 0.0) -> BatchReply:
        return self.peer.call(DataflowAPI.batch, self._name(version, model=model, timeline=timeline, wait_s=wait_s))

    def _name(self, version: int | None = None, *, model: str = "", timeline: int | None = None, wait_s: float = 0.0) -> BatchRequest:
        model = model or self.model
        at = self.version[model] if version is None else version
        return BatchRequest(model_id=model, timeline=self.timeline[model] if timeline is None else timeline, version=at, wait_s=wait_s)

    def _notice(self, version: int, *, model: str = "", timeline: int | None = None, digest: str = "") -> control.NotifyVersion:
        model = model or self.model
        live = self.timeline[model] if timeline is None else timeline
        return control.NotifyVersion(model_id=model, timeline=live, version=version, digest=digest or self._digest(model, version))

    def _batch(self, model: str = "") -> Batch:
        """The batch of the present version, as soon as there is one."""
        model = model or self.model

        def served() -> Batch | None:
            reply = self._ask(model=model, wait_s=LONG_POLL_S)
            if reply.kind not in ("batch", "wait"):
                raise Failed(f"/batch of {model} version {self.version[model]}: {reply.kind}: {reply.reason}")
            expect(reply.kind == "wait" or reply.batch is not None, "/batch: kind `batch` without a batch")
            return reply.batch

        return until(f"the batch of {model} version {self.version[model]}", served)

    def _commit(self, model: str, batch: Batch) -> control.NotifyVersionReply:
        reply = self.peer.call(DataflowAPI.notify_version, self._notice(self.version[model] + 1, model=model))
        self.version[model] += 1
        fresh = {batch.trajectory_ids[i] for i in array(batch.rows["trajectory_index"])[~array(batch.rows["replayed"])]}
        again = fresh & self.served.setdefault(model, set())
        expect(not again, f"trajectory {min(again, default='')} was trained in two batches of {model}")
        self.served[model] |= fresh
        return reply

    def _step(self) -> dict[str, Batch]:
        """One version of every model; the first one's batch is looked at."""
        batches = {model: self._batch(model) for model in self.models}
        for model, batch in batches.items():
            self._look(model, batch)
            self._commit(model, batch)
        return batches

    def _look(self, model: str, batch: Batch) -> None:
        """The batch holds whole trajectories that were delivered, token for token, and none that is damaged or too old."""
        made = {lease: group for raas in self.raas.values() for lease, group in raas.groups.items()}
        bad = {lease: how for raas in self.raas.values() for lease, how in raas.bad.items()}
        name = (batch.model_id, batch.timeline, batch.version)
        expect(name == (model, self.timeline[model], self.version[model]), f"the batch is named {name}")
        ends, tokens = array(batch.offsets), {name: array(values) for name, values in batch.tokens.items()}
        rows = {name: array(values) for name, values in batch.rows.items()}
        expect(len(batch.trajectory_ids) == self._batch_size, f"{len(batch.trajectory_ids)} trajectories, expected {self._batch_size}")
        for row in range(len(ends) - 1):
            lease = batch.group_ids[rows["group_index"][row]]
            expect(lease not in bad, f"group {lease} is in a batch, although {bad.get(lease)}")
            expect(lease in made, f"group {lease} is in a batch and was never delivered")
            mine = [s for t in made[lease].trajectories for s in t.segments if model in s.policies]
            at = slice(int(ends[row]), int(ends[row + 1]))
            names = ("input_ids", "loss_mask", "logprobs", "versions")
            same = any(all(np.array_equal(array(getattr(segment, name)), tokens[name][at]) for name in names) for segment in mine)
            expect(same, f"row {row}: its tokens are those of no trajectory of group {lease}")
        self._look_at_groups(batch, rows, made)

    def _look_at_groups(self, batch: Batch, rows: dict[str, Any], made: dict[str, Any]) -> None:
        oldest = self.version[batch.model_id] - (self._max_staleness if self._max_staleness is not None else 1 << 30)
        for index, lease in enumerate(batch.group_ids):
            mine, rewards = rows["group_index"] == index, [t.reward for t in made[lease].trajectories]
            spread = float(np.std(rewards, ddof=1)) if len(rewards) > 1 else 0.0
            for name, value in (("group_reward_mean", float(np.mean(rewards))), ("group_reward_std", spread)):
                found = rows[name][mine]
                expect(np.allclose(found, value, atol=1e-9), f"{name} of group {lease}: {found[:1]}, its rewards {rewards} say {value:g}")
            fresh = mine & ~rows["replayed"]
            expect((rows["min_version"][fresh] >= oldest).all(), f"group {lease} is older than max_staleness {self._max_staleness} allows")

    # --- before anybody is there ------------------------------------------------------------------------------------------

    @check("status.fresh", "a fresh Dataflow expects its trainers, and its pool is empty", "wire.answers")
    def fresh(self) -> None:
        status = self._status()
        self.models = [trainer.model_id for trainer in status.trainers]
        expect(self.models, "/status names no trainer that is expected")
        taken = [f"{trainer.model_id} is {trainer.state}" for trainer in status.trainers if trainer.state != "expected"]
        taken += [f"instance {instance.instance_id} is in the pool" for instance in status.instances]
        expect(not taken, f"this Dataflow is not there for the test alone: {'; '.join(taken)}")
        config = self.peer.call(DataflowAPI.config).config
        trainer = (config.get("trainer") or {}).get(self.model) or {}
        self._batch_size = self._asked_size or int(trainer.get("train_batch_size", 0))
        expect(self._batch_size, "/config does not say how large a batch is: give --batch-size")
        self._max_staleness = ((config.get("dataflow") or {}).get("buffer") or {}).get("max_staleness")
        self._slots = SLOTS_IN_GROUPS * int((config.get("workflow") or {}).get("n_samples", 8))
        self.version, self.timeline = dict.fromkeys(self.models, 0), dict.fromkeys(self.models, 0)
        self._sender = http_url(reachable_host(self._host.host), free_port())  # named only: the played services pull nothing

    @check("batch.before_ready", "a trainer that has not attached is refused: /batch and /notify_version are 409", "status.fresh")
    def before_ready(self) -> None:
        self.peer.refusal("/batch before /ready", DataflowAPI.batch, self._name(0), Conflict)
        self.peer.refusal("/notify_version before /ready", DataflowAPI.notify_version, self._notice(1), Conflict)

    @check("ready.unknown_model", "a policy that the job does not train is refused", "status.fresh")
    def unknown_model(self) -> None:
        ready = control.Ready(model_id="no-such-policy", train_batch_size=self._batch_size, sender_endpoint="")
        self.peer.refusal("/ready of an unknown policy", DataflowAPI.ready, ready)
        request = BatchRequest(model_id="no-such-policy", timeline=0, version=0, wait_s=0.0)
        self.peer.refusal("/batch of an unknown policy", DataflowAPI.batch, request)

    # --- the pool ---------------------------------------------------------------------------------------------------------

    def _join(self, name: str, **traits: Any) -> PlayedRaaS:
        raas = self.raas[name] = PlayedRaaS(name, self.models, self._slots, **traits)
        self.urls[name] = self._host.serve(name, RaaSAPI, raas.handlers()).url
        self._register(name)
        return raas

    def _register(self, name: str) -> None:
        request = control.RegisterRaaS(instance_id=name, url=self.urls[name], models=self.models, total_slots=self._slots)
        self.peer.call(DataflowAPI.register_raas, request)

    @check("pool.unreachable", "a rollout service whose address does not answer gets an error, not a place", "status.fresh")
    def unreachable(self) -> None:
        nowhere = http_url(reachable_host(self._host.host), free_port())
        request = control.RegisterRaaS(instance_id="conformance-silent", url=nowhere, models=self.models, total_slots=self._slots)
        try:
            self.peer.call(DataflowAPI.register_raas, request)
        except AstraFlowError:
            pool = self.peer.call(DataflowAPI.raas_pool).instances
            expect(all(i.state == "gone" for i in pool if i.instance_id == "conformance-silent"), "it is in the pool all the same")
            return
        raise Failed("registered, although nothing listens there")

    @check("pool.joins", "a rollout service registers and is in the pool; the same call again changes nothing", "status.fresh")
    def joins(self) -> None:
        raas = self._join("conformance-a")
        self._register(raas.instance_id)
        names = [instance.instance_id for instance in self.peer.call(DataflowAPI.raas_pool).instances if instance.state != "gone"]
        expect(names == [raas.instance_id], f"the pool is {names}")
        expect(not any(kind == "submit" for kind, _ in raas.diary), "leases came before any trainer had attached")

    # --- attaching --------------------------------------------------------------------------------------------------------

    @check("ready.attaches", "/ready answers the timeline and the version; the same call again changes nothing", "status.fresh")
    def attaches(self) -> None:
        for model in self.models:
            replies = [self._ready(model) for _ in range(2)]
            expect(replies[0].version == 0, f"{model}: attached at version 0, the reply says {replies[0].version}")
            expect(replies[0].timeline == replies[1].timeline, f"{model}: /ready twice moved the timeline from {replies[0].timeline}")
            self.timeline[model] = replies[0].timeline

    @check(
        "lease.start_order",
        "a rollout service learns workflows and loads the current weights before its first lease",
        "pool.joins",
        "ready.attaches",
    )
    def start_order(self) -> None:
        diary = self.raas["conformance-a"].diary
        until("a lease", lambda: any(kind == "submit" for kind, _ in diary))
        before = diary[: [kind for kind, _ in diary].index("submit")]
        named = {message.workflow_id for kind, message in before if kind == "register_workflow"}
        told = {message.model_id for kind, message in before if kind == "notify_version"}
        leases = [lease for kind, message in diary if kind == "submit" for lease in message.leases]
        expect(told == set(self.models), f"before the first lease it was told of weights of {sorted(told)}, not of {self.models}")
        unknown = {lease.workflow_id for lease in leases} - named
        expect(not unknown, f"a lease names workflow {min(unknown, default='')}, which was not registered before")
        wrong = [m for kind, m in before if kind == "notify_version" and m.digest != self._digest(m.model_id, m.version)]
        expect(not wrong, "the notice has another digest than the trainer gave")

    # --- batches ----------------------------------------------------------------------------------------------------------

    @check("batch.serves", "/batch gives train_batch_size trajectories, token for token as they were delivered", "lease.start_order")
    def serves(self) -> None:
        self._look(self.model, self._batch())

    def _bytes(self) -> bytes:
        query = self._name(wait_s=LONG_POLL_S)
        path = f"/batch?model_id={query.model_id}&timeline={query.timeline}&version={query.version}&wait_s={query.wait_s}"
        response = self.peer.raw("GET", path, accept=MSGPACK)
        expect(response.status_code == 200, f"/batch: HTTP {response.status_code}")
        reply: BatchReply = decode_body(response.content, BatchReply, False)
        expect(reply.batch is not None, f"/batch of a name that was served: {reply.kind}: {reply.reason}")
        return encode(reply.batch)

    @check("batch.redelivery", "the same name gives the same bytes, however often and to however many", "batch.serves")
    def redelivery(self) -> None:
        first = self._bytes()
        with ThreadPoolExecutor(4) as pool:
            again = [task.result() for task in [pool.submit(self._bytes) for _ in range(4)]]
        expect(all(other == first for other in again), f"version {self.version[self.model]} was served with different bytes")

    @check("batch.future", "the batch of a version that the trainer has not reached is not served", "batch.serves")
    def future(self) -> None:
        reply = self._ask(self.version[self.model] + 3)
        expect(reply.batch is None and reply.kind == "wait", f"answered with {reply.kind}")
        expect(reply.reason or reply.waits, "`wait` without a word for what")

    @check("batch.stale_timeline", "a timeline that is not the live one is answered with `stale_timeline`", "batch.serves")
    def stale_timeline(self) -> None:
        reply = self._ask(timeline=self.timeline[self.model] + 5)
        expect(reply.kind == "stale_timeline", f"answered with {reply.kind}")

    # --- notices ----------------------------------------------------------------------------------------------------------

    @check("notify.commits", "/notify_version(v + 1) makes the rows of batch v trained, and says how many", "batch.redelivery")
    def commits(self) -> None:
        before = self._status().ledger.trained
        batches, trained = {model: self._batch(model) for model in self.models}, 0
        for model, batch in batches.items():
            reply = self._commit(model, batch)
            expect(reply.trained == self._batch_size, f"{model}: trained {reply.trained}, the batch had {self._batch_size}")
            trained += reply.trained
        expect(reply.service_version == 1, f"service_version {reply.service_version} after every model's notice of version 1")
        found = self._status().ledger.trained - before
        expect(found == trained, f"/status says {found} trained, the notices {trained}")

    @check("notify.repeats", "the same notice again is a duplicate: it trains nothing", "notify.commits")
    def repeats(self) -> None:
        before = self._status().ledger.trained
        reply = self.peer.call(DataflowAPI.notify_version, self._notice(self.version[self.model]))
        expect(reply.trained == 0, f"trained {reply.trained} by a duplicate")
        expect(self._status().ledger.trained == before, "the ledger counts the rows twice")

    @check("notify.refused", "other bytes under a published version, and a dead timeline, are 409", "notify.commits")
    def refused(self) -> None:
        version = self.version[self.model]
        other = self._notice(version, digest=xxhash.xxh3_128_hexdigest(b"other bytes"))
        self.peer.refusal("another digest for a published version", DataflowAPI.notify_version, other, Conflict)
        dead = self._notice(version + 1, timeline=self.timeline[self.model] + 5)
        self.peer.refusal("a notice of a timeline that is not live", DataflowAPI.notify_version, dead, Conflict)
        expect(self._ask().kind in ("batch", "wait"), "a refused notice moved the version")

    @check("batch.committed", "the name of a committed batch never gives other trajectories", "notify.commits")
    def committed(self) -> None:
        try:
            reply = self._ask(self.version[self.model] - 1)
        except Conflict:
            return
        seen = reply.batch is None or set(reply.batch.trajectory_ids) <= self.served[self.model]
        expect(seen, "trajectories that were in no batch of that name")

    @check("weights.announced", "rollout services are told of the new version at once, with its digest and sender", "notify.commits")
    def announced(self) -> None:
        version, raas = self.version[self.model], self.raas["conformance-a"]

        def notice() -> Any:
            found = [m for kind, m in raas.diary if kind == "notify_version" and (m.model_id, m.version) == (self.model, version)]
            return found[:1]

        (message,) = until(f"a notice of version {version}", notice)
        wanted = (self.timeline[self.model], self._digest(self.model, version), self._sender)
        expect((message.timeline, message.digest, message.sender_endpoint) == wanted, f"the notice is not what the trainer said: {message}")

    @check("weights.retried", "a load that failed is no success: the version is announced again", "weights.announced")
    def retried(self) -> None:
        raas = self.raas["conformance-a"]
        raas.fail_loads = 2
        self._step()
        until("a further notice after failed loads", lambda: all(raas.serving[m].version == self.version[m] for m in self.models))

    # --- results ----------------------------------------------------------------------------------------------------------

    @check("results.lost_reply", "a reply to /pull that was lost is fetched again and acknowledged, and counts once", "batch.serves")
    def lost_reply(self) -> None:
        raas = self.raas["conformance-a"]
        raas.lose_replies = 2
        self._steps_until("a lost reply", lambda: raas.lose_replies == 0)
        waiting = set(raas.outbox)
        until("acknowledgements of what was delivered again", lambda: waiting <= raas.acked)
        expect(not raas.unknown_acks, f"delivery {raas.unknown_acks[:1]} was acknowledged and never handed out")

    @check("results.copies", "a result that comes again under another delivery id is acknowledged and trained once", "results.lost_reply")
    def copies(self) -> None:
        raas = self.raas["conformance-a"]
        raas.copies = 2
        self._steps_until("acknowledgements of second copies", lambda: raas.copies == 0 and set(raas.copied) <= raas.acked)
        self._step()

    @check("results.malformed", "a malformed group is acknowledged, dropped and counted; it is in no batch", "results.lost_reply")
    def malformed_groups(self) -> None:
        raas, before = self.raas["conformance-a"], sum(self._status().ledger.dropped.values())
        raas.damages = list(DAMAGES)
        lost = len(DAMAGES) * len(next(iter(raas.groups.values())).trajectories) * len(self.models)
        self._steps_until("acknowledgements of malformed groups", lambda: self._bad_are_gone(raas))
        found = until("counts of dropped rows", lambda: (n := sum(self._status().ledger.dropped.values()) - before) >= lost and n)
        expect(found >= lost, f"{found} rows were dropped, the malformed groups had {lost}")
        self._step()

    def _bad_are_gone(self, raas: PlayedRaaS) -> bool:
        return len(raas.bad) == len(DAMAGES) and all(raas.delivered(lease) & raas.acked for lease in raas.bad)

    def _steps_until(self, what: str, done: Any) -> None:
        """Trainers go on, so that work is handed out, until the condition holds."""

        def moved() -> bool:
            if not done():
                self._step()
            return bool(done())

        until(what, moved)

    @check("lease.unique", "lease ids are unique, and no more is submitted than there are free slots", "lease.start_order")
    def unique(self) -> None:
        leases = [lease for kind, message in self.raas["conformance-a"].diary if kind == "submit" for lease in message.leases]
        ids = [(lease.lease_id, lease.attempt) for lease in leases]
        expect(len(ids) == len(set(ids)), "a lease was submitted twice although its first submit was answered")
        expect(all(lease.n_samples > 0 and lease.attempt == 1 for lease in leases), "a new lease has no samples or is no first attempt")
        expect(not self.raas["conformance-a"].overfull, self.raas["conformance-a"].overfull)

    @check("lease.reissued", "leases of an instance that leaves run elsewhere: same task, next attempt", "lease.start_order")
    def reissued(self) -> None:
        slow, other = self._join("conformance-b", held=True), self.raas["conformance-a"]
        self._steps_until("a lease for a second instance", lambda: slow.running)
        gone = dict(slow.running)
        self.peer.call(DataflowAPI.deregister_raas, control.DeregisterRaaS(instance_id=slow.instance_id, drain=False))

        def again() -> dict[str, Any] | None:
            later = {
                lease.lease_id: lease
                for kind, message in list(other.diary)
                if kind == "submit"
                for lease in message.leases
                if lease.lease_id in gone
            }
            return later if set(later) == set(gone) else None

        for lease_id, lease in until("leases of the instance that left", again).items():
            first = gone[lease_id]
            expect(lease.attempt == first.attempt + 1, f"lease {lease_id}: attempt {lease.attempt} after {first.attempt}")
            same = (lease.task_id, lease.n_samples, lease.data) == (first.task_id, first.n_samples, first.data)
            expect(same, f"lease {lease_id} is another task in its second attempt")

    @check("ledger.adds_up", "made = trained + dropped + in flight, always", "notify.commits")
    def adds_up(self) -> None:
        for _ in range(3):
            self._step()
            ledger = self._status().ledger
            total = ledger.trained + sum(ledger.dropped.values()) + sum(ledger.in_flight.values())
            expect(ledger.made == total, f"made {ledger.made}, but trained + dropped + in flight = {total}")
        wanted = sum(len(rows) for rows in self.served.values())
        expect(ledger.trained == wanted, f"{ledger.trained} trained, the committed batches had {wanted}")

    # --- the end ----------------------------------------------------------------------------------------------------------

    @check("ready.replaces", "after another process attached, calls of the earlier one are refused: 409 Replaced", "notify.commits")
    def replaces(self) -> None:
        successor = Peer(self.peer.url, self.peer.token, self.peer.identity.run_id)
        version = self.version[self.model]
        reply = self._ready(self.model, successor, version)
        expect(reply.timeline == self.timeline[self.model], "the same version and bytes, and yet a new timeline")
        self.peer.refusal("/batch of the process that was replaced", DataflowAPI.batch, self._name(), Replaced)
        self.peer.refusal("a notice of the process that was replaced", DataflowAPI.notify_version, self._notice(version + 1), Replaced)
        self.peer.close()
        self.peer = successor
        for model in self.models[1:]:
            self._ready(model, successor, self.version[model])

    @check("ready.rolls_back", "a trainer that comes back at a lower version begins a new timeline; the old one is dead", "ready.replaces")
    def rolls_back(self) -> None:
        model, dead = self.model, self.timeline[self.model]
        back, trained = self.version[model] - 2, self._status().ledger.trained
        reply = self._ready(model, recovered=back)
        expect(reply.timeline > dead, f"timeline {reply.timeline} after {dead}")
        expect(reply.version == back, f"version {reply.version}, recovered was {back}")
        self.timeline[model], self.version[model] = reply.timeline, back
        expect(self._ask(timeline=dead).kind == "stale_timeline", "the dead timeline is still served")
        after = self._status().ledger.trained
        expect(after == trained - 2 * self._batch_size, f"{trained - after} rows are no longer trained, two batches were taken back")
        raas = self.raas["conformance-a"]
        until("a notice of the new timeline", lambda: raas.serving[model].timeline == reply.timeline)
        if len(self.models) == 1:
            self.served[model] = set()  # taken back, they may be trained again; so may not those of before, which the ledger guards
            self._step()

    @check("shutdown.ends", "after the last trainer's /shutdown the run has ended and the pool is told so", "ready.attaches")
    def ends(self) -> None:
        for at, model in enumerate(self.models):
            reply = self.peer.call(DataflowAPI.shutdown, control.Shutdown(model_id=model, reason="conformance", wait_s=0.0))
            last = at == len(self.models) - 1
            expect(reply.run_ended == last, f"run_ended {reply.run_ended} after {at + 1} of {len(self.models)} trainers")
        if "conformance-a" not in self.raas:
            raise Skipped("no rollout service had joined")
        until("/shutdown of the rollout service", lambda: self.raas["conformance-a"].ended)
        until("the end of the service", lambda: self.peer.gone(DataflowAPI.status))
