from __future__ import annotations

import asyncio
import contextlib

import pytest

from astraflow.lib.aio import (
    Backoff,
    Contained,
    Escaped,
    Tasks,
    Waits,
    contain_tasks,
    contained,
    deadline,
    in_daemon_thread,
    one_line,
    poll_until,
)
from astraflow.protocol.errors import DeadlinePassed, Unavailable


def test_a_task_that_raises_is_reported_once_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    failures: list[tuple[str, BaseException]] = []

    async def breaks() -> None:
        raise RuntimeError("broken pipe")

    async def scenario() -> None:
        tasks = Tasks(lambda name, error: failures.append((name, error)))
        task = tasks.spawn("collect", breaks())
        await asyncio.wait([task])
        await asyncio.sleep(0)
        assert tasks.names == []
        await tasks.stop()

    asyncio.run(scenario())
    assert [(name, str(error)) for name, error in failures] == [("collect", "broken pipe")]
    assert "collect" in caplog.text


def test_cancellation_is_silent_and_stop_waits_for_the_cleanup() -> None:
    failures: list[str] = []
    cleaned: list[str] = []

    async def runs() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append("yes")

    async def scenario() -> None:
        tasks = Tasks(lambda name, _: failures.append(name))
        tasks.spawn("a", runs())
        tasks.spawn("b", runs())
        await asyncio.sleep(0)
        assert tasks.names == ["a", "b"]
        await tasks.stop()
        late = tasks.spawn("late", runs())
        await asyncio.wait([late])
        assert late.cancelled()

    asyncio.run(scenario())
    assert cleaned == ["yes", "yes"]
    assert failures == []


def test_stop_names_a_task_that_does_not_end(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        release = asyncio.Event()

        async def stubborn() -> None:
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue

        tasks = Tasks(lambda *_: None)
        task = tasks.spawn("stubborn", stubborn())
        await asyncio.sleep(0)
        await tasks.stop(deadline_s=0.01)
        release.set()
        await asyncio.wait([task])

    asyncio.run(scenario())
    assert "stubborn did not end" in caplog.text


def test_a_task_may_stop_the_others() -> None:
    async def scenario() -> None:
        tasks = Tasks(lambda *_: None)
        other = tasks.spawn("other", asyncio.Event().wait())
        await tasks.spawn("leader", tasks.stop())
        assert other.cancelled()

    asyncio.run(scenario())


def test_a_deadline_names_its_wait_and_leaves_other_timeouts_alone() -> None:
    async def inner_timeout() -> None:
        raise TimeoutError("mine")

    async def scenario() -> None:
        with pytest.raises(DeadlinePassed, match=r"batch of default: not done within 0\.01 s"):
            await deadline(asyncio.Event().wait(), 0.01, "batch of default")
        with pytest.raises(TimeoutError, match="mine"):
            await deadline(inner_timeout(), 5, "x")
        assert await deadline(asyncio.sleep(0, "value"), 5, "x") == "value"

    asyncio.run(scenario())


def test_polling_returns_the_value_or_names_what_never_came() -> None:
    async def scenario() -> None:
        values = iter([0, None, "", "ready"])
        assert await poll_until(lambda: next(values), 5, "ready", 0.001) == "ready"

        async def never() -> bool:
            return False

        with pytest.raises(DeadlinePassed, match="an instance"):
            await poll_until(never, 0.01, "an instance", 0.001)
        with pytest.raises(DeadlinePassed, match="a stuck check"):
            await poll_until(lambda: asyncio.Event().wait(), 0.01, "a stuck check", 0.001)

    asyncio.run(scenario())


def test_backoff_grows_to_its_maximum_and_starts_again_after_a_success() -> None:
    plain = Backoff(0.1, 2.0, 0.5, jitter=0.0)
    assert [plain.next() for _ in range(5)] == pytest.approx([0.1, 0.2, 0.4, 0.5, 0.5])
    plain.reset()
    assert plain.next() == pytest.approx(0.1)
    shaken = [Backoff(1.0, jitter=0.5, seed=seed).next() for seed in range(50)]
    assert min(shaken) >= 0.5
    assert max(shaken) <= 1.0
    assert len(set(shaken)) > 40


def test_open_waits_are_listed_with_their_age_and_removed_when_they_end() -> None:
    now = [10.0]
    waits = Waits(clock=lambda: now[0])
    with waits.waiting("trainer:a", "groups", "3 of 8", deadline_s=20):
        now[0] = 12.0
        with contextlib.suppress(KeyError), waits.waiting("trainer:b", "trainer:a", "barrier"):
            first, second = waits.edges()
            assert (first.who, first.since_s, first.deadline_s) == ("trainer:a", 2.0, 18.0)
            assert (second.waits_for, second.since_s, second.deadline_s) == ("trainer:a", 0.0, None)
            raise KeyError
        assert [edge.who for edge in waits.edges()] == ["trainer:a"]
    assert waits.edges() == []


def test_an_error_fits_on_one_line() -> None:
    assert one_line(Unavailable("a\n b")) == "a b"
    assert one_line(ValueError("x")) == "ValueError: x"
    assert one_line(TimeoutError()) == "TimeoutError"

    class Unreadable(Exception):
        def __str__(self) -> str:
            raise SystemExit(3)

    assert one_line(Unreadable()) == "Unreadable: its text cannot be read: SystemExit"


def test_a_noted_wait_keeps_its_age_until_it_waits_for_somebody_else_or_is_over() -> None:
    now = [100.0]
    waits = Waits(clock=lambda: now[0])
    waits.note("eval", "trainer:a", "version 3", 30.0)
    now[0] = 110.0
    waits.note("eval", "trainer:a", "version 3, still", 20.0)
    (edge,) = waits.edges()
    assert (edge.who, edge.waits_for, edge.why, edge.since_s, edge.deadline_s) == ("eval", "trainer:a", "version 3, still", 10.0, 20.0)
    waits.note("eval", "raas:r", "results")
    now[0] = 112.0
    with waits.waiting("submit", "eval", "held"):
        assert [(e.who, e.since_s, e.deadline_s) for e in waits.edges()] == [("eval", 2.0, None), ("submit", 0.0, None)]
    waits.over("eval")
    waits.over("eval")
    assert waits.edges() == []


def raises(error: BaseException) -> None:
    raise error


FATAL = (SystemExit(3), KeyboardInterrupt(), GeneratorExit(), BaseExceptionGroup("both", [SystemExit(3)]))


@pytest.mark.parametrize("error", FATAL, ids=lambda error: type(error).__name__)
def test_what_would_end_the_loop_is_an_exception_of_the_task_and_of_the_thread(error: BaseException) -> None:
    async def breaks() -> None:
        await asyncio.sleep(0)
        raises(error)

    async def scenario() -> None:
        for task in (asyncio.create_task(Contained(breaks())), asyncio.create_task(in_daemon_thread(lambda: raises(error), "test"))):
            with pytest.raises(Escaped, match=type(error).__name__) as caught:
                await task
            assert caught.value.__cause__ is error
            assert one_line(caught.value).startswith(type(error).__name__)

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [StopIteration(), asyncio.CancelledError(), GeneratorExit()], ids=lambda error: type(error).__name__)
def test_a_thread_that_raises_what_no_future_takes_still_ends(error: BaseException) -> None:
    with pytest.raises(Escaped):
        asyncio.run(in_daemon_thread(lambda: raises(error), "test"))


def test_a_contained_coroutine_returns_raises_and_is_cancelled_as_before(recwarn: pytest.WarningsRecorder) -> None:
    ended: list[str] = []

    async def waits() -> int:
        try:
            await asyncio.sleep(0)
            await asyncio.Event().wait()
        finally:
            ended.append("yes")
        return 1

    async def gives(value: int) -> int:
        await asyncio.sleep(0)
        return value // value

    async def scenario() -> None:
        assert await Contained(gives(3)) == 1
        with pytest.raises(ZeroDivisionError):
            await asyncio.create_task(Contained(gives(0)))
        for steps in (0, 3):  # before its first step, and inside
            task = asyncio.create_task(Contained(waits()))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(scenario())
    assert ended == ["yes"]
    closed = contained(waits)
    closed.send(None)
    closed.close()
    with pytest.raises(GeneratorExit):
        contained(waits).throw(GeneratorExit)
    assert ended == ["yes", "yes"]
    assert not [str(warning.message) for warning in recwarn if "never awaited" in str(warning.message)]


def test_tasks_are_contained_only_where_that_was_asked_for() -> None:
    async def scenario() -> None:
        inside = False
        contain_tasks(asyncio.get_running_loop(), lambda: inside)
        plain = asyncio.create_task(asyncio.sleep(0), name="plain")
        inside = True
        with pytest.raises(Escaped):
            await asyncio.gather(asyncio.wait_for(exits(), 60))
        assert isinstance(asyncio.create_task(asyncio.sleep(0)).get_coro(), Contained)
        assert (plain.get_name(), isinstance(plain.get_coro(), Contained)) == ("plain", False)

    async def exits() -> None:
        raises(SystemExit(3))

    asyncio.run(scenario())
