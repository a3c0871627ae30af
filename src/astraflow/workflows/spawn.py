"""One policy: a main agent may hand parts of its task to sub-agents, which may do so again.

The tree is bounded before it grows: an agent at depth d may start sub-agents only while d < `depth`, at most `breadth` at once and
`rounds` times, and it splits what is left of the episode's `budget` evenly among them, so no two agents race for a share. Nobody
holds anything while waiting: an episode has one slot however many agents it starts, and each model call queues in the engine on its
own, so one slot and one engine place are enough for any tree (fault 20).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from astraflow.protocol.errors import AstraFlowError
from astraflow.workflows.api import EngineGroup, Episode, InferenceEngine, Options, RolloutWorkflow, WorkflowContext, is_overlong
from astraflow.workflows.conversation import Conversation
from astraflow.workflows.roles import Role, Team, fields_of, together
from astraflow.workflows.tools import ToolBox, ToolMistake, schema

HELP = (
    "You may hand independent parts of the task to helpers with the tool `spawn`, which returns their answers. Use it only where it "
    "really helps. Then give the final answer yourself."
)
PART = "A part of this problem is yours.\n\nProblem:\n{problem}\n\nYour part:\n{task}\n\nGive its answer, short."
MAX_DEPTH = 32
"""A cancellation goes down all levels at once, one call inside the other."""
MAX_AGENTS = 4096
"""All of them are segments of one trajectory, and run at once when `breadth` lets them."""
SPAWN = schema(
    "spawn", "Work on parts of the task at once; returns one answer per part.", tasks={"type": "array", "items": {"type": "string"}}
)


class Spawn(RolloutWorkflow):
    """The main agent's last answer is scored, and its reward is everybody's: 1 + N segments, each with the one that it comes from.

    Options: `depth` (0 = no sub-agents), `breadth` (at once), `budget` (sub-agents in all), `rounds` (times that one agent may ask for
    some), `tool_format`, `tool_deadline_s` (of one call of `spawn`: the answers of everybody below it); the main agent's role in bare
    words (`template`, `system` …), role `sub` (fields of the task, `problem`, `task`).
    """

    def __init__(self, context: WorkflowContext) -> None:
        super().__init__(context)
        options = Options("spawn", context.options)
        self.depth, self.breadth = options.take("depth", 1, least=0, most=MAX_DEPTH), options.take("breadth", 4, least=1)
        self.budget, self.rounds = options.take("budget", 4, least=0, most=MAX_AGENTS), options.take("rounds", 1, least=0)
        self.main = Role.take(context, options, system=HELP, adds=())
        self.sub = Role.take(context, options, name="sub", template=PART, adds=("problem", "task"))
        format, deadline_s = options.take("tool_format", "json"), options.take("tool_deadline_s", 600.0, above=0)
        options.done()
        self.tools = ToolBox(context.tokenizers[self.main.policy], [SPAWN], format, deadline_s)

    async def arun_episode(self, engine: InferenceEngine | EngineGroup, data: dict[str, Any]) -> Episode:
        tree = _Tree(self, engine, fields_of(data), Team("shared"))
        talk = await tree.main(data)
        return tree.team.episode(await talk.score(data), sub_agents=float(tree.agents - 1))


@dataclass
class _Tree:
    """The agents of one episode."""

    flow: Spawn
    engine: InferenceEngine | EngineGroup
    fields: dict[str, Any]
    team: Team
    agents: int = 0

    async def main(self, data: dict[str, Any]) -> Conversation:
        """The whole episode; the main agent's conversation."""
        may = self._may(0, self.flow.budget)
        talk = self._equipped(self.flow.main, may).open(data, **self._rendering(may))
        await self._work(self.flow.main, talk, None, 0, self.flow.budget)
        return talk

    def _may(self, depth: int, budget: int) -> bool:
        return depth < self.flow.depth and budget > 0 and self.flow.rounds > 0

    def _equipped(self, role: Role, may: bool) -> Role:
        return replace(role, system=self.flow.tools.told(role.system)) if may else role

    def _rendering(self, may: bool) -> dict[str, Any]:
        return self.flow.tools.rendering if may else {}

    async def _work(self, role: Role, talk: Conversation, parent: Conversation | None, depth: int, budget: int) -> str:
        """One agent from its opening to its last answer."""
        self.agents += 1
        self.team.add(talk, parent=parent)
        rounds = self.flow.rounds if self._may(depth, budget) else 0
        text = await role.answer(self.engine, talk)
        while rounds and (calls := self.flow.tools.calls(talk)):
            rounds -= 1
            mine = budget // (self.flow.breadth + 1) if rounds else 0  # kept for the rounds to come
            spawn = partial(self._spawn, talk, depth, budget - mine)
            talk.say(*await self.flow.tools.run(calls[:1], {"spawn": spawn}))
            budget = mine
            more = await role.go_on(self.engine, talk)
            if more is None:
                break  # no room: what it said counts
            text = more
        return text

    async def _spawn(self, parent: Conversation, depth: int, budget: int, tasks: list[str]) -> str:
        if not isinstance(tasks, list) or not tasks or not all(isinstance(task, str) for task in tasks):
            raise ToolMistake("`tasks` must be a list of texts")
        count = min(len(tasks), self.flow.breadth, budget)
        if count == 0:
            raise ToolMistake("no more sub-agents in this episode")
        share = (budget - count) // count
        answers = await together(*(self._sub(parent, depth + 1, share, task) for task in tasks[:count]))
        left = f"\n({len(tasks) - count} more parts were not started: too many)" if count < len(tasks) else ""
        return "\n".join(f"Part {place}: {answer}" for place, answer in enumerate(answers, start=1)) + left

    async def _sub(self, parent: Conversation, depth: int, budget: int, task: str) -> str:
        may = self._may(depth, budget)
        talk = self._equipped(self.flow.sub, may).ask({**self.fields, "task": task}, **self._rendering(may))
        try:
            return await self._work(self.flow.sub, talk, parent, depth, budget)
        except AstraFlowError as error:
            if not is_overlong(error):
                raise
            return "Error: this part is too long"
