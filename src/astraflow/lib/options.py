"""Free options of a plug-in (`options: {…}` in the configuration), read with a type; what nobody read is a mistake."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from astraflow.lib.registry import closest
from astraflow.protocol.errors import ConfigError


class Options:
    """`take` every option that is known, then call `done`."""

    def __init__(self, owner: str, values: Mapping[str, Any]) -> None:
        """`owner`: whose options they are, in front of every error (`workflow 'rlvr'`)."""
        self._owner = owner
        self._left = dict(values)
        self._known: list[str] = []

    def take(self, name: str, default: Any, accepted: Sequence[Any] = ()) -> Any:
        """The option in the default's type (any type when it is None). Raises ConfigError naming the field and what is accepted."""
        self._known.append(name)
        value = self._left.pop(name, default)
        if default is not None and value is not None:
            try:
                value = msgspec.convert(value, type(default))
            except msgspec.ValidationError as error:
                raise ConfigError(f"{self._owner} options.{name}: {error}") from None
        if accepted and value not in accepted:
            words = [str(word) for word in accepted]
            raise ConfigError(f"{self._owner} options.{name}: {value!r} is not one of {', '.join(words)}{closest(str(value), words)}")
        return value

    def done(self) -> None:
        """Raises ConfigError for an option that no `take` asked for, naming the closest one."""
        if self._left:
            name = min(self._left)
            known = ", ".join(self._known) or "none"
            raise ConfigError(f"{self._owner} options.{name}: unknown option{closest(name, self._known)}; accepted: {known}")
