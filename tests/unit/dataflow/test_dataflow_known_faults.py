"""The known faults of the public implementation that touch Dataflow (spec section 9): one test of the whole kind for each. Those
of rows and tokens are in test_dataflow_known_faults_of_rows.py, those of the fleet in test_dataflow_fleet.py.

The book of all faults and of the tests that keep them away is tests/contract/test_fault_book.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import pickle
import sys
import types
import typing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.dataflow.barrier import ModelState, VersionBarrier
from astraflow.dataflow.config import DataflowProcess
from astraflow.protocol import codec
from astraflow.protocol.control import NotifyVersion, Ready
from astraflow.protocol.errors import ConfigError, RemoteError, Unavailable
from astraflow.protocol.message import Empty
from astraflow.protocol.rollout import Serving
from astraflow.protocol.routes import DataflowAPI
from astraflow.protocol.weights import NotifyRaaSReply


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"known_faults_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


bench, fleet_world = _load("bench"), _load("fleet_world")
made, Bench = bench.made, bench.Bench


# --- 3, 4: trainers that come back --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", [0, 1, 2, 3])
def test_faults_3_and_4_a_trainer_re_attaches_at_any_version_and_the_instances_follow_it_down(tmp_path: Path, checkpoint: int) -> None:
    """Fault 3: a restarted trainer cannot re-attach. Fault 4: rollback to a lower version is refused."""

    async def scene() -> None:
        b = await Bench(tmp_path, change=lambda p: setattr(p.dataflow.buffer, "max_staleness", None)).start()
        for version in range(3):
            for lease_id in await b.lease():
                await b.deliver(lease_id, [0.0, 1.0])
            assert (await b.ask(version)).kind == "batch"
            await b.train(version + 1, checkpoint=min(version + 1, checkpoint) if checkpoint else -1)
            b.serves(version + 1)
        before = b.shelf.ledger.snapshot.trained
        await b.back(checkpoint, f"d{checkpoint}")
        state = b.shelf.barrier.models["m"]
        assert (state.version, state.timeline) == (checkpoint, int(checkpoint < 3))
        assert b.service.fleet.target("r", "m") == Serving(timeline=state.timeline, version=checkpoint, digest=f"d{checkpoint}")
        assert b.service.fleet.behind("r", "m") == (checkpoint < 3), "told to load the lower version"
        assert b.shelf.ledger.check().trained == before - (3 - checkpoint) * 4, "what the weights have forgotten is open again"
        reply = await b.ask(checkpoint)
        assert reply.kind == "batch", "and it goes on"
        b.close()

    bench.run(scene)


# --- 11, 12: nobody is waited for without end, nothing starts too early -------------------------------------------------------


@given(st.sets(st.integers(0, 4)), st.integers(0, 2))
def test_fault_11_whoever_dies_the_others_pass_the_barrier_after_its_deadline(dead: set[int], lead: int) -> None:
    """A barrier without time-out, whose failing leader strands the peers: here any of the models may be the one that fails."""
    names = [f"m{i}" for i in range(5)]
    barrier = VersionBarrier({name: ModelState(model_id=name) for name in names}, lead, 100.0)
    for name in names:
        barrier.ready(Ready(model_id=name, train_batch_size=2, sender_endpoint="", digest="d"), 0.0)
    alive = [name for i, name in enumerate(names) if i not in dead]
    for version in range(1, lead + 2):
        for name in alive:
            barrier.notify(NotifyVersion(model_id=name, timeline=0, version=version, digest=f"{name}{version}"), 50.0)
    for name in alive:
        waits = barrier.gate(lead + 1, name)
        assert {edge.waits_for for edge in waits} == {f"trainer:m{i}" for i in dead}, "every one of them is named"
    barrier.tick(120.0)
    for name in alive:
        assert not barrier.gate(lead + 1, name)
    assert set(barrier.live()) == set(alive)


def test_fault_12_nothing_is_issued_before_every_trainer_is_ready_and_an_instance_is_current(tmp_path: Path) -> None:
    """The start gate that never blocks: with one of two trainers missing not a single lease goes out, however long that lasts."""

    def two(process: DataflowProcess) -> None:
        process.models = ["m", "late"]

    world = fleet_world.World(tmp_path, two)
    node = world.node("r", models=["m", "late"])

    def ready(model_id: str) -> Any:
        return world.service.trainers.ready(Ready(model_id=model_id, train_batch_size=4, sender_endpoint="", digest="d0"))

    async def scene() -> None:
        world.shelf.tasks.spawn("submit", world.service.acquisition.submit_loop())
        await ready("m")
        await asyncio.sleep(50.0)
        await world.join(node)
        await asyncio.sleep(500.0)
        assert not world.shelf.started
        assert world.shelf.source.state.drawn == 0
        assert any(edge.waits_for == "trainer:late" for edge in world.shelf.waits.edges())
        await ready("late")
        await world.until(lambda: node.taken, 10, "and then it goes")
        assert max(node.when("notify_version")[:2]) < min(node.when("submit")), "first the weights of both, then work"

    world.run(scene)


# --- 16, 21: nothing is lost, no name comes twice -----------------------------------------------------------------------------


def test_fault_16_a_reply_that_nobody_read_is_given_again_by_pull_and_by_batch(tmp_path: Path) -> None:
    """`/pull` and `/batch` at most once: a client's time-out loses data. Here no reply is ever read at the first time."""
    world = fleet_world.World(tmp_path)
    node = world.node("r")
    pull, seen = node.pull, Counter[str]()

    async def unread(request: Any) -> Any:
        reply = await pull(request)
        fresh = [d for d in reply.deliveries if not seen[d.delivery_id]]
        seen.update(d.delivery_id for d in reply.deliveries)
        if fresh:
            raise Unavailable("the connection broke")
        return reply

    node.pull = unread

    async def ask(version: int) -> Any:
        return await world.service.serving.batch(bench.BatchRequest(model_id="m", timeline=0, version=version, wait_s=20.0))

    async def scene() -> None:
        await world.start(node)
        trained: list[str] = []
        for version in range(4):
            hung_up = asyncio.ensure_future(ask(version))
            await asyncio.sleep(0.01)
            hung_up.cancel()
            first, second = await ask(version), await ask(version)
            assert codec.encode(first.batch) == codec.encode(second.batch)
            trained += first.batch.trajectory_ids
            await world.service.trainers.notify(NotifyVersion(model_id="m", timeline=0, version=version + 1, digest=f"d{version + 1}"))
        assert len(set(trained)) == len(trained) == 16
        assert min(seen.values()) >= 2, "every delivery came again"
        assert not world.shelf.ledger.snapshot.dropped

    world.run(scene)


def test_fault_21_no_group_id_comes_twice_over_restarts_and_run_directories(tmp_path: Path) -> None:
    """Group ids collide after resume: an id names one lease of one task for ever, and is trained on once."""
    owner: dict[str, tuple[Path, str, int]] = {}
    trained: list[str] = []

    async def life(directory: Path, answer: bool) -> None:
        b = Bench(directory)
        await b.service.save()
        state = b.shelf.barrier.models["m"]
        await b.start(state.version)
        for lease_id in await b.lease():
            lease = b.shelf.leases.open[lease_id]
            key = (directory, lease.task_id, lease.seed)
            assert owner.setdefault(lease_id, key) == key
            if answer:
                await b.deliver(lease_id, [0.0, 1.0], state.version, lease.attempt)
        while answer and (reply := await b.ask(b.shelf.barrier.models["m"].version)).kind == "batch":
            trained.extend(reply.batch.group_ids)
            await b.train(b.shelf.barrier.models["m"].version + 1)
        b.close()

    for number in range(8):
        bench.run(lambda number=number: life(tmp_path / ("a" if number % 2 else "b"), number % 3 > 0))
    assert len(trained) >= 20
    assert len(set(trained)) == len(trained)
    assert len(set(owner.values())) == len(owner)


# --- 23, 24, 1: instances -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RemoteError("HTTP 500"), Unavailable("refused")])
def test_fault_23_an_instance_whose_answer_is_an_error_is_not_in_the_pool(tmp_path: Path, error: Exception) -> None:
    """Self-registration takes HTTP 500 for success; at this end an address that fails its check is no member."""
    world = fleet_world.World(tmp_path)
    node = world.node("r")
    node.fail("status", error)

    async def scene() -> None:
        for _ in range(2):
            with pytest.raises(Unavailable, match="does not answer /status"):
                await world.join(node)
        assert not world.shelf.pool.instances
        with pytest.raises(ConfigError, match="does not answer /status"):
            await world.join(node)
        node.refuse.clear()
        await world.join(node)
        assert world.state("r") == "catching_up"

    world.run(scene)


@pytest.mark.parametrize("arrives", ["late", "as a new process", "after a rollback"])
def test_fault_24_no_instance_gets_work_before_it_serves_the_newest_weights(tmp_path: Path, arrives: str) -> None:
    world = fleet_world.World(tmp_path)
    first, node = world.node("first"), world.node("r")

    async def notice(version: int) -> None:
        await world.service.trainers.notify(NotifyVersion(model_id="m", timeline=0, version=version, digest=f"d{version}"))

    async def scene() -> None:
        await world.start(first, *([node] if arrives == "as a new process" else []))
        for version in (1, 2, 3):
            await notice(version)
            await asyncio.sleep(2.0)
        if arrives == "as a new process":
            node.incarnation, node.running, node.workflows, node.serving = "two", {}, [], {}
        elif arrives == "after a rollback":
            message = Ready(model_id="m", train_batch_size=4, sender_endpoint="", version=1, digest="other", recovered_version=1)
            await world.service.trainers.ready(message)
        node.slow["notify_version"] = 20.0
        begin = world.now
        await world.join(node)
        target = world.fleet.target("r", "m")
        await world.until(lambda: any(at > begin for at in node.when("submit")), 60, "work comes in the end")
        assert node.serving["m"] == target, "the newest, by its own receipt"
        assert min(at for at in node.when("submit") if at > begin) > begin + 20.0

    world.run(scene)


def test_fault_1_a_failed_load_is_no_success_and_is_tried_again(tmp_path: Path) -> None:
    """Dataflow believes receipts only: after three failed loads the instance serves, and is shown to serve, the old version."""
    world = fleet_world.World(tmp_path)
    node = world.node("r")
    load, failures = node.notify_version, []

    async def fails(request: Any) -> NotifyRaaSReply:
        if request.version == 1 and len(failures) < 3:
            failures.append(dict(node.serving))
            return NotifyRaaSReply(state="failed", message="out of memory", serving=node.serving)
        return await load(request)  # type: ignore[no-any-return]

    async def scene() -> None:
        await world.start(node)
        node.notify_version = fails
        await world.service.trainers.notify(NotifyVersion(model_id="m", timeline=0, version=1, digest="d1"))
        await world.until(lambda: len(failures) == 3, 20, "tried again and again")
        assert world.shelf.pool.instances["r"].serving["m"].version == 0
        assert world.saw("load failed: out of memory")
        await world.until(lambda: world.shelf.pool.instances["r"].serving["m"].version == 1, 20, "loaded at last")

    world.run(scene)


# --- 28, 32, 34, 37: the service ----------------------------------------------------------------------------------------------


def test_fault_28_an_omitted_key_has_a_value_of_its_type() -> None:
    """Omitted configuration keys became None and crashed later: None only stands where the type says so."""
    process = msgspec.convert({"run_id": "r", "run_dir": "d"}, DataflowProcess)
    process.validate()
    seen = list(_values(process, "dataflow"))
    assert len(seen) > 40
    for path, kind, value in seen:
        optional = type(None) in typing.get_args(kind) or kind is Any
        assert value is not None or optional, path


def _values(struct: msgspec.Struct, path: str) -> Iterator[tuple[str, Any, Any]]:
    for field in msgspec.structs.fields(type(struct)):
        value, kind = getattr(struct, field.name), field.type
        if typing.get_origin(kind) is typing.Annotated:
            kind = typing.get_args(kind)[0]
        yield f"{path}.{field.name}", kind, value
        if isinstance(value, msgspec.Struct):
            yield from _values(value, f"{path}.{field.name}")


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_fault_32_a_pickled_body_is_refused_on_every_route_and_never_executed(tmp_path: Path) -> None:
    """Pickle from open unauthenticated ports is remote code execution."""

    async def scene() -> None:
        b = Bench(tmp_path / "run")
        await b.service.server.start()
        body = pickle.dumps(Bomb(tmp_path / "executed"))
        assert pickle.loads(body) is None
        assert (tmp_path / "executed").exists(), "the bomb works"
        (tmp_path / "executed").unlink()
        async with httpx.AsyncClient(base_url=b.service.server.url) as client:
            paths = [route.path for route in vars(DataflowAPI).values() if getattr(route, "method", "") == "POST"]
            assert len(paths) >= 6
            for path in paths:
                for kind in ("application/x-pickle", "application/octet-stream", "application/msgpack", "application/json"):
                    answer = await client.post(path, content=body, headers={"content-type": kind})
                    assert 400 <= answer.status_code < 500, (path, kind, answer.status_code)
        assert not (tmp_path / "executed").exists()
        assert not b.shelf.pool.instances
        await b.service.server.stop()
        b.close()

    bench.run(scene)
    with pytest.raises(ConfigError, match="token"):
        Bench(tmp_path / "open", change=lambda p: setattr(p, "host", "0.0.0.0"))


def test_fault_34_nothing_in_memory_grows_with_the_length_of_the_run(tmp_path: Path) -> None:
    """Unbounded result tables: after as many groups again every table of the service is as large as before, trained, dropped or
    rejected, and so is what is kept on disk for them."""

    def small(process: DataflowProcess) -> None:
        process.dataflow.policies.filter = "filter_zero_adv"
        process.dataflow.ledger.segment_bytes = 20_000
        process.dataflow.buffer.replay.ratio, process.dataflow.buffer.replay.size = 0.5, 8

    async def scene() -> None:
        b = await Bench(tmp_path, change=small).start()
        seen: list[tuple[Counter[str], int]] = [(Counter(), 0), (Counter(), 0)]
        for version in range(640):
            b.serves(version)
            pending = await b.lease()
            for number, lease_id in enumerate(pending):
                rewards = [0.0, 0.0] if number % 3 == 2 else [None, 1.0] if number % 7 == 6 else [0.0, 1.0]
                await b.deliver(lease_id, rewards, version)
            assert (await b.ask(version)).kind == "batch", version
            await b.train(version + 1, checkpoint=version)
            if version >= 480 and version % 8 == 0:  # the largest of each time: some tables are tidied only now and then
                sizes, files = seen[version >= 560]
                seen[version >= 560] = sizes | tables(b.service), max(files, len(list((tmp_path / "ledger").rglob("*.*"))))
        (before, files), (after, files_after) = seen
        grown = {name: (before.get(name, 0), size) for name, size in after.items() if size > before.get(name, 0) + 4}
        assert not grown
        assert files_after <= files + 1
        b.close()

    bench.run(scene)


def tables(root: Any) -> Counter[str]:
    """Path of every container that is reachable from an object of ours → its size."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("service", root)]
    while waiting:
        path, thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, str | bytes | int | float | type | types.ModuleType | types.FunctionType):
            continue
        seen.add(id(thing))
        if isinstance(thing, dict | list | tuple | set | frozenset) or type(thing).__name__ == "deque":
            found[path] += len(thing)
            items = thing.values() if isinstance(thing, dict) else thing
            waiting += [(f"{path}[]", item) for item in list(items)]
        elif type(thing).__module__.startswith("astraflow."):
            names = list(getattr(thing, "__dict__", {}))
            names += [field.name for field in dataclasses.fields(thing)] if dataclasses.is_dataclass(thing) else []
            names += list(thing.__struct_fields__) if isinstance(thing, msgspec.Struct) else []
            waiting += [(f"{path}.{name}", getattr(thing, name, None)) for name in dict.fromkeys(names)]
    return found


def test_fault_37_a_batch_that_waits_holds_up_nobody(tmp_path: Path) -> None:
    """Sleeping while holding the buffer lock: while a trainer waits for its batch, results come in, others are answered, its own
    notice is taken, and the batch is there as soon as it can be."""
    world = fleet_world.World(tmp_path)
    node = world.node("r", work_s=10.0)

    async def scene() -> None:
        await world.start(node)
        begin = world.now
        waiting = [
            asyncio.ensure_future(world.service.serving.batch(bench.BatchRequest(model_id="m", timeline=0, version=0, wait_s=25.0)))
            for _ in range(3)
        ]
        await asyncio.sleep(1.0)
        asked = world.now
        await world.service._handlers.status(Empty())
        await world.service.save()
        assert world.now - asked < 0.1, "from memory, at once"
        replies = await asyncio.gather(*waiting)
        assert [reply.kind for reply in replies] == ["batch"] * 3
        assert len({codec.encode(reply.batch) for reply in replies}) == 1
        assert 9.0 < world.now - begin < 13.0, "as soon as the groups were there"

    world.run(scene)

