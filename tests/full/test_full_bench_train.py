"""`astraflow bench train --quick` without a peer: a real model, real steps, and no statement about TRL."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


def test_our_side_is_measured_alone_and_nothing_is_claimed(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    argv = [sys.executable, "-m", "astraflow", "bench", "train", "--quick", "--json", str(out)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert set(found["results"]) == {"threads", "step_s_ours", "step_cpu_s_ours", "peak_gb_ours"}
    assert found["checked"] == {"rows": 64}
    assert 1.5 < found["results"]["peak_gb_ours"] < 6
    assert "no --peer" in done.stdout


def test_a_peer_that_cannot_run_is_one_line(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "astraflow", "bench", "train", "--quick", "--peer", str(tmp_path / "nobody")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 2
    assert "nobody" in done.stderr.splitlines()[-1]
