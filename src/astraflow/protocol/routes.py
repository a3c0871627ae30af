"""The API: every call between processes. Server and client derive from these tables, and so does the docs page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from astraflow.protocol import batch, control, rollout, weights
from astraflow.protocol.errors import (
    AstraFlowError,
    AuthError,
    BadMessage,
    ConfigError,
    Conflict,
    LayoutMismatch,
    RemoteError,
    Replaced,
    TooLarge,
    Unavailable,
    UnknownName,
    WrongProtocol,
    WrongRun,
)
from astraflow.protocol.message import Empty, Message

Q = TypeVar("Q", bound=Message)
P = TypeVar("P", bound=Message)


@dataclass(frozen=True)
class Route(Generic[Q, P]):
    """One call. GET requests travel as query parameters, POST requests as a body; replies are bodies.

    Bodies are msgpack (`application/msgpack`) or JSON (`application/json`): the request's Content-Type names its own format,
    its Accept header that of the reply (without one: the request's format for POST, JSON for GET). Our clients speak msgpack.
    Errors: HTTP status of the class in `errors.py` and an `ErrorReply` body. The token travels as `Authorization: Bearer …`.
    """

    method: Literal["GET", "POST"]
    """HTTP method."""
    path: str
    """`{ref}` is the only path parameter."""
    request: type[Q]
    """Type of the request."""
    reply: type[P]
    """Type of the reply."""
    doc: str
    """One line for the reference page."""
    raw_reply: bool = False
    """The reply body is raw bytes instead of a message (media, records)."""
    again: str = "changes nothing"
    """What the same call does a second time: any reply may be lost, so every call is safe to repeat."""
    max_body_bytes: int = 2**20
    """Of a request; a longer one is refused with TooLarge."""
    errors: tuple[type[AstraFlowError], ...] = ()
    """Refusals of this call beside those of every one (`EVERY`)."""


TASKS_BYTES = 256 * 2**20
"""Tasks may carry images."""
IDS_BYTES = 16 * 2**20
EVERY: tuple[type[AstraFlowError], ...] = (AuthError, BadMessage, WrongRun, WrongProtocol, TooLarge, Unavailable, RemoteError)
"""Errors that any call may meet."""
PLACE: tuple[type[AstraFlowError], ...] = (Conflict, Replaced)
"""Of a trainer's calls: it is not attached, or another process is in its place."""


class DataflowAPI:
    """Served by Dataflow."""

    status = Route("GET", "/status", Empty, control.DataflowStatus, "Everything that goes on, and who waits for whom.")
    config = Route("GET", "/config", Empty, control.ConfigReply, "The resolved experiment, for an instance that joins.")
    register_raas = Route(
        "POST", "/register_raas", control.RegisterRaaS, control.RegisterRaaSReply, "A rollout service joins.",
        again="changes nothing; from a new process it replaces the old one",
        errors=(ConfigError,),
    )
    deregister_raas = Route("POST", "/deregister_raas", control.DeregisterRaaS, Empty, "A rollout service leaves.")
    raas_pool = Route("GET", "/raas_pool", Empty, control.RaaSPool, "The instances and their state.")
    ready = Route(
        "POST", "/ready", control.Ready, control.ReadyReply, "A trainer attaches.",
        again="changes nothing; at another version it attaches again",
        errors=(*PLACE, ConfigError),
    )
    batch = Route(
        "GET", "/batch", batch.BatchRequest, batch.BatchReply, "The batch of this name, or why there is none.",
        again="the same bytes",
        errors=PLACE,
    )
    notify_version = Route(
        "POST", "/notify_version", control.NotifyVersion, control.NotifyVersionReply, "A version is published.",
        again="a duplicate: `trained` is 0",
        errors=PLACE,
    )
    eval_results = Route("GET", "/eval_results", control.EvalResultsRequest, control.EvalResults, "Finished evaluations.")
    save_buffer = Route(
        "POST", "/save_buffer", control.SaveBuffer, control.SaveBufferReply, "Checkpoint of Dataflow's state.", again="writes again"
    )
    acquisition = Route(
        "POST", "/acquisition", control.SetAcquisition, Empty, "Pause the submission of new work, or go on.", again="changes nothing"
    )
    checkpoint = Route(
        "POST", "/checkpoint", control.SaveCheckpoint, control.SaveCheckpointReply, "Ask trainers for a checkpoint now.",
        errors=(Conflict,),
    )
    run_eval = Route(
        "POST", "/run_eval", control.RunEval, control.RunEvalReply, "Evaluate what is served now.",
        again="the same evaluation, while the versions are the same",
        errors=(Conflict,),
    )
    shutdown = Route(
        "POST", "/shutdown", control.Shutdown, control.ShutdownReply, "A trainer is done, or the run ends.",
        again="says again whether the run has ended",
        errors=PLACE,
    )


class RaaSAPI:
    """Served by a rollout service."""

    status = Route("GET", "/status", Empty, control.RaaSStatus, "State, slots, what is served; never does I/O.")
    availability = Route("GET", "/availability", Empty, control.Availability, "Free and used slots.")
    register_workflow = Route(
        "POST", "/register_workflow", rollout.RegisterWorkflow, rollout.RegisterWorkflowReply, "Name a workflow.",
        again="replaces the spec of this id",
        errors=(UnknownName, ConfigError),
    )
    submit = Route(
        "POST", "/submit", rollout.Submit, rollout.SubmitReply, "Leases in, a verdict per lease out.",
        again="verdict `duplicate`: it runs once", max_body_bytes=TASKS_BYTES,
        errors=(Conflict,),
    )
    pull = Route(
        "POST", "/pull", rollout.Pull, rollout.PullReply, "Results out, acknowledgements in.",
        again="the same deliveries, until they are acknowledged",
        errors=(Conflict,),
    )
    leases = Route("GET", "/leases", Empty, rollout.Leases, "What is held, for reconciliation.")
    cancel = Route(
        "POST", "/cancel", rollout.CancelLeases, Empty, "Stop leases and forget their results.", max_body_bytes=IDS_BYTES
    )
    notify_version = Route(
        "POST", "/notify_version", weights.NotifyRaaS, weights.NotifyRaaSReply, "Pull and load a version.",
        again="`current`, or goes on with the load",
        errors=(UnknownName,),
    )
    reset_training_engine = Route(
        "POST", "/reset_training_engine", rollout.ResetEngine, rollout.ResetEngineReply, "Cancel training rollouts.",
        again="cancels what runs by then",
    )
    eval_start = Route("POST", "/eval_start", rollout.EvalStart, Empty, "Open a pinned evaluation lane.", errors=(Conflict, UnknownName))
    eval_submit = Route(
        "POST", "/eval_submit", rollout.Submit, rollout.SubmitReply, "Leases of a lane.",
        again="verdict `duplicate`: it runs once", max_body_bytes=TASKS_BYTES,
        errors=(Conflict,),
    )
    eval_pull = Route(
        "POST", "/eval_pull", rollout.Pull, rollout.PullReply, "Results of a lane.",
        again="the same deliveries, until they are acknowledged",
        errors=(Conflict,),
    )
    eval_end = Route("POST", "/eval_end", rollout.EvalEnd, Empty, "Close a lane; loads that were put off go on.")
    media = Route("GET", "/media/{ref}", Empty, Empty, "Original media bytes by sha256.", raw_reply=True, errors=(UnknownName,))
    record = Route("GET", "/record/{ref}", Empty, Empty, "A trajectory's turns as JSON.", raw_reply=True, errors=(UnknownName,))
    shutdown = Route("POST", "/shutdown", control.Shutdown, Empty, "Graceful end.")


class SenderAPI:
    """Served by the trainer's sender agent."""

    get_version = Route("GET", "/get_version", Empty, weights.SenderVersion, "Newest published version.")
    get_buffer_info = Route("GET", "/get_buffer_info", Empty, weights.BufferInfo, "Layout and versions that can be pulled.")
    get_capabilities = Route("GET", "/get_capabilities", Empty, weights.Capabilities, "Modes and codecs.")
    register_receiver = Route(
        "POST", "/register_receiver", weights.RegisterReceiver, weights.RegisterReceiverReply, "First call of a receiver.",
        errors=(LayoutMismatch,),
    )
    register_sglang_instance = Route(
        "POST", "/register_sglang_instance", weights.RegisterReceiver, weights.RegisterReceiverReply, "Alias of register_receiver.",
        errors=(LayoutMismatch,),
    )
    request_transfer = Route(
        "POST", "/request_transfer", weights.TransferRequest, weights.TransferTicket, "A ticket for one exact version.",
        again="a ticket of its own, for the same bytes",
        errors=(Conflict,),
    )
    transfer_done = Route("POST", "/transfer_done", weights.TransferDone, Empty, "The receiver's verdict; releases the half.")
    shutdown = Route("POST", "/shutdown", control.Shutdown, Empty, "Graceful end.")


def table(api: type) -> dict[str, Route[Any, Any]]:
    """Name → route of one service, in the order in which they are written."""
    return {name: value for name, value in vars(api).items() if isinstance(value, Route)}


SERVICES: dict[str, type] = {"dataflow": DataflowAPI, "raas": RaaSAPI, "sender": SenderAPI}
