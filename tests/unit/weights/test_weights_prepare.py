"""What a sender prepares for the halves that it finds or gets, around claims of its manager."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from astraflow.lib.aio import Tasks
from astraflow.weights import layout
from astraflow.weights.buffer import HalfSwitch, Held
from astraflow.weights.config import WeightsConfig
from astraflow.weights.frames import Published
from astraflow.weights.memory import HalfMemory
from astraflow.weights.prepare import Preparer

SHAPE = layout.build([("w", (8,), "BF16")])


@pytest.fixture
def memory() -> Iterator[HalfMemory]:
    made = HalfMemory.create("test", SHAPE.size_bytes)
    yield made
    made.close()


@pytest.mark.parametrize("digest", ["", "known before"])
def test_a_half_that_is_claimed_before_its_preparation_began_is_prepared_all_the_same(memory: HalfMemory, digest: str) -> None:
    """A new life of the sender finds two halves, and the manager's claim of the older one is in its mailbox already."""

    async def scenario() -> tuple[list[BaseException], list[Published], list[str]]:
        failures: list[BaseException] = []
        told: list[Published] = []
        switch = HalfSwitch([Held(1, digest), Held(2)], newest=1)
        tasks = Tasks(lambda name, error: failures.append(error))
        preparer = Preparer(WeightsConfig(), SHAPE, memory, switch, tasks, told.append, lambda: None)
        preparer.begin(0, 1)
        preparer.begin(1, 2)
        switch.claim(0, now=0.0, patience_s=60.0)  # before the tasks had a turn
        for work in list(preparer.work.values()):
            await asyncio.wait_for(work.delta_ended.wait(), 10)
        await tasks.stop()
        return failures, told, switch.readers(0)

    failures, told, readers = asyncio.run(scenario())
    assert failures == []
    assert {frame.version: frame.digest for frame in told} == {
        1: digest or layout.digest(SHAPE, memory.half(0)),
        2: layout.digest(SHAPE, memory.half(1)),
    }
    assert readers == [], "the writer that waits gets its half"
