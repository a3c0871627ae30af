"""Environments of other packages. Each is imported when an episode begins; without it the error says what to install.

    gymnasium       any registered id (toy text, your own): reset(seed) and step(action) as Gymnasium defines them
    reasoning_gym   one generated question, answered once
    textarena       its games for one player
    verifiers       `VerifiersTasks`: a base class, because its task sets are code that only this process may name
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from itertools import islice
from typing import Any

from astraflow.environments.api import EnvironmentFailure, Options
from astraflow.protocol.errors import UserError

GLOBAL_RANDOM = threading.Lock()
"""TextArena draws its boards from Python's one random state."""


def imported(module: str, environment: str) -> Any:
    """The package. Raises UserError that says what to install."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.replace("_", "-").partition(".")[0]
        raise UserError(f"environment {environment!r} needs the package: pip install {package} ({error})") from None


class GymShaped:
    """Any object with Gymnasium's reset(seed=…) and step(action): the base of what wraps one."""

    actions: list[str]
    """Words for the actions 0, 1, …; empty = the action's text goes in as a whole number where one is expected, else as it is."""
    world: Any

    def reset(self, data: Mapping[str, Any]) -> str:
        self.world = self.make(data)
        observation, _ = self.world.reset(seed=int(data.get("seed", 0)))
        return self._shown(observation)

    def make(self, data: Mapping[str, Any]) -> Any:
        """The wrapped object of one episode."""
        raise NotImplementedError(f"{type(self).__name__}.make")

    def step(self, action: str) -> tuple[str, float, bool]:
        try:
            value = self._action(action.strip())
        except ValueError as error:
            return f"{error}\n{self._shown('')}".strip(), 0.0, False
        observation, reward, terminated, truncated, _ = self.world.step(value)
        return self._shown(observation), float(reward), bool(terminated or truncated)

    def close(self) -> None:
        if hasattr(self, "world"):
            self.world.close()

    def _action(self, text: str) -> Any:
        if self.actions:
            if text.lower() not in self.actions:
                raise ValueError(f"{text!r} is no action; actions: {', '.join(self.actions)}")
            return self.actions.index(text.lower())
        count = getattr(getattr(self.world, "action_space", None), "n", None)
        if count is None:
            return text
        with suppress(ValueError):
            if 0 <= int(text) < count:
                return int(text)
        raise ValueError(f"{text!r} is no action; actions: 0 … {count - 1}")

    def _shown(self, observation: Any) -> str:
        """A drawing in text where the environment makes one, else the observation."""
        drawn = self.world.render() if getattr(self.world, "render_mode", None) == "ansi" else None
        return str(observation if drawn is None else drawn).strip("\n")


class Gymnasium(GymShaped):
    """Options: `id`, `kwargs` (of `gymnasium.make`; `render_mode: ansi` shows a drawing), `actions` (words for 0, 1, …)."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        options = Options("gymnasium", values)
        self._id, self._kwargs = options.take("id", ""), options.take("kwargs", {})
        self.actions = [str(word).lower() for word in options.take("actions", [])]
        options.done()
        if not self._id or ":" in self._id:  # `module:id` would import code that only this process may name
            raise UserError(f"environment 'gymnasium' options.id: {self._id!r}, expected a registered id such as FrozenLake-v1")

    def make(self, data: Mapping[str, Any]) -> Any:
        gymnasium = imported("gymnasium", "gymnasium")
        try:
            return gymnasium.make(self._id, **self._kwargs)
        except (gymnasium.error.Error, TypeError) as error:
            raise UserError(f"environment 'gymnasium' options: {self._id!r} {self._kwargs}: {error}") from None


class ReasoningGym:
    """Options: `task` (a set of reasoning-gym), `config` (its settings), `size`; the task's `seed` chooses the entry."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        options = Options("reasoning_gym", values)
        self._task, self._config, self._size = options.take("task", "leg_counting"), options.take("config", {}), options.take("size", 500)
        options.done()

    def reset(self, data: Mapping[str, Any]) -> str:
        gym = imported("reasoning_gym", "reasoning_gym")
        self._set = gym.create_dataset(self._task, seed=0, size=self._size, **self._config)
        self._entry = self._set[int(data.get("seed", 0)) % self._size]
        return str(self._entry["question"])

    def step(self, action: str) -> tuple[str, float, bool]:
        return "", float(self._set.score_answer(action.strip(), self._entry)), True

    def close(self) -> None:
        return


class TextArena:
    """Options: `id` (a game for one player), `kwargs` (its settings). The game's own words for a wrong move go to the model."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        options = Options("textarena", values)
        self._id, self._kwargs = options.take("id", "GuessTheNumber-v0"), options.take("kwargs", {})
        options.done()

    def reset(self, data: Mapping[str, Any]) -> str:
        arena = imported("textarena", "textarena")
        if self._id not in arena.envs.registration.ENV_REGISTRY:
            raise UserError(f"environment 'textarena' options.id: {self._id!r} is no game of textarena")
        seed = int(data.get("seed", 0))
        with GLOBAL_RANDOM:
            random.seed(seed)
            self._game = arena.make(self._id, **self._kwargs)
            self._game.reset(num_players=1, seed=seed)
        return str(self._game.get_observation()[1])

    def step(self, action: str) -> tuple[str, float, bool]:
        done, _ = self._game.step(action)
        if not done:
            return str(self._game.get_observation()[1]), 0.0, False
        rewards, _ = self._game.close()
        return "", float((rewards or {}).get(0, 0.0)), True

    def close(self) -> None:
        return


class VerifiersTasks:
    """The tasks of a verifiers v1 `Taskset`, each answered once and scored by its own `@reward` functions.

    Subclass it with `taskset` in a module of yours and name that in `raas.environments` or as an entry point. Options: `size` (tasks
    to choose from by the task's `seed`), and whatever `taskset` takes. Rewards that need a container are not run here: a task that has
    no other is a failure and not a 0.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self._size = self._values.pop("size", 500)

    def taskset(self, **options: Any) -> Any:
        """The `Taskset` object."""
        raise NotImplementedError(f"{type(self).__name__}.taskset")

    def reset(self, data: Mapping[str, Any]) -> str:
        place = int(data.get("seed", 0)) % self._size
        self._task = next(islice(iter(self.taskset(**self._values)), place, None), None)
        if self._task is None:
            raise EnvironmentFailure("no_task", f"{type(self).__name__}: there is no task {place}; options.size is {self._size}")
        return "\n\n".join(text for text in (self._task.data.system_prompt, self._task.data.prompt_text) if text)

    def step(self, action: str) -> tuple[str, float, bool]:
        assert self._task is not None
        trace = self._trace(self._task, action)
        asyncio.run(self._task.score(trace))
        if not trace.rewards or None in trace.rewards.values():
            raise EnvironmentFailure("unscored", f"{type(self).__name__}: no reward of this task runs without a container")
        return "", float(trace.reward), True

    def _trace(self, task: Any, answer: str) -> Any:
        """The one exchange as verifiers records it."""
        v1, graph, trace = (imported(f"verifiers.v1{part}", "verifiers") for part in ("", ".graph", ".trace"))
        asked = graph.MessageNode(message=v1.UserMessage(content=task.data.prompt_text))
        said = graph.MessageNode(parent=0, sampled=True, message=v1.AssistantMessage(content=answer))
        return trace.Trace(
            task=trace.TraceTask(type=type(task).__name__, data=task.data),
            agent=trace.AgentInfo(config=v1.AgentConfig()),
            nodes=[asked, said],
        )

    def close(self) -> None:
        return
