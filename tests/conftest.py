"""Fixtures that every tier shares."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from astraflow.lib.sandbox import SandboxError, require

settings.register_profile("astraflow", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure
settings.load_profile("astraflow")
DATA = Path(__file__).parent / "data"
sys.path.insert(0, str(Path(__file__).parent / "flow"))


@pytest.fixture(scope="session")
def sandbox() -> None:
    """Skips, saying why, where generated programs cannot be run."""
    try:
        require()
    except SandboxError as problem:
        pytest.skip(str(problem))


@pytest.fixture(scope="session")
def case() -> Callable[[str], dict[str, Any]]:
    """The recorded failure of this id: `case("G08")["input"]`, `["expected"]`."""
    with (DATA / "cases.jsonl").open(encoding="utf-8", newline="\n") as file:
        known = {row["id"]: row for row in map(json.loads, file)}
    return lambda name: known[name]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Any]:
    """Real runs of one test (`flow/system.py: Stage`)."""
    made = importlib.import_module("system").Stage(tmp_path)
    yield made
    made.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test printed travels between processes as UTF-8; some tests are about text that has none."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report
