"""One connection of a weight stream on the sending side, plain or TLS, on a non-blocking socket in the sender's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import struct
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

RECORDS = 256 << 10
"""Bytes that are encrypted at a time: 16 records, a tenth of a millisecond, so that all streams get their turn."""


class Channel(Protocol):
    """What a stream needs of its connection. All methods raise OSError when it is broken."""

    async def open(self) -> None: ...

    async def receive(self, most: int) -> bytes: ...

    async def send(self, data: bytes | memoryview) -> None: ...

    async def send_file(self, source: int, offset: int, most: int) -> int: ...

    def close(self, clean: bool) -> None: ...


class Plain:
    """The kernel sends straight from the file's pages."""

    def __init__(self, sock: socket.socket):
        self._sock, self._loop = sock, asyncio.get_running_loop()

    async def open(self) -> None:
        """Nothing to agree on."""

    async def receive(self, most: int) -> bytes:
        """At least one byte; none at the end."""
        return await self._loop.sock_recv(self._sock, most)

    async def send(self, data: bytes | memoryview) -> None:
        """All of it."""
        await self._loop.sock_sendall(self._sock, data)

    async def send_file(self, source: int, offset: int, most: int) -> int:
        """Wait until the connection takes bytes, and give it as many as it takes, at most `most`; how many.

        No copy: the kernel queues references to the file's pages. Waiting first, also where it would take them at once, gives all
        streams their turn.
        """
        while True:
            await writable(self._sock)
            try:
                sent = os.sendfile(self._sock.fileno(), source, offset, most)
            except BlockingIOError:
                continue
            if sent == 0:
                raise OSError(f"sendfile gave 0 of {most} bytes")
            return sent

    def close(self, clean: bool) -> None:
        """Not `clean` throws away what is queued."""
        if clean:
            self._sock.close()
        else:
            hard_close(self._sock)


class Secure:
    """TLS: bytes are read from the file and encrypted here, because the kernel cannot send them as they lie."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext):
        self._sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    async def open(self) -> None:
        """The handshake."""
        await self._tried(self._sock.do_handshake)

    async def receive(self, most: int) -> bytes:
        """At least one byte; none at the end."""
        return await self._tried(lambda: self._sock.recv(most))

    async def send(self, data: bytes | memoryview) -> None:
        """All of it."""
        with memoryview(data) as view:
            for start in range(0, len(view), RECORDS):
                await self._send_part(view[start : start + RECORDS])

    async def send_file(self, source: int, offset: int, most: int) -> int:
        """So many bytes of the file, at most `most`; how many."""
        data = os.pread(source, min(most, RECORDS), offset)
        if not data:
            raise OSError(f"the file gave 0 of {most} bytes")
        await self._send_part(data)
        return len(data)

    def close(self, clean: bool) -> None:
        """Not `clean` throws away what is queued."""
        if clean:
            self._sock.close()
        else:
            hard_close(self._sock)

    async def _send_part(self, data: bytes | memoryview) -> None:
        await writable(self._sock)  # first, as above
        sent = await self._tried(lambda: self._sock.send(data))
        assert sent == len(data), "OpenSSL takes all of a write or asks for it again"

    async def _tried(self, attempt: Callable[[], T]) -> T:
        """Again and again, whenever the connection has what it was waiting for."""
        while True:
            try:
                return attempt()
            except ssl.SSLWantReadError:
                await readable(self._sock)
            except ssl.SSLWantWriteError:
                await writable(self._sock)


def hard_close(sock: socket.socket) -> None:
    """Close and throw away what is queued: after a cancelled transfer nothing of the half may still leave."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


async def readable(sock: socket.socket) -> None:
    """Wait until there is something to read."""
    loop = asyncio.get_running_loop()
    await _event(sock, loop.add_reader, loop.remove_reader)


async def writable(sock: socket.socket) -> None:
    """Wait until the connection takes bytes."""
    loop = asyncio.get_running_loop()
    await _event(sock, loop.add_writer, loop.remove_writer)


async def _event(sock: socket.socket, add: Callable[..., Any], remove: Callable[[int], Any]) -> None:
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    number = sock.fileno()
    add(number, _settle, ready)
    try:
        await ready
    finally:
        remove(number)


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
