"""What a service takes from a peer at most, and how slow a peer may be. `docs/security.md` tells the same numbers."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from astraflow.protocol.errors import BadMessage, TooLarge, Unavailable

MAX_HEAD_BYTES = 32 * 2**10
"""Request line and headers; the server reads no more of them."""
MAX_HEADERS = 100
MAX_QUERY_BYTES = 8 * 2**10
MAX_DEPTH = 64
"""Lists and maps inside each other."""
MAX_ITEMS = 250_000
"""Elements of all lists and maps of a body: an empty list costs a peer one byte, and the reader sixty."""
MAX_ERROR_CHARS = 2000
"""Of an error's text, which may quote what a peer sent."""
MAX_BODIES_BYTES = 512 * 2**20
"""Of all bodies that are read and worked on at once; more is refused as Unavailable: come again."""
SLOW_S, SLOW_BYTES = 30.0, 2**14
"""A connection from which a request is awaited, or the rest of one, brings at least so many bytes in so many seconds, or is cut."""
UNREAD_S = 120.0
"""A peer that does not take what it asked for is cut: a piece of a reply is `wire.CHUNK_BYTES`."""

SAFE_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
"""Of every answer: no browser makes a page of it, keeps it, or shows it to another site."""


class Bodies:
    """The requests that one server reads and works on at the same time."""

    def __init__(self, name: str) -> None:
        self.name, self.bytes = name, 0


class Held:
    """The share of one request, from its first byte to its answer."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies, self._bytes = bodies, 0

    def add(self, size: int) -> None:
        """Raises Unavailable when all of them together are too much."""
        self._bytes += size
        self._bodies.bytes += size
        if self._bodies.bytes > MAX_BODIES_BYTES:
            raise Unavailable(f"{self._bodies.name}: requests of {MAX_BODIES_BYTES} bytes are being worked on; come again")

    def release(self) -> None:
        self._bodies.bytes -= self._bytes
        self._bytes = 0


def check_structure(body: bytes | bytearray, json: bool, where: str) -> None:
    """Raise TooLarge for a msgpack or JSON body with more than MAX_ITEMS elements, BadMessage for one that is nested deeper than
    MAX_DEPTH or has a map with keys that are no plain values, before anything is made of it. What is no such body at all is left to
    the decoder, which names the fault."""
    if json and body.count(b",") > MAX_ITEMS:  # each element needs one; those inside of text are taken for some
        raise TooLarge(f"{where}: {body.count(b',')} commas; a body has at most {MAX_ITEMS} elements")
    kinds = _JSON if json else _MSGPACK
    left, items = [(msgspec.Raw(bytes(body).lstrip() if json else bytes(body)), 1)], 0
    while left:
        raw, depth = left.pop()
        decoder = kinds.get(_first(raw))
        if decoder is None:
            continue
        if depth > MAX_DEPTH:
            raise BadMessage(f"{where}: lists and maps nested deeper than {MAX_DEPTH}")
        if not json and items + (announced := _announced(raw)) > MAX_ITEMS:
            raise TooLarge(f"{where}: {items + announced} elements of lists and maps, at most {MAX_ITEMS} are taken")
        try:
            found: Any = decoder.decode(raw)
        except msgspec.ValidationError as error:
            raise BadMessage(f"{where}: keys of maps: {error}") from None
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        except RecursionError:
            raise BadMessage(f"{where}: lists and maps nested deeper than {MAX_DEPTH}") from None
        items += len(found)
        parts = found.values() if isinstance(found, dict) else found
        left += [(part, depth + 1) for part in parts if _first(part) in kinds]


def _first(raw: msgspec.Raw) -> int:
    """0 when nothing can be inside."""
    view = memoryview(raw)
    return view[0] if len(view) > 1 else 0


def _announced(raw: msgspec.Raw) -> int:
    """Elements of a msgpack list or map by its own head."""
    view = memoryview(raw)
    if view[0] < 0xDC:
        return view[0] & 0x0F
    return int.from_bytes(view[1 : 3 if view[0] in (0xDC, 0xDE) else 5], "big")


_LIST, _MAP = msgspec.msgpack.Decoder(list[msgspec.Raw]), msgspec.msgpack.Decoder(dict[str | int | float | bool | None, msgspec.Raw])
_MSGPACK: dict[int, Any] = {
    **dict.fromkeys([*range(0x80, 0x90), 0xDE, 0xDF], _MAP),
    **dict.fromkeys([*range(0x90, 0xA0), 0xDC, 0xDD], _LIST),
}
"""First byte → decoder of the parts of a list or map."""
_JSON: dict[int, Any] = {
    ord("["): msgspec.json.Decoder(list[msgspec.Raw]),
    ord("{"): msgspec.json.Decoder(dict[str, msgspec.Raw]),
}


class PatientProtocol(H11Protocol):
    """HTTP of one connection. uvicorn waits for ever for a request that does not come or does not end; this does not."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._begin()

    def data_received(self, data: bytes) -> None:
        self._bytes += len(data)
        super().data_received(data)
        if not self._awaited():
            self._end()
        elif self._watch is None:
            self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():  # closing would wait for a peer that does not read
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _awaited(self) -> bool:
        """The peer is to send: a request, or the rest of one."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def _begin(self) -> None:
        self._bytes = 0
        self._watch = self.loop.call_later(SLOW_S, self._look)

    def _end(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _look(self) -> None:
        self._watch = None
        if self.transport.is_closing() or not self._awaited():
            return
        if self._bytes < SLOW_BYTES and not self.flow.read_paused:
            self.transport.abort()
        else:
            self._begin()
