from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.datasets.api import load
from astraflow.datasets.config import DatasetConfig
from astraflow.protocol.errors import ConfigError


def addition(**options):
    return load(DatasetConfig(loader="addition", options=options), seed=3)


def question(task):
    a, _, b, _ = task.data["messages"][-1]["content"].split()
    return int(a), int(b)


def test_addition_holds_out_twenty_ordered_pairs_and_never_an_example():
    train, held = addition(split="train"), addition(split="heldout")
    assert (len(train), len(held)) == (61, 20)
    pairs = {question(task) for task in held}
    assert all(a * b % 4 == 2 and (b, a) in pairs for a, b in pairs)
    assert pairs.isdisjoint({(2, 2), (5, 1)})
    assert pairs.isdisjoint(question(task) for task in train)
    for task in [*train, *held]:
        assert int(task.data["answer"]) == sum(question(task))


def test_addition_asks_behind_two_solved_examples():
    contents = [(m["role"], m["content"]) for m in addition()[0].data["messages"]]
    assert contents[:5] == [("system", "Add."), ("user", "2 + 2 ="), ("assistant", "4"), ("user", "5 + 1 ="), ("assistant", "6")]
    assert contents[5] == ("user", "1 + 1 =")


def test_the_control_permutes_the_answers_and_leaves_the_questions():
    plain, control = addition(), addition(shuffle_answers=True)
    assert [question(t) for t in plain] == [question(t) for t in control]
    assert Counter(t.data["answer"] for t in plain) == Counter(t.data["answer"] for t in control)
    right = sum(int(t.data["answer"]) == sum(question(t)) for t in control)
    assert right <= 12, "as often as chance makes two tasks share an answer"
    assert control.tasks == addition(shuffle_answers=True).tasks
    with pytest.raises(ConfigError, match="shuffle_answers"):
        addition(split="heldout", shuffle_answers=True)


@given(st.sampled_from(["sort", "reverse"]), st.integers(1, 4), st.integers(0, 3), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_digit_tasks_are_solved_by_definition_and_splits_never_meet(task, low, more, seed):
    def digits(split):
        options = {"task": task, "min_len": low, "max_len": low + more + 1, "n": 15, "seed": seed, "split": split}
        return load(DatasetConfig(loader="digits", options=options))

    train, held = digits("train"), digits("heldout")
    assert len(train) == len(held) == 15
    assert {t.data["prompt"] for t in train}.isdisjoint(t.data["prompt"] for t in held)
    for each in train:
        text = each.data["prompt"][1:]
        assert each.data["answer"] == ("".join(sorted(text)) if task == "sort" else text[::-1])
        assert low <= len(text) <= low + more + 1
    assert train.tasks == digits("train").tasks


@pytest.mark.parametrize(
    ("loader", "options", "text"),
    [
        ("addition", {"split": "test"}, "options.split.*train, heldout"),
        ("addition", {"splt": "train"}, "options.splt"),
        ("digits", {"task": "add"}, "options.task.*sort, reverse"),
        ("digits", {"min_len": 5, "max_len": 4}, "min_len"),
        ("digits", {"min_len": 1, "max_len": 1}, "options.n"),
        ("digits", {"n": "many"}, "options.n"),
    ],
)
def test_options_that_cannot_be_used_name_the_field_and_what_is_accepted(loader, options, text):
    with pytest.raises(ConfigError, match=text):
        load(DatasetConfig(loader=loader, options=options))


def test_reasoning_gym_tasks_carry_how_to_make_them_again():
    pytest.importorskip("reasoning_gym")
    tasks = load(DatasetConfig(loader="reasoning_gym", options={"task": "leg_counting", "size": 4, "seed": 1}))
    assert len(tasks) == 4
    assert tasks[1].data["gym"]["index"] == 1
    assert tasks[1].data["answer"].isdigit()
    with pytest.raises(ConfigError, match="no_such_set"):
        load(DatasetConfig(loader="reasoning_gym", options={"task": "no_such_set"}))
    with pytest.raises(ConfigError, match=r"options\.config"):
        load(DatasetConfig(loader="reasoning_gym", options={"config": {"no_such_setting": 1}}))
