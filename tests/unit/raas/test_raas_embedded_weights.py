"""One fused matrix: whatever order its words lie in, it multiplies by the newest ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from astraflow.raas.engines.embedded_weights import Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_matrix_multiplies_by_its_newest_words_however_often_they_come(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    rows, columns = [40, 24], 48
    linear = Linear(rows, torch.empty(sum(rows), columns, dtype=dtype), torch.randn(sum(rows)).to(dtype) if bias else None)
    for fills in (1, 2, 1):  # two loads may follow each other without a step between them
        for _ in range(fills):
            parts = [torch.randn(count, columns).bfloat16() for count in rows]
            linear.fill(iter(parts))
        whole = torch.cat(parts).to(dtype)
        for tokens in (1, 7, 70):
            x = torch.randn(tokens, columns).to(dtype)
            assert torch.allclose(linear(x), F.linear(x, whole, linear.bias), atol=1e-4 if dtype == torch.float32 else 0.1)
