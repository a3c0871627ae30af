"""What an environment is: three methods, text in and text out. They may block; the workflow calls them in a thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from astraflow.environments import ENVIRONMENTS, register_environment
from astraflow.lib import options
from astraflow.protocol.errors import AstraFlowError
from astraflow.protocol.rollout import Boundary

__all__ = ["ENVIRONMENTS", "Environment", "EnvironmentFailure", "Options", "register_environment"]


class Environment(Protocol):
    """One episode. Its class is called with the options of the recipe, reads them with `Options` and makes nothing yet."""

    def reset(self, data: Mapping[str, Any]) -> str:
        """Begin the task (`data["seed"]` and whatever else its fields say); the first observation."""
        ...

    def step(self, action: str) -> tuple[str, float, bool]:
        """Act: (what is seen now, reward of this step, whether it is over). A mistake of the model is something that it sees."""
        ...

    def close(self) -> None:
        """Free everything; called once, also after a failure."""
        ...


class EnvironmentFailure(AstraFlowError):
    """The environment itself cannot go on; the episode is unscored and counted under `kind`."""

    boundary: Boundary = "environment"

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(message or f"environment: {kind}")
        self.kind = kind


class Options(options.Options):
    """The options of an environment, read at construction."""

    def __init__(self, environment: str, values: Mapping[str, Any]) -> None:
        super().__init__(f"environment {environment!r}", values)
