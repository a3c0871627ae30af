"""The evidence of docs/data-algorithms.md is made by real runs: two short ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from astraflow.tools.algorithms_evidence import VARIANTS, measure

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["greso_dynamic_sampling", "replay"])
def test_a_variant_is_measured_from_its_own_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (variant,) = [variant for variant in VARIANTS if variant.name == name]
    found = measure(variant, 0, ["trainer.max_steps=25", "trainer.eval_freq=25"])
    assert (found.steps, found.groups_trained + found.groups_replayed) == (25, 200)
    assert found.groups_made == found.groups_trained + sum(found.dropped.values())
    if name == "replay":
        assert 0 < found.groups_replayed <= 50
        assert found.rollouts_per_trained_group < 8
    else:
        assert found.dropped["zero_variance"] > 0
        assert found.rollouts_per_trained_group == found.rollouts_per_varied_group > 8
        assert found.skipped > 0
    assert 0 <= found.heldout_first <= 1
    assert 0 <= found.heldout_last <= 1
