"""No secret stands in a configuration: it is written into the run directory, and `/config` tells it to whoever joins."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from astraflow.config.load import Layers
from astraflow.protocol.errors import ConfigError

KEY = re.compile(
    r"(?:^|_)(?:api_?key|access_key|private_key|secret(?:_key)?|passw(?:or)?d|credentials?"
    r"|(?:access|api|auth|bearer|cluster|hf|hub|refresh|session)_token)$|^token$"
)
"""Names, in small letters, whose values are secrets."""
WITH_PASSWORD = re.compile(r"://[^/\s@]+@")
"""A URL with a user name or password."""


def check_secrets(layers: Layers) -> None:
    """Raise ConfigError, naming the key and never the value, for a value that must not be written down."""
    for path in _found(layers.values, ""):
        origin = layers.origin(path)
        raise ConfigError(
            f"{path}: looks like a secret, and configurations are written to disk and shown; expected none: set an environment"
            " variable instead, which every process and engine of the run inherits" + (f" ({origin})" if origin else "")
        )


def _found(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, Mapping | list):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            below = f"{path}.{key}" if path else str(key)
            if isinstance(item, str | int) and not isinstance(item, bool) and item != "" and KEY.search(str(key).lower().replace("-", "_")):
                yield below
            yield from _found(item, below)
    elif isinstance(value, str) and WITH_PASSWORD.search(value):
        yield path
