"""Bytes on the wire: msgpack for messages, JSON on request, and byte columns for token data.

A `Column` is raw little-endian bytes with dtype and shape, so that encoding a batch is a few memory copies.
`array(column)` is a read-only view; the view keeps the whole reply alive, so copy what outlives the reply.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt

from astraflow.protocol.errors import BadMessage

T = TypeVar("T")

DTYPES = ("bool", "uint8", "uint16", "int32", "int64", "float32", "float64")
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name).newbyteorder("<") for name in DTYPES}
"""Name → what its bytes are."""


class Column(msgspec.Struct, frozen=True):
    """An n-dimensional array as bytes."""

    dtype: str
    """One of `DTYPES`; always little-endian."""
    shape: tuple[int, ...]
    """Row-major shape; the first axis is tokens or rows."""
    data: bytes
    """Exactly product(shape) × itemsize bytes."""

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 1


def column(values: npt.ArrayLike, dtype: str) -> Column:
    """Copy `values` into a column. Raises BadMessage for a dtype outside `DTYPES` or a lossy integer conversion."""
    if dtype not in DTYPES:
        raise BadMessage(f"column dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    source = np.asarray(values)
    target = np.asarray(source, dtype=NUMPY_DTYPES[dtype], order="C")
    if target is not source and target.dtype.kind in "iu" and source.size and not np.array_equal(target, source):
        raise BadMessage(f"values do not fit into {dtype}")
    return Column(dtype, tuple(source.shape), target.tobytes())


def array(col: Column) -> np.ndarray[Any, Any]:
    """Read-only view of a column. Raises BadMessage when bytes, dtype and shape contradict each other."""
    check_column(col)
    return np.frombuffer(col.data, dtype=NUMPY_DTYPES[col.dtype]).reshape(col.shape)


def check_column(col: Column, where: str = "column") -> None:
    """Raise BadMessage (naming `where`) unless bytes, dtype and shape agree."""
    if col.dtype not in DTYPES:
        raise BadMessage(f"{where}: dtype {col.dtype!r} is not one of {', '.join(DTYPES)}")
    count = 1
    for extent in col.shape:
        if extent < 0:
            raise BadMessage(f"{where}: negative extent in shape {col.shape}")
        count *= extent
    expected = count * NUMPY_DTYPES[col.dtype].itemsize
    if len(col.data) != expected:
        raise BadMessage(f"{where}: {len(col.data)} bytes for shape {col.shape} of {col.dtype}, expected {expected}")


_msgpack_encoder = msgspec.msgpack.Encoder()
_json_encoder = msgspec.json.Encoder()


@cache
def _msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


@cache
def _json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


UNSENDABLE = (OverflowError, ValueError, TypeError, RecursionError)
"""What the encoder raises: integers beyond 64 bits, lone surrogates, objects, endless nesting."""


def encode(message: Any) -> bytes:
    """msgpack bytes of a Struct. Raises BadMessage for one that holds what cannot be sent (`fault_of`)."""
    try:
        return _msgpack_encoder.encode(message)
    except UNSENDABLE as error:
        raise BadMessage(f"{type(message).__name__} cannot be sent: {error}") from None


def fault_of(value: Any) -> str:
    """Which part of free data cannot be sent, and why, in one line; empty when all of it can."""
    path: list[str] = []
    fault = _fault(value)
    while fault is not None and not isinstance(fault, RecursionError):
        parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
        inner = next(((key, part, found) for key, part in parts if (found := _fault(part)) is not None), None)
        if inner is None:
            break
        key, value, fault = inner
        path.append(f"{key!s:.40}".encode("utf-8", "replace").decode())
    if fault is None:
        return ""
    why = "an integer beyond 64 bits" if isinstance(fault, OverflowError) else str(fault)
    return f"field `{'.'.join(path)}` cannot be sent: {why} ({type(value).__name__})"


def _fault(value: Any) -> Exception | None:
    try:
        _msgpack_encoder.encode(value)
    except UNSENDABLE as error:
        return error
    return None


def decode(data: bytes | bytearray | memoryview | msgspec.Raw, kind: type[T]) -> T:
    """Decode and validate. Raises BadMessage with the path of the offending field."""
    try:
        return cast(T, _msgpack_decoder(cast(Any, kind)).decode(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"{kind.__name__}: {error}") from None


def encode_json(message: Any) -> bytes:
    """JSON bytes of a Struct (status and control routes speak JSON too)."""
    return _json_encoder.encode(message)


def decode_json(data: bytes | bytearray, kind: type[T]) -> T:
    """Decode and validate JSON. Raises BadMessage with the path of the offending field."""
    try:
        return cast(T, _json_decoder(cast(Any, kind)).decode(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"{kind.__name__}: {error}") from None
