"""TensorBoard event files with scalars, written directly.

Format: TFRecord (length, masked CRC-32C, data, masked CRC-32C) around `tensorflow.Event` protobufs; see tensorflow/core/util/event.proto
and tensorflow/core/lib/io/record_writer. Scalars need five protobuf fields, so neither protobuf nor TensorFlow is needed here.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path


def _crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)  # Castagnoli polynomial, reflected
        table.append(value)
    return table


_CRC = _crc_table()


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli) of a short record."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _masked_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    value &= 0xFFFFFFFFFFFFFFFF  # negative int64 as two's complement
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _bytes_field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


class EventFile:
    """One `events.out.tfevents…` file in `directory`; made at the first write. Each record is one unbuffered append."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._descriptor = -1

    def scalars(self, step: int, values: Mapping[str, float], wall_time: float) -> None:
        """Append one event: `values` by tag at `step`."""
        summary = b"".join(
            _bytes_field(1, _bytes_field(1, tag.encode("utf-8")) + b"\x15" + struct.pack("<f", value)) for tag, value in values.items()
        )
        self._event(wall_time, b"\x10" + _varint(step) + _bytes_field(5, summary))

    def _event(self, wall_time: float, rest: bytes) -> None:
        if self._descriptor < 0:
            self._open(wall_time)
        data = b"\x09" + struct.pack("<d", wall_time) + rest
        length = struct.pack("<Q", len(data))
        os.write(self._descriptor, length + _masked_crc(length) + data + _masked_crc(data))

    def _open(self, wall_time: float) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(wall_time)}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._descriptor = os.open(self._directory / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._event(wall_time, _bytes_field(3, b"brain.Event:2"))

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
