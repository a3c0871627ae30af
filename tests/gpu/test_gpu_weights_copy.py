"""Publishing from a GPU: the words in shared memory are those that a copy from the CPU would have."""

from __future__ import annotations

import pytest
import torch

from astraflow.weights import copy, layout
from astraflow.weights.config import PublishedDtype

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_half_holds_the_same_words_as_from_a_cpu(dtype: PublishedDtype) -> None:
    torch.manual_seed(0)
    plain = {"a": torch.randn(300, 7), "b": torch.randn(40, 30).t(), "c": torch.randn(()), "d": torch.empty(0, 3)}
    halves = []
    for device in ("cpu", "cuda"):
        tensors, ties = copy.collect(((name, tensor.to(device)) for name, tensor in plain.items()), {})
        shape = layout.build(copy.specs(tensors, dtype), ties)
        half = bytearray(shape.size_bytes)
        copy.copy_into(memoryview(half), shape, tensors, dtype)
        halves.append(bytes(half))
    assert halves[0] == halves[1]
