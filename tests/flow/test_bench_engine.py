"""`astraflow bench engine --quick`: a tiny model, every sampled token recomputed by the peer, and no statement about time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from astraflow.tools.bench_engine import LIMITS, PROMPTS, QUICK


def test_the_engine_bench_recomputes_what_it_counts(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    argv = [sys.executable, "-m", "astraflow", "bench", "engine", "--quick", "--json", str(out)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    rates = {f"{kind}{peer}_tokens_per_s" for kind in PROMPTS for peer in ("", "_generate")}
    assert set(found["results"]) == {*LIMITS, *rates, "decode_step_ms", "stall_ms", "copy_ms"}
    assert 0 < found["results"]["max_logprob_error"] < 1e-3
    assert found["checked"]["logprobs_recomputed"] == len(PROMPTS) * QUICK.requests * QUICK.new_tokens
