"""Everything else that is said: registration, readiness, versions, status, evaluation, the end."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from astraflow.protocol.batch import WaitEdge
from astraflow.protocol.message import Count, Message, Name, Url, Version
from astraflow.protocol.rollout import Serving

State = Literal["starting", "ready", "idle", "draining", "error"]
Names = Annotated[list[Name], Meta(max_length=256)]
"""Models, of which a run has a few, or addresses."""
Hashes = Annotated[dict[Name, Name], Meta(max_length=256)]
"""Model → hash."""


# --- RaaS ---------------------------------------------------------------------------------------------------------------


class Availability(Message, kw_only=True):
    """Slots in trajectories."""

    total_slots: int
    """Trajectories that run at once."""
    free_slots: int
    """Trajectories that can still be taken."""
    in_flight: int
    """Trajectories that run now."""
    outbox: int
    """Groups that wait to be pulled."""


class EngineStatus(msgspec.Struct, kw_only=True):
    kind: str
    """Registered engine name."""
    state: Literal["starting", "ready", "loading", "restarting", "error"]
    """Where it is in its life."""
    message: str = ""
    """One line for people."""
    restarts: int = 0
    """How often its process was started again."""
    running: int = 0
    """Requests that the engine decodes now."""
    queued: int = 0
    """Requests that wait for a slot."""
    pid: int = 0
    """Process id of the engine child; 0 = none."""


class RaaSStatus(Message, kw_only=True):
    instance_id: str
    """Name of the rollout service, stable across its restarts."""
    state: State
    """Where it is in its life."""
    message: str = ""
    """One line for people."""
    availability: Availability
    """Slots."""
    models: list[str]
    """Policies that this instance can serve."""
    serving: dict[str, Serving]
    """Receipts per model."""
    engines: dict[str, EngineStatus]
    """Per model."""
    workflows: list[str]
    """Registered workflow ids."""
    tokenizer_hash: dict[str, str] = {}
    """Per model."""
    template_hash: dict[str, str] = {}
    """Hash of the chat template; compared at start."""
    lanes: list[str] = []
    """Open evaluation lanes."""
    metrics: dict[str, float] = {}
    """Numbers by name."""


# --- Dataflow: pool -----------------------------------------------------------------------------------------------------


class RegisterRaaS(Message, kw_only=True):
    """RaaS → Dataflow. The same instance_id from a new incarnation replaces the old process."""

    instance_id: Name
    """The same id from a new incarnation replaces the old process."""
    url: Url
    """Where it listens."""
    models: Names
    """Policies that it can serve."""
    total_slots: Count
    """Trajectories that run at once."""
    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """Routing weight: expected speed relative to the others."""
    tokenizer_hash: Hashes = {}
    """Hash of the tokenizer; compared at start."""
    template_hash: Hashes = {}
    """Hash of the chat template; compared at start."""
    region: str = ""
    """Where it runs, for people; empty = not told."""


class RegisterRaaSReply(Message, kw_only=True):
    instance_id: str
    """Name of the rollout service, stable across its restarts."""
    pool_size: int
    """Instances that are not gone."""


class DeregisterRaaS(Message, kw_only=True):
    instance_id: Name
    """Name of the rollout service, stable across its restarts."""
    drain: bool = True
    """Finish what runs, then leave; otherwise its leases are issued again at once."""
    shutdown: bool = False
    """Ask the instance to end afterwards."""


class InstanceInfo(msgspec.Struct, kw_only=True):
    instance_id: str
    """Name of the rollout service, stable across its restarts."""
    url: str
    """Where it listens."""
    incarnation: str
    """Of its process."""
    state: Literal["catching_up", "live", "suspect", "draining", "gone"]
    """Where it is in its life."""
    total_slots: int
    """Trajectories that run at once."""
    free_slots: int
    """Trajectories that can still be taken."""
    in_flight: int
    """Trajectories leased to it."""
    failures: int
    """Consecutive failed heartbeats."""
    last_seen_s: float
    """Seconds since its last good answer."""
    models: list[str]
    """Policies that it can serve."""
    serving: dict[str, Serving]
    """Receipts per model."""
    reason: str = ""
    """One line for people."""
    region: str = ""
    """Where it runs, for people; empty = not told."""


class RaaSPool(Message, kw_only=True):
    instances: list[InstanceInfo]
    """Every known instance."""


# --- Dataflow: trainers -------------------------------------------------------------------------------------------------


class Ready(Message, kw_only=True):
    """Trainer → Dataflow, after it published its first weights."""

    model_id: Name
    """The policy."""
    train_batch_size: Annotated[int, Meta(le=2**31 - 1)]
    """Trajectories per batch."""
    sender_endpoint: Url
    """http address of its sender agent; empty = a trainer that serves no weights."""
    version: Version = 0
    """Version that is published now (0, or recovered_version)."""
    digest: Name = ""
    """Digest of the published bytes; empty = unverified."""
    recovered_version: Version | None = None
    """Set after a resume from a checkpoint."""
    checkpoint_version: Version = -1
    """Newest durable checkpoint; −1 = none."""
    tokenizer_hash: Name = ""
    """Hash of the tokenizer; compared at start."""
    template_hash: Name = ""
    """Hash of the chat template; compared at start."""
    more_senders: Annotated[list[Url], Meta(max_length=256)] = []
    """Sender agents of the trainer's other nodes: each serves the whole model, so rollout services are spread over all of them."""
    region: str = ""
    """Where it runs, for people; empty = not told."""


class ReadyReply(Message, kw_only=True):
    timeline: int
    """Stamp of every later call; bumped when recovered_version is lower than what was served."""
    version: int
    """Version that Dataflow takes for this trainer now."""
    eval_at_start: bool = False
    """An evaluation of this version was begun."""


class NotifyVersion(Message, kw_only=True):
    """Trainer → Dataflow: `version` is published. Commits the batch named version − 1. Returns at once."""

    model_id: Name
    """The policy."""
    timeline: Version
    """Life of the policy's history (contracts: Words)."""
    version: Version
    """Publishes after the first; the first is version 0."""
    digest: Name = ""
    """Hash over the published bytes; empty = unverified."""
    checkpoint_version: Version = -1
    """Newest durable checkpoint; −1 = none."""
    run_eval: bool = False
    """Evaluate this version."""
    sender_endpoint: Url = ""
    """Given again when the sender came back at another address; empty = unchanged."""
    metrics: Annotated[dict[Name, float], Meta(max_length=4096)] = {}
    """The step's training metrics, for status and report."""


class NotifyVersionReply(Message, kw_only=True):
    service_version: int
    """Minimum over live registered models."""
    trained: int
    """Rows (trajectory, policy) that this notice made `trained`; 0 for a duplicate."""
    eval_id: str = ""
    """Names one evaluation; empty = none."""


class EvalResultsRequest(Message, kw_only=True):
    since: Count = 0
    """Index of the first result wanted."""
    wait_s: float = 0.0
    """How long to wait before answering without the thing waited for."""


class EvalResult(msgspec.Struct, kw_only=True):
    """One data set, one set of versions."""

    eval_id: str
    """Names one evaluation; empty = none."""
    dataset: str
    """Name of the validation set."""
    versions: dict[str, Serving]
    """What was evaluated."""
    n_tasks: int
    """Tasks of the set."""
    n_samples: int
    """Configured samples per task."""
    missing: int
    """Samples without a result; counted as wrong."""
    metrics: dict[str, float | None]
    """`avg@n`, `pass@k` (null if n < k), `reward/mean`."""
    duration_s: float
    """From the first lease to the last result."""
    mode: str = "pinned"
    """`pinned` or `synchronous`."""
    note: str = ""
    """Why samples are missing, or why other versions were evaluated than those asked for; empty = nothing to say."""


class EvalResults(Message, kw_only=True):
    results: list[EvalResult]
    """Finished since the index asked for."""
    next: int
    """`since` of the next request."""
    running: list[str]
    """Evaluations not finished yet."""


class TrainerInfo(msgspec.Struct, kw_only=True):
    model_id: str
    """The policy."""
    timeline: int
    """Life of the policy's history (contracts: Words)."""
    version: int
    """Publishes after the first; the first is version 0."""
    digest: str
    """Hash over the published bytes; empty = unverified."""
    checkpoint_version: int
    """Newest durable checkpoint; −1 = none."""
    state: Literal["expected", "live", "late", "dead", "done"]
    """Where it is in its life."""
    last_seen_s: float
    """Seconds since its last call."""
    sender_endpoint: str = ""
    """http address of the sender agent."""
    tokenizer_hash: str = ""
    """Hash of the tokenizer; compared at start."""
    region: str = ""
    """Where it runs, for people; empty = not told."""
    checkpoint_wanted: int = -1
    """An operator has asked for a checkpoint of this version or a later one, which is not there yet; −1 = none is open."""


class QueueInfo(msgspec.Struct, kw_only=True):
    fresh_groups: int
    """Complete groups that wait to be served."""
    fresh_trajectories: int
    """Their trajectories."""
    replay_groups: int
    """Groups kept for replay."""
    held_groups: int
    """Groups that wait for the receipt of their version."""
    served: int
    """Rows in batches that are served but not committed."""


class LedgerCounts(msgspec.Struct, kw_only=True):
    """Rows (trajectory, policy). made = trained + dropped + in flight, always."""

    made: int
    """Rows ever leased."""
    trained: int
    """Rows in committed batches."""
    dropped: dict[str, int]
    """By reason."""
    in_flight: dict[str, int]
    """leased, rolled, buffered, served."""
    replayed: int = 0
    """Extra uses of trained rows; outside the sum."""


class Drop(msgspec.Struct, kw_only=True):
    """A group that was not trained on."""

    lease_id: str
    """The group's lease."""
    task_id: str
    """Its task."""
    policy: str
    """For whom it was dropped; another policy may have trained on it."""
    reason: str
    """Why: `astraflow explain` says it in a sentence."""


class DataflowStatus(Message, kw_only=True):
    state: State
    """Of the service itself."""
    message: str = ""
    """One line for people."""
    uptime_s: float
    """Since this process started."""
    service_version: int
    """Minimum over live registered models."""
    started: bool
    """Acquisition is running (at least one RaaS and every expected trainer are ready)."""
    trainers: list[TrainerInfo]
    """Every expected trainer."""
    instances: list[InstanceInfo]
    """The pool."""
    queues: dict[str, QueueInfo]
    """Per model."""
    ledger: LedgerCounts
    """Where every row is."""
    waits: list[WaitEdge]
    """Who waits for whom."""
    rates: dict[str, float] = {}
    """`trajectories_per_s`, `tokens_per_s`, means of the last minute."""
    metrics: dict[str, float] = {}
    """Numbers by name."""
    tasks_drawn: int = 0
    """Tasks drawn from the training set, all epochs."""
    epoch: int = 0
    """Passes over the training set that were begun, from 0."""
    staleness: dict[str, dict[int, int]] = {}
    """Per model: gap → trained trajectories."""
    steps: dict[str, dict[str, float]] = {}
    """Per model: metrics of its last notice."""
    events: list[str] = []
    """What happened to processes (joins, deaths, rollbacks, resumes), newest last, at most 200."""
    idle_s: float = 0.0
    """Since anything moved: a row, a version, an evaluation, an instance that joined."""
    stall_s: float | None = None
    """When `idle_s` reaches this the run is stalled: a report is written and it ends with exit code 3. None = never."""
    recent_drops: list[Drop] = []
    """Newest groups that were dropped since this process started, newest last, at most 20."""
    paused: bool = False
    """An operator has paused acquisition."""


class ConfigReply(Message, kw_only=True):
    """The resolved experiment, for an instance that joins with nothing but an address."""

    config: dict[str, Any]
    """Plug-in modules are left out: only a process's own configuration may import code."""


class SaveBuffer(Message, kw_only=True):
    """Checkpoint of Dataflow's own state (the ledger is always durable)."""


class SaveBufferReply(Message, kw_only=True):
    path: str
    """Where it was written."""


class SetAcquisition(Message, kw_only=True):
    """An operator → Dataflow. Not durable: a restarted Dataflow acquires again."""

    paused: bool
    """True: no new leases are submitted; what runs is collected and trained on. False: goes on."""


class SaveCheckpoint(Message, kw_only=True):
    """An operator → Dataflow, which hands it on with the trainer's next batch reply. Done when `checkpoint_version` in /status has come."""

    model_id: str = ""
    """The policy whose trainer is meant; empty = all."""


class SaveCheckpointReply(Message, kw_only=True):
    versions: dict[str, int]
    """Per policy, the oldest version that the checkpoint may be of; a policy whose newest version is on disk already is left out."""


class RunEval(Message, kw_only=True):
    """An operator → Dataflow: evaluate the versions of this moment. Asked again at the same versions it is the same evaluation."""


class RunEvalReply(Message, kw_only=True):
    eval_id: str
    """Names the evaluation; empty = the experiment has no validation set, or too many wait."""


class Shutdown(Message, kw_only=True):
    """To Dataflow: one trainer is done (model_id set) or the whole run ends (empty). To RaaS and sender: end gracefully."""

    model_id: Name = ""
    """The trainer that is done; empty = everything ends."""
    reason: str = ""
    """One line for people."""
    deadline_s: float = 10.0
    """Longest time that the end may take."""
    wait_s: float = 0.0
    """To Dataflow, from a trainer that is done: how long to wait for the end of the run before answering, at most 30."""


class ShutdownReply(Message, kw_only=True):
    """Dataflow's answer. A trainer that is done keeps its sender until the run has ended: rollout services that join later need its
    weights."""

    run_ended: bool = False
    """Nobody needs the trainer's weights any more."""
    waits_for: list[str] = []
    """Models that are still trained."""
