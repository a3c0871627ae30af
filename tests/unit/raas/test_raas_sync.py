"""Weight updates: what a notice means, in which order loads happen, and what a failure leaves behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from astraflow.lib.aio import Tasks, Waits
from astraflow.lib.metrics import Counter
from astraflow.protocol.errors import BadMessage, Conflict, DigestMismatch
from astraflow.protocol.weights import NotifyRaaS
from astraflow.raas.engines.scripted import read_digest
from astraflow.raas.models import ServedModel
from astraflow.raas.sync import LaneGate, ModelSync
from astraflow.weights.layout import build, digest, file_header
from astraflow.weights.receiver import Staged

MakeRig = Callable[..., Any]


DEAD = "http://dead"
"""Endpoint of a sender that never answers."""


@dataclass
class FileReceiver:
    """The receiver's contract over files made here: what it stages are real safetensors files."""

    directory: Path
    errors: list[Exception] = field(default_factory=list)
    """Raised by the next pulls, in order."""
    pulls: list[tuple[int, bool]] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    """Names of the files that the pulls had to leave alone."""
    hold: threading.Event = field(default_factory=threading.Event)
    """Pulls wait for it."""

    def __post_init__(self) -> None:
        self.hold.set()

    def pull(
        self,
        sender_endpoint: str,
        version: int,
        digest: str,
        *,
        full: bool = False,
        deadline_s: float,
        stop: threading.Event,
        keep: Path | None = None,
    ) -> Staged:
        self.pulls.append((version, full))
        self.kept.append(keep.name if keep else "")
        while sender_endpoint == DEAD or not self.hold.wait(0.01):
            if stop.wait(0.01):
                raise Conflict("superseded: the pull was abandoned")
        if self.errors:
            raise self.errors.pop(0)
        path = self.directory / f"v{version}.safetensors"
        found = write(path, version)
        return Staged(path, version, found, "full" if full else "delta", "", 100, 0.01, 1)

    def intact(self, path: Path, digest: str) -> bool:
        return stamp(path.read_bytes()[-LAYOUT.size_bytes :]) == digest

    def abandon(self, stop: threading.Event) -> None:
        stop.set()

    def close(self) -> None:
        self.hold.set()


LAYOUT = build([("w", (4, 8), "F32"), ("b", (3,), "BF16")], {"tied": "w"})


def stamp(data: bytes) -> str:
    return digest(LAYOUT, memoryview(data))


def write(path: Path, version: int) -> str:
    data = bytes([version % 256]) * LAYOUT.size_bytes
    name = stamp(data)
    path.write_bytes(file_header(LAYOUT, version, name, False) + data)
    return name


@dataclass
class Bench:
    sync: ModelSync
    receiver: FileReceiver
    engine: Any
    idle: asyncio.Event
    rollbacks: list[tuple[str, int]]
    counts: Counter
    tasks: Tasks
    failures: list[str]

    async def notify(
        self, version: int, timeline: int = 1, wait_s: float = 60.0, digest: str = "", sender: str = "http://x"
    ) -> tuple[str, int]:
        notice = NotifyRaaS(model_id="default", timeline=timeline, version=version, digest=digest, sender_endpoint=sender, wait_s=wait_s)
        outcome = await self.sync.notice(notice)
        serving = self.sync.model.serving
        return outcome.state, -1 if serving is None else serving.version


@pytest.fixture
def bench(rig: MakeRig, tmp_path: Path) -> Callable[..., Bench]:
    def make(**options: Any) -> Bench:
        made = rig(**{"initial": False, **options})
        model: ServedModel = made.executor._models["default"]
        idle = asyncio.Event()
        idle.set()
        receiver = FileReceiver(tmp_path)
        rollbacks: list[tuple[str, int]] = []
        sync = ModelSync(
            model,
            receiver,
            lanes=LaneGate(idle, lambda: 1.0),
            rollback=lambda name, timeline: rollbacks.append((name, timeline)),
            tasks=made.tasks,
            waits=Waits(),
            counts=made.executor.counts,
            pull_s=60.0,
            load_s=60.0,
        )
        return Bench(sync, receiver, made.engine, idle, rollbacks, made.executor.counts, made.tasks, made.failures)

    return make


def run(make: Callable[..., Bench], test: Callable[[Bench], Awaitable[None]], **options: Any) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(90):
            made = make(**options)
            await test(made)
            made.receiver.close()
            await made.tasks.stop()
            assert not made.failures

    asyncio.run(bounded())


def test_notices_are_pulled_loaded_and_confirmed(bench: Callable[..., Bench]) -> None:
    async def test(b: Bench) -> None:
        assert await b.notify(0) == ("loaded", 0)
        assert await b.notify(1) == ("loaded", 1)
        assert await b.notify(1) == ("current", 1), "the same digest"
        assert await b.notify(0) == ("current", 1), "older"
        assert b.receiver.pulls == [(0, False), (1, False)]
        assert b.sync.model.serving.digest == read_digest(b.receiver.directory / "v1.safetensors")
        assert await b.notify(1, digest="ab" * 16) == ("failed", 1), "another digest under the same number is pulled, and must fit"
        assert b.receiver.pulls[-1] == (1, False)

    run(bench, test)


def test_a_new_timeline_rolls_back_with_a_full_pull_and_a_dead_one_is_ignored(bench: Callable[..., Bench]) -> None:
    async def test(b: Bench) -> None:
        await b.notify(7)
        assert not b.rollbacks, "the first load rolls nothing back"
        assert await b.notify(3, timeline=2) == ("loaded", 3)
        assert (b.receiver.pulls[-1], b.rollbacks) == ((3, True), [("default", 2)])
        assert b.sync.model.serving.timeline == 2
        assert await b.notify(9, timeline=1) == ("current", 3)
        assert not b.sync.rolling_back

    run(bench, test)


def test_between_the_notice_of_a_rollback_and_its_load_no_new_work_is_wanted(bench: Callable[..., Bench]) -> None:
    async def test(b: Bench) -> None:
        await b.notify(7)
        b.receiver.errors = [DigestMismatch("bytes")]
        assert await b.notify(3, timeline=2) == ("failed", 7)
        assert b.sync.rolling_back, "also after a failed try"
        assert await b.notify(3, timeline=2) == ("loaded", 3)
        assert not b.sync.rolling_back

    run(bench, test)


def test_a_failure_leaves_the_old_version_and_the_next_notice_tries_again(bench: Callable[..., Bench]) -> None:
    """Case G29, the receiver's side: no number moves without its weights."""

    async def test(b: Bench) -> None:
        await b.notify(1)
        b.receiver.errors = [DigestMismatch("version 2: wrong bytes")]
        assert await b.notify(2) == ("failed", 1)
        assert "wrong bytes" in b.sync.message
        assert b.sync.staged is not None
        assert b.sync.staged.version == 1
        assert await b.notify(3) == ("failed", 1), "the load of 3 fails in the engine"
        assert b.sync.model.gate._open.is_set(), "the pause always ends"
        assert await b.notify(3) == ("loaded", 3)
        assert (b.sync.message, b.counts["weights/failures"]) == ("", 2)

    run(bench, test, fail_loads=[3])


def test_a_restarted_engine_gets_what_was_served_not_what_failed(bench: Callable[..., Bench]) -> None:
    async def test(b: Bench) -> None:
        await b.notify(1)
        assert await b.notify(2) == ("failed", 1)
        assert b.sync.staged.version == 1
        (b.receiver.directory / "v1.safetensors").unlink()
        assert b.sync.staged.version == 2, "the only file that is left"

    run(bench, test, fail_loads=[2])


def test_a_staged_file_that_changed_on_disk_is_not_loaded_again(bench: Callable[..., Bench]) -> None:
    async def test(b: Bench) -> None:
        await b.notify(1)
        assert (await asyncio.to_thread(b.sync.reload)).version == 1
        file = b.receiver.directory / "v1.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        assert await asyncio.to_thread(b.sync.reload) is None
        assert "version 1" in b.sync.message
        assert b.counts["weights/damaged_files"] == 1

    run(bench, test)


def test_the_file_that_is_served_outlives_a_failed_load_and_the_pull_after_it(bench: Callable[..., Bench]) -> None:
    async def test(b: Bench) -> None:
        for version in (1, 2, 3, 4):
            await b.notify(version)
        assert b.receiver.kept == ["", "v1.safetensors", "v1.safetensors", "v3.safetensors"]

    run(bench, test, fail_loads=[2])


def test_a_load_that_ended_after_its_deadline_is_what_a_restarted_engine_gets(bench: Callable[..., Bench]) -> None:
    async def test(b: Bench) -> None:
        await b.notify(1)
        b.sync._load_s, b.engine.options.load_s = 0.02, 0.05
        load = b.engine.load

        async def late(weights: Any) -> None:  # as an engine of its own process, which does not hear that its caller gave up
            await asyncio.shield(asyncio.create_task(load(weights)))

        b.engine.load = late
        assert await b.notify(2) == ("failed", 1)
        while b.sync.model.serving.version != 2:
            await asyncio.sleep(0.01)
        assert b.sync.staged.version == 2

    run(bench, test)


def test_a_late_notice_of_a_dead_timeline_is_ignored_before_its_successor_is_served(bench: Callable[..., Bench]) -> None:
    async def test(b: Bench) -> None:
        await b.notify(7)
        b.receiver.errors = [DigestMismatch("bytes")]
        assert await b.notify(3, timeline=2) == ("failed", 7)
        assert await b.notify(8, timeline=1) == ("current", 7)
        assert b.receiver.pulls == [(7, False), (3, True)]
        with pytest.raises(BadMessage, match="counted from 0"):
            await b.notify(-1)

    run(bench, test)


def test_weights_whose_timeline_died_while_they_waited_for_a_lane_are_not_loaded(bench: Callable[..., Bench]) -> None:
    async def test(b: Bench) -> None:
        await b.notify(7)
        b.receiver.hold.clear()
        dead = asyncio.create_task(b.notify(8))
        while len(b.receiver.pulls) < 2:
            await asyncio.sleep(0.001)
        b.idle.clear()
        b.receiver.hold.set()
        while "lane" not in b.sync.message:
            await asyncio.sleep(0.001)
        new = asyncio.create_task(b.notify(3, timeline=2))
        await asyncio.sleep(0)
        b.idle.set()
        assert await new == ("loaded", 3)
        await dead
        assert b.counts["weights/syncs_delta"] == 1, "version 8 was pulled and left alone"

    run(bench, test)


def test_a_rollback_forgets_the_dead_timeline_although_the_engine_serves_nothing(bench: Callable[..., Bench]) -> None:
    async def test(b: Bench) -> None:
        await b.notify(7)
        b.engine._serving = None  # restarted, and its weights could not be loaded
        assert await b.notify(3, timeline=2) == ("loaded", 3)
        assert b.rollbacks == [("default", 2)]

    run(bench, test)


def test_notices_coalesce_to_the_newest(bench: Callable[..., Bench]) -> None:
    async def test(b: Bench) -> None:
        b.receiver.hold.clear()
        first = asyncio.create_task(b.notify(0))
        while not b.receiver.pulls:
            await asyncio.sleep(0.001)
        later = [asyncio.create_task(b.notify(version)) for version in (1, 2, 3, 2)]
        assert await b.notify(0, wait_s=0.01) == ("loading", -1)
        b.receiver.hold.set()
        assert {state for state, _ in await asyncio.gather(first, *later)} == {"loaded"}
        assert [version for version, _ in b.receiver.pulls] == [0, 3]

    run(bench, test)


@pytest.mark.parametrize(("version", "timeline"), [(3, 1), (2, 2)], ids=["the same version again", "a new timeline"])
def test_a_pull_from_a_sender_that_died_ends_when_its_trainer_is_back_elsewhere(
    bench: Callable[..., Bench], version: int, timeline: int
) -> None:
    async def test(b: Bench) -> None:
        await b.notify(1)
        waiting = asyncio.create_task(b.notify(3, sender=DEAD))
        while len(b.receiver.pulls) < 2:
            await asyncio.sleep(0.001)
        assert await b.notify(3, wait_s=0.05, sender=DEAD) == ("loading", 1), "the same notice again changes nothing"
        assert await b.notify(version, timeline) == ("loaded", version)
        assert (await waiting)[0] in ("loaded", "failed")
        assert len(b.receiver.pulls) == 3
        assert b.counts["weights/failures"] == 0

    run(bench, test)


def test_a_superseded_pull_is_no_failure(bench: Callable[..., Bench]) -> None:
    async def test(b: Bench) -> None:
        await b.notify(0)
        b.receiver.errors = [Conflict("version 1 is superseded")]
        assert await b.notify(1, wait_s=0.05) == ("loading", 0), "the notice that supersedes it is on its way"
        while b.sync.busy:  # the pull of a slow machine outlives that notice
            await asyncio.sleep(0.001)
        assert b.counts["weights/failures"] == 0
        b.receiver.errors = [Conflict("version 1 is superseded")]
        waiting = asyncio.create_task(b.notify(1))
        while b.receiver.errors:
            await asyncio.sleep(0.001)
        assert await b.notify(2) == ("loaded", 2)
        assert await waiting == ("loaded", 2)

    run(bench, test)


def test_loads_wait_for_lanes_and_skip_to_the_newest(bench: Callable[..., Bench]) -> None:
    async def test(b: Bench) -> None:
        await b.notify(0)
        b.idle.clear()
        assert await b.notify(1, wait_s=0.02) == ("loading", 0)
        while "lane" not in b.sync.message:
            await asyncio.sleep(0.001)
        assert await b.notify(2, wait_s=0.02) == ("loading", 0)
        waiting = asyncio.create_task(b.notify(2))
        b.idle.set()
        assert await waiting == ("loaded", 2)
        assert [version for version, _ in b.receiver.pulls] == [0, 2]

    run(bench, test)


def test_requests_wait_while_weights_are_loaded_and_running_ones_are_stamped_as_sampled(bench: Callable[..., Bench], rig: MakeRig) -> None:
    from astraflow.workflows.api import ModelRequest

    async def test(b: Bench) -> None:
        await b.notify(0)
        request = ModelRequest(input_ids=[7], max_new_tokens=4000, seed=3)
        call = asyncio.create_task(b.engine.agenerate(request))
        await asyncio.sleep(0.05)  # some tokens come before, and far more are to come
        assert await b.notify(1) == ("loaded", 1)
        b.engine.options.token_s = 0.0
        response = await call
        assert response.versions[0] == 0
        assert response.versions[-1] == 1
        assert response.versions == sorted(response.versions)
        assert len(response.output_ids) == 3001

    run(bench, test, token_s=0.02, answer_tokens=3000, solver="none")


def test_an_aborting_engine_continues_under_the_new_weights(bench: Callable[..., Bench]) -> None:
    from astraflow.workflows.api import ModelRequest

    async def test(b: Bench) -> None:
        await b.notify(0)
        call = asyncio.create_task(b.engine.agenerate(ModelRequest(input_ids=[7], max_new_tokens=2000, seed=3)))
        await asyncio.sleep(0.05)
        assert await b.notify(1) == ("loaded", 1)
        b.engine.options.token_s = 0.0
        response = await call
        assert set(response.versions) == {0, 1}
        assert len(b.engine.seen) == 2
        done = len(b.engine.seen[1].input_ids) - 1
        assert b.engine.seen[1].max_new_tokens == 2000 - done
        assert response.versions[:done] == [0] * done

    run(bench, test, token_s=0.02, answer_tokens=3000, solver="none", aborts=True)


def test_the_scripted_engine_reads_the_file_and_refuses_a_wrong_digest(bench: Callable[..., Bench], tmp_path: Path) -> None:
    from astraflow.raas.engines.base import EngineError, Weights

    async def test(b: Bench) -> None:
        path = tmp_path / "x.safetensors"
        name = write(path, 5)
        await b.engine.load(Weights(path=str(path), timeline=1, version=5, digest=name))
        with pytest.raises(EngineError, match="digest"):
            await b.engine.load(Weights(path=str(path), timeline=1, version=6, digest="0" * 32))
        path.write_bytes(b"\xff" * 64)
        with pytest.raises(EngineError, match="header"):
            await b.engine.load(Weights(path=str(path), timeline=1, version=6, digest=""))
        assert b.engine.report().serving.version == 5

    run(bench, test)
