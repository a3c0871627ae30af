"""Weight streams: raw bytes of one transfer over several TCP connections, range after range (`protocol/weights.py` has the format).

This file has the hello and the serving side, `channel.py` the connection under it; `fetch.py` is the receiving side.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import struct
import time
from collections import Counter
from collections.abc import Callable
from typing import BinaryIO

from astraflow.lib.aio import Tasks, deadline
from astraflow.lib.auth import same_token
from astraflow.lib.net import listen
from astraflow.lib.tls import Tls, server_context
from astraflow.protocol.codec import decode, encode
from astraflow.protocol.errors import AstraFlowError, AuthError, BadMessage, WrongProtocol
from astraflow.protocol.message import PROTOCOL_VERSION
from astraflow.protocol.weights import StreamHello
from astraflow.weights.channel import Channel, Plain, Secure
from astraflow.weights.transfers import Transfer, TransferBook

log = logging.getLogger(__name__)

MAX_HELLO = 4096
HELLO_S = 10.0
"""A connection that says nothing for this long is closed; between two ranges the transfer's own deadline ends it."""
MAX_CONNECTIONS = 4096
"""Open connections of one sender; more are closed at once."""
TELL_S = 10.0
"""Between two log lines about streams that ended in the same way."""
MAX_STREAMS = 64
"""Streams of one transfer, leftovers of broken ones included."""
PIECE = 1 << 20
"""Bytes between two looks at progress; small, so that a thin link is not taken for a dead one."""


def hello_bytes(hello: StreamHello) -> bytes:
    """What the receiver sends first."""
    body = encode(hello)
    return struct.pack("<I", len(body)) + body


class StreamServer:
    """Serves the ranges of open transfers. `source(half)` gives (file, offset of the half in it)."""

    def __init__(self, book: TransferBook, token: str, tls: Tls, source: Callable[[int], tuple[BinaryIO, int]], tasks: Tasks):
        self._book, self._token, self._source, self._tasks = book, token, source, tasks
        self._tls = tls
        self._context: ssl.SSLContext | None = None
        self._listening: socket.socket | None = None
        self._connections = 0
        self._told: dict[str, float] = {}
        """Kind of ending → when it was logged last."""
        self.counters: Counter[str] = Counter()
        self.port = 0

    def start(self, host: str, port: int) -> None:
        """Bind and accept. Raises ConfigError naming host:port when it cannot be bound, or a certificate file that cannot be used."""
        self._context = server_context(self._tls) if self._tls.cert else None
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
        """One connection: range after range of one transfer, until the receiver closes it."""
        transfer: Transfer | None = None
        channel: Channel | None = None
        task = asyncio.current_task()
        assert task is not None
        clean = False
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = Plain(sock) if self._context is None else Secure(sock, self._context)
            hello = await deadline(self._first_hello(channel), HELLO_S, "hello on a weight stream")
            while hello is not None:
                if transfer is not None and transfer.id != hello.transfer_id:
                    raise BadMessage("a weight stream serves one transfer")
                transfer = self._book.for_stream(hello.transfer_id, hello.offset, hello.length, MAX_STREAMS, task)
                transfer.streams.add(task)
                await self._send(channel, transfer, hello.offset, hello.length)
                hello = await self._read_hello(channel)
            clean = True
        except (AstraFlowError, ssl.SSLError) as error:
            self.counters["streams_refused"] += 1
            self._tell("refused", error)
        except OSError as error:
            self.counters["streams_broken"] += 1
            self._tell("broken", error)
        finally:
            self._connections -= 1
            if channel is None:
                sock.close()
            else:
                channel.close(clean)
            if transfer is not None:
                self._book.stream_ended(transfer, task)

    def _tell(self, what: str, error: Exception) -> None:
        """One line in a while: anybody can connect, and the counters say how many did."""
        kind, now = f"{what} {type(error).__name__}", time.monotonic()
        if now - self._told.get(kind, -TELL_S) >= TELL_S:
            self._told[kind] = now
            log.info("weight stream %s: %s", what, error)

    async def _first_hello(self, channel: Channel) -> StreamHello | None:
        await channel.open()
        return await self._read_hello(channel)

    async def _read_hello(self, channel: Channel) -> StreamHello | None:
        """The next one; None when the receiver has closed the connection."""
        head = await _read_exactly(channel, 4)
        if not head:
            return None
        (length,) = struct.unpack("<I", head)
        if length > MAX_HELLO:
            raise BadMessage(f"hello of {length} bytes (at most {MAX_HELLO})")
        hello = decode(await _read_exactly(channel, length, inside=True), StreamHello)
        # The token before anything else, so that a stranger learns nothing from how a hello is refused.
        if self._token and not same_token(hello.token, self._token):
            raise AuthError("weight stream: the cluster token is missing or wrong")
        if hello.protocol_version != PROTOCOL_VERSION:
            raise WrongProtocol(f"weight stream: protocol version {hello.protocol_version}, this side speaks {PROTOCOL_VERSION}")
        return hello

    async def _send(self, channel: Channel, transfer: Transfer, offset: int, length: int) -> None:
        file, base = self._source(transfer.half) if transfer.chain is None else (None, 0)
        end = offset + length
        while offset < end:
            size = min(PIECE, end - offset)
            if transfer.chain is not None:
                for piece in transfer.chain.pieces(offset, size):
                    await channel.send(piece)
            elif file is not None:
                size = await channel.send_file(file.fileno(), base + offset, size)
            offset += size
            self.counters["streamed_bytes"] += size
            self._book.progress(transfer, size, time.monotonic())


async def _read_exactly(channel: Channel, count: int, inside: bool = False) -> bytes:
    """So many bytes; none at all when the connection ends before the first one, unless we are `inside` a hello."""
    data = b""
    while len(data) < count:
        part = await channel.receive(count - len(data))
        if not part and (data or inside):
            raise BadMessage(f"weight stream closed after {len(data)} of {count} bytes of its hello")
        if not part:
            return b""
        data += part
    return data
