from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.lib.net import (
    bare_host,
    check_url,
    free_port,
    host_port,
    http_url,
    is_loopback,
    listen,
    reachable_host,
    split_host_port,
    tcp_url,
)
from astraflow.lib.wire import Server, new_identity
from astraflow.lib.wire_client import Client
from astraflow.protocol.errors import ConfigError
from astraflow.protocol.message import Empty
from astraflow.protocol.routes import SenderAPI, table
from astraflow.protocol.weights import SenderVersion


def has_ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_ipv6_hosts_get_exactly_one_pair_of_brackets(case: Callable[[str], dict[str, Any]]) -> None:
    g35 = case("G35")
    pairs, values = g35["input"]["pairs"], g35["expected"]["values"]
    assert [http_url(host, port) for host, port in pairs] == values["http"]
    assert tcp_url(*pairs[1]) == values["tcp_second"]
    assert [list(split_host_port(text)) for text in g35["input"]["parse_back"]] == values["parsed"]


@given(st.ip_addresses(), st.integers(0, 65535))
def test_every_address_survives_printing_and_parsing(address: Any, port: int) -> None:
    for written in (host_port(str(address), port), http_url(str(address), port), tcp_url(str(address), port) + "/path"):
        assert split_host_port(written) == (str(address), port)


@pytest.mark.parametrize("text", ["::1:8000", "localhost", "host:", ":80", "host:99999", "host:-1", "host:8²", "", "[::1]"])
def test_an_address_that_cannot_be_split_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        split_host_port(text)


def test_loopback_is_known_in_all_its_spellings() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.1.2.3", "localhost", "LOCALHOST", "::1", "[::1]"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "fd00::12", "some-name", ""]))


def test_a_wildcard_host_is_announced_as_an_address_that_others_can_use() -> None:
    assert reachable_host("[::1]") == "::1"
    assert reachable_host("0.0.0.0") not in ("0.0.0.0", "")
    assert reachable_host("::") not in ("::", "")


def test_a_port_in_use_is_a_one_line_error_naming_host_and_port() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}") as caught:
            listen("127.0.0.1", port)
    assert "\n" not in str(caught.value)
    assert "in use" in str(caught.value)


def test_a_host_that_is_not_ours_is_named() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:80"):
        listen("192.0.2.1", 80)
    with pytest.raises(ConfigError, match="no such host"):
        listen("no such host", 80)


def test_a_free_port_can_be_bound() -> None:
    with listen("127.0.0.1", free_port("127.0.0.1")):
        pass


@pytest.mark.skipif(not has_ipv6_loopback(), reason="this machine has no IPv6 loopback")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_a_service_on_the_ipv6_loopback_answers(host: str) -> None:
    async def version(request: Empty) -> SenderVersion:
        return SenderVersion(model_id="m", version=0, digest="")

    async def scenario() -> None:
        handlers: dict[str, Any] = dict.fromkeys(table(SenderAPI), version)
        server = Server("sender", SenderAPI, handlers, new_identity("run"), host=host)
        await server.start()
        assert server.url == f"http://[::1]:{server.port}"
        client = Client(server.url, new_identity("run"))
        assert (await client.call(SenderAPI.get_version, timeout_s=5)).model_id == "m"
        await client.close()
        await server.stop()

    asyncio.run(scenario())


def test_bind_takes_the_bare_address() -> None:
    assert bare_host("[fd00::12]") == "fd00::12"
    assert bare_host("fd00::12") == "fd00::12"


STRANGE = (
    ("ftp://host:1", "expected http://host:port"),
    ("host:1", "expected http://host:port"),
    ("http://host", "port"),
    ("http://host:0", "port"),
    ("http://host:99999", "port"),
    ("http://:80", "expected http://host:port"),
    ("http://host:1/path", "expected http://host:port"),
    ("http://host:1?a=b", "expected http://host:port"),
    ("http://host:1#a", "expected http://host:port"),
    ("http://user:word@host:1", "holds a user name or password"),
    ("http://a b:1", "plain characters"),
    ("http://h\u00f6st:1", "plain characters"),
    ("http://host:1\r\nX: y", "plain characters"),
    ("http://x..y:1", "no name of a host"),
    (f"http://{'a' * 64}:1", "no name of a host"),
    ("http://2130706433:1", "no name of a host"),
    ("http://0x7f000001:1", "no name of a host"),
    ("http://[::1:1", "expected http://host:port"),
    ("http://0.0.0.0:1", "no address of a service"),
    ("http://169.254.169.254:80", "no address of a service"),
    ("http://[fe80::1]:80", "no address of a service"),
    ("http://224.0.0.1:80", "no address of a service"),
    (f"http://{'a' * 2100}:1", "plain characters"),
)


def test_an_address_that_no_service_of_the_cluster_has_is_refused_in_one_line() -> None:
    for url, said in STRANGE:
        with pytest.raises(ConfigError, match=f"^url .*{said}") as refused:
            check_url(url, "url")
        assert "\n" not in str(refused.value)
        assert "user:word" not in str(refused.value)


def test_addresses_of_services_pass_and_without_a_token_only_those_of_this_machine() -> None:
    for url in ("http://127.0.0.1:80", "https://raas-0.example:8900", "http://[::1]:1/", "http://10.0.0.7:65535", "http://a_b:1"):
        assert check_url(url, "url") == url.rstrip("/")
    for url in ("http://127.0.0.9:80", "http://localhost:80", "http://[::1]:80"):
        assert check_url(url, "url", this_machine=True) == url
    for url in ("http://10.0.0.7:80", "http://raas-0:80"):
        with pytest.raises(ConfigError, match="points off this machine"):
            check_url(url, "url", this_machine=True)
