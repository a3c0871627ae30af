"""The generated pages say what the code says."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from astraflow.config.experiment import Experiment
from astraflow.protocol.control import RegisterRaaS
from astraflow.protocol.routes import SERVICES, table
from astraflow.tools.docs import config_page, field_docs, main, protocol_page, stale

ROOT = Path(__file__).parents[3]


def test_the_pages_in_docs_are_current() -> None:
    assert stale(ROOT / "docs") == [], "run `make docs`"


def test_every_route_and_message_is_on_the_page() -> None:
    page = protocol_page()
    for api in SERVICES.values():
        for name, route in table(api).items():
            assert f"| `{name}` | `{route.method} {route.path}` |" in page
            if route.request.__name__ != "Empty":
                assert f"### {route.request.__name__}\n" in page


def test_field_texts_are_the_strings_under_the_fields() -> None:
    assert field_docs(RegisterRaaS)["weight"] == "Routing weight: expected speed relative to the others."
    assert "run this message belongs to" in field_docs(RegisterRaaS)["run_id"]


def test_every_key_of_the_configuration_is_on_the_page() -> None:
    page = config_page()
    for field in msgspec.structs.fields(Experiment):
        assert f"## `{field.name}`" in page
    assert "| `max_staleness` | `int \\| null` | `2` |" in page


def test_an_unknown_argument_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--help"]) == 2
    assert list(tmp_path.iterdir()) == []
