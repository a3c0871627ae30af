from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from astraflow.lib.aio import poll_until
from astraflow.protocol.errors import UnknownName
from astraflow.rewards.api import REWARDS, AsyncRewardWrapper, RecentErrors, RewardError, load_reward

sys.path.insert(0, str(Path(__file__).parent))  # the workers find the plug-in the way the parent does
PLUGIN = ("reward_plugin",)
WAIT_S = 60.0
"""For what must come; how soon depends on the machine."""
Give = Callable[..., Awaitable[float | str | None]]


@contextlib.asynccontextmanager
async def pool(name: str, **settings: object) -> AsyncIterator[tuple[AsyncRewardWrapper, Give]]:
    """The wrapper, and a call that returns the score or the error's kind."""
    import reward_plugin  # noqa: F401  the registry of this process needs the name too

    wrapper = AsyncRewardWrapper(name, plugins=PLUGIN, **settings)  # type: ignore[arg-type]

    async def give(completion: str, **data: object) -> float | str | None:
        try:
            return await wrapper("", completion, [1], [2], **data)
        except RewardError as error:
            return error.kind

    try:
        yield wrapper, give
    finally:
        await wrapper.close()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def ticker(gaps: list[float]) -> None:
    """Computing time of this thread between two ticks: that of a call that blocks the loop; a busy machine does not add to it."""
    last = time.thread_time()
    while True:
        await asyncio.sleep(0.1)
        gaps.append(time.thread_time() - last)
        last = time.thread_time()


async def spinning(wrapper: AsyncRewardWrapper, used: float) -> None:
    """Until the workers have computed for a while; more than it takes to finish with an earlier call."""
    await poll_until(lambda: sum(cpu_seconds(pid) for pid in wrapper.pids()) > used + 0.2, WAIT_S, "a worker that spins", 0.01)


async def idle(wrapper: AsyncRewardWrapper) -> None:
    """Until no worker computes any more; one that was restarted is importing for a while."""
    for _ in range(100):
        before = {pid: cpu_seconds(pid) for pid in wrapper.pids()}
        await asyncio.sleep(0.3)
        if wrapper.pids() == list(before) and max(cpu_seconds(pid) - used for pid, used in before.items()) < 0.1:
            return
    raise AssertionError("somebody spins on")


async def pathological_batch(name: str, batch: list[tuple[str, dict[str, object]]], deadline_s: float, workers: int) -> None:
    async with pool(name, workers=workers, deadline_s=deadline_s) as (wrapper, give):
        gaps: list[float] = []
        tick = asyncio.create_task(ticker(gaps))
        verdicts = await asyncio.gather(*(give(text, **data) for text, data in batch))
        assert verdicts == ["timeout"] * 4 + [1.0] * 4
        tick.cancel()
        assert max(gaps) < 0.5, "the loop kept ticking"
        assert len(wrapper.pids()) <= workers
        assert await give(*[batch[-1][0]], **batch[-1][1]) == 1.0
        await idle(wrapper)
        assert wrapper.counts == {"timeout": 4, "scored": 5, "restarts": 4}


def test_a_pathological_answer_costs_one_verdict_and_not_the_pool(case):
    given = case("G04")["input"]
    batch = [(row["completion"], {"answer": row["gold"]}) for row in given["batch"] for _ in range(row["repeat"])]
    asyncio.run(pathological_batch("math_verify", batch, given["reward_timeout_s"], given["pool_workers"]))


def test_a_reward_that_spins_for_ever_is_killed_while_others_go_on(case):
    given = case("G04")["input"]
    batch: list[tuple[str, dict[str, object]]] = [(text, {}) for text in ["HANG"] * 4 + ["ok"] * 4]
    asyncio.run(pathological_batch("hang_or_one", batch, given["reward_timeout_s"], given["pool_workers"]))


def test_a_dying_worker_a_raising_reward_and_a_bad_value_are_told_apart():
    async def play() -> None:
        async with pool("hang_or_one", workers=1, deadline_s=WAIT_S) as (wrapper, give):
            assert await give("DIE") == "crash"
            assert await give("RAISE") == "exception"
            assert await give("MEMORY") == "exception"
            assert await give("x", value="good") == "exception"
            assert await give("x", value=float("nan")) == "exception"
            assert await give("x", value=None) is None
            assert await give("PRINT") == 1.0
            assert await give("x", value=True) == 1.0
            pids = wrapper.pids()
            with pytest.raises(RewardError, match="returned str, expected a number"):
                await wrapper("", "x", [], [], value="1.0")
            with pytest.raises(RewardError, match="returned int, expected a number"):
                await wrapper("", "INTEGER", [], [])
            with pytest.raises(RewardError, match=r"field `a\.b` cannot be sent: an integer beyond 64 bits"):
                await wrapper("", "x", [], [], a={"b": 10**25})
            with pytest.raises(RewardError, match="prompt or completion"):
                await wrapper("", "\ud800", [], [])
            assert await give("x", value=3) == 3.0
            assert wrapper.pids() == pids, "what was not sent costs no worker"
            assert wrapper.counts == {"crash": 1, "exception": 8, "unscored": 1, "scored": 3, "restarts": 1}

    asyncio.run(play())


def test_a_cancelled_call_does_not_leave_its_answer_to_the_next_one():
    async def play() -> None:
        async with pool("hang_or_one", workers=1, deadline_s=WAIT_S) as (wrapper, give):
            assert await give("x", value=1) == 1.0
            used = sum(cpu_seconds(pid) for pid in wrapper.pids())
            hung = asyncio.create_task(give("HANG"))
            await spinning(wrapper, used)
            hung.cancel()
            with pytest.raises(asyncio.CancelledError):
                await hung
            assert await give("x", value=3) == 3.0
            assert wrapper.counts["restarts"] == 1

    asyncio.run(play())


def test_a_reward_that_comes_back_twice_from_a_fork_shifts_no_verdict():
    async def play() -> None:
        async with pool("hang_or_one", workers=1, deadline_s=WAIT_S) as (_, give):
            assert await give("FORK", value=0.5) == 0.5
            assert [await give("x", value=float(n)) for n in range(5)] == [0.0, 1.0, 2.0, 3.0, 4.0]

    asyncio.run(play())


@pytest.mark.parametrize("how", ["SPAWN", "ESCAPE"])
def test_fault_35_what_a_hanging_reward_has_started_ends_with_it(tmp_path, how):
    async def play() -> None:
        async with pool("hang_or_one", workers=1, deadline_s=3.0) as (wrapper, give):
            await wrapper.start()
            pid_file = tmp_path / "pid"
            assert await give(f"{how} HANG", pid_file=str(pid_file)) == "timeout"
            stat = Path(f"/proc/{int(pid_file.read_text())}/stat")

            def gone() -> bool:
                return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"  # nobody's child any more

            await poll_until(gone, WAIT_S, "the end of what the reward started", 0.01)
            assert await give("ok") == 1.0

    asyncio.run(play())


def test_the_error_rate_is_that_of_the_last_minute_and_needs_enough_verdicts():
    recent = RecentErrors()
    for number in range(19):
        recent.add(0.0, error=True)
        assert recent.rate(0.0) == 0.0, f"{number + 1} verdicts say nothing"
    for _ in range(21):
        recent.add(50.0, error=False)
    assert recent.rate(50.0) == 19 / 40
    assert recent.rate(61.0) == 0.0, "the errors are older than a minute"
    for _ in range(1000):
        recent.add(100.0, error=True)
    assert recent.rate(100.0) == 1.0
    assert recent.rate(161.0) == 0.0, "a gate that goes by it opens by itself"


def test_closing_ends_the_workers_and_the_calls_in_flight():
    async def play() -> None:
        async with pool("hang_or_one", workers=2, deadline_s=WAIT_S) as (wrapper, give):
            await wrapper.start()
            pids = wrapper.pids()
            assert len(pids) == 2
            used = sum(cpu_seconds(pid) for pid in wrapper.pids())
            hung = asyncio.create_task(give("HANG"))
            await spinning(wrapper, used)
            await wrapper.close()
            assert await asyncio.wait_for(hung, WAIT_S) == "crash"
            assert wrapper.pids() == []
            assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
            assert await give("x") == "crash"

    asyncio.run(play())


def test_a_reward_that_cannot_be_imported_says_so():
    async def play() -> None:
        wrapper = AsyncRewardWrapper("hang_or_one", workers=1, plugins=("no_such_plugin",))
        with pytest.raises(RewardError, match="no_such_plugin"):
            await wrapper("", "x", [], [])
        await wrapper.close()

    asyncio.run(play())


def test_cheap_rewards_run_inline_without_any_process():
    async def play() -> None:
        async with pool("inline_length", workers=2) as (wrapper, give):
            assert await give("four") == 4.0
            assert await give("RAISE") == "exception"
            assert wrapper.pids() == []
        async with pool("exact_match") as (wrapper, give):
            assert await give("4", answer="4") == 1.0
            assert wrapper.pids() == []

    asyncio.run(play())


def test_names_resolve_and_wrong_ones_name_the_closest():
    assert load_reward("astraflow.rewards.text:exact_match") is REWARDS.get("exact_match")
    for name in REWARDS.names():
        assert callable(load_reward(name))
    with pytest.raises(UnknownName, match="math_verify"):
        AsyncRewardWrapper("math_verfy")
