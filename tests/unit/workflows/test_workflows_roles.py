from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from astraflow.protocol.errors import UserError
from astraflow.workflows.api import EngineGroup, Episode, Options, Score
from astraflow.workflows.conversation import Conversation
from astraflow.workflows.plan_solve import PlanAndSolve
from astraflow.workflows.roles import Role, Team, after_thoughts, check_policies, fields_of, same_tokenizer, together

OWN = {"a": 1.0, "b": 0.0}


def talks(context: Any, script: Any, *policies: str) -> list[Conversation]:
    """One answered conversation per policy."""
    made = [Conversation(context(policies=policies), policy, [{"role": "user", "content": "s1"}]) for policy in policies]
    for talk in made:
        asyncio.run(talk.answer(script("1")))
    return made


def credit(episode: Episode) -> list[dict[str, float | None]]:
    return [segment.credit for segment in episode.trajectory.segments]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("own", [{"a": 1.0}, {"b": 0.0}]),
        ("shared", [{}, {}]),
        ("team", [{"a": 0.5}, {"b": 0.5}]),
        ("difference", [{"a": 0.75}, {"b": 0.25}]),
    ],
)
def test_a_rule_of_the_recipe_turns_what_parts_did_into_their_credit(context, script, rule, expected):
    one, two = talks(context, script, "a", "b")
    team = Team(rule)
    team.add(one, OWN["a"], without=0.0)
    team.add(two, OWN["b"], without=0.5)
    assert credit(team.episode(Score(0.75))) == expected


@pytest.mark.parametrize("rule", ["shared", "team", "difference"])
def test_an_unscored_episode_credits_nobody_from_its_reward(context, script, rule):
    (one,) = talks(context, script, "a")
    team = Team(rule)
    team.add(one, 1.0)
    episode = team.episode(Score(None))
    assert (credit(episode), episode.trajectory.reward) == ([{}], None)


def test_a_part_that_could_not_be_scored_is_unscored_by_its_own_rule_and_left_out_of_the_team_s_mean(context, script):
    one, two = talks(context, script, "a", "b")
    for rule, expected in (("own", [{"a": None}, {"b": 0.5}]), ("team", [{"a": 0.5}, {"b": 0.5}])):
        team = Team(rule)
        team.add(one, None)
        team.add(two, 0.5)
        assert credit(team.episode(Score(1.0))) == expected


def test_a_broken_prefix_in_the_second_conversation_points_at_its_own_first_half(context, script, tokenizer):
    class Forgetful:
        """Drops earlier answers."""

        eos_ids, encode, decode, has_chat_template = tokenizer.eos_ids, tokenizer.encode, tokenizer.decode, True

        def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
            return "".join(m["content"] if m["role"] == "user" else "*" for m in messages) + ">"

        def chat(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> list[int]:
            return tokenizer.encode(self.render(messages))

    first, _ = talks(context, script, "a", "b")
    second = Conversation(replace(context(), tokenizers={"b": Forgetful()}), "b", [{"role": "user", "content": "s1"}])

    async def two_turns() -> None:
        engine = script("1", "2")
        await second.answer(engine)
        second.say({"role": "user", "content": "no"})
        await second.answer(engine)

    asyncio.run(two_turns())
    team = Team("own")
    team.add(first, 0.0)
    team.add(second, 1.0, parent=first)
    episode = team.episode(Score(1.0))
    assert [segment.parent for segment in episode.trajectory.segments] == [None, 0, 1]
    assert episode.metrics["rollout/broken_prefix"] == 1
    assert [turn["policy"] for turn in episode.record] == ["a"] * 2 + ["b"] * 4


def test_policies_that_speak_in_one_context_need_one_tokenizer_and_one_temperature(context, script, tokenizer):
    one = context(policies=("planner", "solver"))
    same_tokenizer(one, "w")
    other = type("Other", (), {"hash": "another"})()
    with pytest.raises(UserError, match="tokenizers differ"):
        PlanAndSolve(replace(one, tokenizers={"planner": tokenizer, "solver": other}))
    options = {"planner_generation": {"temperature": 0.5}}
    workflow = PlanAndSolve(context(None, ("planner", "solver"), **options))
    with pytest.raises(UserError, match=r"generation\.temperature: 0\.7 after 0\.5"):
        asyncio.run(workflow.arun_episode(EngineGroup({"planner": script("1"), "solver": script("1")}), {"prompt": "s1"}))


def test_a_policy_may_play_two_roles(context, script):
    async def right(*args: Any, **data: Any) -> float:
        return 1.0

    workflow = PlanAndSolve(context(right, ("a", "a"), planner_template="{problem}", solver_template="go"))
    episode = asyncio.run(workflow.arun_episode(EngineGroup({"a": script("1", "2")}), {"prompt": "s1"}))
    (segment,) = episode.trajectory.segments
    assert (segment.policies, segment.policy_of_token) == (["a"], None)
    with pytest.raises(UserError, match=r"policies.*\[planner, solver\]"):
        check_policies(context(policies=("a",)), "plan_and_solve", "planner", "solver")


def test_a_role_words_tasks_with_messages_too(context):
    options = Options("w", {"x_template": "<{prompt}>", "x_system": "Be short.", "x_chat": {"eos_token": "!"}})
    role = Role.take(context(), options, name="x")
    options.done()
    task = {"messages": [{"role": "system", "content": "Add."}, {"role": "assistant", "content": "4"}, {"role": "user", "content": "1+1"}]}
    talk = role.open(task)
    assert [m["content"] for m in talk.messages] == ["Add.\n\nBe short.", "4", "<1+1>"]
    assert [m["content"] for m in role.open({"messages": task["messages"][2:]}).messages] == ["Be short.", "<1+1>"]
    assert task["messages"][2]["content"] == "1+1"
    assert fields_of(task)["problem"] == "1+1"
    assert [m["content"] for m in role.ask(fields_of(task)).messages] == ["Be short.", "<1+1>"]
    assert talk._render(talk.messages).startswith("Add.\n\nBe short.>4!"), "variables of the template are the role's"


def test_thoughts_are_no_part_of_an_answer_that_is_read():
    assert after_thoughts("<think>no? yes.</think>\n\nyes") == "yes"
    assert after_thoughts(" yes ") == " yes "


def test_the_first_failure_of_work_done_together_ends_the_rest():
    ended = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("waits")

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    async def both() -> None:
        with pytest.raises(ValueError, match="no"):
            await together(waits(), fails())
        await asyncio.sleep(0)
        assert ended == ["waits"], "at once, not when the loop ends"

    asyncio.run(both())
