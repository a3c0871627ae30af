from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path

import msgspec
import pytest

import astraflow.protocol
from astraflow.protocol.message import Empty, Message
from astraflow.protocol.routes import SERVICES, table

PLAIN = {"str", "int", "float", "bool"}


@pytest.mark.parametrize("service", SERVICES)
def test_each_call_of_a_service_has_one_method_path_and_line_of_documentation(service: str) -> None:
    routes = table(SERVICES[service])
    calls = [(route.method, route.path) for route in routes.values()]
    assert len(set(calls)) == len(calls)
    for name, route in routes.items():
        assert route.path.startswith("/")
        assert route.path.split("/")[1] == name
        assert issubclass(route.request, Message)
        assert issubclass(route.reply, Message)
        assert route.doc.endswith(".")
        assert route.raw_reply == ("{ref}" in route.path)


@pytest.mark.parametrize("service", SERVICES)
def test_get_requests_hold_plain_fields_only(service: str) -> None:
    for route in table(SERVICES[service]).values():
        if route.method == "GET" and route.request is not Empty:
            for field in msgspec.structs.fields(route.request):
                plain = getattr(field.type, "__origin__", field.type)  # without its limits
                assert getattr(plain, "__name__", "?") in PLAIN, f"{route.path}: {field.name} cannot be a query parameter"


def test_the_protocol_holds_data_only() -> None:
    """No I/O, nothing of ours from above, no torch."""
    allowed = {"__future__", "collections.abc", "dataclasses", "functools", "msgspec", "numpy", "numpy.typing", "re", "typing"}
    for path in Path(astraflow.protocol.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert {alias.name for alias in node.names} <= allowed, path
            elif isinstance(node, ast.ImportFrom):
                assert node.module is not None
                assert node.module in allowed or node.module.startswith("astraflow.protocol"), path


def test_every_message_says_what_it_is_or_has_a_route_that_does() -> None:
    for module_info in pkgutil.iter_modules(astraflow.protocol.__path__):
        module = importlib.import_module(f"astraflow.protocol.{module_info.name}")
        assert module.__doc__
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Message) and value.__module__ == module.__name__ and value is not Message:
                used = any(value in (route.request, route.reply) for api in SERVICES.values() for route in table(api).values())
                assert used or inspect.getdoc(value), value.__name__
