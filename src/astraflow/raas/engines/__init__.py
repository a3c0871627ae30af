"""Engines by name. A factory takes an `EngineSetup` and returns an `Engine`; loaded when chosen."""

from __future__ import annotations

from astraflow.lib.registry import Registry

ENGINES: Registry = Registry(
    "engines",
    {
        "embedded": "astraflow.raas.engines.process:embedded",
        "vllm": "astraflow.raas.engines.vllm:vllm",
        "sglang": "astraflow.raas.engines.sglang:sglang",
        "openai": "astraflow.raas.engines.openai:OpenAIEngine",
        "scripted": "astraflow.raas.engines.scripted:ScriptedEngine",
    },
)
"""Engine name → factory."""
