"""Weights between a manager with its real sender process and real receivers, over real sockets, damaged and killed on purpose."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
from weights_rig import WAIT_S, Proxy, Rig, Tensors, assert_served, contents, proxies, rigs, until

from astraflow.lib.net import split_host_port
from astraflow.lib.wire import Identity, Server, new_identity
from astraflow.lib.wire_client import SyncClient
from astraflow.protocol import weights as messages
from astraflow.protocol.errors import (
    AuthError,
    ConfigError,
    Conflict,
    DeadlinePassed,
    DigestMismatch,
    LayoutMismatch,
    RemoteError,
    Retryable,
    WeightError,
)
from astraflow.protocol.message import PROTOCOL_VERSION
from astraflow.protocol.routes import SenderAPI, table
from astraflow.weights import control, layout
from astraflow.weights.config import WeightsConfig
from astraflow.weights.delta import MAGICS
from astraflow.weights.receiver import WeightReceiver
from astraflow.weights.stream import hello_bytes


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    with rigs(tmp_path) as make:
        yield make


@pytest.fixture
def proxied(rig: Callable[..., Rig]) -> Iterator[Callable[..., tuple[Rig, Proxy]]]:
    with proxies(rig) as make:
        yield make


def test_full_then_deltas_then_the_periodic_full_sync_and_every_file_is_right(rig: Callable[..., Rig]) -> None:
    here = rig(full_every=4)
    receiver = here.receiver()
    modes = []
    for version in range(1, 6):
        digest = here.publish(version)
        staged = here.pull(receiver, version)
        modes.append((staged.mode, staged.fallback))
        assert staged.digest == digest
        assert receiver.held == (version, digest)
        assert_served(staged, contents(version))
    assert modes == [("full", ""), ("delta", ""), ("delta", ""), ("full", "periodic full sync"), ("delta", "")]
    assert receiver.counters["fallback: periodic full sync"] == 1
    kept = sorted(entry.name for entry in staged.path.parent.parent.iterdir())
    assert kept == [f"v4-{here.digests[4][:8]}", f"v5-{here.digests[5][:8]}"], "only the held file and the one before it stay"
    assert here.pull(receiver, 5).mode == "held", "nothing travels for a version that is staged already"
    assert here.pull(receiver, 5, full=True).mode == "full"
    here.stat("full_transfers", 3)
    stats = here.manager.stats()
    assert (stats["weights/full_transfers"], stats["weights/delta_transfers"]) == (3, 3)
    assert stats["weights/full_bytes"] == 3 * receiver._held[3].size_bytes  # type: ignore[index]
    assert 0 < stats["weights/changed_fraction"] < 0.1
    assert here.manager.receivers()["raas-0"]["delta_transfers"] == 3


def test_six_streams_are_six_connections(rig: Callable[..., Rig]) -> None:
    """Fault 33: six streams are not one with five that do nothing."""
    here = rig()
    here.publish(0)
    here.pull(here.receiver(), 0)
    assert here.stat("streams_accepted", 6) == 6


def test_ties_travel_once_and_are_exported_where_an_engine_needs_them(rig: Callable[..., Rig]) -> None:
    here = rig()
    tensors = {**contents(0), "head.weight": torch.zeros(1)}
    tensors["head.weight"] = tensors["a.weight"]
    here.manager.offload(tensors.items(), 0)
    here.digests[0] = here.manager.published(0, WAIT_S)
    plain = here.pull(here.receiver("plain"), 0)
    with safe_open(plain.path, "pt") as file:
        assert "head.weight" not in file.keys()  # noqa: SIM118  (not a mapping)
        assert file.metadata()["astraflow.tied"] == '{"head.weight": "a.weight"}'
    untied = here.receiver("untied", export_tied=True)
    loaded = load_file(here.pull(untied, 0).path)
    assert torch.equal(loaded["head.weight"], loaded["a.weight"])
    changed = contents(1)
    here.manager.offload({**changed, "head.weight": changed["a.weight"]}.items(), 1)
    here.digests[1] = here.manager.published(1, WAIT_S)
    staged = here.pull(untied, 1)
    loaded = load_file(staged.path)
    assert staged.mode == "delta"
    assert torch.equal(loaded["head.weight"], changed["a.weight"].to(torch.bfloat16))


def test_published_words_are_rounded_to_nearest_even_or_the_masters_themselves(rig: Callable[..., Rig]) -> None:
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x80000000 - (1 << 32), 0x7F800000, 0x00000001], dtype=torch.int64)
    master = {"w": bits.to(torch.int32).view(torch.float32)}
    here = rig()
    here.publish(0, master)
    words = load_file(here.pull(here.receiver(), 0).path)["w"].view(torch.int16)
    assert [int(w) & 0xFFFF for w in words] == [0x3F80, 0x3F82, 0x3F81, 0x8000, 0x7F80, 0x0000]
    wide = rig(dtype="float32")
    wide.publish(0, master)
    assert torch.equal(load_file(wide.pull(wide.receiver("wide"), 0).path)["w"].view(torch.int32), bits.to(torch.int32))


def test_case_g29_a_failed_version_is_never_counted_as_applied(proxied: Callable[..., tuple[Rig, Proxy]], case: Any) -> None:
    """Fault 1: a failed load is no success, and is made good by the next one."""
    given, expected = case("G29")["input"]["trainer"], case("G29")["expected"]["values"]
    here, proxy = proxied(full_every=0)
    here.manager.close()
    here.manager = here.new_manager()  # the case has a layout of its own
    proxy.close()

    def publish(version: int, values: list[float]) -> None:
        here.publish(version, {"w": torch.tensor(values), "rest": torch.zeros(4000)})  # large enough for deltas to pay

    publish(1, given["v1"])
    with SyncClient(here.manager.endpoint, here.identity) as client:
        stream_port = client.call(SenderAPI.get_buffer_info, timeout_s=WAIT_S).stream_port
    proxy = Proxy((split_host_port(here.manager.endpoint)[1], stream_port))
    try:
        receiver, skipper = here.receiver("a"), here.receiver("skips")
        first = here.pull(receiver, 1)
        here.pull(skipper, 1)
        publish(2, given["v2"])
        proxy.tamper = lambda data, position: bytes([data[0] ^ 1]) + data[1:]
        with pytest.raises(DigestMismatch):
            here.pull(receiver, 2, proxy.endpoint)
        assert receiver.held == (expected["receiver_version_after_v2"], here.digests[1])
        assert receiver.counters["failed_pulls"] == 1
        assert load_file(first.path)["w"].tolist() == given["v1"], "what is held is untouched"
        here.stat("failed_transfers", 1)
        proxy.tamper = lambda data, position: data
        restarted = here.receiver("restarted")
        publish(3, given["v3"])
        staged = here.pull(receiver, 3, proxy.endpoint)
        assert (staged.mode, staged.links) == ("delta", 2), "a chain that starts at what it verifiably holds"
        assert load_file(staged.path)["w"].tolist() == expected["weights_after_v3"]
        assert receiver.held == (expected["receiver_version_after_v3"], here.digests[3])
        fresh = here.pull(restarted, 3)
        assert (fresh.mode, load_file(fresh.path)["w"].tolist()) == ("full", expected["weights_after_v3"])
        publish(4, given["v3"])
        staged = here.pull(receiver, 4)
        assert (staged.mode, staged.changed_elements) == ("delta", 0), "no changes is a success"
        assert receiver.held == (expected["receiver_version_after_v4"], here.digests[4])
        skipped = here.pull(skipper, 4)
        assert (skipped.mode, skipped.version, skipped.links) == ("delta", 4, 3)
        assert load_file(skipped.path)["w"].tolist() == expected["weights_after_v3"]
    finally:
        proxy.close()


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 0x40])


DAMAGE: dict[str, Callable[[bytes], bytes]] = {"flipped": flip, "missing": lambda data: data[1:], "extra": lambda data: b"\0" + data}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_byte_on_the_wire_is_noticed_and_never_served(proxied: Callable[..., tuple[Rig, Proxy]], kind: str) -> None:
    """Fault 2: every chunk has a checksum, and the whole version a digest."""
    here, proxy = proxied(attempts=2, io_timeout_s=2.0 if kind == "missing" else WAIT_S)  # what is missing is noticed by the silence
    receiver = here.receiver()
    left = [1]

    def once(data: bytes, position: int) -> bytes:
        if left[0] <= 0:
            return data
        left[0] -= 1
        return DAMAGE[kind](data)

    proxy.tamper = once
    staged = here.pull(receiver, 0, proxy.endpoint)
    assert_served(staged, contents(0))
    assert receiver.counters["damaged_chunks"] >= 1, "healed by fetching the chunk again"

    here.publish(1)
    left[0] = 10**9
    with pytest.raises((WeightError, Retryable)):
        here.pull(receiver, 1, proxy.endpoint, deadline_s=1.5)
    assert receiver.held == (0, here.digests[0])
    assert_served(staged, contents(0))

    proxy.tamper = lambda data, position: DAMAGE[kind](data) if data.startswith(tuple(MAGICS.values())) else data  # deltas only
    staged = here.pull(receiver, 1, proxy.endpoint)
    assert staged.mode == "full"
    assert staged.fallback
    assert_served(staged, contents(1))


def test_a_broken_connection_goes_on_where_it_stopped(proxied: Callable[..., tuple[Rig, Proxy]]) -> None:
    here, proxy = proxied()
    size = contents(0)["a.weight"].numel() * 2
    cuts = [1, 2, 3]

    def cut(data: bytes, position: int) -> bytes | None:
        if position and position + len(data) > 9000:  # after a first byte: a stream that ends before it means another thing
            with contextlib.suppress(IndexError):
                cuts.pop()
                return None
        return data

    proxy.tamper = cut
    receiver = here.receiver()
    staged = here.pull(receiver, 0, proxy.endpoint)
    assert_served(staged, contents(0))
    assert cuts == []
    assert receiver.counters["streams_broken"] == 3
    assert staged.size_bytes < 1.1 * size
    assert proxy.connections == 9


def test_a_delta_needs_the_very_base_that_is_held(rig: Callable[..., Rig]) -> None:
    """Fault 5: a base is named by its digest, at both ends."""
    here = rig()
    receiver = here.receiver()
    here.publish(5)
    here.pull(receiver, 5)
    here.manager.close()
    here.manager = here.new_manager()  # a trainer that came back one step earlier: the same numbers, other words
    here.publish(5, contents(50))
    here.publish(6, contents(6))
    staged = here.pull(receiver, 6)
    assert (staged.mode, staged.fallback) == ("full", "the base's digest is another one")
    assert_served(staged, contents(6))


def test_another_layout_is_pulled_in_full_in_the_same_call(rig: Callable[..., Rig]) -> None:
    here = rig()
    receiver = here.receiver()
    here.publish(1)
    here.pull(receiver, 1)
    with pytest.raises(LayoutMismatch, match=r"a\.weight"):
        here.publish(2, contents(2, words=70_000))
    here.manager.close()
    here.manager = here.new_manager()
    here.publish(2, contents(2, words=70_000))
    staged = here.pull(receiver, 2)
    assert (staged.mode, staged.fallback) == ("full", "the layout changed")
    assert_served(staged, contents(2, words=70_000))


def test_versions_that_are_gone_or_were_never_published_are_refused(rig: Callable[..., Rig]) -> None:
    here = rig()
    receiver = here.receiver()
    for version in range(4):
        here.publish(version)
    assert_served(here.pull(receiver, 2), contents(2))
    with pytest.raises(Conflict, match=r"superseded.*\[3, 2\]"):
        here.pull(receiver, 1)
    with pytest.raises(Conflict, match="was published with digest"):
        receiver.pull(here.manager.endpoint, 3, "0" * 32, deadline_s=WAIT_S)
    with pytest.raises(WeightError, match="32 hex"):
        receiver.pull(here.manager.endpoint, 3, "../../x", deadline_s=WAIT_S)
    assert receiver.held == (2, here.digests[2])
    assert receiver.counters["failed_pulls"] == 2


def open_stream(rig: Rig, ticket: messages.TransferTicket, **changes: Any) -> socket.socket:
    """A connection that asks for one range and for nothing after it."""
    sock = socket.create_connection(("127.0.0.1", ticket.stream_port), WAIT_S)
    fields = {"protocol_version": PROTOCOL_VERSION, "token": rig.identity.token, "transfer_id": ticket.transfer_id, "offset": 0}
    sock.sendall(hello_bytes(messages.StreamHello(**{**fields, "length": ticket.size_bytes, **changes})))
    with contextlib.suppress(OSError):  # refused and closed already
        sock.shutdown(socket.SHUT_WR)
    return sock


def ticket_for(rig: Rig, version: int, instance: str) -> messages.TransferTicket:
    with SyncClient(rig.manager.endpoint, rig.identity) as client:
        request = messages.TransferRequest(instance_id=instance, version=version, digest=rig.digests[version])
        return client.call(SenderAPI.request_transfer, request, timeout_s=WAIT_S)


def read_to_end(sock: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(1 << 16):
            data += part
    return data


def test_strangers_get_nothing_on_http_or_on_a_stream_and_are_counted(rig: Callable[..., Rig]) -> None:
    """Fault 32: what is on an open port asks for the token first, and nothing that comes over it is code."""
    here = rig()
    here.publish(0)
    with pytest.raises(AuthError):
        here.pull(here.receiver("stranger", Identity("run-1", "x", "wrong")), 0)
    ticket = ticket_for(here, 0, "me")
    bad: list[dict[str, Any]] = [
        {"token": "wrong"}, {"token": ""}, {"transfer_id": "0" * 32}, {"offset": -1}, {"offset": 1}, {"length": 0}, {"length": 1 << 62},
        {"protocol_version": 99}, {"transfer_id": "x" * 5000},
    ]  # fmt: skip
    for changes in bad:
        with open_stream(here, ticket, **changes) as sock:
            assert read_to_end(sock) == b"", changes
    for garbage in (b"\xff\xff\xff\xff", struct.pack("<I", 3) + b"abc", b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", ticket.stream_port), WAIT_S) as sock:
            sock.sendall(garbage)
            assert read_to_end(sock) == b""
    assert here.stat("streams_refused", len(bad) + 3) == len(bad) + 3
    with open_stream(here, ticket) as sock:
        assert len(read_to_end(sock)) == ticket.size_bytes


def test_a_slow_reader_is_cancelled_before_its_half_is_written_and_never_sees_a_mixture(rig: Callable[..., Rig]) -> None:
    here = rig(reader_wait_s=0.4)
    words = 8_000_000  # more than the socket buffers take

    def uniform(version: int) -> Tensors:
        return {"w": torch.full((words,), float(version))}

    here.publish(1, uniform(1))
    here.publish(2, uniform(2))
    ticket = ticket_for(here, 1, "slow")
    with open_stream(here, ticket) as sock:
        head = sock.recv(4096)
        began = time.monotonic()
        here.publish(3, uniform(3))
        assert time.monotonic() - began >= 0.4, "the writer waited for its reader first"
        data = head + read_to_end(sock)
    assert len(data) < ticket.size_bytes, "the stream was cut"
    # What the kernel had queued by reference may already be new words (loopback): the checksums tell, so nobody takes them for old ones.
    whole = [data[at : at + ticket.chunk_bytes] for at in range(0, len(data) - ticket.chunk_bytes, ticket.chunk_bytes)]
    for index, chunk in enumerate(whole):
        right = xxhash.xxh3_64_intdigest(chunk) == ticket.chunk_hashes[index]
        assert right == (chunk == b"\x80\x3f" * (len(chunk) // 2))
    assert here.stat("cancelled_transfers", 1) == 1


def test_a_receiver_that_is_too_slow_gets_a_clean_error_and_then_the_next_version(proxied: Callable[..., tuple[Rig, Proxy]]) -> None:
    def uniform(version: int) -> Tensors:
        return {"w": torch.full((8_000_000,), float(version))}  # more than the socket buffers take

    here, proxy = proxied(reader_wait_s=0.3, streams=1, first=uniform(0))
    go_on = threading.Event()

    def crawl(data: bytes, position: int) -> bytes:
        if position > 1_000_000:
            go_on.wait(2 * WAIT_S)
        return data

    proxy.tamper = crawl
    receiver, errors = here.receiver(), []

    def pull() -> None:
        try:
            here.pull(receiver, 0, proxy.endpoint)
        except Conflict as error:
            errors.append(str(error))

    puller = threading.Thread(target=pull)
    puller.start()
    here.stat("streams_accepted", 1)
    here.publish(1, uniform(1))
    here.publish(2, uniform(2))
    go_on.set()
    puller.join(WAIT_S)
    assert not puller.is_alive()
    assert "superseded" in errors[0]
    assert receiver.held is None
    assert_served(here.pull(receiver, 2, proxy.endpoint), uniform(2))


def test_a_dead_receiver_blocks_neither_another_one_nor_the_writer(rig: Callable[..., Rig]) -> None:
    """Fault 38: receivers do not wait for each other."""
    here = rig(reader_wait_s=0.2)
    big = {"w": torch.zeros(6_000_000)}
    here.publish(0, big)
    stuck = [open_stream(here, ticket_for(here, 0, f"dead-{i}")) for i in range(3)]
    try:
        receiver = here.receiver()
        assert here.pull(receiver, 0).mode == "full"
        for version in (1, 2):
            here.publish(version, {"w": big["w"] + version})
            assert here.pull(receiver, version).version == version
        assert here.stat("cancelled_transfers", 3) == 3
    finally:
        for sock in stuck:
            sock.close()


def test_reads_are_never_torn_while_the_writer_goes_on(rig: Callable[..., Rig]) -> None:
    """Fault 2: a pull is never overwritten while it is sent."""
    here = rig(reader_wait_s=0.05, full_every=0, delta_wait_s=0.2)
    newest, stop = [0], threading.Event()
    here.publish(0)

    def write() -> None:
        while not stop.is_set():
            here.publish(newest[0] + 1)
            newest[0] += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        receiver, seen = here.receiver(streams=3), 0
        end = time.monotonic() + 2.5
        while time.monotonic() < end or seen < 5 or newest[0] <= 10:
            version = newest[0]
            try:
                staged = here.pull(receiver, version)
            except Conflict:
                continue  # superseded: the writer was faster
            seen += 1
            assert_served(staged, contents(version))
            assert time.monotonic() < end + WAIT_S
    finally:
        stop.set()
        writer.join()
    assert newest[0] > 10


def test_a_transfer_survives_the_death_of_its_sender(proxied: Callable[..., tuple[Rig, Proxy]]) -> None:
    """Fault 9: a sender that dies is started again."""
    tensors = {"w": torch.arange(8_000_000, dtype=torch.float32)}  # more than the socket buffers take
    here, proxy = proxied(first=tensors, streams=2, chunk_bytes=1 << 18)
    victim, endpoint = here.manager.sender_pid, here.manager.endpoint

    def kill_in_the_middle(data: bytes, position: int) -> bytes:
        if position > 2_000_000 and here.manager.sender_pid == victim:
            os.kill(victim, signal.SIGKILL)
            until(lambda: here.manager.sender_pid != victim, "its death is noticed")
        return data

    proxy.tamper = kill_in_the_middle
    staged = here.pull(here.receiver(), 0, proxy.endpoint)
    assert_served(staged, tensors)
    assert staged.size_bytes < 1.2 * 16_000_000, "what was verified before is not fetched again"
    until(lambda: here.manager.sender_pid not in (0, victim), "a new sender")
    assert here.manager.endpoint == endpoint, "the same address after a restart"


def test_both_halves_and_the_way_between_them_survive_a_restart_of_the_sender(rig: Callable[..., Rig]) -> None:
    here = rig()
    early = here.receiver("early")
    for version in range(3):
        here.publish(version)
        if version == 1:
            here.pull(early, 1)
    victim = here.manager.sender_pid
    os.kill(victim, signal.SIGKILL)
    until(lambda: here.manager.sender_pid not in (0, victim), "a new sender")
    for version in (2, 1):
        assert_served(here.pull(here.receiver(f"late-{version}"), version), contents(version))
        assert here.manager.published(version, WAIT_S) == here.digests[version]
    staged = here.pull(early, 2)
    assert_served(staged, contents(2))
    assert (staged.mode, staged.fallback) == ("delta", "")
    here.publish(3)
    assert_served(here.pull(early, 3), contents(3))


def test_a_sender_that_is_stuck_is_killed_when_the_writer_needs_its_half(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "GRACE_S", 5.0)  # a restart takes up to a few seconds on a busy machine
    here = rig(reader_wait_s=0.1)
    receiver = here.receiver()
    here.publish(0)
    here.publish(1)
    stuck = here.manager.sender_pid
    os.kill(stuck, signal.SIGSTOP)
    here.publish(2)
    assert here.manager.sender_pid != stuck
    assert_served(here.pull(receiver, 2), contents(2))


def test_the_wait_for_a_digest_has_a_deadline(rig: Callable[..., Rig]) -> None:
    here = rig()
    here.publish(0)
    with pytest.raises(DeadlinePassed, match="digest of version 7"):
        here.manager.published(7, 0.05)


def test_a_file_that_an_engine_may_still_need_is_kept_for_one_more_pull(rig: Callable[..., Rig]) -> None:
    here = rig()
    receiver = here.receiver()
    files = []
    for version in range(4):
        here.publish(version)
        files.append(here.pull(receiver, version, keep=files[0] if version == 2 else None).path)
        wanted = {0: [0], 1: [0, 1], 2: [0, 1, 2], 3: [2, 3]}[version]
        assert [number for number, path in enumerate(files) if path.exists()] == wanted


def test_a_sender_that_keeps_dying_stops_the_run(rig: Callable[..., Rig]) -> None:
    """Fault 9: the death of the sender is never only a warning."""
    here = rig(max_restarts=1)
    here.publish(0)
    for _ in range(2):
        pid = until(lambda: here.manager.sender_pid, "sender")
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: here.manager.sender_pid != pid, "its death is noticed")
    until(lambda: _raises(here.manager.check), "given up")
    with pytest.raises(RemoteError, match="sender of policy was killed by SIGKILL: 2 deaths within"):
        here.manager.check()
    with pytest.raises(RemoteError):
        here.publish(1)


def _raises(call: Callable[[], None]) -> bool:
    try:
        call()
    except RemoteError:
        return True
    return False


TRAINER = """
import sys, time, torch
from pathlib import Path
from astraflow.lib.wire import new_identity
from astraflow.weights.config import WeightsConfig
from astraflow.weights.delta import MAGICS
from astraflow.weights.manager import WeightManager
manager = WeightManager("policy", WeightsConfig(), new_identity("run-1"), Path(sys.argv[1]))
manager.offload([("w", torch.zeros(200_000))], 0)
manager.published(0, 60)
print(manager.sender_pid, flush=True)
time.sleep(60)
"""


def test_nothing_is_left_after_a_normal_end_or_after_kill_9(rig: Callable[..., Rig], tmp_path: Path) -> None:
    """Fault 34: no shared memory outlives its processes."""

    def shared() -> set[str]:
        return {entry.name for entry in Path("/dev/shm").iterdir() if "policy" in entry.name or "run-1" in entry.name}

    def alive(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            return False

    before = shared()
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    with trainer.stdout:
        sender = int(trainer.stdout.readline())
        assert alive(sender)
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait(10)
    until(lambda: not alive(sender), "the sender dies with its trainer")
    assert shared() == before
    here = rig()
    here.publish(0)
    receiver = here.receiver()
    staging = here.pull(receiver, 0).path.parent.parent
    pid = here.manager.sender_pid
    here.close()
    assert not alive(pid)
    assert not staging.exists()
    assert shared() == before


def test_a_port_that_is_taken_is_one_line_for_the_user(rig: Callable[..., Rig]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        here = rig(port=port)
        with pytest.raises(ConfigError, match=rf"weights: cannot listen on 127\.0\.0\.1:{port}"):
            here.publish(0)


SHAPE = layout.build([("w", (5000,), "BF16")])
TICKET: dict[str, Any] = {
    "transfer_id": "t", "mode": "full", "version": 1, "digest": "ab" * 16, "size_bytes": 10_000, "chunk_bytes": 4096,
    "chunk_hashes": [1, 2, 3], "stream_port": 9, "deadline_s": 60.0,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"chunk_bytes": 1, "chunk_hashes": [0] * 10_000}, {"chunk_bytes": 0}, {"chunk_bytes": -4096},
        {"chunk_bytes": 1 << 40, "chunk_hashes": [1]},
        {"chunk_hashes": []}, {"chunk_hashes": [1] * 4}, {"size_bytes": 9_999}, {"size_bytes": -10_000}, {"size_bytes": 1 << 50},
        {"stream_port": 0}, {"stream_port": 70_000}, {"digest": "cd" * 16}, {"digest": "../.."}, {"version": 2}, {"mode": "delta"},
    ],
    ids=str,
)  # fmt: skip
def test_a_ticket_that_was_not_asked_for_or_is_out_of_bounds_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    async def nothing(request: Any) -> Any:
        raise Conflict("not here")

    async def info(request: Any) -> messages.BufferInfo:
        return messages.BufferInfo(
            model_id="policy",
            version=1,
            digest="ab" * 16,
            layout_hash=SHAPE.hash,
            size_bytes=SHAPE.size_bytes,
            tensors=list(SHAPE.tensors),
            stream_port=9,
        )

    async def register(request: messages.RegisterReceiver) -> messages.RegisterReceiverReply:
        return messages.RegisterReceiverReply(layout_hash=SHAPE.hash, stream_port=9, max_streams=4)

    async def ticket(request: messages.TransferRequest) -> messages.TransferTicket:
        return messages.TransferTicket(**{**TICKET, **changes})

    async def test() -> None:
        handlers: dict[str, Any] = dict.fromkeys(table(SenderAPI), nothing)
        handlers |= {"get_buffer_info": info, "register_receiver": register, "request_transfer": ticket}
        server = Server("sender", SenderAPI, handlers, new_identity("run-1"))
        await server.start()
        receiver = WeightReceiver("policy", "raas-0", tmp_path, WeightsConfig(), new_identity("run-1"))
        try:
            with pytest.raises((WeightError, DigestMismatch)):
                await asyncio.to_thread(receiver.pull, server.url, 1, "ab" * 16, deadline_s=WAIT_S)
            assert receiver.held is None
            assert list((tmp_path / "policy").iterdir()) == [], "nothing was allocated for it"
        finally:
            receiver.close()
            await server.stop(1.0)

    asyncio.run(test())


def test_closing_a_receiver_ends_its_pull(proxied: Callable[..., tuple[Rig, Proxy]]) -> None:
    here, proxy = proxied()
    proxy.hold.clear()
    receiver, errors = here.receiver(), []

    def pull() -> None:
        try:
            here.pull(receiver, 0, proxy.endpoint, deadline_s=2 * WAIT_S)
        except (WeightError, Retryable) as error:
            errors.append(error)

    puller = threading.Thread(target=pull)
    puller.start()
    here.stat("streams_accepted", 6)
    receiver.close()
    puller.join(WAIT_S)
    assert not puller.is_alive()
    assert "closed" in str(errors[0])


def test_an_abandoned_pull_lets_go_of_a_sender_that_is_gone(rig: Callable[..., Rig]) -> None:
    here = rig()
    here.publish(0)
    receiver, errors, stop = here.receiver(), [], threading.Event()
    gone = here.manager.endpoint
    here.manager.close()

    def pull() -> None:
        try:
            here.pull(receiver, 0, gone, deadline_s=2 * WAIT_S, stop=stop)
        except Conflict as error:
            errors.append(str(error))

    puller = threading.Thread(target=pull)
    puller.start()
    receiver.abandon(stop)
    puller.join(WAIT_S)
    assert not puller.is_alive()
    assert "superseded" in errors[0]
    here.manager = here.new_manager()
    here.publish(0)
    assert_served(here.pull(receiver, 0), contents(0))


def test_an_abandoned_pull_stops_in_the_middle_of_a_transfer(proxied: Callable[..., tuple[Rig, Proxy]]) -> None:
    here, proxy = proxied()
    proxy.hold.clear()
    receiver, errors, stop = here.receiver(), [], threading.Event()

    def pull() -> None:
        try:
            here.pull(receiver, 0, proxy.endpoint, deadline_s=2 * WAIT_S, stop=stop)
        except Conflict as error:
            errors.append(str(error))

    puller = threading.Thread(target=pull)
    puller.start()
    here.stat("streams_accepted", 6)
    receiver.abandon(stop)
    puller.join(WAIT_S)
    assert not puller.is_alive()
    assert "superseded" in errors[0]
    proxy.hold.set()
    assert_served(here.pull(receiver, 0, proxy.endpoint), contents(0))
