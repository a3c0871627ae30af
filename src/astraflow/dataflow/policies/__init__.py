"""Data algorithms by name. One registry per family; a table line is loaded only when chosen."""

from __future__ import annotations

from astraflow.lib.registry import Registry

FILTERS = Registry(
    "filters",
    {
        "keep_all": "astraflow.dataflow.policies.admit:KeepAll",
        "filter_zero_adv": "astraflow.dataflow.policies.admit:FilterZeroAdvantage",
        "reward_band": "astraflow.dataflow.policies.admit:RewardBand",
        "complete_only": "astraflow.dataflow.policies.admit:CompleteOnly",
    },
)
"""Which complete groups are trained on."""

CURATORS = Registry(
    "curators",
    {
        "accept_all": "astraflow.dataflow.policies.curate:AcceptAll",
        "filter_solved": "astraflow.dataflow.policies.curate:FilterSolved",
        "greso": "astraflow.dataflow.policies.greso:Greso",
        "curriculum": "astraflow.dataflow.policies.curriculum:Curriculum",
    },
)
"""Which prompts are submitted."""

SHAPERS = Registry(
    "shapers",
    {
        "none": "astraflow.dataflow.policies.shape:Unshaped",
        "overlong": "astraflow.dataflow.policies.shape:Overlong",
    },
)
"""What is added to rewards before group statistics."""

ORDERS = Registry(
    "orders",
    {
        "edf": "astraflow.dataflow.policies.select:earliest_deadline_first",
        "fifo": "astraflow.dataflow.policies.select:first_in_first_out",
    },
)
"""Sort key of queued groups."""

SELECTIONS = Registry(
    "selections",
    {
        "latest": "astraflow.dataflow.policies.select:latest",
        "uniform": "astraflow.dataflow.policies.select:uniform",
        "prioritised": "astraflow.dataflow.policies.select:prioritised",
    },
)
"""Which trained groups are replayed."""
