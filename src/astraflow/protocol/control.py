"""Everything else that is said: registration, readiness, versions, status, evaluation, the end."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from astraflow.protocol.batch import WaitEdge
from astraflow.protocol.message import Message
from astraflow.protocol.rollout import Serving

State = Literal["starting", "ready", "idle", "draining", "error"]


# --- RaaS ---------------------------------------------------------------------------------------------------------------


class Availability(Message, kw_only=True):
    """Slots in trajectories."""

    total_slots: int
    free_slots: int
    in_flight: int
    outbox: int
    """Groups that wait to be pulled."""


class EngineStatus(msgspec.Struct, kw_only=True):
    kind: str
    """Registered engine name."""
    state: Literal["starting", "ready", "loading", "restarting", "error"]
    message: str = ""
    restarts: int = 0
    running: int = 0
    """Requests that the engine decodes now."""
    queued: int = 0
    pid: int = 0


class RaaSStatus(Message, kw_only=True):
    instance_id: str
    state: State
    message: str = ""
    availability: Availability
    models: list[str]
    """Policies that this instance can serve."""
    serving: dict[str, Serving]
    engines: dict[str, EngineStatus]
    workflows: list[str]
    """Registered workflow ids."""
    tokenizer_hash: dict[str, str] = {}
    """Per model."""
    template_hash: dict[str, str] = {}
    lanes: list[str] = []
    """Open evaluation lanes."""
    metrics: dict[str, float] = {}


# --- Dataflow: pool -----------------------------------------------------------------------------------------------------


class RegisterRaaS(Message, kw_only=True):
    """RaaS → Dataflow. The same instance_id from a new incarnation replaces the old process."""

    instance_id: str
    url: str
    models: list[str]
    total_slots: int
    weight: float = 1.0
    """Routing weight: expected speed relative to the others."""
    tokenizer_hash: dict[str, str] = {}
    template_hash: dict[str, str] = {}


class RegisterRaaSReply(Message, kw_only=True):
    instance_id: str
    pool_size: int


class DeregisterRaaS(Message, kw_only=True):
    instance_id: str
    drain: bool = True
    """Finish what runs, then leave; otherwise its leases are issued again at once."""
    shutdown: bool = False
    """Ask the instance to end afterwards."""


class InstanceInfo(msgspec.Struct, kw_only=True):
    instance_id: str
    url: str
    incarnation: str
    state: Literal["catching_up", "live", "suspect", "draining", "gone"]
    total_slots: int
    free_slots: int
    in_flight: int
    """Trajectories leased to it."""
    failures: int
    """Consecutive failed heartbeats."""
    last_seen_s: float
    """Seconds since its last good answer."""
    models: list[str]
    serving: dict[str, Serving]
    reason: str = ""


class RaaSPool(Message, kw_only=True):
    instances: list[InstanceInfo]


# --- Dataflow: trainers -------------------------------------------------------------------------------------------------


class Ready(Message, kw_only=True):
    """Trainer → Dataflow, after it published its first weights."""

    model_id: str
    train_batch_size: int
    """Trajectories per batch."""
    sender_endpoint: str
    """http address of its sender agent; empty = a trainer that serves no weights."""
    version: int = 0
    """Version that is published now (0, or recovered_version)."""
    digest: str = ""
    """Digest of the published bytes; empty = unverified."""
    recovered_version: int | None = None
    """Set after a resume from a checkpoint."""
    checkpoint_version: int = -1
    """Newest durable checkpoint; −1 = none."""
    tokenizer_hash: str = ""
    template_hash: str = ""


class ReadyReply(Message, kw_only=True):
    timeline: int
    """Stamp of every later call; bumped when recovered_version is lower than what was served."""
    version: int
    """Version that Dataflow takes for this trainer now."""
    eval_at_start: bool = False
    """An evaluation of this version was begun."""


class NotifyVersion(Message, kw_only=True):
    """Trainer → Dataflow: `version` is published. Commits the batch named version − 1. Returns at once."""

    model_id: str
    timeline: int
    version: int
    digest: str = ""
    checkpoint_version: int = -1
    run_eval: bool = False
    sender_endpoint: str = ""
    """Given again when the sender came back at another address; empty = unchanged."""
    metrics: dict[str, float] = {}
    """The step's training metrics, for status and report."""


class NotifyVersionReply(Message, kw_only=True):
    service_version: int
    """Minimum over live registered models."""
    trained: int
    """Rows (trajectory, policy) that this notice made `trained`; 0 for a duplicate."""
    eval_id: str = ""


class EvalResultsRequest(Message, kw_only=True):
    since: int = 0
    """Index of the first result wanted."""
    wait_s: float = 0.0


class EvalResult(msgspec.Struct, kw_only=True):
    """One data set, one set of versions."""

    eval_id: str
    dataset: str
    versions: dict[str, Serving]
    n_tasks: int
    n_samples: int
    """Configured samples per task."""
    missing: int
    """Samples without a result; counted as wrong."""
    metrics: dict[str, float | None]
    """`avg@n`, `pass@k` (null if n < k), `reward/mean`."""
    duration_s: float


class EvalResults(Message, kw_only=True):
    results: list[EvalResult]
    next: int
    """`since` of the next request."""
    running: list[str]
    """Evaluations not finished yet."""


class TrainerInfo(msgspec.Struct, kw_only=True):
    model_id: str
    timeline: int
    version: int
    digest: str
    checkpoint_version: int
    state: Literal["expected", "live", "late", "dead", "done"]
    last_seen_s: float
    sender_endpoint: str = ""
    tokenizer_hash: str = ""


class QueueInfo(msgspec.Struct, kw_only=True):
    fresh_groups: int
    fresh_trajectories: int
    replay_groups: int
    held_groups: int
    """Groups that wait for the receipt of their version."""
    served: int
    """Rows in batches that are served but not committed."""


class LedgerCounts(msgspec.Struct, kw_only=True):
    """Rows (trajectory, policy). made = trained + dropped + in flight, always."""

    made: int
    trained: int
    dropped: dict[str, int]
    in_flight: dict[str, int]
    """leased, rolled, buffered, served."""
    replayed: int = 0
    """Extra uses of trained rows; outside the sum."""


class DataflowStatus(Message, kw_only=True):
    state: State
    message: str = ""
    uptime_s: float
    service_version: int
    started: bool
    """Acquisition is running (at least one RaaS and every expected trainer are ready)."""
    trainers: list[TrainerInfo]
    instances: list[InstanceInfo]
    queues: dict[str, QueueInfo]
    ledger: LedgerCounts
    waits: list[WaitEdge]
    rates: dict[str, float] = {}
    """`trajectories_per_s`, `tokens_per_s`, means of the last minute."""
    metrics: dict[str, float] = {}
    tasks_drawn: int = 0
    epoch: int = 0
    staleness: dict[str, dict[int, int]] = {}
    """Per model: gap → trained trajectories."""
    steps: dict[str, dict[str, float]] = {}
    """Per model: metrics of its last notice."""
    events: list[str] = []
    """What happened to processes (joins, deaths, rollbacks, resumes), newest last, at most 200."""


class ConfigReply(Message, kw_only=True):
    """The resolved experiment, for an instance that joins with nothing but an address."""

    config: dict[str, Any]
    """Plug-in modules are left out: only a process's own configuration may import code."""


class SaveBuffer(Message, kw_only=True):
    """Checkpoint of Dataflow's own state (the ledger is always durable)."""


class SaveBufferReply(Message, kw_only=True):
    path: str


class Shutdown(Message, kw_only=True):
    """To Dataflow: one trainer is done (model_id set) or the whole run ends (empty). To RaaS and sender: end gracefully."""

    model_id: str = ""
    reason: str = ""
    deadline_s: float = 10.0
