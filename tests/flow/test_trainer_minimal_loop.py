"""The algorithm in one file learns, asynchronously, with and without stale samples."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "minimal_loop.py"


@pytest.mark.parametrize("lag", [0, 2])
def test_the_minimal_loop_raises_its_reward(lag: int) -> None:
    command = [sys.executable, str(EXAMPLE), "--steps", "60", "--lag", str(lag)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"reward (\S+) -> (\S+) in", done.stdout)
    assert found is not None, done.stdout
    assert float(found[2]) > float(found[1]) + 0.1, done.stdout


def test_the_example_stands_alone() -> None:
    assert "import astraflow" not in EXAMPLE.read_text(encoding="utf-8")
    assert "from astraflow" not in EXAMPLE.read_text(encoding="utf-8")
