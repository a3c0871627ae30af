from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from astraflow.environments.adapters import Gymnasium, GymShaped, ReasoningGym, TextArena, VerifiersTasks
from astraflow.environments.api import ENVIRONMENTS, EnvironmentFailure
from astraflow.protocol.errors import UserError


class Line:
    """Gymnasium's shape without the package: walk from 0 to 2."""

    def __init__(self) -> None:
        self.action_space = type("Discrete", (), {"n": 2})()
        self.closed = False

    def reset(self, seed: int) -> tuple[int, dict[str, Any]]:
        self.at = seed
        return self.at, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.at += 1 if action else -1
        return self.at, float(self.at == 2), self.at == 2, self.at < -1, {}

    def close(self) -> None:
        self.closed = True


class Walk(GymShaped):
    def __init__(self, values: Mapping[str, Any]) -> None:
        self.actions = list(values.get("actions", []))

    def make(self, data: Mapping[str, Any]) -> Line:
        return Line()


def test_every_listed_environment_loads():
    for name in ENVIRONMENTS.names():
        assert callable(ENVIRONMENTS.get(name))


def test_an_object_of_gymnasium_s_shape_is_an_environment():
    walk = Walk({})
    assert walk.reset({"seed": 0}) == "0"
    assert walk.step("1") == ("1", 0.0, False)
    assert walk.step(" 1 ") == ("2", 1.0, True)
    walk.close()
    assert walk.world.closed
    walk = Walk({"actions": ["left", "right"]})
    walk.reset({})
    assert [walk.step("LEFT")[2], walk.step("left")[2]] == [False, True], "cut off is over too"


@pytest.mark.parametrize(
    ("actions", "action", "known"), [([], "2", "0 … 1"), ([], "go", "0 … 1"), (["left", "right"], "up", "left, right")]
)
def test_a_wrong_action_is_something_that_the_model_sees(actions, action, known):
    walk = Walk({"actions": actions})
    walk.reset({"seed": 0})
    seen, reward, done = walk.step(action)
    assert repr(action) in seen
    assert known in seen
    assert (reward, done, walk.world.at) == (0.0, False, 0)


def test_a_real_toy_game_of_gymnasium_is_walked_to_its_goal():
    pytest.importorskip("gymnasium")
    lake = Gymnasium(
        {
            "id": "FrozenLake-v1",
            "kwargs": {"is_slippery": False, "render_mode": "ansi"},
            "actions": ["left", "down", "right", "up"],
        }
    )
    assert "SFFF" in lake.reset({"seed": 1}).replace("\x1b[41m", "").replace("\x1b[0m", "")
    steps = [lake.step(word) for word in ("down", "down", "right", "right", "down", "right")]
    assert [done for _, _, done in steps] == [False] * 5 + [True]
    assert steps[-1][1] == 1.0
    assert lake.step("sideways")[2] is False
    lake.close()


def test_an_id_may_not_name_code_and_an_unknown_one_is_an_error():
    for wrong in ("", "os:Thing-v0"):
        with pytest.raises(UserError, match=r"environment 'gymnasium' options\.id"):
            Gymnasium({"id": wrong})
    pytest.importorskip("gymnasium")
    with pytest.raises(UserError, match="Nowhere-v9"):
        Gymnasium({"id": "Nowhere-v9"}).reset({})


def test_a_question_of_reasoning_gym_is_answered_once():
    gym = ReasoningGym({"task": "leg_counting", "size": 4})
    assert "legs" in gym.reset({"seed": 5})
    answer = str(gym._entry["answer"])
    assert gym.step(f" {answer} ") == ("", 1.0, True)
    other = ReasoningGym({"task": "leg_counting", "size": 4})
    assert other.reset({"seed": 1}) == str(gym._entry["question"]), "1 = 5 modulo 4"
    seen, reward, done = other.step("x")
    assert (seen, done) == ("", True)
    assert reward < 0.5


def test_a_game_of_textarena_is_played_to_its_end_and_a_seed_is_a_board():
    pytest.importorskip("textarena")
    game = TextArena({"id": "GuessTheNumber-v0"})
    assert "number between" in game.reset({"seed": 3})
    steps = [game.step("[1]")]
    while not steps[-1][2] and len(steps) < 20:
        steps.append(game.step(f"[{len(steps) + 1}]"))
    assert (steps[-1][2], steps[-1][1] <= 1) == (True, True)
    again = TextArena({"id": "GuessTheNumber-v0"})
    again.reset({"seed": 3})
    assert [again.step(f"[{guess}]") for guess in range(1, len(steps) + 1)] == steps
    with pytest.raises(UserError, match="Nowhere-v0"):
        TextArena({"id": "Nowhere-v0"}).reset({})


def test_tasks_of_verifiers_are_scored_by_their_own_rewards():
    # Not among the extras of `make setup`: with TextArena and renderers there already, verifiers 0.4 brings 41 further packages
    # (100 MB: clients of model vendors, of a cloud of sandboxes and of its tunnel), all for this one test.
    v1 = pytest.importorskip("verifiers.v1", reason="41 further packages: pip install -c constraints/cpu.txt -e .[verifiers]")

    class Data(v1.TaskData):  # type: ignore[misc]
        answer: str

    class Sum(v1.Task[Data, v1.State, v1.TaskConfig]):  # type: ignore[misc]
        @v1.reward
        async def right(self, trace: v1.Trace) -> float:
            return float(trace.last_reply == self.data.answer)

    class InABox(v1.Task[Data, v1.State, v1.TaskConfig]):  # type: ignore[misc]
        @v1.reward
        async def right(self, trace: v1.Trace, runtime: Any) -> float:
            return 1.0

    class Sums(v1.Taskset[Sum, v1.TasksetConfig]):  # type: ignore[misc]
        kind = Sum

        def load(self) -> Any:
            return (self.kind(Data(prompt=f"{i}+1=", answer=str(i + 1)), self.config.task) for i in range(3))

    class Tasks(VerifiersTasks):
        kind = Sum

        def taskset(self, **options: Any) -> Any:
            made = Sums(v1.TasksetConfig(**options))
            made.kind = self.kind
            return made

    world = Tasks({"size": 3})
    assert world.reset({"seed": 4}) == "1+1="
    assert world.step("2") == ("", 1.0, True)
    assert Tasks({"size": 3}).reset({"seed": 1}) == "1+1="
    world.reset({"seed": 0})
    assert world.step("7")[1] == 0.0
    with pytest.raises(EnvironmentFailure, match="no task 7"):
        Tasks({"size": 8}).reset({"seed": 7})
    Tasks.kind = InABox
    boxed = Tasks({"size": 3})
    boxed.reset({"seed": 0})
    with pytest.raises(EnvironmentFailure, match="container"):
        boxed.step("1")
