"""TLS by certificate options: what a service shows, whom a client trusts, and one clear line for every way in which the two disagree."""

from __future__ import annotations

import contextlib
import ssl
from functools import cache

import msgspec

from astraflow.lib.net import bare_host
from astraflow.protocol.errors import ConfigError

NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST", "UNKNOWN_PROTOCOL"})
"""What OpenSSL calls an answer that is no TLS at all."""


class Tls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Certificates: PEM files. Nothing given = services speak plain HTTP, and clients trust the system's authorities."""

    cert: str = ""
    """Certificate (and chain) that every service and weight stream shows; empty = they are plain."""
    key: str = ""
    """Its private key, without a passphrase; empty = it is in `cert`."""
    ca: str = ""
    """Authorities that clients trust; empty = the system's."""


PLAIN = Tls()


@cache
def server_context(tls: Tls) -> ssl.SSLContext:
    """For services. Raises ConfigError naming the file that cannot be used."""
    for field, path in (("cert", tls.cert), ("key", tls.key)):
        _readable(field, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.cert, tls.key or None, password=lambda: "")  # without it a key with a passphrase asks the terminal
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"tls.key: {tls.key or tls.cert!r} does not belong to the certificate in {tls.cert!r}") from None
        files = f"{tls.cert!r} and {tls.key!r}" if tls.key else repr(tls.cert)
        raise ConfigError(f"tls.cert: no certificate with its key, in PEM and without a passphrase, in {files}: {_words(error)}") from None
    return context


@cache
def client_context(tls: Tls) -> ssl.SSLContext:
    """For clients: certificates and host names are verified. Raises ConfigError naming the file that cannot be used."""
    _readable("ca", tls.ca)
    try:
        return ssl.create_default_context(cafile=tls.ca or None)
    except ssl.SSLError as error:
        raise ConfigError(f"tls.ca: no certificates in PEM in {tls.ca!r}: {_words(error)}") from None


def check_files(tls: Tls) -> None:
    """Raise ConfigError for options that contradict each other or name files that cannot be used."""
    for field, value in (("key", tls.key), ("ca", tls.ca)):
        if value and not tls.cert:
            raise ConfigError(f"tls.{field}: {value!r} without tls.cert; expected the certificate too, or none of them")
    if tls.cert:
        server_context(tls)
        client_context(tls)


def check_accepted(tls: Tls, host: str) -> None:
    """Let a client and a service with these options meet in memory, as they will at `host`. Raises ConfigError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context(tls).wrap_bio(to_server, to_client, server_side=True)
    client = client_context(tls).wrap_bio(to_client, to_server, server_hostname=bare_host(host))
    try:
        for side in (client, server, client):  # hello, certificate, verdict
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(f"tls.cert: {tls.cert!r} will not be accepted at {host}: {not_accepted(error, tls)}") from None


def find_ssl_error(error: BaseException | None) -> ssl.SSLError | None:
    """The TLS error behind one of a library that wraps it."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error


def not_accepted(error: ssl.SSLCertVerificationError, tls: Tls) -> str:
    """Why a certificate was refused, and by what."""
    return f"{error.verify_message.rstrip('.')} (trusted: {repr(tls.ca) if tls.ca else 'the authorities of this system'})"


def speaks_no_tls(error: ssl.SSLError) -> bool:
    """Whether the other side answered with something that is no TLS."""
    return error.reason in NO_TLS


def _readable(field: str, path: str) -> None:
    if not path:
        return
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigError(f"tls.{field}: {path!r}: {error.strerror or error}") from None


def _words(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()
