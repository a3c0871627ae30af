"""Which parameters travel, and as which words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from astraflow.protocol.errors import LayoutMismatch, UserError
from astraflow.weights import copy, layout
from astraflow.weights.lora import LowRank


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_half_holds_the_converted_words_of_any_memory_order(dtype: copy.PublishedDtype) -> None:
    tensors = {"a": torch.randn(5, 7), "turned": torch.randn(6, 3).t(), "wide": torch.randn(64, dtype=torch.float64)}
    tensors |= {"one": torch.tensor(2.5), "empty": torch.zeros(0, 4)}
    shape = layout.build(copy.specs(tensors, dtype))
    half = bytearray(shape.size_bytes)
    copy.copy_into(memoryview(half), shape, tensors)
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


class Made(TorchDispatchMode):
    """Bytes of the largest tensor that an operation made (views of a half and of the sources do not count)."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        spans = [tensor.untyped_storage() for tensor in known]
        self._known = [range(span.data_ptr(), span.data_ptr() + span.nbytes()) for span in spans]
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not any(result.untyped_storage().data_ptr() in span for span in self._known):
            self.most = max(self.most, result.untyped_storage().nbytes())
        return result


def test_no_second_copy_of_a_tensor_exists_while_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters are converted on their way into the half; a sum with an adapter exists in pieces only."""
    monkeypatch.setattr(copy, "PIECE_BYTES", 1 << 16)
    plain, base = torch.randn(1000, 300), torch.randn(1000, 300)
    a, b = torch.randn(4, 300), torch.randn(1000, 4)
    tensors: dict[str, copy.Source] = {"plain": plain, "adapted": LowRank(base, a, b, 0.5)}
    shape = layout.build(copy.specs(tensors, "bfloat16"))
    half = bytearray(shape.size_bytes)
    with Made(plain, base, a, b, torch.frombuffer(half, dtype=torch.uint8)) as made:
        copy.copy_into(memoryview(half), shape, tensors)
    assert 0 < made.most <= 1 << 16
    assert shape.size_bytes > 10 * made.most
    for name, value in (("plain", plain), ("adapted", base + 0.5 * (b @ a))):
        meta = shape.by_name[name]
        words = torch.frombuffer(half[meta.offset : meta.offset + meta.size_bytes], dtype=torch.bfloat16).view(meta.shape)
        torch.testing.assert_close(words, value.bfloat16(), rtol=2**-7, atol=1e-6)


def test_names_that_stay_float32_are_patterns() -> None:
    tensors = {"layers.0.gate.bias": torch.zeros(3), "layers.0.gate.weight": torch.zeros(3)}
    kinds = {name: dtype for name, _, dtype in copy.specs(tensors, "bfloat16", ["*.gate.bias"])}
    assert kinds == {"layers.0.gate.bias": "F32", "layers.0.gate.weight": "BF16"}


def test_a_parameter_that_was_sharded_must_stay_sharded() -> None:
    shape = layout.build(copy.specs({"a": torch.zeros(2)}, "bfloat16"))
    with pytest.raises(LayoutMismatch, match=r"'a' was sharded before .* reshard\(\)"):
        copy.check_same(shape, {"a": torch.zeros(2)}, frozenset({"a"}))
