"""Weights between real processes that are killed on purpose: the short form (`tests/full` has the long one)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from weights_soak import judge, play


def test_twenty_versions_with_three_receivers_and_random_kills_serve_what_was_published(tmp_path: Path) -> None:
    soak = play(seed=1, versions=20, run_dir=tmp_path)
    judge(soak)
    assert soak.kills["sender"] >= 1
    assert sum(soak.kills.values()) >= 4
    assert soak.chains >= 1, "a receiver that skipped versions got a chain"
    assert any(pull["mode"] == "delta" for pull in soak.pulls)
