"""Backends: how a step runs on the hardware. `local` is the oracle of all others."""

from __future__ import annotations

from astraflow.lib.registry import Registry

BACKENDS = Registry(
    "backends",
    {"local": "astraflow.trainer.backends.local:LocalBackend", "fsdp": "astraflow.trainer.backends.fsdp:FsdpBackend"},
)
