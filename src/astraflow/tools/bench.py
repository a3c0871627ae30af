"""Benchmarks: what the system does per second, measured with real processes. Each is one function; `BENCHES` names them."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from astraflow.lib.registry import Registry
from astraflow.protocol.errors import UserError

BENCHES = Registry("benchmarks", {name: f"astraflow.tools.bench_{name}:run" for name in ("dataflow", "engine", "train", "weights")})
TAKES = {"weights": ("old", "new"), "train": ("peer", "size")}
"""Benchmarks that can be given something, and what."""


@dataclass(frozen=True)
class Limit:
    """What a number must be."""

    at_least: float | None = None
    at_most: float | None = None

    def holds(self, value: float) -> bool:
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)

    def __str__(self) -> str:
        return " and ".join(f"{sign} {bound:g}" for sign, bound in (("≥", self.at_least), ("≤", self.at_most)) if bound is not None)


@dataclass(frozen=True)
class Outcome:
    """What a bench measured."""

    results: dict[str, float]
    """Name → number; names hold their unit."""
    limits: Mapping[str, Limit]
    """Name → what it must be."""
    checked: dict[str, int]
    """What was verified on the way, in counts."""


Say = Callable[[str], None]
Bench = Callable[..., Outcome]
"""(quick, say): `quick` = a few seconds, for a test; its numbers mean nothing. `say` takes a line of progress."""


def run(name: str, json_file: Path | None, quick: bool, console: Console, **options: Path | str) -> Outcome:
    """Measure, print a table, and write the JSON file. Raises UnknownName, or UserError for options that the benchmark does not take."""
    bench: Bench = BENCHES.get(name)
    for option in options:
        if option not in TAKES.get(name, ()):
            fits = ", ".join(bench for bench, taken in TAKES.items() if option in taken)
            raise UserError(f"bench {name} takes no --{option}; {fits} does")
    outcome = bench(quick, lambda line: console.print(f"[dim]{line}[/dim]", highlight=False, soft_wrap=True), **options)
    console.print(table(name, outcome))
    if json_file is not None:
        document = {"bench": name, "machine": machine(), "results": outcome.results, "checked": outcome.checked, "quick": quick}
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    return outcome


def table(name: str, outcome: Outcome) -> Table:
    """Numbers and what they must be."""
    shown = Table("result", "value", "must be", "", title=f"bench {name}")
    for column in shown.columns[1:3]:
        column.justify = "right"
    for key, value in outcome.results.items():
        limit = outcome.limits.get(key)
        verdict = "" if limit is None else "[green]yes[/green]" if limit.holds(value) else "[red]no[/red]"
        shown.add_row(key, f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}", str(limit or ""), verdict)
    return shown


def machine() -> dict[str, Any]:
    """Where it was measured."""
    return {"cores": os.cpu_count(), "cpu": _cpu_model(), "python": platform.python_version(), "commit": _commit()}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    """The commit of this source tree, `+` when it was changed since; empty outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head + ("+" if changed else "")
