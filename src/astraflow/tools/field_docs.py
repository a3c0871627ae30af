"""The text under each field of a Struct, which Python itself forgets: read from the source."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterator


@functools.cache
def field_docs(kind: type) -> dict[str, str]:
    """Field name → the text under it, base classes included (nearest wins)."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("astraflow"):
            docs.update(_module_docs(base.__module__).get(base.__name__, {}))
    return docs


@functools.cache
def _module_docs(module: str) -> dict[str, dict[str, str]]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    out: dict[str, dict[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            out[node.name] = dict(_documented(node.body))
    return out


def _documented(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for statement, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        text = after.value if isinstance(after, ast.Expr) else None
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            yield statement.target.id, " ".join(text.value.split())
