"""Workflows: what happens between a task and its reward. Libraries of the rollout service; torch-free."""

from __future__ import annotations

from astraflow.lib.registry import Registry

WORKFLOWS = Registry(
    "workflows",
    {
        "rlvr": "astraflow.workflows.rlvr:Rlvr",
        "multi_turn": "astraflow.workflows.multi_turn:MultiTurn",
        "plan_and_solve": "astraflow.workflows.plan_solve:PlanAndSolve",
        "propose_and_solve": "astraflow.workflows.propose_solve:ProposeAndSolve",
        "solve_and_check": "astraflow.workflows.plan_solve:SolveAndCheck",
        "sep_solve_and_check": "astraflow.workflows.plan_solve:SepSolveAndCheck",
        "solve_and_verify": "astraflow.workflows.solve_verify:SolveAndVerify",
        "actor_and_verify": "astraflow.workflows.solve_verify:ActorAndVerify",
        "sm_lg_router": "astraflow.workflows.router:SmLgRouter",
        "spawn": "astraflow.workflows.spawn:Spawn",
        "code_actor_and_verify": "astraflow.workflows.code_verify:CodeActorAndVerify",
        "code_solve_and_select": "astraflow.workflows.code_select:CodeSolveAndSelect",
        "env": "astraflow.workflows.env:Env",
        "agent": "astraflow.workflows.agent:Agent",
    },
)
"""Workflow name → class, loaded when chosen."""

register_workflow = WORKFLOWS.register
"""Decorator: `@register_workflow("mine")` on a `RolloutWorkflow` class of a plug-in module."""
