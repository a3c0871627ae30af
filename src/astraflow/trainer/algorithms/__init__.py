"""Advantages and losses: pure functions over flat token columns, chosen by name."""

from __future__ import annotations

from astraflow.lib.registry import Registry

ADVANTAGES = Registry(
    "advantages",
    {
        "grpo": "astraflow.trainer.algorithms.advantage:grpo",
        "dr_grpo": "astraflow.trainer.algorithms.advantage:dr_grpo",
        "rloo": "astraflow.trainer.algorithms.advantage:rloo",
        "reinforce_pp": "astraflow.trainer.algorithms.advantage:reinforce_pp",
        "reinforce_pp_baseline": "astraflow.trainer.algorithms.advantage:reinforce_pp_baseline",
        "gae": "astraflow.trainer.algorithms.advantage:gae",
        "distill": "astraflow.trainer.algorithms.advantage:distill",
        "reward": "astraflow.trainer.algorithms.advantage:reward",
        "uniform": "astraflow.trainer.algorithms.advantage:uniform",
    },
)

LOSSES = Registry(
    "losses",
    {
        "ppo": "astraflow.trainer.algorithms.losses:ppo",
        "m2po": "astraflow.trainer.algorithms.losses:m2po",
        "gspo": "astraflow.trainer.algorithms.losses:gspo",
        "cispo": "astraflow.trainer.algorithms.losses:cispo",
        "sapo": "astraflow.trainer.algorithms.losses:sapo",
        "sft": "astraflow.trainer.algorithms.losses:sft",
    },
)
