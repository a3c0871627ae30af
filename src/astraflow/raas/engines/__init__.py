"""Engines by name. A factory takes an `EngineSetup` and returns an `Engine`; loaded when chosen."""

from __future__ import annotations

from astraflow.lib.registry import Registry

ENGINES: Registry = Registry(
    "engines",
    {
        "embedded": "astraflow.raas.engines.process:embedded",
        "scripted": "astraflow.raas.engines.scripted:ScriptedEngine",
    },
)
"""Engine name → factory."""
