"""A half's bytes are a safetensors file's data part."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize, safe_open

from astraflow.protocol.errors import LayoutMismatch, UserError
from astraflow.protocol.weights import TensorMeta
from astraflow.weights import layout

MOST = 1 << 30
SPECS = [("odd", (3, 5), "BF16"), ("w32", (7,), "F32"), ("embed", (64, 32), "BF16"), ("norm", (64,), "F32"), ("one", (), "F32")]


@given(st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=3), st.sampled_from(["BF16", "F16", "F32"])), min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_tensors_leave_no_holes_and_are_aligned(rows: list[tuple[list[int], str]]) -> None:
    built = layout.build([(f"t{i}", tuple(shape), dtype) for i, (shape, dtype) in enumerate(rows)])
    offset = 0
    for t in built.tensors:
        assert t.offset == offset
        assert offset % layout.WORD_BYTES[t.dtype] == 0
        if t.size_bytes % 64 == 0 and t.size_bytes:
            assert offset % 64 == 0
        offset += t.size_bytes
    assert sum(run.size_bytes for run in built.runs) == built.size_bytes
    assert len(built.runs) <= 5
    if built.size_bytes:
        layout.check(built.tensors, built.tied, built.size_bytes, built.hash, MOST)


@pytest.mark.parametrize("export_tied", [False, True])
def test_header_and_half_are_a_file_that_safetensors_reads(tmp_path, export_tied: bool) -> None:  # type: ignore[no-untyped-def]
    built = layout.build(SPECS, {"head": "odd", "head2": "norm"})
    half = np.random.default_rng(0).integers(0, 256, built.size_bytes, dtype=np.uint8)
    head = layout.file_header(built, 7, "ab" * 16, export_tied)
    assert len(head) % layout.PAGE == 0
    assert len(head) == len(layout.file_header(built, 10**9, "", export_tied))
    body = half.tobytes()
    if export_tied:
        for alias in built.tied.values():
            t = built.by_name[alias]
            body += half[t.offset : t.offset + t.size_bytes].tobytes()
    path = tmp_path / "model.safetensors"
    path.write_bytes(head + body)
    with safe_open(path, "numpy") as file:
        assert file.metadata()["astraflow.digest"] == "ab" * 16
        assert set(file.keys()) == {name for name, _, _ in SPECS} | ({"head", "head2"} if export_tied else set())
    tensors = {name: bytes(row["data"]) for name, row in deserialize(path.read_bytes())}
    t = built.by_name["w32"]
    assert tensors["w32"] == half[t.offset : t.offset + t.size_bytes].tobytes()
    if export_tied:
        assert tensors["head"] == tensors["odd"]


def test_hash_names_everything_that_matters() -> None:
    base = layout.build(SPECS)
    assert layout.build(SPECS).hash == base.hash
    assert layout.build([*SPECS[:-1], ("other", (), "F32")]).hash != base.hash
    assert layout.build([("odd", (5, 3), "BF16"), *SPECS[1:]]).hash != base.hash
    assert layout.build([("odd", (3, 5), "F16"), *SPECS[1:]]).hash != base.hash


def test_digest_sees_every_byte_and_every_name_and_not_the_threads() -> None:
    built = layout.build([("a", (1 << 19,), "F32"), ("b", (3,), "BF16")])
    half = np.zeros(built.size_bytes, np.uint8)
    first = layout.digest(built, memoryview(half))
    assert first == layout.digest(built, memoryview(half), threads=3)
    assert len(first) == 32
    for at in (0, 1 << 20, built.size_bytes - 1):
        half[at] = 1
        assert layout.digest(built, memoryview(half)) != first
        half[at] = 0
    renamed = layout.build([("a", (1 << 19,), "F32"), ("c", (3,), "BF16")])
    assert layout.digest(renamed, memoryview(half)) != first


def test_what_cannot_be_published_is_refused_by_name() -> None:
    for specs, tied, text in (
        ([("a", (1,), "I64")], {}, "I64"),
        ([("a", (1,), "F32"), ("a", (1,), "F32")], {}, "'a'"),
        ([("__metadata__", (1,), "F32")], {}, "reserved"),
        ([("a", (1,), "F32")], {"b": "c"}, "'c'"),
        ([("a", (1,), "F32")], {"a": "a"}, "must not be published"),
        ([], {}, "no tensors"),
    ):
        with pytest.raises(UserError, match=text):
            layout.build(specs, tied)


def test_a_layout_from_the_network_is_checked() -> None:
    good = layout.build(SPECS, {"head": "odd"})

    def check(**changes: object) -> None:
        args: dict[str, object] = {
            "tensors": good.tensors, "tied": good.tied, "size_bytes": good.size_bytes, "layout_hash": good.hash, "max_bytes": MOST,
        }  # fmt: skip
        layout.check(**{**args, **changes})  # type: ignore[arg-type]

    check()
    first, *rest = good.tensors

    def change(**fields: object) -> list[TensorMeta]:
        base = {name: getattr(first, name) for name in ("name", "shape", "dtype", "offset", "size_bytes")}
        return [TensorMeta(**{**base, **fields}), *rest]  # type: ignore[arg-type]

    for changes in (
        {"tensors": []}, {"tensors": change(offset=64)}, {"tensors": change(size_bytes=2)}, {"tensors": change(dtype="I8")},
        {"tensors": change(shape=(-1, -1))}, {"tensors": change(name=rest[0].name)}, {"tensors": change(shape=(1 << 40, 1 << 40))},
        {"size_bytes": good.size_bytes + 1}, {"layout_hash": "0" * 32}, {"max_bytes": 10}, {"tied": {"x": "nowhere"}}, {"tensors": rest},
        {"tied": {"__metadata__": "odd"}}, {"tied": {"x": "__metadata__"}}, {"tensors": change(shape=(*first.shape, *[1] * 16))},
    ):  # fmt: skip
        with pytest.raises(LayoutMismatch):
            check(**changes)


def test_chunks_are_small_enough_that_every_stream_has_work() -> None:
    assert layout.chunk_size(1 << 30, 6, 4 << 20) == 4 << 20
    assert layout.chunk_size(6_000_000, 6, 4 << 20) == 32768
    assert layout.chunk_size(10, 6, 4 << 20) == 4096
    data = memoryview(bytes(range(256)) * 64)
    assert len(layout.chunk_hashes(data, 5000)) == 4
    assert layout.chunk_hashes(data, 5000) != layout.chunk_hashes(data[:-1], 5000)
