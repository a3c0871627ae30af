"""What data policies see and what they are: small classes without I/O, clock or threads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from astraflow.dataflow.config import PolicyChoice
from astraflow.lib.registry import Registry
from astraflow.protocol.errors import ConfigError


class GroupStats(msgspec.Struct, kw_only=True):
    """Statistics of one (policy, group), made once when the group is complete (numerics 7) and never changed."""

    task_id: str
    n_samples: int
    values: dict[int, float]
    """Trajectory index → raw value for this policy: mean of its segments' credits (numerics 8). Scored members only."""
    shaped: dict[int, float]
    """Trajectory index → value after shaping; mean and std run over these."""
    mean: float
    std: float
    """Unbiased, float64; 0 for one member."""
    all_equal: bool
    """Shaped values are equal within rtol 1e-6: the group teaches nothing to a group-relative estimator."""
    timeline: int
    """Oldest timeline of any own token."""
    min_version: int
    max_version: int
    loss_tokens: int
    """Own sampled tokens of the scored members."""

    @property
    def size(self) -> int:
        """Scored members."""
        return len(self.values)


class Filter(Protocol):
    """Decides on complete groups."""

    def reject(self, policy: str, stats: GroupStats) -> str:
        """Reason to drop the group for this policy; empty = keep."""
        ...


class Curator(Protocol):
    """Decides on prompts. Its state is part of Dataflow's checkpoint."""

    def accepts(self, task_id: str, epoch: int) -> bool: ...

    def observe(self, policy: str, stats: GroupStats) -> None:
        """One complete scored group, even if it is dropped later."""
        ...

    def on_version(self, policy: str, version: int) -> None: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


class Shaper(Protocol):
    """Adds to a trajectory's value before statistics."""

    def bonus(self, loss_tokens: int, finish: str) -> float:
        """`loss_tokens` = own sampled tokens of the trajectory."""
        ...


def build(registry: Registry, field: str, choice: PolicyChoice) -> list[Any]:
    """The chosen policies, in order. Raises UnknownName or ConfigError naming `field`."""
    items = choice if isinstance(choice, list) else [choice]
    built = []
    for item in items:
        name, options = _split(field, item)
        maker = registry.resolve(name)
        try:
            built.append(maker(**options))
        except TypeError as error:
            raise ConfigError(f"{field}: {name}: {error}") from None
    return built


def _split(field: str, item: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if isinstance(item, str):
        return item, {}
    options = dict(item)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"{field}: {item!r}: expected a name or a mapping with the key `name`")
    return name, options
