"""`astraflow bench dataflow --quick`: real processes, every payload verified, and no statement about time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from astraflow.tools.bench_dataflow import BATCH, LIMITS, QUICK


def test_the_dataflow_bench_verifies_what_it_counts(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    argv = [sys.executable, "-m", "astraflow", "bench", "dataflow", "--quick", "--json", str(out)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert set(found["results"]) == set(LIMITS)
    assert all(isinstance(value, float) for value in found["results"].values())
    size, compared = QUICK, QUICK.rounds * (QUICK.warm_up + QUICK.compared)
    assert found["checked"] == {
        "trajectories_512": BATCH * (size.warm_up + size.short + size.ready + compared),
        "trajectories_4096": BATCH * (size.warm_up + size.long + size.ready),
        "trajectories_without_ledger": BATCH * compared,
    }
