"""The cluster token: one secret per run, kept in a file that only its owner can read."""

from __future__ import annotations

import base64
import binascii
import hmac
import os
import secrets
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from astraflow.lib.net import is_loopback
from astraflow.protocol.errors import ConfigError


def load_or_make_token(path: Path | str) -> str:
    """The token in `path`; made there with mode 0600 when there is none. Raises ConfigError for an unreadable or empty file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = secrets.token_urlsafe(32)
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(fresh + "\n")
        os.link(scratch, path)  # atomic: of two processes that start at once, both read the one that came first
    except FileExistsError:
        return read_token(path)
    finally:
        scratch.unlink()
    return fresh


def read_token(path: Path | str) -> str:
    """The token in `path`. Raises ConfigError when it cannot be read or is empty."""
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token file {str(path)!r}: {error}") from None
    return check_token(token, f"token file {str(path)!r}") if token else _refuse(f"token file {str(path)!r}")


def check_token(token: str, where: str) -> str:
    """The token again. Raises ConfigError (naming `where`, not the token) unless it can stand in an HTTP header; empty = none."""
    return token if not token or (token.isascii() and token.isprintable() and " " not in token) else _refuse(where)


def _refuse(where: str) -> NoReturn:
    raise ConfigError(f"{where}: expected one line with one token of printable ASCII characters")


def same_token(given: str, expected: str) -> bool:
    """Comparison whose time does not depend on where the two differ."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected.encode("utf-8", "surrogateescape"))


def foreign(host: str, origin: str, token: str) -> str:
    """Why a request may come from a page of another site, by its Host and Origin headers; empty = it does not.

    Browsers send what such a page wants to any address, a service on loopback included. Without a token only the name of this machine
    is taken for ours (a page's own name may lead here: DNS rebinding), and never the call of another origin.
    """
    try:
        name, site = urlsplit(f"//{host}").hostname or "", urlsplit(origin).netloc
    except ValueError:
        return f"Host {host[:80]!r} or Origin {origin[:80]!r} is none"
    if origin and site != host:
        return "a page of another site asked"
    if token or not host or is_loopback(name):  # no browser leaves the host out
        return ""
    return f"without a token this service is only for this machine, not for {host[:80]!r}"


def given_token(header: str) -> str:
    """The token in an Authorization header: of `Bearer`, or the password of `Basic`, which is how a client that can only be given an
    address (`http://any:TOKEN@host:port`) carries it. Empty when there is none."""
    scheme, _, value = header.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(value.strip(), validate=True).decode("utf-8").partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def token_required(host: str) -> bool:
    """A service that other machines can reach must ask for the token."""
    return not is_loopback(host)
