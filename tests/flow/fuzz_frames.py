"""A fuzzer of weight streams: seeded first frames of a connection, and how each connection ends."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from fuzz import DEEP, mutated, packed

from astraflow.protocol.message import PROTOCOL_VERSION

END_S = 45.0
"""Every connection ends within this after its last byte was sent."""
MAX_READ = 1 << 22


def hello(token: str, transfer_id: str, offset: int, length: int) -> dict[str, Any]:
    return {"protocol_version": PROTOCOL_VERSION, "token": token, "transfer_id": transfer_id, "offset": offset, "length": length}


def frame(body: bytes, length: int | None = None) -> bytes:
    return struct.pack("<I", len(body) if length is None else length) + body


class Frames:
    """Frame number i. `ticket()` = (id, bytes) of a transfer that is open now."""

    def __init__(self, seed: int, token: str, ticket: Callable[[], tuple[str, int]]) -> None:
        self._seed, self._token, self._ticket = seed, token, ticket

    def __call__(self, number: int) -> bytes:
        rng = random.Random(f"{self._seed}/frame/{number}")
        transfer_id, size = self._ticket()
        right = hello(self._token, transfer_id, rng.randrange(size), rng.choice((1, 100, size)))
        body = packed(right)
        match rng.randrange(10):
            case 0:
                return rng.randbytes(rng.randrange(200))
            case 1:
                return frame(rng.randbytes(rng.randrange(300)))
            case 2 | 3 | 4:
                return frame(packed(mutated(rng, right)))
            case 5:
                return frame(body, rng.choice((0, 1, len(body) - 1, len(body) + 1, 4096, 4097, 2**31, 2**32 - 1)))
            case 6:
                return frame(body)[: rng.randrange(len(body) + 4)]
            case 7:
                spoilt = bytearray(frame(body))
                spoilt[rng.randrange(len(spoilt))] = rng.randrange(256)
                return bytes(spoilt)
            case 8:
                return frame(body) * rng.randrange(2, 5) + rng.randbytes(rng.randrange(20))
            case _:
                wrongs = [{"token": ""}, {"token": self._token[:-1]}, {"transfer_id": "x"}, {"offset": -1}, {"offset": 2**63}, {"x": DEEP}]
                wrong: dict[str, Any] = rng.choice(wrongs)
                return frame(packed(right | wrong))


async def open_stream(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # leaves no port behind that waits for a minute
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    return sock


async def say(port: int, data: bytes) -> bytes:
    """Send it all on a new connection, say that no more comes, and read to the end. Raises TimeoutError."""
    loop, got = asyncio.get_running_loop(), bytearray()
    sock = await open_stream(port)
    try:
        async with asyncio.timeout(END_S):
            with contextlib.suppress(ConnectionError):  # closed before all was sent or read: an ending too
                await loop.sock_sendall(sock, data)
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_WR)
                while (part := await loop.sock_recv(sock, 1 << 16)) and len(got) < MAX_READ:
                    got += part
    finally:
        sock.close()
    return bytes(got)


async def drive_frames(port: int, frames: Iterator[bytes], lines: int = 16) -> tuple[Counter[str], list[str]]:
    """(how connections ended, faults)."""
    ends: Counter[str] = Counter()
    faults: list[str] = []

    async def work() -> None:
        for data in frames:
            started = time.monotonic()
            try:
                got = await say(port, data)
            except TimeoutError:
                faults.append(f"no end within {END_S:g} s to {data[:300]!r}")
                continue
            except OSError as error:
                faults.append(f"{type(error).__name__}: {error} after {time.monotonic() - started:.1f} s")
                continue
            ends["with bytes" if got else "without a byte"] += 1

    await asyncio.gather(*(work() for _ in range(lines)))
    return ends, faults
