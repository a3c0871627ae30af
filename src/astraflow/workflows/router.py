"""Three policies: a router sends the problem to a small or a large model."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from astraflow.workflows.api import EngineGroup, Episode, InferenceEngine, Options, RolloutWorkflow, Score, WorkflowContext
from astraflow.workflows.conversation import Conversation
from astraflow.workflows.roles import Role, Team, check_policies, fields_of, together

ROUTE = (
    "{problem}\n\nWho should solve this: SMALL (cheap) or LARGE (costly, more able)? Do not solve it. Judge how hard it is, "
    "then end with one word: SMALL or LARGE."
)
NEUTRAL = 0.5
"""Credit of a choice that could not have been right: neither model solved it."""


class SmLgRouter(RolloutWorkflow):
    """`policies: [router, small, large]`; the trajectory's reward is that of the chosen solver.

    The solvers are credited for their own answers; the router with 1 when it chose the cheapest model that is right, 0.5 when none
    is, else 0. A choice that cannot be read counts 0 and goes to the large model.
    Options: `compare` (both solve, so that the choice can be judged; in evaluation set false: only the chosen one works); `correct`;
    `small_word`, `large_word` (regular expressions; the last match in the answer counts); roles `router`, `solver` (for both).
    """

    def __init__(self, context: WorkflowContext) -> None:
        super().__init__(context)
        check_policies(context, "sm_lg_router", "router", "small", "large")
        options = Options("sm_lg_router", context.options)
        self._compare = options.take("compare", True)
        self._correct = options.take("correct", 1.0)
        self._words = {name: options.pattern(f"{name}_word", rf"\b{name}\b", re.IGNORECASE) for name in ("small", "large")}
        self._router = Role.take(context, options, 0, "router", ROUTE, adds=("problem",))
        small = Role.take(context, options, 1, "solver", adds=())
        self._solvers = {"small": small, "large": replace(small, policy=context.policies[2])}
        options.done()

    async def arun_episode(self, engine: InferenceEngine | EngineGroup, data: dict[str, Any]) -> Episode:
        route = self._router.ask(fields_of(data))
        asked = list(self._solvers) if self._compare else []
        choice, *both = await together(self._choose(engine, route), *(self._solve(engine, data, name) for name in asked))
        chosen = choice or "large"
        solved: dict[str, tuple[Conversation, Score]] = dict(zip(asked, both, strict=True))
        if not solved:
            solved[chosen] = await self._solve(engine, data, chosen)
        team = Team()
        team.add(route, self._credit(choice, {name: score.reward for name, (_, score) in solved.items()}))
        for talk, score in solved.values():
            team.add(talk, score.reward)
        return team.episode(solved[chosen][1], to_small=float(choice == "small"), unreadable=float(choice is None))

    async def _choose(self, engine: InferenceEngine | EngineGroup, route: Conversation) -> str | None:
        text = await self._router.answer(engine, route)
        found = [(match.end(), -match.start(), name) for name, word in self._words.items() for match in word.finditer(text)]
        return max(found)[2] if found else None

    async def _solve(self, engine: InferenceEngine | EngineGroup, data: dict[str, Any], name: str) -> tuple[Conversation, Score]:
        talk = self._solvers[name].open(data)
        await self._solvers[name].answer(engine, talk)
        return talk, await talk.score(data)

    def _credit(self, choice: str | None, rewards: dict[str, float | None]) -> float | None:
        """None where it cannot be known: one of the two was not asked or not scored."""
        if len(rewards) < 2 or None in rewards.values():
            return None
        right = [name for name in self._solvers if (rewards[name] or 0.0) >= self._correct]
        if choice is None:
            return 0.0
        return float(choice == right[0]) if right else NEUTRAL
