"""An agent of somebody else during one episode: what it may ask for, what it has reported, and why it had to stop.

The workflow makes a `Visit`, the rollout service's door lets it in (`Door.admit`: an address and a key for the program) and brings its
calls here, until the workflow dismisses it.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from astraflow.protocol.errors import AstraFlowError, Conflict, Refused, UserError
from astraflow.workflows.api import Attributed, EngineGroup, WorkflowContext, is_overlong
from astraflow.workflows.histories import Asked, Histories, Said


class LimitReached(Refused):
    """The episode has had all the calls or tokens that its recipe gives it; trying again does not help."""


class Report(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What an agent posts about itself: `POST /v1/reward`."""

    reward: float | None = None
    """The trajectory's reward."""
    credit: dict[str, float | None] = {}
    """By policy, for the rule `own`."""
    answer: str | None = None
    """What the reward function looks at, instead of the last answer of the first policy."""


@dataclass(frozen=True)
class Admission:
    """What a program needs to come in."""

    base_url: str
    """Up to and including the version: OpenAI's clients take it as it is, Anthropic's without the last part."""
    key: str

    @property
    def anthropic_url(self) -> str:
        return self.base_url.removesuffix("/v1")


@dataclass
class Limits:
    """Of one episode."""

    calls: int
    tokens: int
    """Sampled, in all calls together."""


@dataclass
class Visit:
    """State of one agent; every method is called in the loop of the rollout service."""

    context: WorkflowContext
    engines: EngineGroup
    limits: Limits
    histories: Histories
    calls: int = 0
    tokens: int = 0
    refused: int = 0
    """Calls over a limit."""
    sampling_replaced: int = 0
    """Calls whose temperature, top_p or top_k may not be trained on, so that the recipe's were taken."""
    report: Report | None = None
    reported: asyncio.Event = field(default_factory=asyncio.Event)
    failure: Exception | None = None
    """What the engine failed with: the episode is over."""
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    overlong: AstraFlowError | None = None
    """The last prompt that did not fit."""

    @property
    def policies(self) -> list[str]:
        return self.context.policies

    async def ask(self, asked: Asked) -> list[Said]:
        """The answers. Raises LimitReached, UserError (the template refuses), or what the engine raises."""
        for name, had, most in (("max_calls", self.calls, self.limits.calls), ("max_tokens", self.tokens, self.limits.tokens)):
            if had >= most:
                self.refused += 1
                raise LimitReached(f"{name}: this episode has had its {most}")
        self.calls += 1
        try:
            answers = await self.histories.reply(self.engines, asked)
        except AstraFlowError as error:
            if isinstance(error, Attributed) and error.boundary == "engine":
                self.failure = self.failure or error
                self.failed.set()
            if is_overlong(error):
                self.overlong = error
            raise
        self.tokens += sum(len(said.ids) for said in answers)
        return answers

    def take(self, report: Report) -> None:
        """Note what was posted; the same once more is fine. Raises UserError naming the field, Conflict for another one."""
        for name, value in (("reward", report.reward), *((f"credit.{policy}", value) for policy, value in report.credit.items())):
            if value is not None and not math.isfinite(value):
                raise UserError(f"{name}: {value} is not a finite number")
        for policy in report.credit:
            if policy not in self.policies:
                raise UserError(f"credit: {policy!r} is no policy of this workflow; expected {', '.join(self.policies)}")
        if self.report is not None and self.report != report:
            raise Conflict("reward: this episode's was posted already, and it was another one")
        self.report = report
        self.reported.set()


class Door(Protocol):
    """Where agents come in; one per rollout service."""

    def admit(self, visit: Visit) -> Admission:
        """From now on the key opens the address."""
        ...

    def dismiss(self, admission: Admission) -> None:
        """The key is worth nothing any more; calls that run are cut."""
        ...
