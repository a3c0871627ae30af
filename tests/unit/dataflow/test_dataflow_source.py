from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from astraflow.dataflow.policies.curate import AcceptAll
from astraflow.dataflow.source import TaskSource
from astraflow.datasets.api import Task


def tasks(count: int) -> list[Task]:
    return [Task(f"t{i}", {"i": i}) for i in range(count)]


class Nothing(AcceptAll):
    def accepts(self, task_id: str, epoch: int) -> bool:
        return False


def test_draws_by_steps_differ_by_at_most_one(case: Any) -> None:
    given_, expected = case("G25")["input"], case("G25")["expected"]["values"]
    source = TaskSource(tasks(given_["dataset_prompts"]), seed=0)
    counts = Counter(source.draw(AcceptAll()).task.task_id for _ in range(5 * given_["batch"]))  # type: ignore[union-attr]
    assert sum(counts.values()) == expected["by_steps"]["prompts_drawn"]
    assert sorted(Counter(counts.values()).items()) == [
        (2, expected["by_steps"]["prompts_drawn_2_times"]),
        (3, expected["by_steps"]["prompts_drawn_3_times"]),
    ]


def test_one_epoch_uses_every_task_once_and_then_ends() -> None:
    source = TaskSource(tasks(30), seed=1, epochs=1)
    drawn = []
    while (draw := source.draw(AcceptAll())) is not None:
        drawn.append(draw.index)
    assert sorted(drawn) == list(range(30))
    assert source.exhausted


@given(st.integers(1, 12), st.integers(0, 40), st.integers(0, 40))
def test_a_restored_position_goes_on_as_if_nothing_had_happened(size: int, before: int, after: int) -> None:
    whole = TaskSource(tasks(size), seed=5)
    expected = [whole.draw(AcceptAll()) for _ in range(before + after)]
    first = TaskSource(tasks(size), seed=5)
    for _ in range(before):
        first.draw(AcceptAll())
    second = TaskSource(tasks(size), seed=5)
    second.state = first.state
    assert [second.draw(AcceptAll()) for _ in range(after)] == expected[before:]


def test_a_curator_that_refuses_everything_does_not_stop_the_run() -> None:
    source = TaskSource(tasks(3), seed=0)
    assert source.draw(Nothing()) is not None
    assert (source.state.drawn, source.state.skipped) == (1, 2)


def test_a_recovered_lease_finds_its_task_only_if_it_is_still_the_same() -> None:
    source = TaskSource(tasks(3), seed=0)
    assert source.find(1, "t1") is not None
    assert source.find(1, "t2") is None
    assert source.find(9, "t9") is None
