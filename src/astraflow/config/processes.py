"""From one resolved experiment to what each process is started with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from astraflow.config.experiment import Experiment, Resolved, generation, is_group_relative
from astraflow.dataflow.config import DataflowProcess
from astraflow.lib.auth import load_or_make_token, read_token, token_required
from astraflow.lib.net import http_url, reachable_host
from astraflow.protocol.errors import ConfigError
from astraflow.raas.config import RaaSProcess
from astraflow.trainer.config import TrainerProcess

TOKEN_ENV, TOKEN_FILE_ENV = "ASTRAFLOW_TOKEN", "ASTRAFLOW_TOKEN_FILE"


def cluster_token(experiment: Experiment, token_file: str = "") -> str:
    """The token of this run, from the environment, the named file or `<run_dir>/token`; empty when loopback makes it needless.

    The file is made (mode 0600) when the run needs a token and has none.
    """
    if given := given_token(token_file or experiment.launch.token_file):
        return given
    if not token_required(experiment.launch.host) and not token_required(experiment.weights.host):
        return ""
    return load_or_make_token(Path(experiment.launch.token_file or Path(experiment.experiment.run_dir) / "token"))


def given_token(token_file: str = "") -> str:
    """A token that the user gave: environment first, then a file; empty = none."""
    if token := os.environ.get(TOKEN_ENV, "").strip():
        return token
    path = token_file or os.environ.get(TOKEN_FILE_ENV, "")
    return read_token(path) if path else ""


def dataflow_url(experiment: Experiment) -> str:
    """Where the other processes find Dataflow. Raises ConfigError while its port is not fixed."""
    if not experiment.launch.dataflow_port:
        raise ConfigError("launch.dataflow_port: 0, but a process started by itself must know Dataflow's port; expected 1 … 65535")
    launch = experiment.launch
    return http_url(reachable_host(launch.host), launch.dataflow_port, bool(launch.tls.cert))


def dataflow_process(resolved: Resolved, token: str = "") -> DataflowProcess:
    """What `astraflow dataflow` runs."""
    experiment, run = resolved.experiment, resolved.experiment.experiment
    return DataflowProcess(
        run_id=run.run_id,
        run_dir=run.run_dir,
        trace=run.trace,
        token=token,
        tls=experiment.launch.tls,
        seed=run.seed,
        host=experiment.launch.host,
        port=experiment.launch.dataflow_port,
        plugins=experiment.plugins,
        models=list(experiment.models),
        workflow=experiment.workflow,
        train_dataset=experiment.train_dataset,
        valid_datasets=experiment.valid_datasets,
        eval_workflows=experiment.eval_workflows,
        dataflow=experiment.dataflow,
        group_relative={name: is_group_relative(trainer.algorithm.advantage) for name, trainer in experiment.trainer.items()},
        log_file=os.devnull,  # its lines go to standard error, which the supervisor sends to logs/dataflow.log
        experiment=public_config(resolved),
    )


def raas_process(resolved: Resolved, index: int, token: str = "", url: str = "") -> RaaSProcess:
    """What `astraflow raas --index N` runs."""
    experiment, run = resolved.experiment, resolved.experiment.experiment
    return RaaSProcess(
        run_id=run.run_id,
        run_dir=run.run_dir,
        trace=run.trace,
        region=experiment.launch.region,
        token=token,
        tls=experiment.launch.tls,
        seed=run.seed,
        instance_id=f"raas-{index}",
        dataflow_url=url or dataflow_url(experiment),
        host=experiment.launch.host,
        models=experiment.models,
        raas=experiment.raas,
        weights=experiment.weights,
        plugins=experiment.plugins,
    )


def trainer_process(resolved: Resolved, policy: str, token: str = "") -> TrainerProcess:
    """What `astraflow trainer --policy NAME` runs."""
    experiment, run = resolved.experiment, resolved.experiment.experiment
    if policy not in experiment.models:
        raise ConfigError(f"--policy {policy!r}: no such model; known: {', '.join(experiment.models)}")
    return TrainerProcess(
        run_id=run.run_id,
        run_dir=run.run_dir,
        trace=run.trace,
        region=experiment.launch.region,
        token=token,
        tls=experiment.launch.tls,
        seed=run.seed,
        host=experiment.weights.host,
        dataflow_url=dataflow_url(experiment),
        model_id=policy,
        max_new_tokens=generation(experiment)["max_new_tokens"],
        model=experiment.models[policy],
        trainer=experiment.trainer[policy],
        weights=experiment.weights,
        plugins=experiment.plugins,
    )


OWN_CODE = ("workflows", "reward_functions", "environments", "agents")
"""Keys of `raas` that name code or programs: only a process's own configuration may."""


def drop_own_code(plain: dict[str, Any]) -> None:
    """Empty what only a process's own configuration may name: in what Dataflow tells, and again in what it is told to have said."""
    plain["plugins"], plain["trackers"] = [], {}
    if isinstance(plain.get("raas"), dict):
        plain["raas"] |= {name: {} for name in OWN_CODE}


def public_config(resolved: Resolved) -> dict[str, object]:
    """The experiment as `GET /config` tells it: without the modules that only a process's own configuration may name, and without
    the environment of servers, which may hold keys."""
    plain = resolved.plain()
    drop_own_code(plain)
    for engine in (plain["raas"]["engine"], *plain["raas"]["engines"].values()):
        engine["options"].pop("env", None)
    return msgspec.to_builtins(plain)  # type: ignore[no-any-return]
