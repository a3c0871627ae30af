"""Free options of a plug-in (`options: {…}` in the configuration), read with a type; what nobody read is a mistake."""

from __future__ import annotations

import math
import re
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

    def take(
        self,
        name: str,
        default: Any,
        accepted: Sequence[Any] = (),
        *,
        least: float | None = None,
        above: float | None = None,
        most: float | None = None,
    ) -> Any:
        """The option in the default's type (any type when it is None). Raises ConfigError naming field, value and what is accepted.

        accepted: the values that there are; least, most: its range, both ends included; above: its lower end, excluded.
        """
        self._known.append(name)
        value = self._left.pop(name, default)
        if default is not None:
            try:
                value = msgspec.convert(value, type(default))
            except msgspec.ValidationError as error:
                raise self.refuse(name, str(error)) from None
        if accepted and value not in accepted:
            words = [str(word) for word in accepted]
            raise self.refuse(name, f"{value!r} is not one of {', '.join(words)}{closest(str(value), words)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.refuse(name, f"{value!r}, expected a finite number")
        limits = (("at least", least), ("more than", above), ("at most", most))
        kept = (least is None or value >= least) and (above is None or value > above) and (most is None or value <= most)
        if not kept:
            wanted = " and ".join(f"{words} {limit:g}" for words, limit in limits if limit is not None)
            raise self.refuse(name, f"{value!r}, expected {wanted}")
        return value

    def pattern(self, name: str, default: str, flags: int = 0, *, group: bool = False) -> re.Pattern[str]:
        """A regular expression. Raises ConfigError for one that cannot be read and, with `group`, for one without a group."""
        text = self.take(name, default)
        try:
            found = re.compile(text, flags)
        except (re.error, RecursionError, OverflowError) as error:
            raise self.refuse(name, f"{text!r} is no regular expression: {error}") from None
        if group and text and not found.groups:
            raise self.refuse(name, f"{text!r} has no group; expected one around what is looked for, such as ({text})")
        return found

    def refuse(self, name: str, problem: str) -> ConfigError:
        """The error of an option that cannot be used."""
        return ConfigError(f"{self._owner} options.{name}: {problem}")

    def done(self) -> None:
        """Raises ConfigError for an option that no `take` asked for, naming the closest one."""
        if self._left:
            name = min(self._left)
            known = ", ".join(self._known) or "none"
            raise self.refuse(name, f"unknown option{closest(name, self._known)}; accepted: {known}")
