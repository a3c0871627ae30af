"""Publishing from a GPU: the words in shared memory are those that a copy from the CPU would have, page-locked or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from astraflow.weights import copy, layout
from astraflow.weights.config import PublishedDtype
from astraflow.weights.lora import LowRank
from astraflow.weights.memory import HalfMemory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]

PLAIN = {"a": (300, 7), "b": (40, 30), "c": (), "d": (0, 3), "large": (1500, 333)}


@pytest.fixture
def halves() -> Iterator[Callable[[int], HalfMemory]]:
    made: list[HalfMemory] = []

    def make(size_bytes: int) -> HalfMemory:
        made.append(HalfMemory.create("gpu", size_bytes))
        return made[-1]

    yield make
    for memory in made:
        memory.close()


def tensors_on(device: str) -> dict[str, copy.Source]:
    torch.manual_seed(0)
    plain: dict[str, torch.Tensor] = {name: torch.randn(shape) for name, shape in PLAIN.items()}
    plain["b"] = plain["b"].t()
    return {name: tensor.to(device) for name, tensor in plain.items()}


def words(tensors: dict[str, copy.Source], dtype: PublishedDtype, memory: HalfMemory | None = None) -> tuple[layout.Layout, bytes]:
    found, ties = copy.collect(tensors.items(), {})
    shape = layout.build(copy.specs(found, dtype, ["c"]), ties)
    half = memoryview(bytearray(shape.size_bytes)) if memory is None else memory.half(1)
    copy.copy_into(half, shape, found)
    return shape, bytes(half)


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_half_holds_the_same_words_as_from_a_cpu(
    dtype: PublishedDtype, locked: bool, halves: Callable[[int], HalfMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy, "PIECE_BYTES", 1 << 16)  # many pieces: the conversion of one overlaps the copy of the one before
    shape, expected = words(tensors_on("cpu"), dtype)
    memory = halves(shape.size_bytes)
    unlock = copy.page_lock(memory.all) if locked else None
    assert (unlock is not None) == locked
    assert torch.frombuffer(memory.all, dtype=torch.uint8).is_pinned() == locked
    for _ in range(3):
        memory.half(1)[:] = bytes(shape.size_bytes)
        assert words(tensors_on("cuda"), dtype, memory)[1] == expected
    if unlock is not None:
        unlock()
        assert not torch.frombuffer(memory.all, dtype=torch.uint8).is_pinned()


def test_a_refused_lock_is_said_and_breaks_nothing_after_it(halves: Callable[[int], HalfMemory]) -> None:
    memory = halves(1 << 20)
    unlock = copy.page_lock(memory.all)
    assert unlock is not None
    assert copy.page_lock(memory.all) is None, "locked already"
    assert torch.ones(3, device="cuda").sum().item() == 3.0
    torch.cuda.synchronize()
    unlock()


def test_what_the_gpu_still_computes_when_it_is_published_is_waited_for(halves: Callable[[int], HalfMemory]) -> None:
    """What is copied is ordered behind the kernels that make it, and is there when `copy_into` returns."""
    source = torch.zeros(1 << 22, device="cuda")
    shape = layout.build([("w", (1 << 22,), "BF16")])
    memory = halves(shape.size_bytes)
    unlock = copy.page_lock(memory.all)
    assert unlock is not None
    for value in range(1, 6):
        for _ in range(200):  # kernels that are still queued when the copy is asked for
            source.mul_(0.5)
        source.fill_(float(value))
        copy.copy_into(memory.half(0), shape, {"w": source})
        assert bool((torch.frombuffer(memory.half(0), dtype=torch.bfloat16) == value).all())
    unlock()


def test_an_adapter_is_merged_on_the_gpu() -> None:
    torch.manual_seed(0)
    base, a, b = torch.randn(700, 90), torch.randn(4, 90), torch.randn(700, 4)
    shape, half = words({"w": LowRank(base.cuda(), a.cuda(), b.cuda(), 0.5)}, "float32")
    got = torch.frombuffer(bytearray(half), dtype=torch.float32).view(shape.tensors[0].shape)
    torch.testing.assert_close(got, base + 0.5 * (b @ a), rtol=1e-3, atol=1e-3)
