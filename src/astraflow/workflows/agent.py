"""Any program that talks to an OpenAI- or Anthropic-shaped address, unchanged: what it asks for is what is trained on.

    visit ─▶ door: address, key ─▶ the agent runs and calls ─▶ it ends ─▶ score ─▶ its conversations as one trajectory

The agent's failures are errors of the boundary `workflow` with a kind of their own: `agent_exit`, `agent_limit` (it ended badly after
a call was refused), `agent_timeout`, `agent_no_call`, `agent_no_reward`, `agent_unreachable`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from astraflow.lib.registry import closest
from astraflow.protocol.errors import DeadlinePassed, UserError
from astraflow.protocol.rollout import RolloutError
from astraflow.workflows.api import (
    EngineGroup,
    Episode,
    EpisodeError,
    InferenceEngine,
    Options,
    RolloutWorkflow,
    Score,
    WorkflowContext,
    rollout_error,
)
from astraflow.workflows.histories import Histories
from astraflow.workflows.roles import Team
from astraflow.workflows.runners import End, exit_problem, reported, runner_of
from astraflow.workflows.tools import ToolBox
from astraflow.workflows.visit import Admission, Limits, Report, Visit

EXIT_REWARDS = {0: 1.0, 1: 0.0}
"""Score `exit`: what an exit code is worth; any other one is a failure."""


class Agent(RolloutWorkflow):
    """Options: `agent` (a name of `raas.agents`, which need not be given where there is one); `score`: `reward` (the reward function,
    over the text that the agent posted or returned, else over the last answer of the first policy), `posted` (what it posted or
    returned as a number) or `exit` (of a program: code 0 is worth 1, code 1 is worth 0); the default is `reward` where the workflow has
    one, else `posted`. `credit`: `shared` (the reward, for everybody) or `own` (posted by policy; a policy that got none is unscored).
    `deadline_s` of one run, `max_calls` and `max_tokens` (sampled) of an episode; `tool_format` (how the policies write tool calls),
    `chat` (variables of the chat template).
    """

    def __init__(self, context: WorkflowContext) -> None:
        super().__init__(context)
        options = Options("agent", context.options)
        name = options.take("agent", next(iter(context.agents)) if len(context.agents) == 1 else "")
        self._score = options.take("score", "reward" if context.reward else "posted", ("reward", "posted", "exit"))
        self._credit = options.take("credit", "shared", ("shared", "own"))
        self._deadline_s = options.take("deadline_s", 300.0, above=0)
        self._max_calls = options.take("max_calls", 100, least=1)
        self._max_tokens = options.take("max_tokens", 100_000, least=1)
        self._format = options.take("tool_format", "json")
        self._chat = options.take("chat", {})
        options.done()
        if name not in context.agents:
            known = list(context.agents)
            raise options.refuse("agent", f"{name!r} is not in raas.agents{closest(name, known)}; known: {', '.join(known) or 'none'}")
        config = context.agents[name]
        if self._score == "exit" and not config.command:
            raise options.refuse("score", f"'exit', but raas.agents.{name} has no command; expected reward or posted")
        if self._score == "reward" and context.reward is None:
            raise options.refuse("score", "'reward', but the workflow names no reward function; expected posted or exit")
        self._runner = runner_of(name, config)
        for part in config.command:
            self._check_template(name, part)
        for policy in context.policies:
            ToolBox(context.tokenizers[policy], [], self._format)  # a format that is not known here is refused now

    def _check_template(self, name: str, part: str) -> None:
        try:
            Options("agent", {"command": part}).template("command", "", self.context.fields_with())
        except UserError as error:
            raise UserError(str(error).replace("workflow 'agent' options", f"raas.agents.{name}")) from None

    async def arun_episode(self, engine: InferenceEngine | EngineGroup, data: dict[str, Any]) -> Episode:
        door = self.context.door
        if door is None or not isinstance(engine, EngineGroup):
            raise UserError("workflow 'agent': there is no door in this process; it runs in a rollout service")
        histories = Histories(self.context, self._format, self._chat)
        visit = Visit(self.context, engine, Limits(self._max_calls, self._max_tokens), histories)
        admission = door.admit(visit)
        end, problem = End(), None
        try:
            end = await self._run(data, visit, admission)
        except DeadlinePassed as error:
            problem = RolloutError(boundary="workflow", kind="agent_timeout", message=str(error)[:500])
        except EpisodeError as error:
            problem = rollout_error(error)
        finally:
            door.dismiss(admission)
        if visit.failure is not None:
            raise visit.failure  # the engine's, so that the episode may run again
        return await self._episode(data, visit, end, problem or self._problem(visit, end))

    async def _run(self, data: Mapping[str, Any], visit: Visit, admission: Admission) -> End:
        """Until the agent ends, or the engine has failed and there is nothing left to wait for."""
        running = asyncio.ensure_future(self._runner.run(data, visit, admission, self._deadline_s))
        failed = asyncio.ensure_future(visit.failed.wait())
        try:
            await asyncio.wait({running, failed}, return_when=asyncio.FIRST_COMPLETED)
            return running.result() if running.done() else End()
        finally:
            failed.cancel()
            running.cancel()
            await asyncio.wait({running})  # it ends what it has started

    def _problem(self, visit: Visit, end: End) -> RolloutError | None:
        """Why an agent that ended by itself is no episode to train on."""
        kind, message = "", ""
        worth = EXIT_REWARDS if self._score == "exit" else {0: 1.0}
        if end.code is not None and end.code not in worth:
            kind, message = "agent_limit" if visit.refused else "agent_exit", exit_problem(end)
        elif not visit.histories.parts:
            kind, message = "agent_no_call", "the agent ended without an answer of a policy"
        elif self._score == "posted" and _reward(reported(end, visit.report)) is None:
            kind, message = "agent_no_reward", "the agent ended without a reward: POST /v1/reward, or a number that its function returns"
        if kind and visit.overlong is not None and not visit.histories.parts:
            return rollout_error(visit.overlong)  # it could not even begin
        return RolloutError(boundary="workflow", kind=kind, message=message[:500]) if kind else None

    async def _episode(self, data: dict[str, Any], visit: Visit, end: End, problem: RolloutError | None) -> Episode:
        report = reported(end, visit.report)
        score = Score(None, problem) if problem else await self._scored(data, visit, end, report)
        team = Team(self._credit)
        own = {} if report is None else report.credit
        for talk, origin in visit.histories.parts:
            team.add(talk, {policy: own.get(policy) for policy in talk.policies}, parent=origin)
        episode = team.episode(
            score,
            forks=float(visit.histories.forks),
            rewritten=float(visit.histories.rewritten),
            refused_calls=float(visit.refused),
            sampling_replaced=float(visit.sampling_replaced),
        )
        if end.output:
            episode.record.append({"policy": "", "role": "output", "content": end.output})
        return episode

    async def _scored(self, data: dict[str, Any], visit: Visit, end: End, report: Report | None) -> Score:
        if self._score == "posted":
            return Score(_reward(report))
        if self._score == "exit":
            return Score(EXIT_REWARDS[end.code or 0])
        last = visit.histories.last
        talk, text = last[self.context.policies[0]] if self.context.policies[0] in last else list(last.values())[-1]
        return await talk.score(data, text if report is None or report.answer is None else report.answer)


def _reward(report: Report | None) -> float | None:
    return None if report is None else report.reward
