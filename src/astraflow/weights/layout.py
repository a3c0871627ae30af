"""Which bytes of a half belong to which tensor.

safetensors allows no holes between tensors, so there are none: a half has exactly the bytes of a safetensors file's data part, and
a full pull is one receive into the file. Tensors of a multiple of 64 bytes come first and are therefore 64-byte aligned (nearly all
of a real model); the rest follows, widest dtype first, so that every tensor is at least aligned to its own word.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

import xxhash

from astraflow.protocol.errors import LayoutMismatch, UserError
from astraflow.protocol.weights import TensorMeta

WORD_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
PAGE = 4096
MAX_TENSORS = 1_000_000
MAX_NAME = 512
MAX_AXES = 16
CHUNKS_PER_STREAM = 32
HEADER_KEY = "__metadata__"
"""A safetensors name that is not a tensor's."""


@dataclass(frozen=True)
class Run:
    """Neighbouring tensors of one word size."""

    offset: int
    size_bytes: int
    word_bytes: int


@dataclass(frozen=True)
class Layout:
    """All tensors in the order of their bytes, and the names that share another tensor's bytes."""

    tensors: tuple[TensorMeta, ...]
    tied: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of one half."""
        return sum(t.size_bytes for t in self.tensors)

    @cached_property
    def words(self) -> int:
        return sum(run.size_bytes // run.word_bytes for run in self.runs)

    @cached_property
    def hash(self) -> str:
        """xxh3-128 hex over names, shapes, dtypes and offsets."""
        rows = [[t.name, list(t.shape), t.dtype, t.offset] for t in self.tensors]
        return xxhash.xxh3_128_hexdigest(json.dumps(rows, ensure_ascii=False, separators=(",", ":")).encode())

    @cached_property
    def by_name(self) -> dict[str, TensorMeta]:
        return {t.name: t for t in self.tensors}

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The half as few stretches of equal word size, in order."""
        found: list[Run] = []
        for t in self.tensors:
            word = WORD_BYTES[t.dtype]
            if found and found[-1].word_bytes == word:
                found[-1] = Run(found[-1].offset, found[-1].size_bytes + t.size_bytes, word)
            elif t.size_bytes:
                found.append(Run(t.offset, t.size_bytes, word))
        return tuple(found)


def build(specs: Iterable[tuple[str, tuple[int, ...], str]], tied: Mapping[str, str] | None = None) -> Layout:
    """Lay out (name, shape, safetensors dtype). `tied` maps a name without bytes of its own to the one that holds them.

    Raises UserError for a dtype or name that cannot be published, a name given twice, or a tie to nowhere.
    """
    rows: list[tuple[str, tuple[int, ...], str, int]] = []
    seen: set[str] = set()
    for name, shape, dtype in specs:
        if dtype not in WORD_BYTES:
            raise UserError(f"tensor {name!r}: dtype {dtype} cannot be published; expected one of {', '.join(WORD_BYTES)}")
        if not name or len(name) > MAX_NAME or name == HEADER_KEY or name in seen:
            raise UserError(f"tensor name {name!r} is empty, too long, reserved or given twice")
        seen.add(name)
        rows.append((name, tuple(shape), dtype, math.prod(shape) * WORD_BYTES[dtype]))
    rows.sort(key=lambda row: (row[3] % 64 != 0, -WORD_BYTES[row[2]]))
    tensors: list[TensorMeta] = []
    offset = 0
    for name, shape, dtype, size in rows:
        tensors.append(TensorMeta(name=name, shape=shape, dtype=dtype, offset=offset, size_bytes=size))
        offset += size
    ties = dict(tied or {})
    for alias, target in ties.items():
        if target not in seen or alias in seen:
            raise UserError(f"tied name {alias!r} → {target!r}: the first must not be published, the second must")
    if not rows:
        raise UserError("no tensors to publish")
    return Layout(tuple(tensors), ties)


def check(tensors: Iterable[TensorMeta], tied: Mapping[str, str], size_bytes: int, layout_hash: str, max_bytes: int) -> Layout:
    """A layout that came over the network. Raises LayoutMismatch unless it is complete, without holes and within `max_bytes`."""
    rows = tuple(tensors)
    if not 0 < len(rows) <= MAX_TENSORS:
        raise LayoutMismatch(f"layout with {len(rows)} tensors (accepted: 1…{MAX_TENSORS})")
    offset, seen = 0, set()
    for t in rows:
        word = WORD_BYTES.get(t.dtype)
        if word is None or not t.name or len(t.name) > MAX_NAME or t.name == HEADER_KEY or t.name in seen:
            raise LayoutMismatch(f"tensor {t.name[:MAX_NAME]!r} of {t.dtype[:16]}: name or dtype not accepted")
        if len(t.shape) > MAX_AXES or any(extent < 0 for extent in t.shape) or math.prod(t.shape) * word != t.size_bytes:
            raise LayoutMismatch(f"tensor {t.name!r}: shape {t.shape} of {t.dtype} does not have {t.size_bytes} bytes")
        if t.offset != offset or offset % word:
            raise LayoutMismatch(f"tensor {t.name!r}: offset {t.offset} leaves a hole or is not aligned (expected {offset})")
        seen.add(t.name)
        offset += t.size_bytes
    if offset != size_bytes or offset > max_bytes or offset == 0:
        raise LayoutMismatch(f"layout of {offset} bytes: {size_bytes} announced, {max_bytes} accepted")
    taken = seen | {HEADER_KEY}
    bad = [alias for alias, target in tied.items() if target not in seen or alias in taken or not 0 < len(alias) <= MAX_NAME]
    if bad or len(tied) > MAX_TENSORS:
        raise LayoutMismatch(f"tied names {bad[:3]} do not fit the tensors")
    layout = Layout(rows, dict(tied))
    if layout.hash != layout_hash:
        raise LayoutMismatch(f"layout hash {layout_hash[:64]!r} announced, {layout.hash!r} computed")
    return layout


def digest(layout: Layout, data: memoryview, threads: int = 1) -> str:
    """Digest of a half: `digest_of` the xxh3-128 of every tensor's bytes."""
    parts = [data[t.offset : t.offset + t.size_bytes] for t in layout.tensors]
    if threads > 1 and layout.size_bytes > 1 << 20:
        with ThreadPoolExecutor(threads, thread_name_prefix="digest") as pool:
            hashes = list(pool.map(xxhash.xxh3_128_digest, parts))
    else:
        hashes = [xxhash.xxh3_128_digest(part) for part in parts]
    return digest_of(layout, hashes)


def digest_of(layout: Layout, hashes: Iterable[bytes]) -> str:
    """xxh3-128 hex over (name, xxh3-128 of the tensor's bytes) in layout order."""
    total = xxhash.xxh3_128()
    for t, value in zip(layout.tensors, hashes, strict=True):
        total.update(t.name.encode() + b"\0" + value)
    return total.hexdigest()


def chunk_size(size_bytes: int, streams: int, most: int) -> int:
    """Bytes of a chunk: at most `most`, at least a page, and small enough that all streams end at about the same time."""
    share = -(-size_bytes // (max(1, streams) * CHUNKS_PER_STREAM))
    return min(most, max(PAGE, -(-share // PAGE) * PAGE))


def chunk_hashes(data: memoryview, chunk_bytes: int, threads: int = 1) -> list[int]:
    """xxh3-64 of every chunk."""
    parts = [data[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes)]
    if threads > 1 and len(data) > 1 << 20:
        with ThreadPoolExecutor(threads, thread_name_prefix="chunks") as pool:
            return list(pool.map(xxhash.xxh3_64_intdigest, parts))
    return [xxhash.xxh3_64_intdigest(part) for part in parts]


def exported(layout: Layout, export_tied: bool) -> list[tuple[str, TensorMeta, int]]:
    """(name, tensor with the bytes, offset in the file's data part) of everything that the staged file holds."""
    rows = [(t.name, t, t.offset) for t in layout.tensors]
    offset = layout.size_bytes
    if export_tied:
        # A tied tensor may have an odd size: each starts where the previous one ends, as safetensors wants it.
        for alias, target in layout.tied.items():
            rows.append((alias, layout.by_name[target], offset))
            offset += layout.by_name[target].size_bytes
    return rows


def file_header(layout: Layout, version: int, digest_hex: str, export_tied: bool) -> bytes:
    """Header of the staged safetensors file. Its length depends on the layout alone, so that a newer version can overwrite it."""
    metadata = {
        "format": "pt",
        "astraflow.version": f"{version:020d}",
        "astraflow.digest": f"{digest_hex:>32}",
        "astraflow.layout": layout.hash,
        "astraflow.tied": json.dumps(dict(layout.tied), ensure_ascii=False),
    }
    table: dict[str, object] = {HEADER_KEY: metadata}
    for name, t, offset in exported(layout, export_tied):
        table[name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [offset, offset + t.size_bytes]}
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // PAGE) * PAGE
    return struct.pack("<Q", length - 8) + text.ljust(length - 8)
