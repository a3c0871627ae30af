"""Numbers of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from astraflow.protocol.batch import Batch
from astraflow.trainer.batch import ragged
from astraflow.trainer.loop import batch_metrics


def test_rewards_are_the_policys_own_and_gaps_are_over_its_tokens(sample: Any, batch_of: Callable[..., Batch]) -> None:
    groups = [[sample([3], [4, 5], 1.0), sample([3], [4], 0.0, finish="length")], [sample([3], [5], 1.0), sample([3], [6], 1.0)]]
    batch = ragged(batch_of(groups, version=3))
    batch.rows["credit"] = np.array([0.2, 0.4, 0.6, 0.8])
    found = batch_metrics(batch, 5)
    assert found["reward/mean"] == pytest.approx(0.5)
    assert found["reward/trajectory_mean"] == pytest.approx(0.75)
    assert found["staleness/mean"] == found["staleness/max"] == 2
    assert found["rollout/truncated"] == 0.25
    assert found["rollout/loss_tokens"] == 5
    assert found["reward/zero_variance_groups"] == 0.5
