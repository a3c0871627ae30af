"""The command line starts quickly: nothing heavy is loaded before it is needed (tests/contract looks at the rooms)."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

ROOMS = ["astraflow.cli", "astraflow.config.processes", "astraflow.launch.local", "astraflow.tools.panel", "astraflow.tools.report"]
HEAVY = ("torch", "transformers", "matplotlib", "sympy", "numba")


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_heavy_is_loaded_at_the_start(room: str) -> None:
    code = f"import sys, {room}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_names_are_listed_without_loading_what_they_name() -> None:
    code = (
        "import sys\nfrom astraflow.launch.names import FAMILIES, names\n"
        "for family in FAMILIES: names(family)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_the_package_is_imported_in_under_half_a_second() -> None:
    """The best of many, because the machine is shared."""

    def once() -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import astraflow"], check=True, timeout=60)
        return time.perf_counter() - began

    assert any(once() < 0.5 for _ in range(20))
