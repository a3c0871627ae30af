from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from astraflow.environments.api import EnvironmentFailure
from astraflow.lib.aio import Threads, poll_until
from astraflow.protocol.errors import UnknownName, UserError
from astraflow.workflows.api import Episode, EpisodeError
from astraflow.workflows.env import Env

SHUT: list[str] = []


class Door:
    """Opens for the number that the task names; "break" breaks it and "wait" never ends."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        if set(options) - {"worth"}:
            raise UserError(f"environment 'door' options: {sorted(options)}")
        self.worth = options.get("worth", 1.0)
        self.never = threading.Event()

    def reset(self, data: Mapping[str, Any]) -> str:
        self.key = str(data["seed"])
        return "door"

    def step(self, action: str) -> tuple[str, float, bool]:
        if action == "break":
            raise EnvironmentFailure("broken", "it fell apart")
        if action == "wait":
            self.never.wait(60)
        return ("open", self.worth, True) if action == self.key else ("shut", -0.25, False)

    def close(self) -> None:
        self.never.set()
        SHUT.append(self.key)


def make(name: str) -> Any:
    if name != "door":
        raise UnknownName(f"environment {name!r} is unknown; known: door")
    return Door


def play(context: Any, script: Any, *answers: Any, **options: Any) -> Episode:
    made = replace(context(None, environment="door", **options), environment=make)
    return asyncio.run(Env(made).arun_episode(script(*answers), {"seed": 7}))


def test_rewards_of_all_steps_add_up_and_what_is_seen_is_context(context, script, tokenizer):
    episode = play(context, script, "1", "7", environment_options={"worth": 2.0})
    assert episode.trajectory.reward == 1.75
    assert [turn["content"] for turn in episode.record] == ["door", "1", "shut", "7"]
    assert episode.metrics["rollout/done"] == 1


def test_the_last_turn_ends_an_episode_that_is_not_done_with_what_it_has(context, script):
    episode = play(context, script, "1", "2", max_turns=2)
    assert (episode.trajectory.reward, episode.trajectory.error, episode.metrics["rollout/done"]) == (-0.5, None, 0)
    episode = play(context, script, "1", EpisodeError("prompt", "overlong"))
    assert episode.trajectory.reward == -0.25


def test_an_answer_without_an_action_costs_a_turn_and_is_counted(context, script):
    episode = play(context, script, "hm", "go 1, no: go 7", action=r"go (\d)", no_action="what?")
    assert [turn["content"] for turn in episode.record][2] == "what?"
    assert (episode.trajectory.reward, episode.metrics["rollout/no_action"]) == (1.0, 1)


@pytest.mark.parametrize(("action", "kind"), [("break", "broken"), ("wait", "timeout")])
def test_a_world_that_fails_is_the_environment_s_error_and_is_closed(context, script, action, kind):
    SHUT.clear()
    with pytest.raises((EpisodeError, EnvironmentFailure)) as caught:
        play(context, script, action, deadline_s=0.1)
    assert (caught.value.boundary, caught.value.kind) == ("environment", kind)
    assert SHUT == ["7"]


class Given:
    """Each method does what the test says."""

    def __init__(self, **calls: Callable[..., Any]) -> None:
        self.calls = calls
        self.closed = 0

    def reset(self, data: Mapping[str, Any]) -> Any:
        return self.calls["reset"]() if "reset" in self.calls else "at"

    def step(self, action: str) -> Any:
        return self.calls["step"]() if "step" in self.calls else ("end", 1.0, True)

    def close(self) -> None:
        self.closed += 1
        if "close" in self.calls:
            self.calls["close"]()


def play_given(context: Any, script: Any, world: Given, **options: Any) -> Episode:
    worlds = iter((Given(), world))  # the first is made to try the options
    made = replace(context(None, environment="given", **options), environment=lambda name: lambda values: next(worlds))
    return asyncio.run(Env(made).arun_episode(script("1", "1", "1"), {"seed": 7}))


def raising(error: BaseException) -> Callable[[], Any]:
    def call() -> Any:
        raise error

    return call


ORDINARY = (RuntimeError("x"), KeyError("x"), TimeoutError("x"), StopIteration(), UserError("x"))
FATAL = (SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), BaseExceptionGroup("x", [SystemExit()]))


@pytest.mark.parametrize("error", [*ORDINARY, *FATAL], ids=lambda error: type(error).__name__)
def test_whatever_an_environment_raises_is_the_environment_s_error_and_costs_no_reward_at_its_end(context, script, error, caplog):
    for method in ("reset", "step"):
        world = Given(**{method: raising(error)})
        with pytest.raises(EpisodeError) as caught:
            play_given(context, script, world)
        assert (caught.value.boundary, caught.value.kind, world.closed) == ("environment", "exception", 1)
        assert str(caught.value).startswith(f"{method}: ")
    episode = play_given(context, script, Given(close=raising(error)))
    assert (episode.trajectory.reward, episode.metrics["rollout/close_failed"]) == (1.0, 1.0)
    assert "environment Given: close: " in caplog.text


class Hostile:
    def __float__(self) -> float:
        raise SystemExit(3)

    __repr__ = __float__  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (None, "bad_result"),
        (("x", 1.0, True, False, {}), "bad_result"),
        ((None, 1.0, True), "bad_result"),
        (("\ud800", 1.0, True), "bad_result"),
        (("x", None, True), "bad_result"),
        (("x", "1.0", True), "bad_result"),
        (("x", float("nan"), True), "bad_result"),
        (("x", 10**400, True), "bad_result"),
        (("x", 1.0, "yes"), "bad_result"),
        (("x", Hostile(), True), "exception"),
        (("x", 1.0, Hostile()), "exception"),
    ],
    ids=range(11),
)
def test_a_step_that_is_not_text_number_and_truth_is_the_environment_s_error(context, script, result, kind):
    with pytest.raises(EpisodeError) as caught:
        play_given(context, script, Given(step=lambda: result))
    assert (caught.value.boundary, caught.value.kind) == ("environment", kind)
    with pytest.raises(EpisodeError, match="reset: the observation is NoneType, expected text"):
        play_given(context, script, Given(reset=lambda: None))


def test_worlds_that_hang_keep_their_deadline_starve_no_other_and_are_counted_and_bounded(context, script):
    """More of them than any shared pool has threads, each hung in `step` and in `close`."""
    release = threading.Event()
    worlds = [Given(step=release.wait, close=release.wait) for _ in range(40)]

    async def scenario() -> None:
        threads = Threads(most=40)
        hanging, flow = (
            Env(replace(context(None, environment="given", deadline_s=seconds), threads=threads, environment=lambda _, turn=turn: turn))
            for seconds, turn in ((0.5, iter([Given(), *worlds]).__next__), (60.0, Given))
            for turn in [lambda values, make=turn: make()]
        )
        hung = [asyncio.create_task(hanging.arun_episode(script("1"), {"seed": 1})) for _ in worlds]
        started = time.monotonic()
        healthy = await asyncio.gather(*(flow.arun_episode(script("1"), {"seed": 1}) for _ in range(2)))
        assert [episode.trajectory.reward for episode in healthy] == [1.0, 1.0]
        ended = await asyncio.gather(*hung, return_exceptions=True)
        assert time.monotonic() - started < 30, "a queue of them would take 40 s"
        assert [(error.boundary, error.kind) for error in ended] == [("environment", "timeout")] * 40
        assert threads.left >= 40, "each `close` at least"
        with pytest.raises(EpisodeError, match="calls of environments hang") as caught:
            await flow.arun_episode(script("1"), {"seed": 1})
        assert (caught.value.boundary, caught.value.kind) == ("environment", "stuck")
        release.set()
        await poll_until(lambda: threads.left == 0, 60, "the end of the threads")
        assert (await flow.arun_episode(script("1"), {"seed": 1})).trajectory.reward == 1.0

    asyncio.run(scenario())


def test_the_one_that_is_made_to_try_the_options_is_closed_and_one_that_hangs_is_refused_at_its_deadline(context):
    world, release = Given(), threading.Event()
    made = context(None, environment="given", deadline_s=0.2)
    Env(replace(made, environment=lambda name: lambda values: world))
    assert world.closed == 1
    started = time.monotonic()
    with pytest.raises(UserError, match=r"'given': environment making it: not done within 0\.2 s"):
        Env(replace(made, environment=lambda name: lambda values: release.wait(60)))
    Env(replace(made, environment=lambda name: lambda values: Given(close=lambda: release.wait(60))))
    assert time.monotonic() - started < 30
    release.set()


def test_a_group_that_took_no_part_in_the_match_is_no_action(context, script):
    episode = play(context, script, "go", "go 7", action=r"go( \d)?")
    assert (episode.trajectory.reward, episode.metrics["rollout/no_action"]) == (1.0, 1)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"environment": "dor"}, "environment 'dor'"),
        ({"environment_options": {"worht": 1}}, "worht"),
        ({"max_turns": 0}, r"max_turns: 0, expected at least 1"),
        ({"deadline_s": 0}, r"deadline_s: 0.0, expected more than 0"),
        ({"action": "("}, r"action: '\(' is no regular expression"),
        ({"action": "go"}, "no group"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_runs(context, wrong, says):
    with pytest.raises(UserError, match=says):
        Env(replace(context(None, **{"environment": "door", **wrong}), environment=make))
    with pytest.raises(UserError, match="none are known"):
        Env(context(None, environment="door"))
