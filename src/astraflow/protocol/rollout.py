"""Work and its result: lease → group → trajectories → segments, and the calls between Dataflow and RaaS that move them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from astraflow.protocol.codec import Column
from astraflow.protocol.message import Message, Name, Whole

Boundary = Literal["prompt", "engine", "tool", "reward", "environment", "workflow", "cancelled"]
Finish = Literal["stop", "length", "error", "rejected"]
Ids = Annotated[list[Name], Meta(max_length=65536)]
"""Of leases or deliveries; more than any instance holds."""


class RolloutError(msgspec.Struct, kw_only=True):
    """Why a trajectory has no usable result; data, not an exception."""

    boundary: Boundary
    """The boundary at which it failed; `prompt` = the prompt itself is unusable (too long, no template)."""
    kind: str
    """Short stable word for counting: `timeout`, `crash`, `overlong`, `exception`, `unscored` …"""
    message: str = ""
    """One line for people; at most 500 characters are kept."""


class Segment(msgspec.Struct, kw_only=True):
    """One context of one or more model calls: a token sequence of length T."""

    policies: list[str]
    """Policies that sampled tokens here; one for nearly every segment."""
    policy_of_token: Column | None = None
    """uint8 [T], index into `policies`; None = every sampled token belongs to policies[0]."""
    parent: int | None = None
    """Index (in the trajectory) of the segment this one was split or spawned from."""
    input_ids: Column
    """int32 [T], prompt and everything after it."""
    loss_mask: Column
    """uint8 [T], 1 exactly on tokens that a policy sampled, its end token included."""
    logprobs: Column
    """float32 [T], behaviour log-prob of the token at its own position (numerics 2); 0 where loss_mask is 0."""
    versions: Column
    """int32 [T], weight version that sampled the token; −1 where loss_mask is 0."""
    temperature: float = 1.0
    """Sampling temperature of every sampled token here."""
    credit: dict[str, float | None] = {}
    """Reward of this segment per policy; a policy without an entry gets the trajectory's reward; None = unscored for it."""
    extra: dict[str, Column] = {}
    """Per-token columns of later features (teacher log-probs, values, expert routes); first axis T."""
    media: list[str] = []
    """sha256 of images and other media in prompt order; bytes by `GET /media/{sha256}`."""


class Trajectory(msgspec.Struct, kw_only=True):
    """One episode of a task."""

    index: int
    """Position in the group, 0 … n−1."""
    segments: list[Segment] = []
    """Empty only when `error` is set or `finish` is `rejected`."""
    reward: float | None = None
    """What the user sees; None = unscored: outside statistics, loss and denominators, counted."""
    error: RolloutError | None = None
    """Set when the episode failed."""
    finish: Finish = "stop"
    """`length` = the engine ran into the limit of new tokens (numerics 11); `rejected` = the workflow returned None."""
    record_ref: str = ""
    """Key of the human-readable record (turns, tool calls); `GET /record/{ref}`."""


class VersionSpan(msgspec.Struct, kw_only=True):
    """Versions that one policy used in a group."""

    timeline: int
    """The oldest timeline that any token belongs to."""
    min: int
    """Smallest version over the policy's own sampled tokens (version 0 counts)."""
    max: int
    """Largest one."""


class Group(msgspec.Struct, kw_only=True):
    """The n trajectories of one lease, returned as one result."""

    lease_id: str
    """The lease it belongs to."""
    attempt: int
    """Attempt of the lease that produced it."""
    task_id: str
    """Data set + content hash."""
    versions: dict[str, VersionSpan]
    """Per policy that sampled at least one token."""
    trajectories: list[Trajectory]
    """Exactly the lease's n_samples, ordered by index; failed members carry `error`."""
    metrics: dict[str, float] = {}
    """Numbers of the rollout service and workflow, averaged per group (`raas/…`, `rollout/…`)."""


class WorkflowSpec(msgspec.Struct, kw_only=True):
    """What to run for a lease: names of the RaaS's registry only, never code."""

    workflow: Name
    """Registered workflow name."""
    reward: Name = ""
    """Registered reward name; empty = the workflow scores by itself."""
    options: dict[str, Any] = {}
    """Options of the workflow."""
    generation: dict[str, Any] = {}
    """Overrides of the RaaS's generation settings (temperature, max_new_tokens, stop …)."""
    policies: Annotated[list[Name], Meta(max_length=256)] = msgspec.field(default_factory=lambda: ["default"])
    """Policies that the workflow samples from, in the order that its roles name them."""


class Lease(msgspec.Struct, kw_only=True):
    """One task handed to one instance."""

    lease_id: Name
    """Unique in the run, across resume."""
    attempt: Whole = 1
    """Grows when the lease is issued again after an instance died."""
    task_id: Name
    """Data set + content hash."""
    workflow_id: Name
    """Hash of the `WorkflowSpec`, registered before by `/register_workflow`."""
    n_samples: Whole
    """Group size."""
    data: dict[str, Any]
    """The task's fields: `prompt` or `messages`, `answer`, whatever the workflow and reward read."""
    seed: Whole = 0
    """Base of the per-sample seeds."""
    max_prompt_tokens: Whole | None = None
    """Longer prompts are refused by RaaS (it owns the tokenizer) and counted; None = the model's context."""
    deadline_s: float = 600.0
    """The episode is cancelled after this time; a duration, never a wall clock."""


class Serving(msgspec.Struct, kw_only=True):
    """Receipt: the weights that an instance really serves for one model."""

    timeline: Whole
    """Life of the policy's history (contracts: Words)."""
    version: Whole
    """Publishes after the first; the first is version 0."""
    digest: Name
    """Digest of the loaded bytes, empty for a foreign peer without digests (shown as unverified)."""


class RegisterWorkflow(Message, kw_only=True):
    """Dataflow → RaaS."""

    workflow_id: Name
    """Hash of the spec."""
    spec: WorkflowSpec
    """Registry names and options."""


class RegisterWorkflowReply(Message, kw_only=True):
    workflow_id: str
    """Hash of the spec."""
    total_workflows: int
    """How many are registered now."""


class Submit(Message, kw_only=True):
    """Dataflow → RaaS: leases to run. The same lease (id and attempt) twice runs once."""

    leases: Annotated[list[Lease], Meta(max_length=65536)]
    """Whole groups."""
    lane: Name = ""
    """Evaluation lane; empty = training."""


class LeaseVerdict(msgspec.Struct, kw_only=True):
    lease_id: str
    """The lease it belongs to."""
    verdict: Literal["accepted", "duplicate", "over_capacity", "refused"]
    """What became of it."""
    reason: str = ""
    """Why it was refused (unknown workflow, not serving, draining)."""


class SubmitReply(Message, kw_only=True):
    verdicts: list[LeaseVerdict]
    """One per lease, in order."""
    free_slots: int
    """Trajectories that the instance can still take."""
    serving: dict[str, Serving]
    """Receipts per model."""


class Pull(Message, kw_only=True):
    """Dataflow → RaaS: long-poll for results and acknowledge earlier ones."""

    ack: Ids = []
    """Deliveries that are durable at Dataflow; only now the RaaS may forget them."""
    max_items: Whole = 64
    """Most deliveries in one reply."""
    wait_s: float = 0.0
    """How long to wait for the first result, at most 30."""
    lane: Name = ""
    """Evaluation lane; empty = training."""


class Delivery(msgspec.Struct, kw_only=True):
    """A result in the outbox; delivered again under the same id until acknowledged."""

    delivery_id: str
    """Stable until acknowledged."""
    lease_id: str
    """The lease it belongs to."""
    attempt: int
    """Attempt of that lease."""
    group: msgspec.Raw
    """An encoded `Group`; Dataflow stores these bytes as they are."""


class PullReply(Message, kw_only=True):
    deliveries: list[Delivery]
    """Unacknowledged results, oldest first."""
    free_slots: int
    """Trajectories that can still be taken."""
    in_flight: int
    """Trajectories that are running."""
    waiting: int
    """Further deliveries in the outbox."""
    serving: dict[str, Serving]
    """Receipts per model."""


class HeldLease(msgspec.Struct, kw_only=True):
    lease_id: str
    """The lease it belongs to."""
    attempt: int
    """Attempt of that lease."""
    state: Literal["running", "done"]
    """`done` = its result waits in the outbox."""
    lane: str = ""
    """Evaluation lane; empty = training."""


class Leases(Message, kw_only=True):
    """What an instance holds, for reconciliation after a Dataflow restart."""

    held: list[HeldLease]
    """Running and finished, not yet acknowledged."""


class CancelLeases(Message, kw_only=True):
    """Dataflow → RaaS: stop these leases and forget their results (superseded attempts, drains)."""

    lease_ids: Ids
    """Leases to stop."""


class ResetEngine(Message, kw_only=True):
    """Cancel training rollouts before a synchronous evaluation."""

    deadline_s: float = 5.0
    """Longest time that the end may take."""


class ResetEngineReply(Message, kw_only=True):
    cancelled: list[str]
    """Lease ids that were cancelled; Dataflow requeues them."""


class EvalStart(Message, kw_only=True):
    """Open an evaluation lane pinned to one set of versions: loads of newer weights wait until it ends."""

    lane: Name
    """Its name, chosen by Dataflow."""
    versions: Annotated[dict[Name, Serving], Meta(max_length=256)]
    """What must be served for the lane to open; refused (Conflict) otherwise."""
    deadline_s: float = 300.0
    """The lane closes by itself after this time."""


class EvalEnd(Message, kw_only=True):
    lane: Name
    """The lane to close."""
