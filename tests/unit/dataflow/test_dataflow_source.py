from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from astraflow.dataflow.source import FORCED_AFTER, TaskSource
from astraflow.datasets.api import Task


def tasks(count: int) -> list[Task]:
    return [Task(f"t{i}", {"i": i}) for i in range(count)]


def every(task_id: str, number: int) -> bool:
    return True


def nothing(task_id: str, number: int) -> bool:
    return False


def every_third(task_id: str, number: int) -> bool:
    return number % 3 == 0


def test_draws_by_steps_differ_by_at_most_one(case: Any) -> None:
    given_, expected = case("G25")["input"], case("G25")["expected"]["values"]
    source = TaskSource(tasks(given_["dataset_prompts"]), seed=0)
    counts = Counter(source.draw(every).task.task_id for _ in range(5 * given_["batch"]))  # type: ignore[union-attr]
    assert sum(counts.values()) == expected["by_steps"]["prompts_drawn"]
    assert sorted(Counter(counts.values()).items()) == [
        (2, expected["by_steps"]["prompts_drawn_2_times"]),
        (3, expected["by_steps"]["prompts_drawn_3_times"]),
    ]


def test_one_epoch_uses_every_task_once_and_then_ends(case: Any) -> None:
    expected = case("G25")["expected"]["values"]["one_epoch"]
    source = TaskSource(tasks(30), seed=1, epochs=1)
    drawn = []
    while (draw := source.draw(every)) is not None:
        drawn.append(draw.index)
    assert len(drawn) == expected["groups_total"]
    assert set(Counter(drawn).values()) == {expected["each_prompt_used"]}
    assert source.exhausted


@given(st.integers(1, 12), st.integers(0, 40), st.integers(0, 40), st.sampled_from([every, every_third, nothing]))
def test_a_restored_position_goes_on_as_if_nothing_had_happened(size: int, before: int, after: int, wants: Any) -> None:
    whole = TaskSource(tasks(size), seed=5)
    expected = [whole.draw(wants) for _ in range(before + after)]
    first = TaskSource(tasks(size), seed=5)
    for _ in range(before):
        first.draw(wants)
    second = TaskSource(tasks(size), seed=5)
    second.restore(first.state)
    assert [second.draw(wants) for _ in range(after)] == expected[before:]
    assert second.state == whole.state


def test_a_task_is_taken_unasked_after_256_refusals_in_a_row_and_no_call_asks_more() -> None:
    source, asked = TaskSource(tasks(1000), seed=0, shuffle=False), [0]

    def refuse(task_id: str, number: int) -> bool:
        assert number == source.state.skipped + source.state.drawn == source.looked
        asked[0] += 1
        return False

    drawn = [source.draw(refuse) for _ in range(3)]
    assert [draw.index for draw in drawn if draw is not None] == [256, 513, 770]
    assert asked[0] == 3 * FORCED_AFTER == 768
    assert (source.state.drawn, source.state.skipped, source.state.forced) == (3, 768, 3)


def test_refusals_are_counted_in_a_row_over_epochs_and_a_wanted_task_ends_the_row() -> None:
    source = TaskSource(tasks(100), seed=0, shuffle=False)
    first = source.draw(lambda task_id, number: number == 200)
    assert first is not None
    assert (first.epoch, first.index, source.state.refused_in_row) == (2, 0, 0)
    assert (source.state.skipped, source.state.forced) == (200, 0)
    forced = source.draw(nothing)
    assert forced is not None
    assert (forced.epoch, forced.index) == (4, 57), "201 looked at, then 256 refused"
    assert (source.state.skipped, source.state.forced) == (456, 1)


def test_a_source_whose_every_task_is_refused_still_ends_after_its_epochs() -> None:
    source = TaskSource(tasks(10), seed=0, epochs=3)
    assert source.draw(nothing) is None
    assert (source.exhausted, source.state.skipped, source.state.drawn) == (True, 30, 0)


def test_a_recovered_lease_finds_its_task_only_if_it_is_still_the_same() -> None:
    source = TaskSource(tasks(3), seed=0)
    assert source.find(1, "t1") is not None
    assert source.find(1, "t2") is None
    assert source.find(9, "t9") is None


def test_a_position_beyond_a_set_that_became_smaller_is_the_beginning_of_the_next_epoch() -> None:
    before = TaskSource(tasks(64), seed=5, epochs=2)
    for _ in range(47):
        before.draw(every)
    for size, epochs, left in ((32, 2, 32), (47, 2, 47), (48, 2, 1 + 48), (32, 1, 0)):
        after = TaskSource(tasks(size), seed=5, epochs=epochs)
        after.restore(msgspec.structs.replace(before.state))
        drawn = []
        while (draw := after.draw(every)) is not None:
            drawn.append(draw.index)
        assert len(drawn) == left
        assert set(Counter(drawn[-size:]).values()) <= {1}
