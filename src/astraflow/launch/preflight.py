"""What can be known before anything is started: models that can be read, workflows that take their options, data that loads.

A process would find out as well, but only after it has started, and one that asks for the impossible over and over looks like a
run that waits. Nothing here imports torch or reads a weight; the price is one look at each header.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from astraflow.config.experiment import Experiment, Resolved, workflow_sections
from astraflow.datasets import api as datasets
from astraflow.lib.registry import import_attr
from astraflow.lib.tokenizer import Tokenizer
from astraflow.protocol.errors import ConfigError, UserError
from astraflow.weights.config import ModelConfig
from astraflow.workflows.api import WORKFLOWS, WorkflowContext

SLOW_LOADER = "reasoning_gym"
"""Its import alone takes many seconds; Dataflow says what is wrong with it."""
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""


async def no_reward(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float | None:
    """Stands where a workflow wants a reward; never called, because no episode runs."""
    raise AssertionError("preflight runs no episode")


def preflight(resolved: Resolved, models: Mapping[str, ModelConfig]) -> None:
    """Raise ConfigError, naming the field, for a model that cannot be read or a workflow that refuses its options.

    `models`: those of the experiment with paths on this machine.
    """
    tokenizers = {name: check_model(f"models.{name}", model) for name, model in models.items()}
    check_workflows(resolved.experiment, tokenizers)
    check_data(resolved.experiment)


def check_data(experiment: Experiment) -> None:
    """Load every data set once, as Dataflow will. Raises UserError for a misspelt option, a broken row or an empty set."""
    sets = {"train_dataset": experiment.train_dataset, **{f"valid_datasets.{k}": v for k, v in experiment.valid_datasets.items()}}
    for path, config in sets.items():
        if config.loader == SLOW_LOADER:
            continue
        try:
            datasets.load(config, experiment.experiment.seed)
        except UserError as error:
            raise ConfigError(f"{path}: {error}") from None


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


def check_workflows(experiment: Experiment, tokenizers: Mapping[str, Tokenizer]) -> None:
    """Build every workflow once, with its options and generation settings."""
    generation = msgspec.to_builtins(experiment.raas.generation)
    for path, spec in workflow_sections(experiment).items():
        local = experiment.raas.workflows
        factory = import_attr(local[spec.workflow]) if spec.workflow in local else WORKFLOWS.resolve(spec.workflow)
        context = WorkflowContext(
            tokenizers={policy: tokenizers[policy] for policy in spec.policies},
            policies=list(spec.policies),
            reward=no_reward if spec.reward else None,
            options=dict(spec.options),
            generation={**generation, **spec.generation},
        )
        try:
            factory(context)
        except UserError as error:
            words, own = str(error), f"workflow {spec.workflow!r} "
            raise ConfigError(f"{path}.{words.removeprefix(own)}" if words.startswith(own) else f"{path}: {words}") from None
        except (TypeError, KeyError) as error:
            raise ConfigError(f"{path}.options: {spec.options!r} does not fit workflow {spec.workflow!r}: {error}") from None
