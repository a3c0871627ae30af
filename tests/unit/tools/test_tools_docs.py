"""The generated pages say what the code says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from astraflow.config.experiment import Experiment
from astraflow.protocol.control import RegisterRaaS
from astraflow.protocol.routes import SERVICES, table
from astraflow.tools import openapi
from astraflow.tools.docs import config_page, main, protocol_page, stale
from astraflow.tools.field_docs import field_docs

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


@pytest.mark.parametrize("service", list(SERVICES))
def test_the_openapi_document_has_every_call_its_errors_and_no_loose_reference(service: str) -> None:
    text = openapi.document(service)
    found = json.loads(text)
    assert found["openapi"] == "3.1.0"
    schemas = found["components"]["schemas"]
    assert {name.rpartition("/")[2] for name in re.findall(r'"\$ref": "(#/components/schemas/\w+)"', text)} <= set(schemas)
    for name, route in table(SERVICES[service]).items():
        call = found["paths"][route.path][route.method.lower()]
        assert call["operationId"] == name
        assert ("requestBody" in call) == (route.method == "POST")
        assert {"200", "401", "422", "426", "503", *(str(kind.http_status) for kind in route.errors)} <= set(call["responses"])
        assert call["description"].endswith(f"{route.again}.")
        names = {(given["name"], given["in"]) for given in call.get("parameters", [])}
        assert (("ref", "path") in names) == ("{ref}" in route.path)
        if route.method == "GET":
            assert {(field, "query") for field in route.request.__struct_fields__} <= names
        else:
            shape = schemas[route.request.__name__]
            assert set(shape["properties"]) == set(route.request.__struct_fields__)
            assert all(field.get("description") for field in shape["properties"].values())
    assert len({call["operationId"] for path in found["paths"].values() for call in path.values()}) == len(table(SERVICES[service]))


def test_every_key_of_the_configuration_is_on_the_page() -> None:
    page = config_page()
    for field in msgspec.structs.fields(Experiment):
        assert f"## `{field.name}`" in page
    assert "| `max_staleness` | `int \\| null` | `2` |" in page


def test_an_unknown_argument_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--help"]) == 2
    assert list(tmp_path.iterdir()) == []
