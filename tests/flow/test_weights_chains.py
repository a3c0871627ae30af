"""Receivers that are several versions behind, that come to another sender, and that run out of time."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from weights_rig import Proxy, Rig, assert_served, contents, proxies, rigs, until

from astraflow.protocol.errors import Retryable, WeightError


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    with rigs(tmp_path) as make:
        yield make


@pytest.fixture
def proxied(rig: Callable[..., Rig]) -> Iterator[Callable[..., tuple[Rig, Proxy]]]:
    with proxies(rig) as make:
        yield make


def publish(here: Rig, *versions: int) -> None:
    """One after the other, each with its delta on the shelf (a hurried offload would cancel the encoding)."""
    for version in versions:
        here.publish(version)
        if version - 1 in here.digests:
            until(lambda version=version: (version - 1, version) in here.info().deltas, f"delta to {version}")


def test_a_receiver_several_versions_behind_gets_the_deltas_of_the_way(rig: Callable[..., Rig]) -> None:
    here = rig(full_every=0)
    late, early = here.receiver("late"), here.receiver("early")
    publish(here, 1)
    here.pull(late, 1)
    publish(here, 2, 3, 4)
    staged = here.pull(late, 4)
    assert (staged.mode, staged.links, staged.fallback) == ("delta", 3, "")
    assert_served(staged, contents(4))
    full = here.pull(early, 4)
    assert staged.size_bytes < full.size_bytes / 4
    assert late.counters["chain_pulls"] == 1
    assert here.stat("chain_transfers", 1) == 1
    assert here.manager.stats()["weights/chain_links"] == 3
    publish(here, 5)
    assert here.pull(late, 5).links == 1
    assert late.counters["chain_pulls"] == 1


def test_whoever_missed_a_periodic_full_version_makes_its_full_sync_at_the_next_one(rig: Callable[..., Rig]) -> None:
    here = rig(full_every=4)
    receiver = here.receiver()
    publish(here, 2)
    here.pull(receiver, 2)
    for version in range(3, 6):
        here.publish(version)
    staged = here.pull(receiver, 5)
    assert (staged.mode, staged.fallback) == ("full", "a periodic full sync was missed")
    publish(here, 6, 7)
    staged = here.pull(receiver, 7)
    assert (staged.mode, staged.links) == ("delta", 2)
    assert_served(staged, contents(7))


def test_a_chain_that_is_no_smaller_than_a_full_sync_is_not_sent(rig: Callable[..., Rig]) -> None:
    here = rig(full_every=0)
    receiver = here.receiver()
    words = torch.randn(40_000)

    def much(version: int) -> dict[str, torch.Tensor]:
        made = words.clone()
        made[: 20_000 * version] = torch.randn(20_000 * version)
        return {"w": made}

    here.publish(1, {"w": words})
    here.pull(receiver, 1)
    for version in (2, 3):
        here.publish(version, much(version - 1))
        until(lambda version=version: (version - 1, version) in here.info().deltas, "its delta")
    staged = here.pull(receiver, 3)
    assert (staged.mode, staged.fallback) == ("full", "no delta from the version held")
    assert here.info().deltas == [(2, 3)], "the shelf let the older one go"


def test_after_the_death_of_the_sender_only_the_way_between_its_halves_is_left(rig: Callable[..., Rig]) -> None:
    here = rig(full_every=0)
    one_behind, two_behind = here.receiver("one"), here.receiver("two")
    publish(here, 1)
    here.pull(two_behind, 1)
    publish(here, 2)
    here.pull(one_behind, 2)
    publish(here, 3)
    victim = here.manager.sender_pid
    os.kill(victim, signal.SIGKILL)
    until(lambda: here.manager.sender_pid not in (0, victim), "a new sender")
    staged = here.pull(one_behind, 3)
    assert (staged.mode, staged.links) == ("delta", 1), "encoded anew from the two halves"
    staged = here.pull(two_behind, 3)
    assert (staged.mode, staged.fallback) == ("full", "no delta from the version held")
    assert_served(staged, contents(3))


def test_faults_3_and_4_a_receiver_follows_a_new_sender_down_and_up_again(rig: Callable[..., Rig]) -> None:
    """A trainer that was restarted listens elsewhere and begins at a lower version, with other words under numbers that were used."""
    here = rig(full_every=0)
    receiver = here.receiver()
    publish(here, 6, 7)
    here.pull(receiver, 7)
    here.manager.close()
    here.manager = here.new_manager()
    here.digests.clear()
    here.publish(5, contents(50))
    assert_served(here.pull(receiver, 5, full=True), contents(50))
    assert receiver.held == (5, here.digests[5])
    for version in (6, 7):
        here.publish(version, contents(version + 50))
        until(lambda version=version: (version - 1, version) in here.info().deltas, "its delta")
    staged = here.pull(receiver, 7)
    assert (staged.mode, staged.links) == ("delta", 2)
    assert_served(staged, contents(57))


def test_fault_7_a_pull_that_runs_out_of_time_is_a_failure_on_both_sides(proxied: Callable[..., tuple[Rig, Proxy]]) -> None:
    here, proxy = proxied(idle_s=0.5)
    proxy.tamper = lambda data, position: time.sleep(0.05) or data[:64] if position == 0 else time.sleep(0.2) or b""
    receiver = here.receiver()
    with pytest.raises((WeightError, Retryable)):
        here.pull(receiver, 0, proxy.endpoint, deadline_s=4.0)  # its ticket comes within that, its data never
    assert receiver.held is None
    assert (receiver.counters["failed_pulls"], receiver.counters["full_pulls"]) == (1, 0)
    failed = ("weights/failed_transfers", "weights/cancelled_transfers")  # as a verdict came through or not, once per ticket
    until(lambda: sum(here.manager.stats().get(name, 0) for name in failed) >= 1, "a failure at the sender")
    assert here.manager.stats()["weights/full_transfers"] == 0
    proxy.tamper = lambda data, position: data
    assert_served(here.pull(receiver, 0, proxy.endpoint), contents(0))
    assert here.stat("full_transfers", 1) == 1
