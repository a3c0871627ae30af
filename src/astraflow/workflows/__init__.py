"""Workflows: what happens between a task and its reward. Libraries of the rollout service; torch-free."""

from __future__ import annotations

from astraflow.lib.registry import Registry

WORKFLOWS = Registry(
    "workflows",
    {
        "rlvr": "astraflow.workflows.rlvr:Rlvr",
        "multi_turn": "astraflow.workflows.multi_turn:MultiTurn",
        "solve_and_verify": "astraflow.workflows.solve_verify:SolveAndVerify",
    },
)
"""Workflow name → class, loaded when chosen."""

register_workflow = WORKFLOWS.register
"""Decorator: `@register_workflow("mine")` on a `RolloutWorkflow` class of a plug-in module."""
