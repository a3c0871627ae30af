"""The run directory: made once, locked while a run uses it, continued only when asked to."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import yaml

from astraflow.config.experiment import Resolved
from astraflow.config.load import read_yaml
from astraflow.lib.net import bare_host, free_port
from astraflow.protocol.errors import ConfigError

CONFIG = "config.yaml"


@contextmanager
def run_directory(resolved: Resolved, *, resume: bool) -> Iterator[Path]:
    """Make or continue the directory, write the resolved `config.yaml`, and hold its lock while the block runs.

    Fills in `experiment.run_id` and `launch.dataflow_port`: the first is kept over `--resume`, the second chosen anew.
    Raises ConfigError when the directory belongs to another run or is in use.
    """
    experiment, path = resolved.experiment, resolved.run_dir
    config_file = path / CONFIG
    if config_file.exists() and not resume:
        raise ConfigError(
            f"experiment.name: {str(path)!r} holds a run already; continue it with --resume, or choose another name (experiment.name=…)"
        )
    if resume and not config_file.exists():
        raise ConfigError(f"--resume: there is no run in {str(path)!r}")
    with _lock(_made(path) / "lock"):
        if resume:
            experiment.experiment.run_id = _run_id(config_file)
        elif experiment.experiment.run_id == experiment.experiment.name:
            # a process left over from an older run of this name must not talk to this one
            experiment.experiment.run_id = f"{experiment.experiment.name}-{secrets.token_hex(4)}"
        if not experiment.launch.dataflow_port:
            experiment.launch.dataflow_port = _free_port(experiment.launch.host)
        (path / "logs").mkdir(exist_ok=True)
        write_config(resolved, config_file)
        yield path


def _made(path: Path) -> Path:
    """The directory, made and writable. Raises ConfigError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with (path / "lock").open("a"):
            return path
    except OSError as error:
        raise ConfigError(f"experiment.run_dir: {str(path)!r} cannot be written: {error.strerror or error}") from None


def _free_port(host: str) -> int:
    try:
        return free_port(bare_host(host))
    except ConfigError as error:
        raise ConfigError(f"launch.host: {error}") from None


def write_config(resolved: Resolved, target: Path) -> None:
    """The resolved experiment as YAML, replaced atomically. It never holds the token."""
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    scratch.write_text(as_yaml(resolved.plain()), encoding="utf-8")
    scratch.replace(target)


def as_yaml(value: object) -> str:
    """Block-style YAML in the order of the sections."""
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=120)


def write_json(path: Path, value: object) -> None:
    """Replace a JSON file atomically."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")
    scratch.replace(path)


def _run_id(config_file: Path) -> str:
    values, _ = read_yaml(config_file)
    run_id = values.get("experiment", {}).get("run_id")
    if not isinstance(run_id, str) or not run_id:
        raise ConfigError(f"--resume: {str(config_file)!r} has no experiment.run_id")
    return run_id


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("a", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"experiment.name: another `astraflow run` is using {str(path.parent)!r}") from None
        yield
