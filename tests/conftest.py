"""Fixtures that every tier shares."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("astraflow", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure
settings.load_profile("astraflow")
DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def case() -> Callable[[str], dict[str, Any]]:
    """The recorded failure of this id: `case("G08")["input"]`, `["expected"]`."""
    with (DATA / "cases.jsonl").open(encoding="utf-8", newline="\n") as file:
        known = {row["id"]: row for row in map(json.loads, file)}
    return lambda name: known[name]
