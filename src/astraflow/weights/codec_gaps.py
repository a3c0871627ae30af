"""Delta codec `gaps-zstd`: changed words of one block as gaps and steps in ulp order, split into byte planes, each under zstd.

Pure: two arrays in, bytes out, and back. Bit-exact for every word (−0.0, NaN payloads, infinities are just words): the ulp order
is a bijection of the words that sorts them by value, so neighbouring floats differ by one and a step is a small number.

    block = header, then for each byte plane of the gaps (3) and of the steps (word bytes): its zstd frame
    header = <I changed words, then <I compressed length per plane (0 = the plane is all zero)
    gap i = changed[i] − changed[i−1] − 1 (changed[−1] = −1);  step i = zigzag(order(new) − order(old)) modulo the word
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import zstandard

from astraflow.protocol.errors import DigestMismatch

Words = np.ndarray[Any, np.dtype[Any]]

NAME = "gaps-zstd"
BLOCK_WORDS = 1 << 22
"""Words per block: bounds the temporaries to a few times 8 or 16 MiB; gaps fit into three bytes."""
GAP_PLANES = 3


def order(words: Words) -> Words:
    """Sign-magnitude words → unsigned integers in the order of the floats."""
    top = words.dtype.type(1 << (words.dtype.itemsize * 8 - 1))
    return np.where(words & top, ~words, words | top)


def unorder(ranks: Words) -> Words:
    """Inverse of `order`."""
    top = ranks.dtype.type(1 << (ranks.dtype.itemsize * 8 - 1))
    return np.where(ranks & top, ranks ^ top, ~ranks)


def zigzag(steps: Words) -> Words:
    """Two's complement steps → unsigned, small magnitudes first: 0, −1, 1, −2, …"""
    bits = steps.dtype.itemsize * 8
    sign = steps >> steps.dtype.type(bits - 1)
    mixed: Words = (steps << steps.dtype.type(1)) ^ (steps.dtype.type(0) - sign)
    return mixed


def unzigzag(values: Words) -> Words:
    """Inverse of `zigzag`."""
    one = values.dtype.type(1)
    steps: Words = (values >> one) ^ (values.dtype.type(0) - (values & one))
    return steps


def encode_block(old: Words, new: Words, compressor: zstandard.ZstdCompressor) -> tuple[bytes, int]:
    """(encoded block, changed words). old, new: equal-length 1-d uint16 or uint32, at most `BLOCK_WORDS`."""
    assert old.dtype == new.dtype
    assert old.size == new.size <= BLOCK_WORDS
    changed = np.flatnonzero(old != new)
    if not changed.size:
        return struct.pack("<I", 0), 0
    gaps = np.empty(changed.size, "<u4")
    gaps[0] = changed[0]
    np.subtract(changed[1:], changed[:-1] + 1, out=gaps[1:], casting="unsafe")
    steps = zigzag(order(new[changed]) - order(old[changed]))
    planes = [*_planes(gaps, GAP_PLANES), *_planes(steps, steps.dtype.itemsize)]
    frames = [compressor.compress(plane.data) if np.any(plane) else b"" for plane in planes]
    header = struct.pack(f"<{1 + len(frames)}I", changed.size, *map(len, frames))
    return b"".join([header, *frames]), int(changed.size)


def _planes(values: Words, count: int) -> list[Words]:
    table = values.view(np.uint8).reshape(values.size, values.dtype.itemsize)
    return [np.ascontiguousarray(table[:, k]) for k in range(count)]


def apply_block(words: Words, block: bytes | memoryview) -> int:
    """Turn the old words into the new ones, in place; the number of changed words.

    Raises DigestMismatch for a block that cannot be one (the words may be half patched then: discard them).
    """
    data = memoryview(block)
    (count,) = _header(data, "<I", 0)
    if count == 0:
        if len(data) != 4:
            raise DigestMismatch(f"delta block: {len(data) - 4} bytes after an empty block")
        return 0
    if count > words.size:
        raise DigestMismatch(f"delta block: {count} changes of {words.size} words")
    planes = GAP_PLANES + words.dtype.itemsize
    lengths = _header(data, f"<{planes}I", 4)
    offset = 4 + 4 * planes
    if offset + sum(lengths) != len(data):
        raise DigestMismatch(f"delta block: {len(data)} bytes, {offset + sum(lengths)} announced")
    unpacker = zstandard.ZstdDecompressor()
    columns: list[Words] = []
    for length in lengths:
        columns.append(_plane(unpacker, data[offset : offset + length], count))
        offset += length
    gaps = _join(columns[:GAP_PLANES], np.dtype("<u4"))
    positions = np.cumsum(gaps, dtype=np.int64) + np.arange(count)
    if positions[-1] >= words.size:
        raise DigestMismatch(f"delta block: position {positions[-1]} of {words.size} words")
    words[positions] = unorder(order(words[positions]) + unzigzag(_join(columns[GAP_PLANES:], words.dtype)))
    return int(count)


def _header(data: memoryview, form: str, offset: int) -> tuple[int, ...]:
    if len(data) < offset + struct.calcsize(form):
        raise DigestMismatch(f"delta block: cut off after {len(data)} bytes")
    return struct.unpack_from(form, data, offset)


def _plane(unpacker: zstandard.ZstdDecompressor, frame: memoryview, count: int) -> Words:
    if not frame:
        return np.zeros(count, np.uint8)
    try:
        # Checked before decompressing: the frame's own size field decides how much is allocated.
        if zstandard.frame_content_size(frame) != count:
            raise DigestMismatch(f"delta block: a plane of {zstandard.frame_content_size(frame)} bytes, expected {count}")
        plane = unpacker.decompress(frame, max_output_size=count, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DigestMismatch(f"delta block: {error}") from None
    return np.frombuffer(plane, np.uint8)


def _join(columns: list[Words], dtype: np.dtype[Any]) -> Words:
    table = np.zeros((columns[0].size, dtype.itemsize), np.uint8)
    for k, column in enumerate(columns):
        table[:, k] = column
    return table.view(dtype).reshape(-1)
