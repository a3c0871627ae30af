"""Addresses: URLs and host:port texts with IPv6 brackets where they belong, and the bare address where `bind` wants it."""

from __future__ import annotations

import ipaddress
import re
import socket
from urllib.parse import SplitResult, urlsplit

from astraflow.protocol.errors import ConfigError


def bare_host(host: str) -> str:
    """The host as `bind` and `connect` want it: without brackets."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def host_port(host: str, port: int) -> str:
    """`host:port`, an IPv6 literal in brackets (RFC 3986); brackets that are there already are not doubled."""
    bare = bare_host(host)
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def http_url(host: str, port: int, tls: bool = False) -> str:
    """`http://host:port`, or `https://host:port`."""
    return f"{'https' if tls else 'http'}://{host_port(host, port)}"


def tcp_url(host: str, port: int) -> str:
    """`tcp://host:port`."""
    return f"tcp://{host_port(host, port)}"


def split_host_port(text: str) -> tuple[str, int]:
    """(bare host, port) of `host:port`, `[v6]:port` or `scheme://host:port[/…]`. Raises ConfigError otherwise."""
    authority = text.split("://", 1)[-1].split("/", 1)[0]
    host, colon, port = authority.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed):
        raise ConfigError(f"address {text!r}: expected host:port, with an IPv6 address in brackets ([::1]:8000)")
    if not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"address {text!r}: port {port!r} is not a number between 0 and 65535")
    return bare_host(host), int(port)


HOST_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?)*\.?")
MAX_URL_CHARS = 2048


def check_url(url: str, where: str, *, this_machine: bool = False) -> str:
    """The address of a service of the cluster, without a slash at its end. `this_machine`: only loopback is meant.

    Raises ConfigError, beginning with `where`, for another scheme than http and https, a missing host or port, credentials, a path,
    query or fragment, and for a host that is no service's: unspecified, multicast or link-local (where clouds keep their keys).
    """
    wanted = "expected http://host:port or https://host:port"
    parts = _split(url, where, wanted)
    shown = f"{where} {url[:100]!r}"
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ConfigError(f"{shown}: {wanted}")
    host, port = parts.hostname, _port(parts)
    if port is None:
        raise ConfigError(f"{shown}: its port is not a number between 1 and 65535; {wanted}")
    try:
        address = ipaddress.ip_address(host.split("%", 1)[0])
    except ValueError:
        if not HOST_NAME.fullmatch(host) or re.fullmatch(r"[0-9.]+|0[xX][0-9a-fA-F]+", host):
            raise ConfigError(f"{shown}: {host[:100]!r} is no name of a host; {wanted}") from None
    else:
        if address.is_unspecified or address.is_multicast or address.is_link_local:
            raise ConfigError(f"{shown}: {host} is no address of a service of this cluster")
    if this_machine and not is_loopback(host):
        raise ConfigError(f"{shown}: points off this machine, and this process has no token; expected a loopback address, or a token")
    return url.rstrip("/")


def _split(url: str, where: str, wanted: str) -> SplitResult:
    """Its parts; errors quote no URL that may hold a password."""
    if len(url) > MAX_URL_CHARS or not url.isascii() or not url.isprintable() or set(url) & set(" \\"):
        raise ConfigError(f"{where} {url[:100]!r}: {wanted}, in at most {MAX_URL_CHARS} plain characters")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError(f"{where} {url[:100]!r}: {wanted}") from None
    if "@" in url:
        raise ConfigError(f"{where} holds a user name or password; {wanted}, and the token in a file or in ASTRAFLOW_TOKEN")
    return parts


def _port(parts: SplitResult) -> int | None:
    try:
        return parts.port or None
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """True for addresses that only this machine can reach; names other than `localhost` count as reachable."""
    bare = bare_host(host).lower()
    if bare == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare.split("%", 1)[0]).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """True for `0.0.0.0`, `::` and the empty host: every interface."""
    bare = bare_host(host)
    try:
        return not bare or ipaddress.ip_address(bare).is_unspecified
    except ValueError:
        return False


def reachable_host(host: str) -> str:
    """The address that others should use for a service bound to `host`: the machine's own one for a wildcard."""
    if not is_wildcard(host):
        return bare_host(host)
    family, probe = (socket.AF_INET6, "2001:db8::1") if ":" in host else (socket.AF_INET, "192.0.2.1")
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((probe, 9))  # documentation addresses; a datagram socket sends nothing on connect
            return str(sock.getsockname()[0])
        except OSError:  # no route off this machine
            return "::1" if family == socket.AF_INET6 else "127.0.0.1"


def listen(host: str, port: int, backlog: int = 2048) -> socket.socket:
    """A listening TCP socket; port 0 takes any free one. Raises ConfigError naming host:port when it cannot be bound."""
    bare = bare_host(host)
    where = host_port(host, port)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(bare or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"host {host!r}: not an address of this machine ({error})") from None
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restarted service takes its port back at once
        sock.bind(address)
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}; choose another port, or 0 for any free one") from None
    sock.setblocking(False)
    return sock


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago (another process may take it: prefer port 0 where the caller can read it back)."""
    with listen(host, 0) as sock:
        return int(sock.getsockname()[1])
