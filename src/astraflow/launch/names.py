"""Names of the plug-in families, looked up without loading what they name.

Checked before anything is started, so that a misspelt name is one line on the terminal and not a dead process.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from astraflow.config.check import nearest
from astraflow.config.experiment import Experiment, Resolved, workflow_sections
from astraflow.dataflow.policies.base import build
from astraflow.lib.registry import Registry, import_attr
from astraflow.protocol.errors import ConfigError, UnknownName

FAMILIES: dict[str, tuple[str, ...]] = {
    "workflows": ("astraflow.workflows:WORKFLOWS",),
    "rewards": ("astraflow.rewards:REWARDS",),
    "datasets": ("astraflow.datasets:DATASETS",),
    "environments": ("astraflow.environments:ENVIRONMENTS",),
    "engines": ("astraflow.raas.engines:ENGINES",),
    "backends": ("astraflow.trainer.backends:BACKENDS",),
    "policies": (
        "astraflow.dataflow.policies:FILTERS",
        "astraflow.dataflow.policies:CURATORS",
        "astraflow.dataflow.policies:SHAPERS",
        "astraflow.dataflow.policies:ORDERS",
        "astraflow.dataflow.policies:SELECTIONS",
    ),
    "filters": ("astraflow.dataflow.policies:FILTERS",),
    "curators": ("astraflow.dataflow.policies:CURATORS",),
    "shapers": ("astraflow.dataflow.policies:SHAPERS",),
    "orders": ("astraflow.dataflow.policies:ORDERS",),
    "selections": ("astraflow.dataflow.policies:SELECTIONS",),
    "advantages": ("astraflow.trainer.algorithms:ADVANTAGES",),
    "losses": ("astraflow.trainer.algorithms:LOSSES",),
    "trackers": ("astraflow.lib.tracking:TRACKERS",),
}
"""Family → registries. Their modules hold literal tables only and import neither torch nor what they name."""
POLICY_KINDS = ("filter", "curator", "shaper")
"""Keys of `dataflow.policies`; with an s they are families."""


def registries(family: str) -> list[Registry]:
    """The registries of a family. Raises UnknownName for a family that does not exist."""
    if family not in FAMILIES:
        raise UnknownName(f"{family!r} is no family of names{nearest(family, list(FAMILIES))}; known: {', '.join(FAMILIES)}")
    return [import_attr(target) for target in FAMILIES[family]]


def names(family: str) -> list[str]:
    """All names of a family, sorted; `family/name` where it holds several (`policies`)."""
    found = registries(family)
    return sorted(name if len(found) == 1 else f"{registry.family}/{name}" for registry in found for name in registry.names())


def import_plugins(modules: Iterable[str]) -> None:
    """Import the modules of `plugins:`; their decorators write into the registries. Raises ConfigError naming the entry."""
    for index, module in enumerate(modules):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(f"plugins.{index}: {module!r} cannot be imported: {error}") from None


def check_names(resolved: Resolved) -> None:
    """Raise ConfigError naming the field and the closest known name for every name that nobody registered."""
    import_plugins(resolved.experiment.plugins)
    for path, family, name, local in named(resolved.experiment):
        if ":" in name:
            _check_attribute(path, name, resolved)
            continue
        known = sorted({*names(family), *local})
        if name not in known:
            origin = f" ({resolved.origins[path]})" if path in resolved.origins else ""
            hint = f"{nearest(name, known)}; known {family}: {', '.join(known)}"
            raise ConfigError(f"{resolved.written(path)}: {name!r} is unknown{hint}{origin}")
    for kind in POLICY_KINDS:  # their options too; those of `module:attr` are known only where that is imported
        chosen = getattr(resolved.experiment.dataflow.policies, kind)
        own = [item for item in (chosen if isinstance(chosen, list) else [chosen]) if ":" not in _name(item)]
        build(registries(f"{kind}s")[0], f"dataflow.policies.{kind}", own)


def named(experiment: Experiment) -> Iterator[tuple[str, str, str, Iterable[str]]]:
    """(dotted path, family, name, further names known to this experiment) of every plug-in that an experiment names."""
    raas = experiment.raas
    for path, workflow in workflow_sections(experiment).items():
        yield f"{path}.workflow", "workflows", workflow.workflow, raas.workflows
        if workflow.reward:
            yield f"{path}.reward", "rewards", workflow.reward, raas.reward_functions
    yield "train_dataset.loader", "datasets", experiment.train_dataset.loader, ()
    for name, valid in experiment.valid_datasets.items():
        yield f"valid_datasets.{name}.loader", "datasets", valid.loader, ()
    for path, engine in (("raas.engine", raas.engine), *((f"raas.engines.{name}", own) for name, own in raas.engines.items())):
        yield f"{path}.kind", "engines", engine.kind, ()
    for policy, trainer in experiment.trainer.items():
        yield f"trainer.{policy}.backend", "backends", trainer.backend, ()
        yield f"trainer.{policy}.algorithm.advantage", "advantages", trainer.algorithm.advantage, ()
        yield f"trainer.{policy}.algorithm.loss", "losses", trainer.algorithm.loss, ()
    for name in experiment.trackers:
        yield f"trackers.{name}", "trackers", name, ()
    for kind in POLICY_KINDS:
        for choice in _choices(getattr(experiment.dataflow.policies, kind)):
            yield f"dataflow.policies.{kind}", f"{kind}s", choice, ()


def _choices(value: Any) -> Iterator[str]:
    for item in value if isinstance(value, list) else [value]:
        yield _name(item)


def _name(item: Any) -> str:
    if not isinstance(item, Mapping):
        return str(item)
    if not isinstance(item.get("name"), str):
        raise ConfigError(f"dataflow.policies: {dict(item)!r}: expected a name or a mapping with the key `name`")
    return str(item["name"])


def _check_attribute(path: str, target: str, resolved: Resolved) -> None:
    """`module:attr` is imported by the process that uses it; here only its spelling is looked at."""
    module = target.partition(":")[0]
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise ConfigError(f"{resolved.written(path)}: {target!r}: there is no module {module!r} ({resolved.origins.get(path, 'default')})")
