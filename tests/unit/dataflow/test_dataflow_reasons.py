"""Every reason that the code gives has a sentence, and no sentence is about a reason that nobody gives."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import astraflow.dataflow
from astraflow.dataflow.policies import FILTERS
from astraflow.dataflow.reasons import OWN, PREFIXES, REASONS, describe, known

DATAFLOW = Path(astraflow.dataflow.__path__[0])
ROOT = Path(__file__).parents[3]
DECIDES = {"reject", "_reject", "unservable", "_lost_because"}
"""Functions whose answer is a reason."""
TAKES = {"Settled": 3, "ShareResult": 2, "_note": 1, "abandon": 1}
"""Calls that are given a reason, and its place among their arguments."""


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(DATAFLOW.rglob("*.py")):
        if path.name != "reasons.py":
            yield path, ast.parse(path.read_text())


def texts(node: ast.expr | None) -> Iterator[str]:
    """String literals that an expression may come to; the fixed beginning of an f-string."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
            yield text
        case ast.IfExp(body=body, orelse=other):
            yield from (*texts(body), *texts(other))
        case ast.BoolOp(values=values):
            for value in values:
                yield from texts(value)


def given() -> dict[str, str]:
    """Reason → a place where the code gives it."""
    found: dict[str, str] = {}
    for path, tree in trees():
        for node in ast.walk(tree):
            reasons: list[str] = []
            if isinstance(node, ast.FunctionDef) and node.name in DECIDES:
                reasons = [text for inner in ast.walk(node) if isinstance(inner, ast.Return) for text in texts(inner.value)]
            elif isinstance(node, ast.Call):
                name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr if isinstance(node.func, ast.Attribute) else ""
                if name in TAKES and len(node.args) > TAKES[name]:
                    reasons = list(texts(node.args[TAKES[name]]))
                if name == "write" and node.args and isinstance(node.args[0], ast.Attribute) and node.args[0].attr == "abandon":
                    reasons = list(texts(node.args[-1]))
            elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                if isinstance(target, ast.Name) and target.id == "gone":  # recovery: reason → leases
                    reasons = [text for key in node.value.keys for text in texts(key)]
            elif isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "reason" for t in node.targets):
                reasons = [text for text in texts(node.value) if " " not in text]
            found |= {reason: f"{path.name}:{node.lineno}" for reason in reasons if reason}  # type: ignore[attr-defined]
    return found


def test_every_reason_of_the_code_is_described() -> None:
    nameless = {reason: place for reason, place in given().items() if not known(reason)}
    assert not nameless, f"no sentence in dataflow/reasons.py: {nameless}"


def test_no_description_is_of_a_reason_that_nobody_gives() -> None:
    constants = [node.value for _, tree in trees() for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    literals = {value for value in constants if isinstance(value, str)}
    assert set(REASONS) <= literals
    assert len(given()) >= 14, "the scan finds what it looks for"


@pytest.mark.parametrize("name", FILTERS.names())
def test_a_filter_of_ours_is_among_those_that_decide(name: str) -> None:
    assert callable(FILTERS.get(name).reject)


def test_a_failure_is_described_by_its_boundary_and_a_foreign_reason_as_one() -> None:
    assert describe("error:reward.timeout") == PREFIXES["error:reward."]
    assert describe("error:elsewhere.strange") == PREFIXES["error:"]
    assert describe("my_rule") == OWN
    assert not known("my_rule")
    assert describe("stale") == REASONS["stale"]


def test_the_page_about_rollouts_lists_every_reason() -> None:
    page = (ROOT / "docs" / "life-of-a-rollout.md").read_text()
    for reason, text in {**REASONS, **PREFIXES}.items():
        assert f"| `{reason}` | {text} |" in page, reason
