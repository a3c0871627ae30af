"""TLS by certificate options: a service and its clients over real sockets, and every way in which the two disagree."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest
from certificates import Authority

from astraflow.lib.net import split_host_port
from astraflow.lib.tls import PLAIN, Tls, check_accepted, check_files
from astraflow.lib.wire import Identity, Server, new_identity
from astraflow.lib.wire_client import Client, SyncClient
from astraflow.protocol.errors import AuthError, ConfigError, Unavailable
from astraflow.protocol.message import Message
from astraflow.protocol.routes import Route

WAIT_S = 60.0


class Blob(Message, kw_only=True):
    data: bytes = b""


class EchoAPI:
    echo = Route("POST", "/echo", Blob, Blob, "The same bytes.")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls(authority: Authority) -> Tls:
    return authority.certificate()


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"), "stranger")


async def echo(message: Blob) -> Blob:
    return Blob(data=message.data)


def served(tls: Tls) -> Server:
    return Server("echo", EchoAPI, {"echo": echo}, new_identity("run", "secret", tls))


def asks(tls: Tls) -> Identity:
    return new_identity("run", "secret", tls)


async def asked(url: str, tls: Tls, data: bytes = b"?") -> bytes:
    async with Client(url, asks(tls)) as client:
        return (await client.call(EchoAPI.echo, Blob(data=data), timeout_s=WAIT_S)).data


def blocking(url: str, tls: Tls) -> bytes:
    with SyncClient(url, asks(tls)) as client:
        return client.call(EchoAPI.echo, Blob(data=b"sync"), timeout_s=WAIT_S).data


def test_both_clients_talk_over_tls_and_a_silent_one_delays_no_end(tls: Tls) -> None:
    async def run() -> float:
        server = served(tls)
        await server.start()
        assert server.url.startswith("https://127.0.0.1:")
        large = bytes(range(256)) * (3 << 10)
        assert await asked(server.url, tls, large) == large
        assert await asyncio.to_thread(blocking, server.url, tls) == b"sync"
        with socket.create_connection(split_host_port(server.url)), SyncClient(server.url, asks(tls)) as idle:
            await asyncio.to_thread(lambda: idle.call(EchoAPI.echo, Blob(), timeout_s=WAIT_S))
            began = time.monotonic()
            await server.stop(deadline_s=WAIT_S)
            return time.monotonic() - began

    assert asyncio.run(run()) < WAIT_S / 2, "an idle client's goodbye is not waited for"


@pytest.fixture
def mixed(authority: Authority, stranger: Authority, tls: Tls) -> dict[str, tuple[Tls, str, Tls, type[Exception], str]]:
    """What the service shows, the scheme of the client, what it trusts → the error and its words."""
    elsewhere = authority.certificate("elsewhere", "DNS:example.org")
    expired = authority.certificate("expired", days=-1)
    return {
        "another authority": (tls, "https", Tls(ca=stranger.ca), AuthError, r"unable to get local issuer certificate.*stranger\.pem"),
        "no authority": (tls, "https", PLAIN, AuthError, "certificate is not accepted: .*authorities of this system"),
        "another host": (elsewhere, "https", tls, AuthError, "IP address mismatch"),
        "expired": (expired, "https", tls, AuthError, "certificate has expired"),
        "http to https": (tls, "http", tls, Unavailable, r"http://127\.0\.0\.1:\d+: .*a service with TLS does so"),
        "https to http": (PLAIN, "https", tls, Unavailable, r"https://127\.0\.0\.1:\d+: it speaks no TLS; expected .* http://"),
    }


def test_a_call_that_cannot_be_trusted_fails_in_one_clear_line_and_does_not_hang(
    mixed: dict[str, tuple[Tls, str, Tls, type[Exception], str]],
) -> None:
    async def run(shown: Tls, scheme: str, trusted: Tls, kind: type[Exception], words: str) -> None:
        server = served(shown)
        await server.start()
        url = f"{scheme}://{server.url.partition('://')[2]}"
        try:
            with pytest.raises(kind, match=words) as first:
                await asked(url, trusted)
            with pytest.raises(kind, match=words):
                await asyncio.to_thread(blocking, url, trusted)
            assert "\n" not in str(first.value)
            assert url in str(first.value)
        finally:
            await server.stop()

    for case in mixed.values():
        asyncio.run(run(*case))


def test_files_that_cannot_be_used_are_named(authority: Authority, tls: Tls, stranger: Authority, tmp_path: Path) -> None:
    other = stranger.certificate("other")
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("no certificate")
    for wrong, words in (
        (replace_tls(tls, cert="/nowhere/c.pem"), r"tls\.cert: '/nowhere/c\.pem': No such file"),
        (replace_tls(tls, key="/nowhere/k.pem"), r"tls\.key: '/nowhere/k\.pem': No such file"),
        (replace_tls(tls, ca="/nowhere/ca.pem"), r"tls\.ca: '/nowhere/ca\.pem': No such file"),
        (replace_tls(tls, key=other.key), r"tls\.key: '.*other\.key' does not belong to the certificate in '.*service\.pem'"),
        (replace_tls(tls, cert=str(nonsense)), r"tls\.cert: no certificate with its key.*nonsense\.pem"),
        (replace_tls(tls, ca=str(nonsense)), r"tls\.ca: no certificates in PEM in '.*nonsense\.pem'"),
        (replace_tls(tls, cert=""), r"tls\.key: .* without tls\.cert"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_files(wrong)
    check_files(tls)
    check_files(PLAIN)


def test_a_certificate_is_tried_in_memory_before_anything_starts(authority: Authority, stranger: Authority, tls: Tls) -> None:
    for host in ("127.0.0.1", "localhost"):
        check_accepted(tls, host)
    for wrong, host, words in (
        (tls, "::1", "will not be accepted at ::1: IP address mismatch"),
        (tls, "node-7", "Hostname mismatch"),
        (replace_tls(tls, ca=stranger.ca), "127.0.0.1", "unable to get local issuer"),
        (authority.certificate("late", days=-1), "127.0.0.1", "certificate has expired"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_accepted(wrong, host)


def replace_tls(tls: Tls, **changes: str) -> Tls:
    return Tls(**{name: changes.get(name, getattr(tls, name)) for name in ("cert", "key", "ca")})
