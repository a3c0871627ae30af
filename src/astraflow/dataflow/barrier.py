"""Pure core: versions, timelines, the gate, receipts. Calls in, decisions out; `now` (seconds, monotonic) is an argument.

A timeline of a model is bumped each time its trainer re-attaches at a lower version (or at the same version with other
bytes), so that a version number of a dead timeline is never mistaken for a live one.

A model has one trainer process: the one that said /ready last. Calls of another process of the same model are refused, so that a
trainer that was taken for dead and replaced cannot train, publish or end anything when it comes back.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from astraflow.protocol.control import NotifyVersion, Ready, TrainerInfo
from astraflow.protocol.errors import Conflict, Replaced
from astraflow.protocol.rollout import Serving

KNOWN_DIGESTS = 64
"""Digests kept per model: groups hold tokens of at most max_staleness + 1 versions, and slow loads lag a few more."""


KNOWN_PROCESSES = 16
"""Lives of a trainer, and attachments of one life, that are remembered; a late message is far younger than so many."""


class ModelState(msgspec.Struct, kw_only=True):
    """One trainer as Dataflow knows it; persisted as it is."""

    model_id: str
    registered: bool = False
    """It has said /ready (also before a Dataflow restart)."""
    done: bool = False
    timeline: int = 0
    version: int = 0
    digests: dict[int, str] = {}
    """Version → digest on the live timeline, the newest ones."""
    batch_size: int = 0
    checkpoint_version: int = -1
    sender_endpoint: str = ""
    more_senders: list[str] = []
    sent_from: int = 0
    """Oldest version that this sender ever had: one that was started anew has nothing older than what it resumed from."""
    tokenizer_hash: str = ""
    template_hash: str = ""
    rollbacks: list[tuple[int, int]] = []
    """(timeline that died, last version it shares with its successor)."""
    incarnation: str = ""
    """The process that said /ready last; empty = it named none, and then nobody is refused."""
    replaced: list[str] = []
    """Processes whose place was taken, the newest ones: what still comes of them takes nothing back."""
    region: str = ""
    checkpoint_wanted: int = -1
    """An operator waits for a checkpoint of at least this version; −1 = nobody does."""


@dataclass(frozen=True)
class ReadyOutcome:
    """What /ready changed."""

    timeline: int
    version: int
    fresh: bool
    """The trainer attached for the first time, or again after its end."""
    bumped: bool
    """Back at an earlier version: rows trained later than it are to be buffered again or dropped."""
    commit_through: int | None = None
    """The checkpoint holds batches up to this name whose notice never came."""


@dataclass(frozen=True)
class NotifyOutcome:
    """What a notice changed."""

    kind: Literal["new", "duplicate"]
    first: int = 0
    """Batches first … version − 1 are committed by it."""
    skipped: int = 0
    """Versions that it jumped over: at most one batch was served, so that these were made without one."""


@dataclass(frozen=True)
class Edge:
    """Why a gate is closed."""

    waits_for: str
    why: str
    until: float | None = None
    """Clock time at which the gate no longer waits for this trainer if nothing is heard of it; None = it waits on."""


@dataclass
class VersionBarrier:
    """Versions of all expected models."""

    models: dict[str, ModelState]
    max_policy_lead: int = 0
    trainer_deadline_s: float = 900.0
    _seen: dict[str, float] = field(default_factory=dict)
    _dead: set[str] = field(default_factory=set)
    _receipts: dict[tuple[str, str], dict[tuple[int, int], str]] = field(default_factory=dict)
    """(instance, model) → (timeline, version) → digest, what it has really served."""
    _said: dict[str, list[tuple[str, int, str, int]]] = field(default_factory=dict)
    """Model → what was said with /ready: process, version, digest, checkpoint."""

    # --- trainers -------------------------------------------------------------------------------------------------------

    def state(self, model_id: str) -> ModelState:
        """Raises Conflict for a model that the experiment does not name."""
        if model_id not in self.models:
            raise Conflict(f"model_id {model_id!r} is not trained in this run; expected one of {', '.join(self.models)}")
        return self.models[model_id]

    def claim(self, model_id: str, incarnation: str) -> ModelState:
        """This call comes from the trainer of the model. Raises Replaced when another process has attached since; a peer that
        stamps no incarnation is believed."""
        state = self.state(model_id)
        if state.registered and state.incarnation and incarnation and incarnation != state.incarnation:
            raise Replaced(
                f"model {model_id}: this call comes from trainer process {incarnation}, but process {state.incarnation} attached later"
                " and has taken its place: end one of the two"
            )
        return state

    def ready(self, message: Ready, now: float) -> ReadyOutcome:
        """A trainer attaches: the first time, again (idempotent), after a rollback, or as a new process that takes over."""
        state = self.state(message.model_id)
        start = message.version if message.recovered_version is None else message.recovered_version
        if self._came_late(message, start):
            return ReadyOutcome(state.timeline, state.version, False, False)
        fresh = not state.registered or state.done
        before, bumped = state.version, False
        commit: int | None = None
        if state.digests:  # it was attached before
            other_bytes = not same_digest(message.digest, state.digests.get(start, ""))
            bumped = start < before or (start == before and other_bytes)
            if bumped:
                state.rollbacks.append((state.timeline, start - 1 if other_bytes else start))
                state.timeline += 1
                state.digests = {version: digest for version, digest in state.digests.items() if version < start}
            elif start > before:
                commit = start - 1
        if state.incarnation and state.incarnation != message.incarnation:
            state.replaced = [*state.replaced[-KNOWN_PROCESSES:], state.incarnation]
        state.registered, state.done, state.incarnation = True, False, message.incarnation
        state.version, state.batch_size = start, message.train_batch_size
        if bumped or message.sender_endpoint != state.sender_endpoint:
            state.sent_from = start
        state.sender_endpoint, state.more_senders = message.sender_endpoint, message.more_senders
        state.tokenizer_hash, state.template_hash, state.region = message.tokenizer_hash, message.template_hash, message.region
        state.checkpoint_version = (
            min(message.checkpoint_version, start) if bumped else max(state.checkpoint_version, message.checkpoint_version)
        )
        state.checkpoint_wanted = min(state.checkpoint_wanted, start)
        self._checkpoint_came(state)
        self._remember(state, start, message.digest)
        self.touch(message.model_id, now)
        return ReadyOutcome(state.timeline, start, fresh, bumped, commit)

    def want_checkpoint(self, model_id: str) -> dict[str, int]:
        """An operator wants one of a policy, or of all (empty): policy → the version it is asked of. Raises Conflict when a trainer is not
        there to write it, or the policy is none of this run."""
        wanted = {}
        for name in [model_id] if model_id else list(self.models):
            state = self.state(name)
            if not state.registered or state.done:
                raise Conflict(f"model {name}: its trainer is {'done' if state.done else 'not ready'}, so it writes no checkpoint")
            if state.checkpoint_version < state.version:
                state.checkpoint_wanted = wanted[name] = state.version
        return wanted

    def _checkpoint_came(self, state: ModelState) -> None:
        if state.checkpoint_version >= state.checkpoint_wanted:
            state.checkpoint_wanted = -1

    def _came_late(self, message: Ready, start: int) -> bool:
        """A copy of a /ready whose sender has moved on since (it was called again, or trained): it changes nothing, and above all it
        takes no healthy trainer back. Raises Replaced when it is of a process that another one has replaced."""
        state, process = self.models[message.model_id], message.incarnation
        if process in state.replaced:
            raise Replaced(f"model {message.model_id}: process {state.incarnation} has taken the place of {process}: end one of the two")
        if not process:
            return False
        said = (process, start, message.digest, message.checkpoint_version)
        heard = [known for known in self._said.get(message.model_id, []) if known[0] == process]
        self._said[message.model_id] = [*heard[-KNOWN_PROCESSES:], said]
        return said in heard and process == state.incarnation and start < state.version

    def notify(self, message: NotifyVersion, now: float) -> NotifyOutcome:
        """A version is published. Duplicates and late ones change nothing; a dead timeline, or other bytes under a version that is
        published already, are refused with Conflict.

        A version further ahead than the next one is believed: the weights of that number exist, and refusing it would only hide
        how old the rollouts are. `skipped` says how many versions were made without a batch.
        """
        state = self.claim(message.model_id, message.incarnation)
        if not state.registered:
            raise Conflict(f"model {message.model_id}: version {message.version} before /ready")
        if message.timeline != state.timeline:
            raise Conflict(f"model {message.model_id}: timeline {message.timeline} is dead, live is {state.timeline}: call /ready again")
        if message.version <= state.version and not same_digest(message.digest, known := state.digests.get(message.version, "")):
            raise Conflict(
                f"model {message.model_id}: version {message.version} of timeline {state.timeline} was published with digest {known},"
                f" the notice says {message.digest}: call /ready again"
            )
        self.touch(message.model_id, now)
        if message.sender_endpoint:
            state.sender_endpoint = message.sender_endpoint
        state.checkpoint_version = max(state.checkpoint_version, message.checkpoint_version)
        self._checkpoint_came(state)
        if message.version <= state.version:
            return NotifyOutcome("duplicate")
        first, state.version = state.version, message.version
        self._remember(state, message.version, message.digest)
        return NotifyOutcome("new", first, message.version - first - 1)

    def finish(self, model_id: str, now: float, incarnation: str = "") -> bool:
        """A trainer said /shutdown. False when it had said so before."""
        state = self.claim(model_id, incarnation)
        before, state.done = state.done, True
        self.touch(model_id, now)
        return not before

    def touch(self, model_id: str, now: float) -> bool:
        """A call of this trainer came. True when it was taken for dead before."""
        self._seen[model_id] = now
        was_dead = model_id in self._dead
        self._dead.discard(model_id)
        return was_dead

    def tick(self, now: float) -> list[str]:
        """Models whose trainer is past its deadline now; each is named once."""
        late = [m for m in self._attached() if m not in self._dead and now - self._seen.get(m, now) > self.trainer_deadline_s]
        self._dead.update(late)
        return late

    def resumed(self, now: float) -> None:
        """After a Dataflow restart every registered trainer gets its full deadline to call."""
        self._seen = dict.fromkeys(self._attached(), now)

    # --- the gate -------------------------------------------------------------------------------------------------------

    @property
    def all_ready(self) -> bool:
        """Every expected trainer has attached (or ended)."""
        return all(state.registered or state.done for state in self.models.values())

    @property
    def all_done(self) -> bool:
        return all(state.done for state in self.models.values())

    def live(self) -> list[str]:
        """Models that count for the minimum."""
        return [model_id for model_id in self._attached() if model_id not in self._dead]

    @property
    def service_version(self) -> int:
        """Minimum version over live registered models; with none, over those that remain known."""
        models = self.live() or [m for m, s in self.models.items() if s.registered] or list(self.models)
        return min(self.models[model_id].version for model_id in models)

    def gate(self, version: int, model_id: str = "") -> list[Edge]:
        """Whom a batch of this version still waits for; empty = open."""
        edges = [
            Edge(f"trainer:{m}", f"expected trainer {m!r} is not ready") for m, s in self.models.items() if not (s.registered or s.done)
        ]
        floor = version - self.max_policy_lead
        for name in self.live():
            behind = self.models[name].version
            if behind < floor and name != model_id:
                why = f"version {behind} of {name!r} must reach {floor} (max_policy_lead {self.max_policy_lead})"
                heard = self._seen.get(name)
                edges.append(Edge(f"trainer:{name}", why, None if heard is None else heard + self.trainer_deadline_s))
        return edges

    # --- groups and receipts --------------------------------------------------------------------------------------------

    def on_live_timeline(self, model_id: str, timeline: int, max_version: int) -> bool:
        """False when tokens come from versions that only a dead timeline had."""
        state = self.models[model_id]
        if timeline > state.timeline:
            return False
        return all(max_version <= shared for died, shared in state.rollbacks if died >= timeline)

    def target(self, model_id: str) -> Serving:
        """The newest published weights."""
        state = self.models[model_id]
        return Serving(timeline=state.timeline, version=state.version, digest=state.digests.get(state.version, ""))

    def is_current(self, model_id: str, serving: Serving | None) -> bool:
        """True when this receipt names the newest weights; an empty digest on either side is unverified and allowed."""
        return serving is not None and self.lag(model_id, serving) == 0 and same_digest(serving.digest, self.target(model_id).digest)

    def lag(self, model_id: str, serving: Serving) -> int | None:
        """Versions behind the newest; None when the receipt belongs to another timeline."""
        state = self.models[model_id]
        return state.version - serving.version if serving.timeline == state.timeline else None

    def receipt(self, instance_id: str, model_id: str, serving: Serving) -> str:
        """Note what an instance serves. Returns a complaint when its digest is not the published one."""
        if model_id not in self.models:
            return ""
        known = self._receipts.setdefault((instance_id, model_id), {})
        known[(serving.timeline, serving.version)] = serving.digest
        while len(known) > KNOWN_DIGESTS:
            del known[next(iter(known))]
        wanted = self._published(model_id, serving.timeline, serving.version)
        if same_digest(serving.digest, wanted):
            return ""
        return f"{instance_id} serves {model_id} version {serving.version} with digest {serving.digest}, published was {wanted}"

    def confirmed(self, instance_id: str, model_id: str, timeline: int, max_version: int) -> bool:
        """A receipt of this instance shows the published bytes at this version (or, when it moved on unseen, a later one)."""
        receipts = self._receipts.get((instance_id, model_id), {})
        return any(
            line >= timeline and version >= max_version and same_digest(digest, self._published(model_id, line, version))
            for (line, version), digest in receipts.items()
        )

    def _published(self, model_id: str, timeline: int, version: int) -> str:
        """Digest of this version; empty = not known, or of a dead timeline."""
        return self.models[model_id].digests.get(version, "") if self.on_live_timeline(model_id, timeline, version) else ""

    def forget_instance(self, instance_id: str) -> None:
        """An instance is gone, or came back as a new process."""
        self._receipts = {key: value for key, value in self._receipts.items() if key[0] != instance_id}

    def sender_for(self, model_id: str, instance_id: str) -> str:
        """The sender that an instance pulls this model from: always the same one, so that it can go on with deltas."""
        state = self.models[model_id]
        senders = [state.sender_endpoint, *state.more_senders]
        return senders[zlib.crc32(instance_id.encode()) % len(senders)]

    # --- reports --------------------------------------------------------------------------------------------------------

    def info(self, now: float) -> list[TrainerInfo]:
        return [
            TrainerInfo(
                model_id=model_id,
                timeline=state.timeline,
                version=state.version,
                digest=state.digests.get(state.version, ""),
                checkpoint_version=state.checkpoint_version,
                state=self._word(model_id, now),
                last_seen_s=now - self._seen.get(model_id, now),
                sender_endpoint=state.sender_endpoint,
                tokenizer_hash=state.tokenizer_hash,
                region=state.region,
                checkpoint_wanted=state.checkpoint_wanted,
            )
            for model_id, state in self.models.items()
        ]

    def _word(self, model_id: str, now: float) -> Literal["expected", "live", "late", "dead", "done"]:
        state = self.models[model_id]
        if state.done:
            return "done"
        if not state.registered:
            return "expected"
        if model_id in self._dead:
            return "dead"
        return "late" if now - self._seen.get(model_id, now) > self.trainer_deadline_s / 2 else "live"

    def _attached(self) -> list[str]:
        return [model_id for model_id, state in self.models.items() if state.registered and not state.done]

    def _remember(self, state: ModelState, version: int, digest: str) -> None:
        state.digests[version] = digest
        for old in sorted(state.digests)[:-KNOWN_DIGESTS]:
            del state.digests[old]


def same_digest(served: str, published: str) -> bool:
    """Equal, or one of them unverified."""
    return not served or not published or served == published
