"""Environments: worlds that a model acts in, one object per episode. Torch-free libraries of the rollout service."""

from __future__ import annotations

from astraflow.lib.registry import Registry

ENVIRONMENTS = Registry(
    "environments",
    {
        "gymnasium": "astraflow.environments.adapters:Gymnasium",
        "reasoning_gym": "astraflow.environments.adapters:ReasoningGym",
        "textarena": "astraflow.environments.adapters:TextArena",
    },
)
"""Environment name → class that takes its options, loaded when chosen."""

register_environment = ENVIRONMENTS.register
"""Decorator: `@register_environment("mine")` on an `Environment` class of a plug-in module."""
