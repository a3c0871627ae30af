"""The seed's pickle wire: a trainer or a rollout service that was written for it takes part, when the operator says --allow-pickle.

Both wires live on Dataflow's port. What only an old peer sends is taken here: a POST with `application/octet-stream` (or with neither
body nor Content-Type), a registration with `uid`, `GET /batch` without a timeline. `GET /status` and `/raas_pool` as JSON get the old
keys beside ours. Each is turned into a call of our own handlers. The other way round, `connect` gives the pool a caller that says our
calls to an old rollout service in pickle; its address is `pickle+http://host:port#uid`, also in a ledger. So admission, ledger,
staleness and barrier are those of every other peer: there is no second way for data. This file has the pickles, and it alone; the port
is in `compat_door`, the caller in `compat_raas`, what users read in docs/compat.md.

Who may come: old peers can send no token of their own accord. Without a token the service is on loopback. With one, an old client
carries it as the password of its URL, `http://any:TOKEN@host:port`, or in ~/.netrc: both need no change of its code (HTTP Basic).

What is unpickled: only the names of `ALLOWED`, each of which stands for a function of this file: nothing is imported or called by name,
torch tensors are read without torch, and states can be set on nothing but arrays. What remains dangerous: a peer can make this process
use memory and time (a pickle's memo may be sized at will), can lie about rewards, log-probs and versions, and can name the address that
is called. A future fault of CPython's unpickler would be open to every peer that gets this far. So it stays off unless it is needed.

What the old wire cannot give, and what is done about it:
- /pull takes results away: a lost reply loses them. When its own counts say that nothing runs, its leases are issued again.
- It has no receipts and no digests: what it says it loaded is believed, `unverified`. It loads no lower version: restart it after
  a rollback. Weights flow between two old peers, or not at all.
- /batch without a version means the next one: one reply that was sent is not sent again. With a version it is ours: the same bytes.
- Checkpoints are not told: trained rows never become final, so that payload files are kept to the end of the run.
- End of data and starvation are HTTP 500 with a reason.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from astraflow.protocol.errors import BadMessage

WARNING = (
    "--allow-pickle: Dataflow unpickles what peers of the old wire send. Unpickling has been code execution before: only what this run"
    " needs is allowed, but give no untrusted process a way to this port, and leave the option off when no old peer takes part"
)
PICKLE = "application/octet-stream"
POLL_S = 0.1
"""Pause before a question is repeated; an old /pull waits no longer than this."""
MAX_EXPANDED = 1 << 24
"""Elements of a tensor that is larger than its storage (an expanded one)."""

# --- pickles --------------------------------------------------------------------------------------------------------------


class Allowed:
    """What a name of a pickle stands for. It can be called, and the BUILD opcode can set nothing on it."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *arguments: Any) -> Any:
        return self._make(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("a state for a name")


class Kind:
    """A dtype of numbers."""

    __slots__ = ("dtype", "halves")

    def __init__(self, text: Any, *flags: Any) -> None:
        if not isinstance(text, str) or not re.fullmatch(r"[biuf][1248]", text):
            raise pickle.UnpicklingError(f"dtype {text!r:.40}: expected a number")
        self.dtype, self.halves = np.dtype(text), False

    def __setstate__(self, state: Any) -> None:
        if state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])


class Values:
    """An array or tensor."""

    __slots__ = ("array",)

    def __init__(self, raw: Any = b"", kind: Kind | None = None, shape: Any = (0,), order: str = "C") -> None:
        dtype = kind.dtype if kind is not None else np.dtype("f4")
        _demand(order in ("C", "F"), "the order of its memory")
        self.array = np.frombuffer(raw, dtype).reshape(shape, order="F" if order == "F" else "C")

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, raw = state
        self.array = Values(raw, kind, shape, "F" if fortran else "C").array


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise pickle.UnpicklingError(f"{what} is not as expected")


def _scalar(kind: Kind, raw: bytes) -> Any:
    return np.frombuffer(raw, kind.dtype)[0].item()


def _bytes(text: str, codec_name: str) -> bytes:
    _demand(codec_name == "latin1", "a codec")
    return text.encode("latin1")


def _bytearray(raw: bytes = b"") -> bytearray:
    _demand(isinstance(raw, bytes), "a bytearray")
    return bytearray(raw)


def _storage_kind(name: str) -> Kind:
    kind = Kind(STORAGE_DTYPES[name])
    kind.halves = name == "BFloat16"
    return kind


def _storage(data: bytes) -> Values:
    """A torch storage in the older of torch.save's formats, which is what pickled tensors hold; flat."""
    stream = io.BytesIO(data)
    _, version, about = (Reader(stream, {}).load() for _ in range(3))
    kind, count = StorageReader(stream, STORAGES).load()
    keys = Reader(stream, {}).load()
    _demand(version == 1001 and about["little_endian"] and len(keys) == 1, "a storage")
    stream.read(8)  # how many elements, once more
    values = Values(stream.read(count * kind.dtype.itemsize), kind, (count,))
    if kind.halves:
        values.array = (values.array.astype("u4") << 16).view("f4")
    return values


def _tensor(storage: Values, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *rest: Any) -> Values:
    """A strided view of a storage, copied."""
    found, flat = Values(), storage.array.reshape(-1)
    _demand(len(size) == len(stride) and min((offset, *size, *stride)) >= 0, "a tensor's shape")
    last = offset + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
    _demand(0 in size or (last < len(flat) and math.prod(size) <= max(len(flat), MAX_EXPANDED)), "a tensor's size")
    steps = [step * flat.itemsize for step in stride]
    found.array = np.zeros(size, flat.dtype) if 0 in size else np.lib.stride_tricks.as_strided(flat[offset:], size, steps).copy()
    return found


def _no_call(*arguments: Any) -> Any:
    raise pickle.UnpicklingError("it is only a name")


ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("builtins", "bytearray"): _bytearray,
    ("builtins", "bytes"): lambda: b"",
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("collections", "OrderedDict"): lambda items=(): dict(items),
    ("_codecs", "encode"): _bytes,
    ("numpy", "dtype"): Kind,
    ("numpy", "ndarray"): _no_call,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): lambda *_: Values() for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _scalar for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): Values for core in ("core", "_core")},
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch.storage", "_load_from_bytes"): _storage,
}
"""All names that a pickle may hold, and what is called in their place."""
STORAGE_DTYPES = {"Float": "f4", "Double": "f8", "Half": "f2", "BFloat16": "u2", "Long": "i8", "Int": "i4"}
STORAGE_DTYPES |= {"Short": "i2", "Char": "i1", "Byte": "u1", "Bool": "b1"}
STORAGES = {("torch", f"{name}Storage"): partial(_storage_kind, name) for name in STORAGE_DTYPES}
"""The same for the head of a saved storage."""


class Reader(pickle.Unpickler):
    """Plain containers, numbers, texts and bytes, and the names of one table."""

    def __init__(self, stream: io.BytesIO, allowed: Mapping[tuple[str, str], Callable[..., Any]]) -> None:
        super().__init__(stream)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        made = self._allowed.get((module.replace("__builtin__", "builtins"), name))
        if made is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not allowed")
        return Allowed(made)

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it wants something persistent")


class StorageReader(Reader):
    """The one persistent thing of a saved storage: its dtype and length."""

    def persistent_load(self, pid: Any) -> Any:
        word, kind, _, _, count, *_ = pid
        _demand(word == "storage" and isinstance(count, int) and count >= 0, "a storage")
        return kind(), count


def unpickled(body: bytes, where: str) -> dict[str, Any]:
    """The dict in a body; empty for an empty one. Arrays and tensors are `Values`. Raises BadMessage naming what is refused."""
    if not body:
        return {}
    try:
        found = Reader(io.BytesIO(body), ALLOWED).load()
    except Exception as error:  # the boundary to a pickle of any origin, which raises whatever it likes
        raise BadMessage(f"{where}: this pickle is refused: {str(error) or type(error).__name__:.200}") from None
    if not isinstance(found, dict):
        raise BadMessage(f"{where}: a pickled {type(found).__name__}, expected a dict")
    return found


def pickled(value: Any) -> bytes:
    """Plain values, in dicts also numpy arrays: these become torch tensors where they are read, and neither side needs the other's
    version of numpy, nor this one torch."""
    return b"\x80\x03" + _part(value) + b"."


def _part(value: Any) -> bytes:
    if isinstance(value, dict):
        return b"}(" + b"".join(_part(key) + _part(part) for key, part in value.items()) + b"u"
    if isinstance(value, np.ndarray):
        little = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
        buffer = b"cbuiltins\nbytearray\n" + _part(little.tobytes()) + b"\x85R"  # a call with one argument
        return b"ctorch\nfrom_numpy\ncnumpy\nndarray\n" + _part(little.shape) + _part(little.dtype.str) + buffer + b"\x87R\x85R"
    return pickle.dumps(value, protocol=3)[2:-1]  # protocol 3 has no frames: without head and end it can stand inside another


REQUIRED: Any = object()


def field(message: Mapping[str, Any], name: str, kind: type, where: str, default: Any = REQUIRED) -> Any:
    """A field of its type. Raises BadMessage for another one, and for one that is missing and has no default."""
    value = message.get(name)
    if value is None and default is not REQUIRED:
        return default
    if kind is not int and isinstance(value, kind):
        return value
    if kind is int and isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise BadMessage(f"{where}: {name}: {value!r:.60}, expected {kind.__name__}")
