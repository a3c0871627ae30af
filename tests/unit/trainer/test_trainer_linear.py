"""oneDNN products against float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from astraflow.trainer.linear import Linear, product, use_fast_products


@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 3, 5), (130, 48, 33), (0, 4, 3)])
def test_products_of_any_strides_are_those_of_float64(shape: tuple[int, int, int]) -> None:
    rows, inner, columns = shape
    torch.manual_seed(0)
    x, w = torch.randn(rows, inner), torch.randn(columns, inner)
    expected = x.double() @ w.double().t()
    for left in (x, x.t().contiguous().t(), x[None]):
        for right in (w, w.t().contiguous().t()):
            torch.testing.assert_close(product(left, right).double().reshape(expected.shape), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", ["nothing", "weight", "input"])
def test_a_layer_and_its_gradients_are_those_of_torch(bias: bool, frozen: str) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(9, 6, bias=bias)
    layer.weight.requires_grad_(frozen != "weight")
    x = torch.randn(2, 5, 9, requires_grad=frozen != "input")
    slope = torch.randn(2, 5, 6)
    found = []
    for fast in (False, True):
        if fast:
            use_fast_products(nn.Sequential(layer))
            assert type(layer) is Linear
        (layer(x) * slope).sum().backward()
        found.append([None if t is None or t.grad is None else t.grad.clone() for t in (x, layer.weight, layer.bias)])
        for tensor in (x, *layer.parameters()):
            tensor.grad = None
    for plain, ours in zip(*found, strict=True):
        assert (plain is None) == (ours is None)
        if plain is not None:
            torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def test_other_dtypes_take_the_usual_way() -> None:
    layer = nn.Linear(4, 3).double()
    use_fast_products(layer)
    x = torch.randn(2, 4, dtype=torch.float64)
    torch.testing.assert_close(nn.Sequential(layer)(x), x @ layer.weight.t() + layer.bias)
    torch.testing.assert_close(product(x, layer.weight), x @ layer.weight.t())
