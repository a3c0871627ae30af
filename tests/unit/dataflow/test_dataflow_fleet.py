"""The fleet between the real service and rollout services that the test moves, in simulated time."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from astraflow.dataflow.config import DataflowProcess
from astraflow.dataflow.pool import InstanceRecord
from astraflow.protocol.control import NotifyVersion
from astraflow.protocol.errors import ConfigError, RemoteError, Unavailable, UnknownName
from astraflow.protocol.rollout import LeaseVerdict, SubmitReply

_spec = importlib.util.spec_from_file_location("fleet_world", Path(__file__).with_name("fleet_world.py"))
assert _spec is not None
assert _spec.loader is not None
fleet_world: Any = importlib.util.module_from_spec(_spec)
sys.modules["fleet_world"] = fleet_world
_spec.loader.exec_module(fleet_world)


@pytest.fixture
def world(tmp_path: Path) -> Any:
    return fleet_world.World(tmp_path)


def made_with(tmp_path: Path, change: Callable[[DataflowProcess], None]) -> Any:
    return fleet_world.World(tmp_path, change)


def pauses(times: list[float]) -> list[float]:
    return [round(b - a, 2) for a, b in itertools.pairwise(times)]


# --- heartbeats -------------------------------------------------------------------------------------------------------------


def test_one_silent_instance_delays_nobody_elses_check(world: Any) -> None:
    """Fault 25: serial heartbeats, where one dead node delays the rest."""
    nodes = [world.node(name) for name in ("a", "b", "c")]

    async def scene() -> None:
        await world.start(*nodes)
        nodes[0].slow = {"status": 1e6, "pull": 1e6}
        begin = world.now
        await asyncio.sleep(200.0)
        assert world.state("a") == "out"
        for node in nodes[1:]:
            times = [at for at in node.when("status") if at > begin]
            assert len(times) >= 19
            assert max(pauses(times)) <= 10.1, "every 10 s, while the other one let each of its checks time out"

    world.run(scene)


def test_a_saturated_instance_stays_as_long_as_its_data_path_works(world: Any) -> None:
    busy = world.node("busy")

    async def scene() -> None:
        await world.start(busy)
        busy.slow["status"] = 60.0
        await asyncio.sleep(300.0)
        assert world.state("busy") == "live"
        assert world.count("raas/late_status") > 10, "seen and counted"
        assert busy.taken > 100, "and it works on"
        busy.slow["pull"] = busy.slow["submit"] = 1e6
        await world.until(lambda: world.state("busy") == "out", 90, "nothing answers any more")
        assert world.saw("heartbeats failed")

    world.run(scene)


def test_instances_do_not_pay_for_a_dataflow_that_had_no_time_to_read_their_answers(world: Any) -> None:
    nodes = [world.node(name) for name in ("a", "b")]

    async def scene() -> None:
        await world.start(*nodes)
        world.busy_s = 60.0
        await asyncio.sleep(300.0)
        world.busy_s = 0.0
        assert len(world.shelf.pool.instances) == 2
        assert all(instance.failures == 0 for instance in world.shelf.pool.instances.values())
        assert world.count("raas/late_status") > 4
        await world.until(lambda: all(world.state(node.instance_id) == "live" for node in nodes), 90, "confirmed again")

    world.run(scene)


def test_a_stopped_process_is_out_after_two_missed_checks(world: Any) -> None:
    stopped, other = world.node("stopped"), world.node("other")

    async def scene() -> None:
        await world.start(stopped, other)
        stopped.slow = dict.fromkeys(("status", "pull", "submit", "leases", "notify_version"), 1e6)
        leases = dict(world.shelf.pool.instances["stopped"].held)
        await world.until(lambda: world.state("stopped") == "out", 60, "it is out")
        await world.until(lambda: not set(leases) & set(world.shelf.leases.open), 30, "its leases ran elsewhere")
        assert "max_attempts" not in world.shelf.ledger.snapshot.dropped

    world.run(scene)


def test_a_flapping_instance_rests_longer_each_time_and_is_counted(world: Any) -> None:
    flapping, calm = world.node("flapping"), world.node("calm")

    async def scene() -> None:
        await world.start(flapping, calm)
        flapping.fail("submit", *[Unavailable("cut"), fleet_world.Going()] * 6)
        await asyncio.sleep(100.0)
        assert world.state("flapping") == "live"
        rests = world.count("raas/rests")
        assert rests >= 3
        assert world.count("raas/suspicions") == rests + 1, "the first one costs nothing"
        assert world.saw("suspected 3 times: no new work for 2 s")
        assert calm.taken > flapping.taken

    world.run(scene)


def test_a_slow_instance_does_not_slow_the_others(tmp_path: Path) -> None:
    """Per-instance tasks: what a fast instance does in a minute is the same beside a slow one."""
    done = []
    for name, slow in (("alone", False), ("beside", True)):
        world = made_with(tmp_path / name, lambda p: setattr(p.dataflow.buffer, "max_groups", 100_000))
        fast, other = world.node("fast"), world.node("slow")

        async def scene(world: Any = world, fast: Any = fast, other: Any = other, slow: bool = slow) -> None:
            await world.start(fast, other)
            if slow:
                other.slow = dict.fromkeys(("status", "pull", "submit", "leases", "notify_version", "register_workflow"), 4.0)
                other.work_s = 30.0
            begin = fast.taken
            await asyncio.sleep(60.0)
            done.append(fast.taken - begin)
            assert world.state("slow") == "live"

        world.run(scene)
    assert done[1] >= 0.95 * done[0], done


# --- who is who -------------------------------------------------------------------------------------------------------------


def test_a_new_process_at_the_same_address_is_a_new_instance_whatever_it_calls_itself(world: Any) -> None:
    old = world.node("old", url="http://x", work_s=1e6)

    async def scene() -> None:
        await world.start(old)
        await world.until(lambda: world.shelf.pool.instances["old"].held, 10, "it works")
        leases = set(world.shelf.pool.instances["old"].held)
        world.nodes.remove(old)
        new = world.node("new", url="http://x", incarnation="two")
        await world.join(new)
        assert world.state("old") == "out", "at once: its address belongs to another process"
        assert world.saw("instance old is out of the pool: new listens at its address now")
        await world.until(lambda: not leases & set(world.shelf.leases.open), 30, "its leases ran on the new one")

    world.run(scene)


def test_an_address_that_answers_under_another_name_is_no_proof_of_life(world: Any) -> None:
    old = world.node("old", url="http://x")

    async def scene() -> None:
        await world.start(old)
        world.nodes.remove(old)
        world.node("new", url="http://x", incarnation="two")  # never registers here: it belongs to another run
        await world.until(lambda: world.state("old") == "out", 15, "found out")
        assert world.saw("answers as instance 'new'") or world.saw("another process answers")

    world.run(scene)


def test_a_restart_in_place_is_noticed_by_the_first_answer_of_the_data_path(world: Any) -> None:
    node = world.node("r", work_s=1e6)

    async def scene() -> None:
        await world.start(node)
        await world.until(lambda: world.shelf.pool.instances["r"].held, 10, "it works")
        leases = {key: held.attempt for key, held in world.shelf.pool.instances["r"].held.items()}
        node.incarnation, node.running, node.workflows, node.serving, node.work_s = "two", {}, [], {}, 1.0
        began = world.now
        await world.until(lambda: world.saw("instance r is a new process"), 15, "noticed")
        assert world.now - began < 11.0
        await world.until(lambda: world.state("r") == "live", 15, "introduced and caught up again")
        await world.until(lambda: not set(leases) & set(world.shelf.leases.open), 30, "what the old process ran is run again")

    world.run(scene)


def test_an_instance_that_leaves_while_the_leases_of_its_last_life_are_given_up_is_simply_gone(tmp_path: Path) -> None:
    world = made_with(tmp_path, lambda p: setattr(p.dataflow.pool, "max_attempts", 1))
    node = world.node("r")

    async def scene() -> None:
        await world.start(node)
        await world.until(lambda: world.shelf.pool.instances["r"].held, 10, "leases")
        node.incarnation, node.running = "two", {}
        write, left = world.shelf.write, []

        async def meanwhile(function: Any, *arguments: Any) -> Any:
            if function.__name__ == "abandon" and not left:
                left.append(await world.fleet.leave("r", False, False))
            return await write(function, *arguments)

        world.shelf.write = meanwhile
        await world.join(node)
        assert left, "it left in the middle of its registration"
        assert "r" not in world.shelf.pool.instances

    world.run(scene)


def test_two_machines_under_one_name_the_first_keeps_it_while_it_lives(world: Any) -> None:
    first = world.node("r", url="http://one")

    async def scene() -> None:
        await world.start(first)
        second = world.node("r", url="http://two", incarnation="two")
        for _ in range(3):
            with pytest.raises(ConfigError, match="name of the instance at http://one, which is alive"):
                await world.join(second)
        assert world.shelf.pool.instances["r"].record.url == "http://one"
        assert world.state("r") == "live", "nothing was thrown away"
        first.state = "draining"
        with pytest.raises(Unavailable, match="about to end"):
            await world.join(second)
        first.state, first.slow["status"] = "idle", 1e6
        with pytest.raises(Unavailable, match="may be alive"):
            await world.join(second)
        world.nodes.remove(first)
        await world.join(second)
        assert world.shelf.pool.instances["r"].record.url == "http://two"

    world.run(scene)


def test_a_registration_that_arrives_after_the_death_of_its_process_does_not_count(world: Any) -> None:
    node = world.node("r", incarnation="two")

    async def scene() -> None:
        await world.start(node)
        with pytest.raises(Unavailable, match="newer process"):
            await world.join(node, incarnation="one")
        assert world.shelf.pool.instances["r"].record.incarnation == "two"
        assert world.state("r") == "live"

    world.run(scene)


# --- workflows --------------------------------------------------------------------------------------------------------------


def test_an_instance_that_refuses_a_workflow_leaves_with_the_reason_and_may_come_again(world: Any) -> None:
    able, unable = world.node("able"), world.node("unable")
    unable.fail("register_workflow", UnknownName("workflow: 'rlvr' is not registered here"))

    async def scene() -> None:
        await world.start(able)
        await world.join(unable)
        await world.until(lambda: world.state("unable") == "out", 5, "it leaves at once")
        assert world.saw("unable is out of the pool: it does not take the workflows: workflow: 'rlvr' is not registered here")
        assert len(unable.when("register_workflow")) == 1, "asked once, not for ever"
        unable.refuse.clear()
        await world.join(unable)
        await world.until(lambda: world.state("unable") == "live", 10, "its second chance")

    world.run(scene)


def test_an_instance_that_fails_to_take_a_workflow_is_asked_until_the_deadline(world: Any) -> None:
    able, broken = world.node("able"), world.node("broken")
    broken.fail("register_workflow", RemoteError("ImportError: no module named x"))

    async def scene() -> None:
        await world.start(able)
        await world.join(broken)
        begin = world.now
        await world.until(lambda: world.state("broken") == "out", 200, "it leaves")
        assert 115 < world.now - begin < 135, "dataflow.pool.introduce_s"
        assert len(broken.when("register_workflow")) > 10
        assert sum("broken: it does not take the workflows" in event for event in world.shelf.events) == 1, "said once"

    world.run(scene)


# --- leaving ----------------------------------------------------------------------------------------------------------------


def test_drain_finishes_what_runs_gets_nothing_new_and_leaves_when_its_results_are_acknowledged(world: Any) -> None:
    leaving, other = world.node("leaving", work_s=20.0), world.node("other")

    async def scene() -> None:
        await world.start(leaving, other)
        await world.until(lambda: leaving.taken >= 2, 10, "it works")
        await world.fleet.leave("leaving", drain=True, shutdown=True)
        taken = leaving.taken
        (record,) = [r for r in stored(world) if r.instance_id == "leaving"]
        assert record.draining, "a restarted Dataflow gives it no work either"
        await world.until(lambda: len(leaving.acknowledged) == taken, 60, "its results are taken")
        await world.until(lambda: world.state("leaving") == "out", 2.5, "it leaves, and no long poll is waited for")
        assert leaving.taken == taken, "no new work"
        assert len(leaving.acknowledged) == taken
        assert not leaving.outbox
        assert leaving.when("shutdown")
        assert world.shelf.meter.counts["raas/removed"] == 1
        assert not world.shelf.ledger.snapshot.dropped

    def stored(world: Any) -> list[InstanceRecord]:
        data = world.shelf.ledger.recover().meta["instances"]
        return msgspec.msgpack.decode(data, type=list[InstanceRecord])

    world.run(scene)


def test_a_drained_instance_is_not_let_go_while_its_last_results_are_being_written(world: Any) -> None:
    """It would end with results that nobody acknowledged, or wait for that in vain."""
    leaving, other = world.node("leaving", work_s=20.0), world.node("other")

    async def scene() -> None:
        await world.start(leaving, other)
        await world.until(lambda: leaving.taken >= 2, 10, "it works")
        await world.fleet.leave("leaving", drain=True, shutdown=True)
        taken, world.loop.thread_delay = leaving.taken, lambda: 3.0
        await world.until(lambda: world.state("leaving") == "out", 120, "it leaves")
        assert len(leaving.acknowledged) == taken
        world.loop.thread_delay = lambda: 0.0

    world.run(scene)


def test_a_drain_that_never_ends_is_over_after_its_deadline(world: Any) -> None:
    """Its status answers, its work does not end, and its own deadline for leases is not kept."""
    stuck, other = world.node("stuck", work_s=1e6), world.node("other")

    async def scene() -> None:
        await world.start(stuck, other)
        await world.until(lambda: stuck.taken >= 2, 10, "it works")
        leases, begin = set(world.shelf.pool.instances["stuck"].held), world.now
        await world.fleet.leave("stuck", drain=True, shutdown=False)
        await world.until(lambda: world.state("stuck") == "out", 700, "it is let go")
        assert 629 < world.now - begin < 635, "lease_deadline_s and call_timeout_s"
        assert world.saw("stuck is out of the pool: its drain did not end within 630 s")
        await world.until(lambda: not leases & set(world.shelf.leases.open), 30, "its leases ran elsewhere")

    world.run(scene)


def test_a_draining_instance_that_dies_gives_its_leases_back(world: Any) -> None:
    leaving, other = world.node("leaving", work_s=1e6), world.node("other")

    async def scene() -> None:
        await world.start(leaving, other)
        await world.until(lambda: leaving.taken >= 2, 10, "it works")
        leases = set(world.shelf.pool.instances["leaving"].held)
        await world.fleet.leave("leaving", drain=True, shutdown=False)
        world.nodes.remove(leaving)
        await world.until(lambda: world.state("leaving") == "out", 15, "found dead")
        await world.until(lambda: not leases & set(world.shelf.leases.open), 30, "its leases ran elsewhere")

    world.run(scene)


def test_all_instances_gone_is_a_wait_that_says_so_and_ends_when_one_joins(world: Any) -> None:
    first = world.node("first")

    async def scene() -> None:
        await world.start(first)
        world.nodes.remove(first)
        await world.until(lambda: world.state("first") == "out", 30, "out")
        await world.until(lambda: any("no live instance" in edge.why for edge in world.shelf.waits.edges()), 10, "it says so")
        await asyncio.sleep(300.0)
        second = world.node("second")
        await world.join(second)
        await world.until(lambda: second.taken, 15, "it goes on")

    world.run(scene)


# --- notices and refusals -----------------------------------------------------------------------------------------------------


def test_a_failed_notice_is_seen_and_sent_again_and_holds_up_nobody(world: Any) -> None:
    """Faults 30 and 38: failed notices swallowed; one dead receiver that blocks all."""
    a, b, dead = world.node("a"), world.node("b"), world.node("dead")

    async def scene() -> None:
        await world.start(a, b, dead)
        a.fail("notify_version", Unavailable("cut"), Unavailable("cut"), fleet_world.Going())
        dead.slow["notify_version"] = 1e6
        await world.service.trainers.notify(NotifyVersion(model_id="m", timeline=0, version=1, digest="d1"))
        begin = world.now
        await world.until(lambda: b.serving["m"].version == 1, 1, "at once")
        await world.until(lambda: a.serving["m"].version == 1, 10, "after two failures")
        assert world.now - begin < 5.0
        assert world.saw("instance a: m version 1: cut")
        await world.until(lambda: world.saw("instance dead: m version 1: "), 60, "and the dead one is named")

    world.run(scene)


def test_refused_leases_go_elsewhere_and_the_one_that_refuses_is_suspected(world: Any) -> None:
    picky, other = world.node("picky"), world.node("other")

    async def scene() -> None:
        await world.start(picky, other)

        async def refuse(request: Any) -> SubmitReply:
            verdicts = [LeaseVerdict(lease_id=lease.lease_id, verdict="refused", reason="not today") for lease in request.leases]
            return SubmitReply(verdicts=verdicts, free_slots=picky.slots, serving=picky.serving)

        picky.submit = refuse
        await asyncio.sleep(60.0)
        assert world.saw("refused lease")
        assert world.count("rollout/refused_leases") > 0
        assert world.count("raas/rests") > 0
        assert other.taken > 20
        assert not world.shelf.ledger.snapshot.dropped, "no attempt was spent on it"

    world.run(scene)
