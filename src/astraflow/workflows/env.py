"""One policy in an environment: what it says is the next action, what it sees is the next user's turn."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from astraflow.lib.aio import one_line, within
from astraflow.protocol.errors import DeadlinePassed, UserError
from astraflow.workflows.api import (
    EngineGroup,
    Environment,
    Episode,
    EpisodeError,
    InferenceEngine,
    Options,
    RolloutWorkflow,
    Score,
    WorkflowContext,
    charged,
    is_text,
)
from astraflow.workflows.roles import Role, alone, user

T = TypeVar("T")
log = logging.getLogger(__name__)


class Env(RolloutWorkflow):
    """The reward is the sum of the environment's rewards; an episode that is cut by `max_turns` keeps what it has earned.

    Whatever the environment raises, and a step that is not (text, finite number, true or false), is an error of the environment; a
    `close` that fails is logged and counted, because what was earned is known by then.
    Options: `environment` (registered name, `astraflow list environments`), `environment_options`; `max_turns` (actions);
    `action` (regular expression; its first group in the last match is the action; empty = the whole answer), `no_action` (what the
    model is told when its answer has none, which costs a turn); `deadline_s` (of each call of the environment); one role in bare
    words (`template`: fields of the task, `prompt` is the first observation).
    """

    def __init__(self, context: WorkflowContext) -> None:
        super().__init__(context)
        options = Options("env", context.options)
        name = options.take("environment", "")
        self._settings = options.take("environment_options", {})
        self._max_turns = options.take("max_turns", 20, least=1)
        self._action = options.pattern("action", "", re.DOTALL, group=True)
        self._no_action = options.take("no_action", "There is no action in your answer.")
        self._deadline_s = options.take("deadline_s", 60.0, above=0)
        self._agent = Role.take(context, options, adds=())
        options.done()
        if context.environment is None:
            raise UserError("workflow 'env' options.environment: none are known in this process")
        self._make = context.environment(name)
        self._try(name)

    def _try(self, name: str) -> None:
        """Make one and close it: options that it refuses are known now. Blocks for `deadline_s` at most, each."""
        try:
            with charged("environment", "making it"):
                world: Environment = within(partial(self._make, self._settings), self._deadline_s, "environment making it")
        except (EpisodeError, DeadlinePassed) as error:
            raise UserError(f"workflow 'env' options.environment: {name!r}: {error}") from error
        try:
            within(lambda: world.close(), self._deadline_s, "environment close")
        except Exception as error:
            log.info("environment %s: close without a reset: %s", name, one_line(error))  # not every one expects that

    async def arun_episode(self, engine: InferenceEngine | EngineGroup, data: dict[str, Any]) -> Episode:
        threads = self.context.threads
        if threads.full:
            raise EpisodeError("environment", "stuck", f"{threads.left} calls of environments hang; none is begun until some of them end")
        world: Environment = await self._do("making it", partial(self._make, self._settings))
        try:
            episode = await self._play(world, engine, data)
        except BaseException:
            await self._close(world)
            raise
        episode.metrics["rollout/close_failed"] = float(not await self._close(world))
        return episode

    async def _play(self, world: Environment, engine: InferenceEngine | EngineGroup, data: dict[str, Any]) -> Episode:
        seen = await self._do("reset", lambda: _text("reset", world.reset(data)))
        talk = self._agent.open({**{key: value for key, value in data.items() if key != "messages"}, "prompt": seen})
        total, done, missing = 0.0, False, 0
        while not done and talk.turns < self._max_turns:
            text = await (self._agent.go_on if talk.turns else self._agent.answer)(engine, talk)
            if text is None:
                break  # no room to go on: what was earned counts
            action = self._found(text)
            missing += action is None
            if action is None:
                seen, reward, done = self._no_action, 0.0, False
            else:
                seen, reward, done = await self._do("step", partial(_step, world, action))
            total += reward
            if not done:
                talk.say(user(seen))
        episode = alone(talk, Score(_finite("the sum of rewards", total)))
        episode.metrics |= {"rollout/done": float(done), "rollout/no_action": float(missing)}
        return episode

    def _found(self, text: str) -> str | None:
        if not self._action.pattern:
            return text
        found = [match[1] for match in self._action.finditer(text)]
        return found[-1].strip() if found and found[-1] is not None else None

    async def _close(self, world: Environment) -> bool:
        """Whether it could be closed; nothing that goes wrong there changes the episode."""
        try:
            await self._do("close", world.close)
        except EpisodeError as error:
            log.warning("environment %s: %s", type(world).__name__, error)
            return False
        return True

    async def _do(self, what: str, call: Callable[[], T]) -> T:
        """In a thread of its own, because environments block and some never return; what goes wrong inside is the environment's error."""
        with charged("environment", what):
            try:
                return await self.context.threads.run(call, self._deadline_s, f"environment {what}")
            except DeadlinePassed:
                raise EpisodeError("environment", "timeout", f"{what} took longer than {self._deadline_s:g} s") from None
            except UserError as error:  # a package that is missing, an id that nobody knows
                raise EpisodeError("environment", "exception", f"{what}: {error}") from error


def _bad(what: str, problem: str) -> EpisodeError:
    return EpisodeError("environment", "bad_result", f"{what}: {problem}")


def _text(what: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _bad(what, f"the observation is {type(value).__name__}, expected text")
    if not is_text(value):
        raise _bad(what, "the observation has half a surrogate pair, which is no text")
    return value


def _finite(what: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise _bad(what, f"{value!r:.60} is not a finite number")
    return number


def _step(world: Environment, action: str) -> tuple[str, float, bool]:
    """A step and the check of what it returned, which is code of the environment's too (`__float__`, `__repr__`)."""
    result: Any = world.step(action)
    if not isinstance(result, tuple | list) or len(result) != 3:
        size = f" of {len(result)}" if isinstance(result, tuple | list) else ""
        raise _bad("step", f"returned {type(result).__name__}{size}, expected (observation, reward, done)")
    seen, reward, done = result
    if type(done).__name__ not in ("bool", "bool_"):  # numpy's too
        raise _bad("step", f"done is {done!r:.60}, expected true or false")
    return _text("step", seen), _finite("step: reward", reward), bool(done)
