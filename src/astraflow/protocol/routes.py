"""The API: every call between processes. Server and client derive from these tables, and so does the docs page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from astraflow.protocol import batch, control, rollout, weights
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


class DataflowAPI:
    """Served by Dataflow."""

    status = Route("GET", "/status", Empty, control.DataflowStatus, "Everything that goes on, and who waits for whom.")
    config = Route("GET", "/config", Empty, control.ConfigReply, "The resolved experiment, for an instance that joins.")
    register_raas = Route("POST", "/register_raas", control.RegisterRaaS, control.RegisterRaaSReply, "A rollout service joins.")
    deregister_raas = Route("POST", "/deregister_raas", control.DeregisterRaaS, Empty, "A rollout service leaves.")
    raas_pool = Route("GET", "/raas_pool", Empty, control.RaaSPool, "The instances and their state.")
    ready = Route("POST", "/ready", control.Ready, control.ReadyReply, "A trainer attaches.")
    batch = Route("GET", "/batch", batch.BatchRequest, batch.BatchReply, "The batch of this name, or why there is none.")
    notify_version = Route("POST", "/notify_version", control.NotifyVersion, control.NotifyVersionReply, "A version is published.")
    eval_results = Route("GET", "/eval_results", control.EvalResultsRequest, control.EvalResults, "Finished evaluations.")
    save_buffer = Route("POST", "/save_buffer", control.SaveBuffer, control.SaveBufferReply, "Checkpoint of Dataflow's state.")
    shutdown = Route("POST", "/shutdown", control.Shutdown, control.ShutdownReply, "A trainer is done, or the run ends.")


class RaaSAPI:
    """Served by a rollout service."""

    status = Route("GET", "/status", Empty, control.RaaSStatus, "State, slots, what is served; never does I/O.")
    availability = Route("GET", "/availability", Empty, control.Availability, "Free and used slots.")
    register_workflow = Route("POST", "/register_workflow", rollout.RegisterWorkflow, rollout.RegisterWorkflowReply, "Name a workflow.")
    submit = Route("POST", "/submit", rollout.Submit, rollout.SubmitReply, "Leases in, a verdict per lease out.")
    pull = Route("POST", "/pull", rollout.Pull, rollout.PullReply, "Results out, acknowledgements in.")
    leases = Route("GET", "/leases", Empty, rollout.Leases, "What is held, for reconciliation.")
    cancel = Route("POST", "/cancel", rollout.CancelLeases, Empty, "Stop leases and forget their results.")
    notify_version = Route("POST", "/notify_version", weights.NotifyRaaS, weights.NotifyRaaSReply, "Pull and load a version.")
    reset_training_engine = Route(
        "POST", "/reset_training_engine", rollout.ResetEngine, rollout.ResetEngineReply, "Cancel training rollouts."
    )
    eval_start = Route("POST", "/eval_start", rollout.EvalStart, Empty, "Open a pinned evaluation lane.")
    eval_submit = Route("POST", "/eval_submit", rollout.Submit, rollout.SubmitReply, "Leases of a lane.")
    eval_pull = Route("POST", "/eval_pull", rollout.Pull, rollout.PullReply, "Results of a lane.")
    eval_end = Route("POST", "/eval_end", rollout.EvalEnd, Empty, "Close a lane; loads that were put off go on.")
    media = Route("GET", "/media/{ref}", Empty, Empty, "Original media bytes by sha256.", raw_reply=True)
    record = Route("GET", "/record/{ref}", Empty, Empty, "A trajectory's turns as JSON.", raw_reply=True)
    shutdown = Route("POST", "/shutdown", control.Shutdown, Empty, "Graceful end.")


class SenderAPI:
    """Served by the trainer's sender agent."""

    get_version = Route("GET", "/get_version", Empty, weights.SenderVersion, "Newest published version.")
    get_buffer_info = Route("GET", "/get_buffer_info", Empty, weights.BufferInfo, "Layout and versions that can be pulled.")
    get_capabilities = Route("GET", "/get_capabilities", Empty, weights.Capabilities, "Modes and codecs.")
    register_receiver = Route(
        "POST", "/register_receiver", weights.RegisterReceiver, weights.RegisterReceiverReply, "First call of a receiver."
    )
    register_sglang_instance = Route(
        "POST", "/register_sglang_instance", weights.RegisterReceiver, weights.RegisterReceiverReply, "Alias of register_receiver."
    )
    request_transfer = Route(
        "POST", "/request_transfer", weights.TransferRequest, weights.TransferTicket, "A ticket for one exact version."
    )
    transfer_done = Route("POST", "/transfer_done", weights.TransferDone, Empty, "The receiver's verdict; releases the half.")
    shutdown = Route("POST", "/shutdown", control.Shutdown, Empty, "Graceful end.")


def table(api: type) -> dict[str, Route[Any, Any]]:
    """Name → route of one service, in the order in which they are written."""
    return {name: value for name, value in vars(api).items() if isinstance(value, Route)}


SERVICES: dict[str, type] = {"dataflow": DataflowAPI, "raas": RaaSAPI, "sender": SenderAPI}
