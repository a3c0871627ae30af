"""What the RaaS process and an engine's child process say to each other over a socketpair.

A frame is a 4-byte little-endian length followed by the msgpack of one Struct of a tagged union: `ToChild` going down,
`FromChild` coming up. The child handles frames in the order they arrive, between two decode steps. Every `Generate` is
answered by exactly one `Done` or `Failed`, every `Load` by one `Loaded` or `LoadFailed`, every `Ping` by one `Pong`.
Torch-free: both sides import this file.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

from astraflow.protocol.errors import BadMessage
from astraflow.workflows.api import ModelRequest, ModelResponse

HEADER = struct.Struct("<I")
"""Length of the body that follows, in bytes."""
MAX_FRAME_BYTES = 256 * 1024 * 1024
"""Far above any request (a 1M-token prompt is 5 MB); a larger length means that the stream is out of step."""


# --- to the child -------------------------------------------------------------------------------------------------------


class Init(msgspec.Struct, kw_only=True, tag="init"):
    """The first frame. Answered by `Ready` once requests are accepted, or the child exits with a message on stderr."""

    model_dir: str
    """HF directory: config.json, tokenizer files and, for `load_initial`, safetensors."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype; auto = float32 on a CPU, bfloat16 on a GPU (bf16 matmuls are 4–8× slower on CPUs without AMX)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 1
    """torch intra-op threads; 0 = torch's own choice."""
    max_slots: int = 64
    """Sequences decoded at once; more wait in arrival order."""
    max_queue: int = 4096
    """Requests that may wait; the next one fails. Above it the executor's slots are configured wrongly."""
    max_len: int = 0
    """Prompt + new tokens of one request; 0 = the model's context length."""
    kv_bytes: int = 2 * 1024**3
    """Bound of the KV cache of running sequences; requests that do not fit now wait."""
    prefix_cache_bytes: int = 256 * 1024**2
    """Bound of the prefix cache; 0 switches it off."""
    prefill_tokens: int = 2048
    """Most prompt tokens computed in one step: bounds activations and the pause of running sequences."""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """Running sequences after a weight load: prefill again under the new weights (default), or go on with the old keys (numerics 3)."""
    load_initial: bool = False
    """Load `model_dir`'s own weights at the start (standalone use); otherwise `Generate` fails until the first `Load`."""
    eos_ids: list[int] | None = None
    """Ends of sequence added to every request's stop_ids; None = those of generation_config.json / config.json."""


class Generate(msgspec.Struct, kw_only=True, tag="generate"):
    id: str
    """Unique among running requests; answers carry it."""
    request: ModelRequest


class Cancel(msgspec.Struct, kw_only=True, tag="cancel"):
    """Free the slot now. A known request is answered `Failed(kind="cancelled")`; an unknown one is ignored (it has been answered)."""

    id: str


class Load(msgspec.Struct, kw_only=True, tag="load"):
    """Replace all weights in place from a staged safetensors file. On failure the old weights stay complete and served."""

    path: str
    timeline: int
    version: int
    digest: str


class Ping(msgspec.Struct, kw_only=True, tag="ping"):
    nonce: int = 0


class Stop(msgspec.Struct, kw_only=True, tag="stop"):
    """Exit 0 now; running requests get no answer. A closed socket means the same."""


# --- from the child -----------------------------------------------------------------------------------------------------


class Ready(msgspec.Struct, kw_only=True, tag="ready"):
    pid: int
    max_len: int
    """Resolved bound on prompt + new tokens."""
    device: str
    dtype: str
    seconds: float
    """From Init to here."""
    loaded: bool
    """Weights are in place (`load_initial`); otherwise a `Load` must come first."""


class Done(msgspec.Struct, kw_only=True, tag="done"):
    id: str
    response: ModelResponse


class Failed(msgspec.Struct, kw_only=True, tag="failed"):
    """This request failed; others are untouched."""

    id: str
    kind: Literal["bad_request", "overlong", "over_capacity", "not_loaded", "cancelled", "engine"]
    message: str


class Loaded(msgspec.Struct, kw_only=True, tag="loaded"):
    timeline: int
    version: int
    digest: str
    seconds: float
    """Generation stood still for this long."""


class LoadFailed(msgspec.Struct, kw_only=True, tag="load_failed"):
    timeline: int
    version: int
    message: str
    """Names the tensor or file; the old weights go on serving."""


class Pong(msgspec.Struct, kw_only=True, tag="pong"):
    nonce: int
    running: int
    queued: int
    version: int
    """Weights served now; −1 = none yet."""
    timeline: int
    stats: dict[str, float]
    """`kv_use` (share of kv_bytes), `tokens_per_s` (generated, last 10 s of work), `generated_tokens`, `prefill_tokens`,
    `prefix_hit_tokens` (prompt tokens found in the prefix cache), `shared_tokens` (prompt tokens computed for another request),
    `steps`, `load_stall_ms` (last load),
    `recomputed_tokens`, `prefix_cache_use`, `cancelled`, `failed`."""


ToChild = Init | Generate | Cancel | Load | Ping | Stop
FromChild = Ready | Done | Failed | Loaded | LoadFailed | Pong

_encoder = msgspec.msgpack.Encoder()
_to_child: msgspec.msgpack.Decoder[ToChild] = msgspec.msgpack.Decoder(ToChild)
_from_child: msgspec.msgpack.Decoder[FromChild] = msgspec.msgpack.Decoder(FromChild)


def pack(frame: ToChild | FromChild) -> bytes:
    """Header and body of one frame."""
    body = _encoder.encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise BadMessage(f"frame {type(frame).__name__}: {len(body)} bytes, limit {MAX_FRAME_BYTES}")
    return HEADER.pack(len(body)) + body


def body_length(header: bytes) -> int:
    """Length announced by a 4-byte header. Raises BadMessage when no honest peer would send it."""
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise BadMessage(f"frame of {length} bytes announced, limit {MAX_FRAME_BYTES}: the stream is out of step")
    return int(length)


def decode_to_child(body: bytes | memoryview) -> ToChild:
    """Frame that the child received. Raises BadMessage with the field's path."""
    try:
        return _to_child.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadMessage(f"frame to child: {error}") from None


def decode_from_child(body: bytes | memoryview) -> FromChild:
    """Frame that the RaaS process received. Raises BadMessage with the field's path."""
    try:
        return _from_child.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadMessage(f"frame from child: {error}") from None


class FrameBuffer:
    """Cuts a byte stream into frame bodies: feed what was read, get every body that is complete."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Complete bodies, in order. The rest stays (at most one frame, so bounded by MAX_FRAME_BYTES)."""
        self._data += data
        bodies: list[bytes] = []
        start = 0
        while len(self._data) - start >= HEADER.size:
            body_start = start + HEADER.size
            end = body_start + body_length(bytes(self._data[start:body_start]))
            if len(self._data) < end:
                break
            bodies.append(bytes(self._data[body_start:end]))
            start = end
        del self._data[:start]
        return bodies
