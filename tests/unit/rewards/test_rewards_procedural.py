from __future__ import annotations

from typing import Any

import msgspec
import pytest

from astraflow.datasets.api import load
from astraflow.datasets.config import DatasetConfig
from astraflow.rewards.procedural import answer_of, reasoning_gym


def score(completion: str, data: dict[str, Any]) -> float:
    return reasoning_gym("", completion, [], [], **{key: value for key, value in data.items() if key != "prompt"})


def test_the_answer_stands_in_tags_or_after_the_thoughts():
    assert answer_of("<think>3</think> 4 ") == "4"
    assert answer_of("x <answer>1</answer> <answer> 2 </answer> y") == "2"
    assert answer_of("<answer>5") == "5"


def test_a_set_scores_the_answer_of_its_own_entry():
    pytest.importorskip("reasoning_gym")
    tasks = load(DatasetConfig(loader="reasoning_gym", options={"task": "leg_counting", "size": 3, "seed": 7}))
    for task in tasks:
        assert score(f"<answer>{task.data['answer']}</answer>", task.data) == 1.0
        assert score("-1", task.data) < 0.1


def test_a_set_without_a_single_answer_is_scored_through_its_entry():
    pytest.importorskip("reasoning_gym")
    task = load(DatasetConfig(loader="reasoning_gym", options={"task": "propositional_logic", "size": 1, "seed": 1}))[0]
    assert task.data["answer"] is None
    assert score("(Q ∧ Q)", task.data) > score("(P ∧ ¬P)", task.data)


def test_an_entry_that_comes_out_differently_is_an_error_and_not_a_score():
    pytest.importorskip("reasoning_gym")
    task = load(DatasetConfig(loader="reasoning_gym", options={"task": "leg_counting", "size": 1, "seed": 7}))[0]
    with pytest.raises(ValueError, match="leg_counting"):
        score("4", {"gym": {**task.data["gym"], "question": "another"}})


def test_a_set_that_depends_on_the_process_carries_its_entries():
    pytest.importorskip("reasoning_gym")
    for name in ("isomorphic_strings", "polynomial_multiplication", "ransom_note"):
        task = load(DatasetConfig(loader="reasoning_gym", options={"task": name, "size": 1, "seed": 5}))[0]
        data = msgspec.msgpack.decode(msgspec.msgpack.encode(task.data))
        assert score(task.data["answer"], data) == 1.0
