"""Slots, the trie of shared runs, the step plan and the counter-based random numbers, without torch."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.raas.engines.embedded_batch import Scheduler, Segment, Sequence, Slots, plan, share, uniform
from astraflow.workflows.api import ModelRequest

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=9)


def sequence(tokens: list[int], computed: int = 0, new: int = 4, name: str = "s") -> Sequence:
    request = ModelRequest(input_ids=tokens, max_new_tokens=new)
    return Sequence(name, request, list(tokens), len(tokens), frozenset(), computed=computed, epoch=0)


def apply(segments: list[Segment]) -> None:
    """Compute a plan on paper: every run must continue what its sequences have, and be equal in all of them."""
    for segment in segments:
        run = segment.owner.tokens[segment.start : segment.end]
        assert run, "an empty run"
        for row in segment.rows:
            assert row.computed == segment.start
            assert row.tokens[: segment.end] == segment.owner.tokens[: segment.end]
            row.computed = segment.end
        assert all(len(row.tokens) == segment.end for row in segment.ends)


@given(PROMPTS, st.integers(0, 5))
@settings(max_examples=150, deadline=None)
def test_shared_runs_cover_every_missing_token_once_and_in_an_order_that_can_be_computed(prompts: list[list[int]], cached: int) -> None:
    sequences = [sequence(prompt, min(cached, len(prompt) - 1)) for prompt in prompts]
    alone = sum(len(one.tokens) - one.computed for one in sequences)
    segments = share(sequences)
    apply(segments)
    assert all(one.computed == len(one.tokens) for one in sequences)
    assert sum(segment.length for segment in segments) <= alone
    sampled = [row for segment in segments for row in segment.ends]
    assert sorted(map(id, sampled)) == sorted(map(id, sequences))


@given(PROMPTS, st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_a_budget_cuts_a_plan_without_losing_or_repeating_tokens(prompts: list[list[int]], budget: int) -> None:
    sequences = [sequence(prompt) for prompt in prompts]
    for _ in range(sum(map(len, prompts)) + 1):
        segments = plan([one for one in sequences if one.computed < len(one.tokens)], budget)
        assert sum(segment.length for segment in segments) <= budget
        apply(segments)
    assert all(one.computed == len(one.tokens) for one in sequences)


def test_a_group_computes_its_prompt_once_and_a_template_once_for_all_groups() -> None:
    template = list(range(40))
    sequences = [sequence([*template, 50 + group, 60, 61, 62]) for group in range(3) for _ in range(8)]
    segments = share(sequences)
    assert sum(segment.length for segment in segments) == 40 + 3 * 4
    assert [len(segment.rows) for segment in segments] == [24, 8, 8, 8]


def test_runs_too_short_to_be_worth_a_call_are_not_shared() -> None:
    segments = share([sequence([1, 5, 6, 7]), sequence([1, 8, 9, 3])])
    assert [(segment.start, segment.end, len(segment.rows)) for segment in segments] == [(0, 4, 1), (0, 4, 1)]


def test_sequences_with_keys_of_several_loads_share_with_nobody() -> None:
    mixed = [sequence(list(range(20)), computed=5) for _ in range(2)]
    for one in mixed:
        one.epoch = -1
    assert all(len(segment.rows) == 1 for segment in share(mixed))


def test_decoding_comes_before_prefill_and_is_never_held_back_by_its_budget() -> None:
    decoding = [sequence([1, 2, 3], computed=3) for _ in range(3)]
    for row, one in enumerate(reversed(decoding)):
        one.tokens.append(7)
        one.capacity, one.row = 128, row
    segments = plan([sequence(list(range(9))), *decoding], 4)
    assert [segment.length for segment in segments] == [1, 1, 1, 4]
    assert [segment.owner.row for segment in segments[:3]] == [0, 1, 2]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 900)), max_size=60), st.integers(1, 12), st.integers(128, 6000))
@settings(max_examples=150, deadline=None)
def test_slots_stay_compact_and_within_their_bounds(events: list[tuple[bool, int]], max_slots: int, kv_tokens: int) -> None:
    slots = Slots(max_slots, kv_tokens)
    held: list[Sequence] = []
    for arrives, size in events:
        if arrives or not held:
            one = sequence([0], new=size)
            if slots.place(one) is not None:
                held.append(one)
                assert one.capacity >= one.limit - 1
        else:
            slots.release(held.pop(size % len(held)))
        assert slots.used == len(held) <= max_slots
        assert slots.used_tokens <= slots.allocated_tokens <= kv_tokens
        for capacity, rows in slots.rows.items():
            assert [row.row for row in rows] == list(range(len(rows)))
            assert len(rows) <= slots.allocated.get(capacity, 0)


def test_idle_rows_of_one_pool_make_room_for_another() -> None:
    slots = Slots(max_slots=8, kv_tokens=1024)
    small = [sequence([0], new=10) for _ in range(8)]
    assert all(slots.place(one) is not None for one in small)
    assert slots.place(sequence([0], new=10)) is None, "all slots are taken"
    for one in small[:6]:
        slots.release(one)
    large = sequence([0], new=500)
    resizes = slots.place(large)
    assert resizes is not None
    assert {(resize.capacity, resize.rows) for resize in resizes} == {(128, 2), (512, 1)}


def test_arrival_order_is_kept_and_a_cancelled_one_makes_room_at_once() -> None:
    scheduler = Scheduler(Slots(max_slots=2, kv_tokens=4096), max_queue=3)
    sequences = [sequence([1], name=str(index)) for index in range(6)]
    assert [scheduler.submit(one) for one in sequences[:3]] == [True, True, True]
    assert not scheduler.submit(sequences[3]), "the queue is bounded"
    admitted, _ = scheduler.admit()
    assert [one.id for one in admitted] == ["0", "1"]
    move = scheduler.finish(sequences[0])
    assert move is not None
    assert (move.source, move.target) == (1, 0)
    assert sequences[1].row == 0
    assert [one.id for one in scheduler.admit()[0]] == ["2"]


def test_random_numbers_belong_to_seed_and_place_alone() -> None:
    values = [uniform(seed, index) for seed in range(100) for index in range(100)]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 1 for value in values)
    assert abs(sum(values) / len(values) - 0.5) < 0.01
    shuffled = list(range(100))
    random.Random(0).shuffle(shuffled)
    assert [uniform(7, index) for index in shuffled] == [values[700 + index] for index in shuffled]
    assert uniform(-3, 0) == uniform(2**64 - 3, 0), "any integer is a seed"
