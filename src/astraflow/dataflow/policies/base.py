"""What data policies see and what they are: small classes without I/O, clock or threads."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec

from astraflow.dataflow.config import PolicyChoice
from astraflow.lib.registry import Registry, closest
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
    lengths: dict[int, int] = {}
    """Trajectory index → own sampled tokens. Scored members only."""
    finishes: dict[int, str] = {}
    """Trajectory index → finish, of the scored members that ended otherwise than by `stop`."""

    @property
    def size(self) -> int:
        """Scored members."""
        return len(self.values)

    @property
    def raw_mean(self) -> float:
        """Mean of the raw values; there is at least one."""
        return sum(self.values.values()) / len(self.values)

    def right(self, correct_threshold: float) -> int:
        """Members whose raw value is at least this."""
        return sum(value >= correct_threshold for value in self.values.values())


class Filter(Protocol):
    """Decides on complete groups."""

    def reject(self, policy: str, stats: GroupStats) -> str:
        """Reason to drop the group for this policy; empty = keep."""
        ...


class Curator(Protocol):
    """Decides on prompts, by what it knows per (policy, prompt) and by a small state of the whole.

    Both are durable: what an observation changed is written in the ledger's transaction of that observation, what a new version
    changed in the transaction of that version. So `wants` must change nothing, and whatever it needs of chance it is given.
    """

    def wants(self, policy: str, task_id: str, chance: float) -> bool:
        """Whether this policy should see the prompt now. `chance`: uniform in [0, 1), the same for all policies of one draw."""
        ...

    def observe(self, policy: str, stats: GroupStats) -> None:
        """One complete scored group, even if it is dropped later."""
        ...

    def on_version(self, policy: str, version: int, epoch: int) -> None:
        """The policy's trainer moved on. `epoch`: whole passes that the source has made over the data set."""
        ...

    def state(self) -> dict[str, Any]:
        """The small state of the whole; what msgpack can hold."""
        ...

    def changed(self) -> list[tuple[str, str, Any]]:
        """(policy, task, what is known of it now) of each prompt that changed since the last call."""
        ...

    def restore(self, state: dict[str, Any], prompts: Iterable[tuple[str, str, Any]]) -> None:
        """After a restart: what `state` and `changed` said last (tuples come back as lists)."""
        ...


class Shaper(Protocol):
    """Adds to a trajectory's value before statistics."""

    def bonus(self, loss_tokens: int, finish: str) -> float:
        """`loss_tokens` = own sampled tokens of the trajectory."""
        ...


def build(registry: Registry, field: str, choice: PolicyChoice) -> dict[str, Any]:
    """The chosen policies by name, in order. Raises UnknownName or ConfigError naming `field`, the option and what it accepts."""
    built: dict[str, Any] = {}
    for item in choice if isinstance(choice, list) else [choice]:
        name, options = _split(field, item)
        if name in built:
            raise ConfigError(f"{field}: {name!r} is named twice")
        maker = registry.resolve(name)
        try:
            built[name] = maker(**_checked(f"{field}: {name}", maker, options))
        except ConfigError as error:
            text = str(error)
            raise ConfigError(text if text.startswith(field) else f"{field}: {name}: {text}") from None
    return built


def _split(field: str, item: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if isinstance(item, str):
        return item, {}
    options = dict(item)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"{field}: {item!r}: expected a name or a mapping with the key `name`")
    return name, options


def _checked(where: str, maker: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by the maker's own signature: names, types and `Annotated` bounds."""
    if not callable(maker):
        raise ConfigError(f"{where}: {maker!r} cannot be called")
    try:
        hints = typing.get_type_hints(getattr(maker, "__init__", None) if isinstance(maker, type) else maker, include_extras=True)
    except NameError:  # a plug-in whose annotations exist only for its type checker: its options go in as they are
        hints = {}
    parameters = inspect.signature(maker).parameters
    free = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    checked = {}
    for name, value in options.items():
        if name not in known and not free:
            raise ConfigError(f"{where}: unknown option {name!r}{closest(name, known)}; accepted: {', '.join(known) or 'none'}")
        try:
            checked[name] = msgspec.convert(value, hints.get(name, Any))
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}: option {name}: {value!r}: {error}") from None
    missing = [name for name in known if parameters[name].default is inspect.Parameter.empty and name not in options]
    if missing:
        raise ConfigError(f"{where}: option {missing[0]} is required; accepted: {', '.join(known)}")
    return checked
