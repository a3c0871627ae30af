"""What the RaaS process and an engine's child process say to each other over a socketpair.

Frames as in `lib/frames.py`: `ToChild` going down, `FromChild` coming up. The child handles frames in the order they arrive, between
two decode steps. Every `Generate` is answered by exactly one `Done` or `Failed`, every `Load` by one `Loaded` or `LoadFailed`,
every `Ping` by one `Pong`.
Torch-free: both sides import this file.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from astraflow.lib.frames import FrameReader, pack
from astraflow.workflows.api import ModelRequest, ModelResponse

__all__ = ["from_child", "pack", "to_child"]


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


def to_child() -> FrameReader[ToChild]:
    """Reads what the child gets."""
    return FrameReader(ToChild, "frame to child")


def from_child() -> FrameReader[FromChild]:
    """Reads what the RaaS process gets."""
    return FrameReader(FromChild, "frame from child")
