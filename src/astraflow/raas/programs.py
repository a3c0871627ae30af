"""Registered workflows: a name and options that came over the wire become an object that runs episodes."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from astraflow.environments.api import ENVIRONMENTS
from astraflow.lib.aio import one_line
from astraflow.lib.registry import closest, import_attr
from astraflow.protocol.errors import UnknownName, UserError
from astraflow.protocol.rollout import RegisterWorkflow, WorkflowSpec
from astraflow.raas.config import GenerationConfig, RewardsConfig
from astraflow.raas.episode import ChargedReward, ChargedThreads, training_refusal
from astraflow.raas.models import ServedModel
from astraflow.rewards.api import REWARDS, AsyncRewardWrapper
from astraflow.workflows.api import WORKFLOWS, RolloutWorkflow, WorkflowContext
from astraflow.workflows.config import AgentConfig
from astraflow.workflows.runners import LEFT
from astraflow.workflows.tools import CALLS
from astraflow.workflows.visit import Door

MAX_PROGRAMS = 256
"""One per (workflow, options) of an experiment: a handful. The bound is against a peer that registers without end."""


@dataclass(frozen=True)
class Program:
    workflow_id: str
    spec: WorkflowSpec
    workflow: RolloutWorkflow
    training_refusal: str
    """Why its generation settings may not be trained on; empty = they may (numerics 2)."""


class Programs:
    """By workflow id."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        generation: GenerationConfig,
        rewards: RewardsConfig,
        *,
        local_workflows: Mapping[str, str] | None = None,
        local_rewards: Mapping[str, str] | None = None,
        local_environments: Mapping[str, str] | None = None,
        agents: Mapping[str, AgentConfig] | None = None,
        door: Door | None = None,
        plugins: list[str] | None = None,
    ) -> None:
        self._models, self._generation, self._rewards_config = models, generation, rewards
        self._local_workflows, self._local_rewards = dict(local_workflows or {}), dict(local_rewards or {})
        self._local_environments = dict(local_environments or {})
        self._agents, self._door = dict(agents or {}), door
        self._plugins = list(plugins or [])
        self._programs: dict[str, Program] = {}
        self._threads = ChargedThreads()
        self._rewards: dict[str, AsyncRewardWrapper] = {}

    def __len__(self) -> int:
        return len(self._programs)

    @property
    def ids(self) -> list[str]:
        return list(self._programs)

    def get(self, workflow_id: str) -> Program | None:
        return self._programs.get(workflow_id)

    def using(self, policy: str) -> set[str]:
        """Ids of the workflows that sample from this policy."""
        return {program.workflow_id for program in self._programs.values() if policy in program.spec.policies}

    def preload(self, spec: WorkflowSpec) -> None:
        """Import what the names stand for: in a thread, because some libraries take seconds. Raises as `register` does."""
        _named(spec.workflow, "workflow", WORKFLOWS, self._local_workflows)
        if spec.reward:
            _named(spec.reward, "reward", REWARDS, self._local_rewards)

    def register(self, call: RegisterWorkflow) -> None:
        """Raises UnknownName with the closest name, or UserError for options that cannot be used. The same id twice is fine."""
        known = self._programs.get(call.workflow_id)
        if known is not None and known.spec == call.spec:
            return
        if len(self._programs) >= MAX_PROGRAMS:
            raise UserError(f"workflow_id {call.workflow_id!r}: {MAX_PROGRAMS} workflows are registered already")
        spec = call.spec
        self._check_policies(spec)
        factory = _named(spec.workflow, "workflow", WORKFLOWS, self._local_workflows)
        settings = {**msgspec.to_builtins(self._generation), **spec.generation}
        context = WorkflowContext(
            tokenizers={policy: self._models[policy].tokenizer for policy in spec.policies},
            policies=list(spec.policies),
            reward=ChargedReward(self._reward(spec.reward)) if spec.reward else None,
            options=dict(spec.options),
            generation=settings,
            context_length=min((self._models[policy].context_length for policy in spec.policies), default=0),
            environment=lambda name: _named(name, "environment", ENVIRONMENTS, self._local_environments),
            threads=self._threads,
            agents=self._agents,
            door=self._door,
        )
        refusal = training_refusal(context.request([0]))  # also checks names and types of the settings
        try:
            workflow = factory(context)
        except UserError:
            raise
        except (TypeError, LookupError, ValueError, AttributeError, re.error) as error:
            raise UserError(f"workflow {spec.workflow!r}: options {spec.options!r} do not fit: {one_line(error)}") from None
        self._programs[call.workflow_id] = Program(call.workflow_id, spec, workflow, refusal)

    def _check_policies(self, spec: WorkflowSpec) -> None:
        if not spec.policies:
            raise UserError(f"workflow {spec.workflow!r}: policies: names none; served here: {', '.join(self._models)}")
        for policy in spec.policies:
            if policy not in self._models:
                raise UnknownName(
                    f"workflow {spec.workflow!r}: policy {policy!r} is not served here{closest(policy, list(self._models))}; "
                    f"served: {', '.join(self._models)}"
                )

    def _reward(self, name: str) -> AsyncRewardWrapper:
        """One set of worker processes per reward, however many workflows use it."""
        if name not in self._rewards:
            _named(name, "reward", REWARDS, self._local_rewards)
            target = self._local_rewards.get(name, name)
            config = self._rewards_config
            self._rewards[name] = AsyncRewardWrapper(target, config.workers, config.deadline_s, plugins=self._plugins)
        return self._rewards[name]

    def counts(self) -> dict[str, float]:
        """For status: `reward/<name>/<verdict>`, `reward/<name>/error_rate` (of the last minute), `raas/hung_calls/environment`,
        `raas/hung_calls/tool` and `raas/hung_calls/agent` (now)."""
        now = time.monotonic()
        hung = {"environment": self._threads.left, "tool": CALLS.left, "agent": LEFT.left}
        out = {f"raas/hung_calls/{kind}": float(count) for kind, count in hung.items()}
        for name, reward in self._rewards.items():
            out |= {f"reward/{name}/{kind}": float(n) for kind, n in reward.counts.items()}
            out[f"reward/{name}/error_rate"] = reward.recent.rate(now)
        return out

    def complaint(self, program: Program) -> str:
        """Why this workflow's reward is not trusted now; empty = it is."""
        name, limit = program.spec.reward, self._rewards_config.max_error_rate
        rate = self._rewards[name].recent.rate(time.monotonic()) if name else 0.0
        what = f"reward {name!r}: {rate:.0%} of its verdicts in the last minute are errors (rewards.max_error_rate {limit:g})"
        return what if rate > limit else ""

    def complaints(self) -> list[str]:
        """Those of all workflows, each once."""
        return list(dict.fromkeys(self.complaint(program) for program in self._programs.values()))

    async def close(self) -> None:
        """Kill and reap the reward workers."""
        for reward in self._rewards.values():
            await reward.close()


def _named(name: str, family: str, registry: Any, local: Mapping[str, str]) -> Any:
    """A registered or locally configured object. Nothing that came over the wire names code: `module:attr` is refused."""
    if name in local:
        return import_attr(local[name])
    if ":" in name:
        raise UnknownName(f"{family} {name!r}: only names are accepted from the wire; known: {', '.join(registry.names())}")
    if name not in registry:
        known = sorted({*registry.names(), *local})
        raise UnknownName(f"{family} {name!r} is unknown{closest(name, known)}; known: {', '.join(known)}")
    return registry.get(name)
