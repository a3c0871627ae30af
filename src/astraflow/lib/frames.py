"""Frames between a process and its child: four bytes of length (little-endian), then the msgpack of one Struct of a union.

Over a socketpair or a pipe, so both sides are of one installation. The three ways to read are those of the three kinds of reader:
an asyncio stream, a blocking file, and a byte stream that is fed as it comes.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO, Generic, TypeVar

import msgspec

from astraflow.protocol.codec import encode
from astraflow.protocol.errors import BadMessage

T = TypeVar("T")

HEADER = struct.Struct("<I")
MAX_BYTES = 256 << 20
"""Far above any frame (a 1M-token prompt is 5 MB, a layout of a million tensors 100 MB); more means that the stream is out of step."""


def pack(frame: msgspec.Struct) -> bytes:
    """Header and body of one frame. Raises BadMessage for one that nobody would read."""
    body = encode(frame)
    if len(body) > MAX_BYTES:
        raise BadMessage(f"frame {type(frame).__name__}: {len(body)} bytes, limit {MAX_BYTES}")
    return HEADER.pack(len(body)) + body


class FrameReader(Generic[T]):
    """Frames of one direction. `union`: the Struct types that may come; `name`: for errors. All methods raise BadMessage for what is
    no such frame."""

    def __init__(self, union: Any, name: str) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)
        self._name = name
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[T]:
        """Add bytes (at the first step of the iterator); the frames that are complete now, in order. What is not asked for stays."""
        self._data += data
        while len(self._data) >= HEADER.size:
            end = HEADER.size + self._length(self._data[: HEADER.size])
            if len(self._data) < end:
                return
            body = bytes(self._data[HEADER.size : end])
            del self._data[:end]
            yield self._decode(body)

    async def read(self, stream: asyncio.StreamReader) -> T:
        """The next frame. Raises IncompleteReadError or OSError at the end of the stream."""
        return self._decode(await stream.readexactly(self._length(await stream.readexactly(HEADER.size))))

    def read_file(self, file: BinaryIO) -> T | None:
        """The next frame; None at the end of the file."""
        header = file.read(HEADER.size)
        return self._decode(file.read(self._length(header))) if len(header) == HEADER.size else None

    def _length(self, header: bytes | bytearray) -> int:
        length = int(HEADER.unpack(header)[0])
        if length > MAX_BYTES:
            raise BadMessage(f"{self._name}: a frame of {length} bytes announced, limit {MAX_BYTES}: the stream is out of step")
        return length

    def _decode(self, body: bytes) -> T:
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadMessage(f"{self._name}: {error}") from None
