"""Weights over TLS: the same bytes, encrypted on the way, cut and damaged, and refused by who does not trust the sender."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from certificates import Authority
from weights_rig import WAIT_S, Proxy, Rig, assert_served, contents, proxies, rigs

from astraflow.lib.tls import Tls
from astraflow.protocol.errors import AuthError

SOON_S = 30.0
"""Far below the deadline of a pull (60 s): whoever is not trusted is not tried again until then."""


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return Authority(tmp_path_factory.mktemp("certificates")).certificate(names="IP:127.0.0.1,IP:127.0.0.2")


@pytest.fixture
def secured(tmp_path: Path, tls: Tls) -> Iterator[Callable[[], tuple[Rig, Proxy]]]:
    with rigs(tmp_path) as make, proxies(lambda **settings: make(tls=tls, **settings)) as make_proxied:

        def both() -> tuple[Rig, Proxy]:
            here, proxy = make_proxied()
            proxy.endpoint = proxy.endpoint.replace("http:", "https:")
            return here, proxy

        yield both


def test_weights_travel_bit_exact_and_encrypted_through_cuts_and_damage(secured: Callable[[], tuple[Rig, Proxy]]) -> None:
    here, proxy = secured()
    assert here.manager.endpoint.startswith("https://")
    seen, cuts, damages = bytearray(), [1, 2], [1]

    def hurt(data: bytes, position: int) -> bytes | None:
        seen.extend(data)
        if position > 20_000 and cuts:
            cuts.pop()
            return None
        if position > 12_000 and damages and not cuts:
            damages.pop()
            return data[:-1] + bytes([data[-1] ^ 1])
        return data

    proxy.tamper = hurt
    # a damaged length leaves both sides waiting for the other: the receiver's silence limit ends that
    receiver = here.receiver(streams=2, io_timeout_s=5.0, attempts=20)
    assert_served(here.pull(receiver, 0, proxy.endpoint, deadline_s=4 * WAIT_S), contents(0))
    assert not cuts
    assert not damages
    assert receiver.counters["streams_broken"] >= 3
    assert receiver.counters["damaged_chunks"] == 0, "TLS refuses a damaged record before it is taken for weights"
    size = sum(tensor.numel() for tensor in contents(0).values()) * 2
    assert receiver.counters["received_bytes"] == size, "each byte travelled once: a cut stream goes on where it stopped"
    words = contents(0)["a.weight"][:2].bfloat16().view(torch.uint8).numpy().tobytes()
    assert words not in seen

    here.publish(1)
    delta = here.pull(receiver, 1, proxy.endpoint)
    assert delta.mode == "delta"
    assert_served(delta, contents(1))


def test_who_does_not_trust_the_sender_pulls_nothing_and_says_so_at_once(
    secured: Callable[[], tuple[Rig, Proxy]], tmp_path: Path
) -> None:
    here, _ = secured()
    stranger = Tls(ca=Authority(tmp_path / "stranger", "stranger").ca)
    began = time.monotonic()
    wrong = here.receiver("wrong", dataclasses.replace(here.identity, tls=stranger))
    with pytest.raises(AuthError, match=r"https://127.* certificate is not accepted: .*issuer.*stranger\.pem"):
        here.pull(wrong, 0)
    late = here.receiver("late")
    here.pull(late, 0)
    late.identity = dataclasses.replace(here.identity, tls=stranger)  # the call is known already, the stream is a new connection
    here.publish(1)
    with pytest.raises(AuthError, match=r"weight stream to 127\.0\.0\.1:\d+: its certificate is not accepted"):
        here.pull(late, 1, full=True)
    assert late.held == (0, here.digests[0])
    assert time.monotonic() - began < SOON_S

    before = here.manager.stats().get("weights/streams_refused", 0.0)
    with socket.create_connection(("127.0.0.1", here.info().stream_port)) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        plain.settimeout(SOON_S)
        with contextlib.suppress(ConnectionResetError):
            assert plain.recv(1) == b"", "whoever speaks no TLS gets no byte"
    here.stat("streams_refused", before + 1)
    assert_served(here.pull(here.receiver("right"), 1), contents(1))
