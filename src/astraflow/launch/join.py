"""Coming to a running job from outside: as a further rollout service, or just to look."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from astraflow.config.check import typed
from astraflow.config.experiment import Experiment, Resolved, load_experiment, resolve
from astraflow.config.load import Layers, parse_scalar, put, split_override
from astraflow.config.processes import dataflow_url, drop_own_code, given_token, raas_process
from astraflow.launch.names import check_names
from astraflow.launch.rundir import CONFIG
from astraflow.lib.auth import read_token
from astraflow.lib.tls import PLAIN, Tls, check_files
from astraflow.lib.wire import Identity, new_identity
from astraflow.lib.wire_client import SyncClient
from astraflow.protocol.control import DataflowStatus
from astraflow.protocol.errors import AuthError, BadMessage, ConfigError, RemoteError, Retryable, Unavailable, UserError
from astraflow.protocol.message import Message
from astraflow.protocol.routes import DataflowAPI, Route
from astraflow.raas.config import RaaSProcess

P = TypeVar("P", bound=Message)

CALL_S = 10.0


def join_process(
    url: str,
    *,
    name: str = "",
    host: str = "127.0.0.1",
    token_file: str = "",
    tls: Tls = PLAIN,
    plugins: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> RaaSProcess:
    """A further rollout service for the job at `url`, configured by what Dataflow answers and this side's own overrides.

    Only `plugins` given here are imported: nothing that came over the wire names code.
    Raises what `ask` raises when Dataflow does not answer or does not let us in.
    """
    token = given_token(token_file)
    if url.startswith("https:") and not tls.cert:
        raise ConfigError(f"--join {url}: this job speaks TLS, so its rollout services must; give --tls-cert and --tls-key")
    check_files(tls)
    reply = ask(DataflowAPI.config, url, new_identity("", token, tls), f"--join {url}")
    resolved = from_wire(reply.config, [*overrides, f"plugins={list(plugins)}"])
    check_names(resolved)
    process = raas_process(resolved, 0, token, url=url)
    process.run_id = reply.run_id or process.run_id
    process.instance_id = name or f"raas-{secrets.token_hex(3)}"
    process.host, process.tls = host, tls
    return process


def from_wire(config: dict[str, Any], overrides: Sequence[str] = ()) -> Resolved:
    """A resolved experiment from Dataflow's answer, for a rollout service on this machine.

    Models must be here too; the files that only the job's own side reads (data sets, its token) need not be.
    """
    layers = Layers(copy.deepcopy(config))
    _without_code(layers.values, overrides)
    for section in (layers.values.get("train_dataset"), *(layers.values.get("valid_datasets") or {}).values()):
        if isinstance(section, dict):
            section["path"] = ""
    if isinstance(layers.values.get("launch"), dict):
        layers.values["launch"] |= {"token_file": "", "tls": {}}
    for override in overrides:
        path, text = split_override(override)
        put(layers.values, path, parse_scalar(text, path))
        layers.origins[path], layers.overridden_text[path] = "override", text
    return resolve(typed(layers, Experiment), layers)


def _without_code(config: dict[str, Any], overrides: Sequence[str]) -> None:
    """Whoever answered: what came over the wire names neither code nor programs for this machine. Raises ConfigError for an engine
    that is code, unless an override names this side's own."""
    drop_own_code(config)
    raas = config.get("raas")
    if not isinstance(raas, dict):
        return
    engines = raas.get("engines")
    named = {"raas.engine": raas.get("engine"), **{f"raas.engines.{k}": v for k, v in (engines or {}).items()}}
    given = {split_override(override)[0] for override in overrides}
    for path, engine in named.items():
        kind = engine.get("kind") if isinstance(engine, dict) else None
        if isinstance(kind, str) and ":" in kind and not {path, f"{path}.kind"} & given:
            raise ConfigError(f"{path}.kind: the job says {kind!r}, which is code; give --set {path}.kind=… to name your own")


def dataflow_status(target: str, token_file: str = "", ca: str = "") -> DataflowStatus:
    """The status of the job at a URL, or of the run in a directory on this machine."""
    url, identity = _address(target, token_file, ca)
    return ask(DataflowAPI.status, url, identity, f"status {target}")


def steps_planned(target: str, token_file: str = "", ca: str = "") -> dict[str, int]:
    """Policy → max_steps of the job's experiment; empty when its Dataflow was not started from one."""
    url, identity = _address(target, token_file, ca)
    trainers = ask(DataflowAPI.config, url, identity, f"status {target}").config.get("trainer")
    found = trainers.items() if isinstance(trainers, dict) else ()
    return {name: steps for name, config in found if isinstance(config, dict) and isinstance(steps := config.get("max_steps"), int)}


def _address(target: str, token_file: str, ca: str) -> tuple[str, Identity]:
    """Where the job answers, and who asks."""
    run_id, url, token = "", target, given_token(token_file)
    if "://" not in target:
        file = Path(target) / CONFIG if Path(target).is_dir() else Path(target)
        if not file.is_file():
            raise ConfigError(f"status {target!r}: neither a URL (http://host:port) nor the directory of a run")
        experiment = load_experiment([file]).experiment
        run_id, url = experiment.experiment.run_id, dataflow_url(experiment)
        own = Path(experiment.launch.token_file or Path(experiment.experiment.run_dir) / "token")
        token, ca = token or (read_token(own) if own.is_file() else ""), ca or experiment.launch.tls.ca
    return url, new_identity(run_id, token, Tls(ca=ca))


def ask(route: Route[Any, P], url: str, identity: Identity, asked: str) -> P:
    """One call to Dataflow. Raises Unavailable, AuthError or ConfigError in one line that begins with what was asked for."""
    try:
        with SyncClient(url, identity) as client:
            return client.call(route, timeout_s=CALL_S)
    except AuthError as error:
        of_certificate = "certificate is not accepted" in str(error)
        hint = "give its authority by --tls-ca" if of_certificate else "give the job's token by --token-file or ASTRAFLOW_TOKEN"
        raise AuthError(f"{asked}: {error}; {hint}") from None
    except Retryable as error:
        raise Unavailable(f"{asked}: no Dataflow answers at {url}: {error}") from None
    except (BadMessage, RemoteError) as error:
        raise ConfigError(f"{asked}: what answers at {url} is no Dataflow of this version: {error}") from None
    except UserError as error:
        raise ConfigError(f"{asked}: {error}") from None
