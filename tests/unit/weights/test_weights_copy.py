"""Which parameters travel, and as which words."""

from __future__ import annotations

import pytest
import torch

from astraflow.protocol.errors import LayoutMismatch, UserError
from astraflow.weights import copy, layout


def test_ties_are_taken_from_the_caller_and_seen_in_shared_storage() -> None:
    table = torch.randn(8, 4)
    named = [("embed", table), ("head", table), ("again", table.clone()), ("known", table.clone())]
    tensors, ties = copy.collect(named, {"known": "embed"})
    assert list(tensors) == ["embed", "again"]
    assert ties == {"known": "embed", "head": "embed"}
    views, ties = copy.collect([("whole", table), ("rows", table[:4]), ("turned", table.t())], {})
    assert list(views) == ["whole", "rows", "turned"], "views of other shapes are tensors of their own"
    assert ties == {}


def test_what_cannot_be_published_is_named() -> None:
    for tensor in (torch.zeros(3, dtype=torch.int64), torch.zeros(3, device="meta")):
        with pytest.raises(UserError, match="'steps'"):
            copy.collect([("steps", tensor)], {})
    sharded = torch.zeros(3)
    sharded.placements = ()  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="sharded"):
        copy.collect([("w", sharded)], {})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_half_holds_the_converted_words_of_any_memory_order(dtype: copy.PublishedDtype) -> None:
    tensors = {"a": torch.randn(5, 7), "turned": torch.randn(6, 3).t(), "wide": torch.randn(64, dtype=torch.float64)}
    tensors |= {"one": torch.tensor(2.5), "empty": torch.zeros(0, 4)}
    shape = layout.build(copy.specs(tensors, dtype))
    half = bytearray(shape.size_bytes)
    copy.copy_into(memoryview(half), shape, tensors, dtype)
    for name, tensor in tensors.items():
        meta = shape.by_name[name]
        expected = tensor.to(copy.WIRE[dtype][1]).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert bytes(half[meta.offset : meta.offset + meta.size_bytes]) == expected, name


def test_later_versions_must_fill_the_same_layout() -> None:
    shape = layout.build(copy.specs({"a": torch.zeros(2), "b": torch.zeros(3)}, "bfloat16"))
    copy.check_same(shape, {"b": torch.zeros(3), "a": torch.zeros(2)})
    for wrong, name in (
        ({"a": torch.zeros(2)}, "'b'"),
        ({"a": torch.zeros(2), "b": torch.zeros(4)}, "'b'"),
        ({"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1)}, "'c'"),
    ):
        with pytest.raises(LayoutMismatch, match=name):
            copy.check_same(shape, wrong)
