"""Weight streams: raw bytes of one transfer over one TCP connection per part (`protocol/weights.py` has the format).

This file has the hello and the serving side, on non-blocking sockets in the sender's event loop; `fetch.py` is the receiving side.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from typing import BinaryIO

from astraflow.lib.aio import Tasks, deadline
from astraflow.lib.auth import same_token
from astraflow.lib.net import listen
from astraflow.protocol.codec import decode, encode
from astraflow.protocol.errors import AstraFlowError, AuthError, BadMessage, WrongProtocol
from astraflow.protocol.message import PROTOCOL_VERSION
from astraflow.protocol.weights import StreamHello
from astraflow.weights.transfers import Transfer, TransferBook

log = logging.getLogger(__name__)

MAX_HELLO = 4096
HELLO_S = 10.0
"""A connection that says nothing for this long is closed."""
MAX_CONNECTIONS = 4096
"""Open connections of one sender; more are closed at once."""
MAX_STREAMS = 64
"""Streams of one transfer, leftovers of broken ones included."""
PIECE = 1 << 20
"""Bytes between two looks at progress; small, so that a thin link is not taken for a dead one."""


def hello_bytes(hello: StreamHello) -> bytes:
    """What the receiver sends first."""
    body = encode(hello)
    return struct.pack("<I", len(body)) + body


def hard_close(sock: socket.socket) -> None:
    """Close and throw away what is queued: after a cancelled transfer nothing of the half may still leave."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


class StreamServer:
    """Serves the ranges of open transfers. `source(half)` gives (file, offset of the half in it)."""

    def __init__(self, book: TransferBook, token: str, source: Callable[[int], tuple[BinaryIO, int]], tasks: Tasks):
        self._book, self._token, self._source, self._tasks = book, token, source, tasks
        self._listening: socket.socket | None = None
        self._connections = 0
        self.counters: Counter[str] = Counter()
        self.port = 0

    def start(self, host: str, port: int) -> None:
        """Bind and accept. Raises ConfigError naming host:port when it cannot be bound."""
        self._listening = listen(host, port)
        self.port = int(self._listening.getsockname()[1])
        self._tasks.spawn("weight streams", self._accept(self._listening))

    def stop(self) -> None:
        """Accept no more."""
        if self._listening is not None:
            self._listening.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listening)
            except OSError as error:  # out of descriptors, or the peer is gone already
                log.warning("weight stream not accepted: %s", error)
                await asyncio.sleep(0.1)
                continue
            self.counters["streams_accepted"] += 1
            if self._connections >= MAX_CONNECTIONS:
                self.counters["streams_refused"] += 1
                sock.close()
                continue
            self._connections += 1
            self._tasks.spawn("weight stream", self._serve(sock))

    async def _serve(self, sock: socket.socket) -> None:
        """One connection, from hello to close."""
        transfer: Transfer | None = None
        task = asyncio.current_task()
        assert task is not None
        clean = False
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello = await deadline(self._read_hello(sock), HELLO_S, "hello on a weight stream")
            transfer = self._book.for_stream(hello.transfer_id, hello.offset, hello.length, MAX_STREAMS)
            transfer.streams.add(task)
            await self._send(sock, transfer, hello.offset, hello.length)
            clean = True
        except AstraFlowError as error:
            self.counters["streams_refused"] += 1
            log.info("weight stream refused: %s", error)
        except OSError as error:
            self.counters["streams_broken"] += 1
            log.info("weight stream broken: %s", error)
        finally:
            self._connections -= 1
            if clean:
                sock.close()
            else:
                hard_close(sock)
            if transfer is not None:
                self._book.stream_ended(transfer, task)

    async def _read_hello(self, sock: socket.socket) -> StreamHello:
        (length,) = struct.unpack("<I", await _read_exactly(sock, 4))
        if length > MAX_HELLO:
            raise BadMessage(f"hello of {length} bytes (at most {MAX_HELLO})")
        hello = decode(await _read_exactly(sock, length), StreamHello)
        # The token before anything else, so that a stranger learns nothing from how a hello is refused.
        if self._token and not same_token(hello.token, self._token):
            raise AuthError("weight stream: the cluster token is missing or wrong")
        if hello.protocol_version != PROTOCOL_VERSION:
            raise WrongProtocol(f"weight stream: protocol version {hello.protocol_version}, this side speaks {PROTOCOL_VERSION}")
        return hello

    async def _send(self, sock: socket.socket, transfer: Transfer, offset: int, length: int) -> None:
        loop = asyncio.get_running_loop()
        file, base = (None, 0) if transfer.mode == "delta" else self._source(transfer.half)
        end = offset + length
        while offset < end:
            size = min(PIECE, end - offset)
            if file is None:
                await loop.sock_sendall(sock, memoryview(transfer.payload)[offset : offset + size])
            else:
                sent = await loop.sock_sendfile(sock, file, base + offset, size)
                if sent != size:
                    raise OSError(f"sendfile gave {sent} of {size} bytes")
            offset += size
            self.counters["streamed_bytes"] += size
            self._book.progress(transfer, size, time.monotonic())


async def _read_exactly(sock: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < count:
        part = await loop.sock_recv(sock, count - len(data))
        if not part:
            raise BadMessage(f"weight stream closed after {len(data)} of {count} bytes of its hello")
        data += part
    return data
