"""Ranks of one node over real sockets, each in a thread: one memory, one decision."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from astraflow.protocol.codec import encode
from astraflow.protocol.errors import DeadlinePassed, LayoutMismatch, RemoteError, WeightError
from astraflow.weights.memory import HalfMemory
from astraflow.weights.node import Follower, Hello, Leader, place


def nothing() -> None:
    pass


def two_ranks(memory: HalfMemory) -> tuple[Leader, Follower]:
    leader = Leader(0, [1], 60.0)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(Follower, 1, leader.address, 60.0, 1.0)
        leader.admit(memory.fd)
        return leader, joining.result(60)


def in_thread(call: Callable[[], tuple[None, int]]) -> Future[tuple[None, int]]:
    future: Future[tuple[None, int]] = Future()

    def body() -> None:
        try:
            future.set_result(call())
        except (DeadlinePassed, RemoteError, WeightError) as error:
            future.set_exception(error)

    threading.Thread(target=body, daemon=True).start()
    return future


def test_the_others_write_into_the_memory_of_the_first() -> None:
    memory = HalfMemory.create("node", 5000)
    leader, follower = two_ranks(memory)
    other = HalfMemory.attach(follower.fd, 5000)
    other.half(1)[100:103] = b"abc"
    assert bytes(memory.half(1)[100:103]) == b"abc"
    step = in_thread(lambda: follower.together("v1", nothing, nothing))  # type: ignore[arg-type]
    assert leader.together("v1", nothing, lambda: 7) == (None, 7)
    assert step.result(60) == (None, 7), "what the first one decides reaches all"
    with pytest.raises(WeightError, match="two halves of 50000"):
        HalfMemory.attach(os.dup(memory.fd), 50000)
    for part in (leader, follower, memory, other):
        part.close()


def test_an_error_anywhere_is_an_error_everywhere() -> None:
    memory = HalfMemory.create("node", 5000)
    leader, follower = two_ranks(memory)

    def fails() -> int:
        raise LayoutMismatch("parameter 'w' is missing")

    for mine, theirs, lead in ((fails, nothing, lambda: 1), (nothing, fails, lambda: 1), (nothing, nothing, fails)):
        step = in_thread(lambda theirs=theirs: follower.together("v1", theirs, nothing))  # type: ignore[misc]
        with pytest.raises((LayoutMismatch, RemoteError), match="'w' is missing"):
            leader.together("v1", mine, lead)
        with pytest.raises((LayoutMismatch, RemoteError), match="'w' is missing"):
            step.result(60)
    step = in_thread(lambda: follower.together("v2", nothing, nothing))  # type: ignore[arg-type]
    assert leader.together("v2", nothing, lambda: 0) == (None, 0), "and the next version is free of it"
    assert step.result(60) == (None, 0)
    for part in (leader, follower, memory):
        part.close()


def test_a_rank_that_does_not_come_is_named_at_the_deadline() -> None:
    memory = HalfMemory.create("node", 5000)
    leader, follower = two_ranks(memory)
    leader._wait_s = 0.05
    with pytest.raises(DeadlinePassed, match=r"v1: ranks \[1\] were not there within 0.05 s"):
        leader.together("v1", nothing, lambda: 0)
    follower.close()
    with pytest.raises(RemoteError, match="v2: rank 1 is gone"):
        leader.together("v2", nothing, lambda: 0)
    leader.close()
    alone = Leader(0, [1, 2], wait_s=0.05)
    with pytest.raises(DeadlinePassed, match=r"ranks \[1, 2\] did not join"):
        alone.admit(memory.fd)
    alone.close()
    memory.close()


def test_a_stranger_gets_no_memory() -> None:
    memory = HalfMemory.create("node", 5000)
    leader = Leader(0, [1], 0.2)
    name = leader.address.partition(":")[0]
    for first in (encode(Hello(1, "guessed")), b"\xc1nonsense", encode(Hello(5, leader.address.partition(":")[2]))):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(f"\0{name}")
        stranger.send(first)
        with pytest.raises(DeadlinePassed):
            leader.admit(memory.fd)
        assert socket.recv_fds(stranger, 100, 1)[:2] == (b"", [])
        stranger.close()
    leader.close()
    with pytest.raises(RemoteError, match="cannot join"):
        Follower(1, leader.address, 0.2, 0.1)
    memory.close()


def test_processes_of_one_machine_and_network_namespace_share_a_place() -> None:
    assert place() == place()
    assert str(os.getuid()) in place()
