"""The sections that no room owns: the run itself and how it is started."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from astraflow.lib.tls import PLAIN, Tls

Seconds = Annotated[float, Meta(gt=0)]
Port = Annotated[int, Meta(ge=0, le=65535)]


class RunConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The run as a whole."""

    name: str
    """Name of the run and of its directory; letters, digits, `.`, `_` and `-`."""
    seed: int = 0
    """The one seed: order of tasks, samples, training. Every process gets it."""
    run_dir: str = ""
    """Where everything of this run is written; empty = `runs/<name>`."""
    trace: bool = False
    """Every process writes when it did what to `<run_dir>/trace/`, for `astraflow trace`: some 5 lines per trajectory and 10 per step."""
    run_id: str = ""
    """Stamped on every message, so that processes of another run are refused; empty = made by `astraflow run`, else the name."""


class RestartConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the supervisor does when a process dies."""

    limit: Annotated[int, Meta(ge=0)] = 5
    """Restarts of one process within `window_s`; one more failure ends the run."""
    window_s: Seconds = 600.0
    """Older restarts are forgotten, so that a long run survives rare faults."""
    first_s: Seconds = 0.5
    """Pause before the first restart; doubled each time."""
    max_s: Seconds = 15.0
    """Longest pause."""


class LaunchConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which processes run where, and how long they may take to end."""

    raas: Annotated[int, Meta(ge=0)] = 1
    """Rollout services started by `astraflow run`; 0 = others will join."""
    trainers: bool = True
    """`astraflow run` starts a trainer for every policy; false = they are started elsewhere, by whatever speaks the routes, and the run
    ends when Dataflow does: after the last one's /shutdown."""
    host: str = "127.0.0.1"
    """Address that services bind to. Off loopback every call needs the token of `<run_dir>/token`."""
    dataflow_port: Port = 0
    """Port of Dataflow; 0 = a free one, chosen once by `astraflow run` and kept over restarts."""
    region: str = ""
    """Where the processes started with this configuration run, shown beside rollout services and trainers; set it per machine."""
    token_file: str = ""
    """File with the cluster token; empty = `<run_dir>/token`, made when needed."""
    tls: Tls = PLAIN
    """Certificates; with them every service and every weight stream of the run speaks TLS."""
    restart: RestartConfig = msgspec.field(default_factory=RestartConfig)
    """Back-off and limit."""
    drain_s: Seconds = 180.0
    """After Ctrl-C: time for trainers to finish their step and save."""
    end_s: Seconds = 30.0
    """After the last trainer: time for the others to end by themselves before they are terminated."""
    term_s: Seconds = 10.0
    """After a terminate signal: time until a process is killed."""
    poll_s: Seconds = 0.5
    """Pause between looks at Dataflow's `/status` (panel and report)."""
