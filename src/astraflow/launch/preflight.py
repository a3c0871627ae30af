"""What can be known before anything is started: models that can be read, workflows that take their options, data that loads.

A process would find out as well, but only after it has started, and one that asks for the impossible over and over looks like a
run that waits. Nothing here imports torch or reads a weight; the price is one look at each header.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import tokenizers.models

from astraflow.config.experiment import Experiment, Resolved, workflow_sections
from astraflow.datasets import api as datasets
from astraflow.environments import ENVIRONMENTS
from astraflow.lib.aio import one_line
from astraflow.lib.net import reachable_host
from astraflow.lib.registry import import_attr
from astraflow.lib.tls import check_accepted
from astraflow.lib.tokenizer import Tokenizer
from astraflow.protocol.errors import ConfigError, UserError
from astraflow.weights.config import ModelConfig
from astraflow.workflows.api import WORKFLOWS, WorkflowContext

SLOW_LOADER = "reasoning_gym"
"""Its import alone takes many seconds; Dataflow says what is wrong with it."""
MADE_HERE = ("addition", "digits")
"""Loaders that make their rows, so that nothing is fetched without a path."""
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""


async def no_reward(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float | None:
    """Stands where a workflow wants a reward; never called, because no episode runs."""
    raise AssertionError("preflight runs no episode")


def preflight(resolved: Resolved, models: Mapping[str, ModelConfig]) -> None:
    """Raise ConfigError, naming the field, for a model that cannot be read or a workflow that refuses its options.

    `models`: those of the experiment with paths on this machine.
    """
    check_certificate(resolved.experiment)
    known: dict[str, Tokenizer | None] = {name: check_model(f"models.{name}", model) for name, model in models.items()}
    check_workflows(resolved.experiment, known, check_data(resolved.experiment))


def check_certificate(experiment: Experiment) -> None:
    """With TLS: the clients of this run will accept its services where they can be reached. Raises ConfigError."""
    launch, weights = experiment.launch, experiment.weights
    for host in {reachable_host(launch.host), weights.advertise_host or reachable_host(weights.host)} if launch.tls.cert else ():
        try:
            check_accepted(launch.tls, host)
        except ConfigError as error:
            raise ConfigError(f"launch.{error}") from None


def check_without_fetching(experiment: Experiment) -> None:
    """Of `preflight` what needs no model and no data but those on this machine: options, templates, names of policies."""
    known: dict[str, Tokenizer | None] = {}
    for name, model in experiment.models.items():
        try:
            known[name] = Tokenizer.load(Path(model.tokenizer_path or model.path).expanduser())
        except ConfigError:  # not here yet, or broken: `run` says so
            known[name] = None
    check_workflows(experiment, known, check_data(experiment, fetch=False))


Fields = dict[str, frozenset[str]]
"""Dotted path of a data set → the fields that its tasks have, each in some of them."""


def check_data(experiment: Experiment, *, fetch: bool = True) -> Fields:
    """Load every data set once, as Dataflow will. Raises UserError for a misspelt option, a broken row or an empty set.

    fetch: also those that may come from a hub.
    """
    sets = {"train_dataset": experiment.train_dataset, **{f"valid_datasets.{k}": v for k, v in experiment.valid_datasets.items()}}
    found: Fields = {}
    for path, config in sets.items():
        if config.loader == SLOW_LOADER or not (fetch or config.path or config.loader in MADE_HERE):
            continue
        try:
            tasks = datasets.load(config, experiment.experiment.seed).tasks
        except UserError as error:
            raise ConfigError(f"{path}: {error}") from None
        found[path] = frozenset(name for task in tasks for name in task.data)
    return found


def fields_for(path: str, experiment: Experiment, fields: Fields) -> frozenset[str] | None:
    """Fields that all data sets of the workflow at `path` have; None = there is one that was not looked at, or none at all."""
    own = path.removeprefix("eval_workflows.") if path != "workflow" else ""
    sets = [f"valid_datasets.{name}" for name, valid in experiment.valid_datasets.items() if valid.workflow == own]
    sets += [] if own else ["train_dataset"]
    if not sets or not set(sets) <= set(fields):
        return None
    return frozenset.intersection(*(fields[name] for name in sets))


def stand_in() -> Tokenizer:
    """Instead of a model's own, while that is not on this machine: no workflow reads more of it before an episode runs."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    return Tokenizer(backend, {}, {"default": "{{ messages }}"}, {"config": {}, "generation_config": {}, "tokenizer_config": {}})


def check_model(path: str, model: ModelConfig) -> Tokenizer:
    """The model's tokenizer. Raises ConfigError for a directory without config.json, whole weights or tokenizer."""
    directory = Path(model.path).expanduser()
    try:
        if not isinstance(json.loads((directory / "config.json").read_bytes()), dict):
            raise ValueError("expected an object")
    except FileNotFoundError:
        raise ConfigError(f"{path}.path: {model.path!r} has no config.json; expected a Hugging Face model directory") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}.path: {directory / 'config.json'} cannot be read: {error}") from None
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{path}.path: {model.path!r} has no *.safetensors; expected a Hugging Face model directory with its weights")
    for file in files:
        if problem := broken(file):
            raise ConfigError(f"{path}.path: {file} is no whole safetensors file: {problem}")
    try:
        return Tokenizer.load(Path(model.tokenizer_path or model.path).expanduser())
    except ConfigError as error:
        raise ConfigError(f"{path}.{'tokenizer_path' if model.tokenizer_path else 'path'}: {error}") from None


def broken(file: Path) -> str:
    """What is wrong with a safetensors file as far as its header and size tell; empty = nothing."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            return f"{size} bytes and no header"
        try:
            header = json.loads(stream.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, LookupError, TypeError, AttributeError):
            return "its header is damaged"
    wanted = 8 + length + max(ends, default=0)
    return "" if size == wanted else f"{size} bytes, its header tells of {wanted}"


def check_workflows(experiment: Experiment, known: Mapping[str, Tokenizer | None], fields: Fields | None = None) -> None:
    """Build every workflow once, with its options and generation settings. Raises ConfigError naming the option.

    known: by policy; where one of a workflow's is None, all of them are stood in for, because they are compared.
    """
    missing = stand_in()
    generation, own = msgspec.to_builtins(experiment.raas.generation), experiment.raas.environments
    for path, spec in workflow_sections(experiment).items():
        local = experiment.raas.workflows
        factory = import_attr(local[spec.workflow]) if spec.workflow in local else WORKFLOWS.resolve(spec.workflow)
        own_tokenizers = {policy: known[policy] for policy in spec.policies}
        if None in own_tokenizers.values():
            own_tokenizers = dict.fromkeys(own_tokenizers)
        context = WorkflowContext(
            tokenizers={policy: mine or missing for policy, mine in own_tokenizers.items()},
            policies=list(spec.policies),
            reward=no_reward if spec.reward else None,
            options=dict(spec.options),
            generation={**generation, **spec.generation},
            environment=lambda name: import_attr(own[name]) if name in own else ENVIRONMENTS.get(name),
            fields=fields_for(path, experiment, fields or {}),
            agents=experiment.raas.agents,
        )
        try:
            factory(context)
        except UserError as error:
            words, about = str(error), f"workflow {spec.workflow!r} "
            raise ConfigError(f"{path}.{words.removeprefix(about)}" if words.startswith(about) else f"{path}: {words}") from None
        except (TypeError, LookupError, ValueError, AttributeError, re.error) as error:
            raise ConfigError(f"{path}.options: {spec.options!r} does not fit workflow {spec.workflow!r}: {one_line(error)}") from None
