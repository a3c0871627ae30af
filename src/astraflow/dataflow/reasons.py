"""Why a group, or a row of it, was not trained on: every reason that the code gives, in one sentence each.

A group ends under exactly one reason, and so does each trajectory that it lost on its own. Filters of one's own
(`module:attr`) may give further reasons.
"""

from __future__ import annotations

REASONS: dict[str, str] = {
    "damaged": "its payload on disk is not what was written; the group can never be served",
    "dead_timeline": "it holds tokens of weights that exist no more: its trainer went back to an earlier version",
    "error": "the episode failed without saying where",
    "malformed": "the rollout service sent something that breaks the contract (see the log of Dataflow)",
    "max_attempts": "its lease was lost with its instance as often as dataflow.pool.max_attempts allows",
    "model_gone": "a resumed run no longer trains this model",
    "no_room": "the queue was full (dataflow.buffer.max_groups)",
    "no_tokens": "the trajectory holds no token that this policy sampled",
    "partial": "a member of the group failed or has no score (filter complete_only)",
    "rejected": "the workflow gave no trajectory (it returned None)",
    "reward_band": "the mean reward of the group lies outside the band of the filter reward_band",
    "stale": "it was older than dataflow.buffer.max_staleness versions when its turn came",
    "task_gone": "a resumed run no longer has this task in its data set, or another group size",
    "too_few_scored": "fewer than two members are scored, and this advantage compares members",
    "unconfirmed": "its instance never confirmed the weights that sampled it (dataflow.buffer.hold_s)",
    "unsendable": "its task holds what a message cannot, e.g. an integer beyond 64 bits; the log names the field",
    "unscored": "no reward: of the one trajectory, or of all members of the group",
    "zero_variance": "all rewards of the group are equal, so it carries no gradient (filter_zero_adv)",
}

PREFIXES: dict[str, str] = {
    "error:engine.": "the inference engine failed in the episode",
    "error:environment.": "the environment failed in the episode",
    "error:prompt.": "the prompt could not be used, e.g. it is longer than max_length",
    "error:reward.": "the reward failed: it crashed, ran out of time, or raised",
    "error:tool.": "a tool failed in the episode",
    "error:": "the episode failed at this boundary (boundary.kind)",
}
"""Reasons with a part that is only known when it happens; the first that fits counts."""

OWN = "a reason of a filter of your own"


def describe(reason: str) -> str:
    """The sentence of a reason."""
    if reason in REASONS:
        return REASONS[reason]
    return next((text for prefix, text in PREFIXES.items() if reason.startswith(prefix)), OWN)


def known(reason: str) -> bool:
    """It is one of the code's own."""
    return reason in REASONS or any(reason.startswith(prefix) for prefix in PREFIXES)
