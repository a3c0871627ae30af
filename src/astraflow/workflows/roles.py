"""What a workflow's author starts from: roles that are worded by options, and the conversations of an episode with their credit.

A workflow reads its `Role`s at construction, lets them open and continue conversations, puts each conversation into a `Team` with
what it is worth by itself, and returns `team.episode(score)`. The credit rule, an option of the recipe, does the rest:

    own         what the workflow says that this part did well (a verdict that was right, a solution that passed)
    shared      the trajectory's reward, for everybody
    team        the mean of all parts' own scores, for everybody
    difference  the trajectory's reward less what it would have been without this part (Wolpert & Tumer 2002)
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from astraflow.lib.aio import Contained
from astraflow.protocol.errors import AstraFlowError, UserError
from astraflow.protocol.rollout import Finish, Trajectory
from astraflow.workflows.api import EngineGroup, Episode, InferenceEngine, Options, Score, WorkflowContext, is_overlong
from astraflow.workflows.conversation import Conversation, Message, fill, messages_of

RULES = ("own", "shared", "team", "difference")
Value = float | None | Mapping[str, float | None]
"""For every speaker, or by policy; None = unscored."""


@dataclass(frozen=True)
class Role:
    """One policy's part: how its turns are worded and how it samples."""

    context: WorkflowContext
    policy: str
    template: str
    """Its user's turn; fields of the task and whatever the workflow adds."""
    system: str
    generation: dict[str, Any]
    """Overrides of the generation settings for this role."""
    chat: dict[str, Any]
    """Variables of the chat template (`enable_thinking: false`)."""

    @classmethod
    def take(
        cls,
        context: WorkflowContext,
        options: Options,
        place: int = 0,
        name: str = "",
        template: str = "{prompt}",
        system: str = "",
        adds: Collection[str] | None = None,
    ) -> Role:
        """Read `<name>_template`, `<name>_system`, `<name>_generation`, `<name>_chat`; without a name the bare words.

        place: position of its policy in `context.policies`; adds: fields of its template beside those of the task (None = any, so
        that a template is not held against the task's fields).
        """
        prefix = f"{name}_" if name else ""
        generation = options.take(f"{prefix}generation", {})
        try:
            context.request([0], **generation)
        except UserError as error:
            raise options.refuse(f"{prefix}generation", str(error)) from None
        return cls(
            context,
            context.policies[place],
            options.template(f"{prefix}template", template, None if adds is None else context.fields_with(*adds)),
            options.take(f"{prefix}system", system),
            generation,
            options.take(f"{prefix}chat", {}),
        )

    def open(self, data: Mapping[str, Any], **rendering: Any) -> Conversation:
        """A conversation that begins with the task: its `messages` as they are, else the template."""
        return Conversation(self.context, self.policy, messages_of(data, self.template, self.system), **self.chat, **rendering)

    def ask(self, fields: Mapping[str, Any], **rendering: Any) -> Conversation:
        """A conversation that begins with the template, whatever the task looks like (see `fields_of`)."""
        return self.open({"prompt": fields["problem"], **{key: fields[key] for key in fields if key != "messages"}}, **rendering)

    def say(self, talk: Conversation, fields: Mapping[str, Any]) -> None:
        """Continue a conversation with the template as the user's turn."""
        talk.say(user(fill(self.template, fields)))

    async def answer(self, engine: InferenceEngine | EngineGroup, talk: Conversation) -> str:
        """Speak; the text after its thoughts."""
        return after_thoughts(await talk.answer(engine, self.policy, **self.generation))

    async def go_on(self, engine: InferenceEngine | EngineGroup, talk: Conversation) -> str | None:
        """Speak again; None when the context has no room for it, and an episode ends with what it has."""
        try:
            return await self.answer(engine, talk)
        except AstraFlowError as error:
            if is_overlong(error):
                return None
            raise


def check_policies(context: WorkflowContext, workflow: str, *roles: str) -> None:
    """Raise UserError unless there is one policy per role (the same one may play several)."""
    if len(context.policies) != len(roles):
        raise UserError(f"workflow {workflow!r} policies: {context.policies}, expected [{', '.join(roles)}]")


def same_tokenizer(context: WorkflowContext, workflow: str) -> None:
    """Raise UserError unless all policies share one tokenizer, as those that speak in one context must."""
    if len({context.tokenizers[policy].hash for policy in context.policies}) > 1:
        raise UserError(f"workflow {workflow!r} policies: {context.policies} speak in one context, but their tokenizers differ")


def fields_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """The task's fields and `problem`: its prompt, or the last user's turn of its messages."""
    return {**data, "problem": data["prompt"] if "prompt" in data else messages_of(data)[-1]["content"]}


def user(text: str) -> Message:
    """A user's turn."""
    return {"role": "user", "content": text}


def after_thoughts(text: str) -> str:
    """What stands after the thoughts of a model that writes them."""
    return text.rpartition("</think>")[2].strip() if "</think>" in text else text


async def together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """All at once; the first failure cancels the rest, so that nothing outlives the episode."""
    tasks = [asyncio.ensure_future(Contained(one)) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def alone(talk: Conversation, score: Score) -> Episode:
    """One conversation as the whole trajectory, credited with its reward."""
    team = Team("shared")
    team.add(talk)
    return team.episode(score)


@dataclass(frozen=True)
class _Part:
    talk: Conversation
    own: Value
    without: Value
    parent: Conversation | None


class Team:
    """The conversations of one episode, in the order of their segments."""

    def __init__(self, rule: str = "own") -> None:
        """`rule`: one of RULES, an option of the workflow."""
        self._rule = rule
        self._parts: list[_Part] = []

    def add(self, talk: Conversation, own: Value = None, *, without: Value = 0.0, parent: Conversation | None = None) -> None:
        """`own`: what it is worth by itself; `without`: the episode's reward had it not been there; `parent`: who started it."""
        self._parts.append(_Part(talk, own, without, parent))

    def episode(self, score: Score, **metrics: float) -> Episode:
        """Everything as one trajectory; metrics are reported as `rollout/<name>`."""
        trajectory = Trajectory(index=0, reward=score.reward, error=score.error, finish=self._finish(score))
        record: list[Message] = []
        place: dict[int, int] = {}
        for part in self._parts:
            place[id(part.talk)] = first = len(trajectory.segments)
            parent = None if part.parent is None else place[id(part.parent)]
            trajectory.segments += part.talk.segments(self._credit(part, score), first=first, parent=parent)
            record += part.talk.record()
        counts = {"turns": float(sum(p.talk.turns for p in self._parts)), "broken_prefix": float(sum(p.talk.broken for p in self._parts))}
        return Episode(trajectory, record, {f"rollout/{name}": value for name, value in {**counts, **metrics}.items()})

    def _finish(self, score: Score) -> Finish:
        if score.error is not None:
            return "error"
        return "length" if any(part.talk.finish == "length" for part in self._parts) else "stop"

    def _credit(self, part: _Part, score: Score) -> dict[str, float | None]:
        policies = part.talk.policies
        if self._rule == "own":
            return _by_policy(part.own, policies)
        if score.reward is None or self._rule == "shared":
            return {}  # the trajectory's reward
        if self._rule == "team":
            return dict.fromkeys(policies, _mean([value for p in self._parts for value in _by_policy(p.own, p.talk.policies).values()]))
        without = _by_policy(part.without, policies)
        return {policy: None if lost is None else score.reward - lost for policy, lost in without.items()}


def _by_policy(value: Value, policies: Sequence[str]) -> dict[str, float | None]:
    return {policy: value.get(policy) for policy in policies} if isinstance(value, Mapping) else dict.fromkeys(policies, value)


def _mean(values: Sequence[float | None]) -> float | None:
    scored = [value for value in values if value is not None]
    return sum(scored) / len(scored) if scored else None
