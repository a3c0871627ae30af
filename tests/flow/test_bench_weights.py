"""`astraflow bench weights`: its floors against a plain reading of their definition, and the whole of it on small pairs."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from astraflow.tools import bench_traces, bench_weights


def plainly(old: np.ndarray, new: np.ndarray) -> tuple[float, float]:
    """Both floors, counted with dictionaries."""

    def places(changed: int, every: int) -> float:
        shares = [part / every for part in (changed, every - changed) if part]
        return -every * sum(p * math.log2(p) for p in shares)

    def steps(counts: Counter[int]) -> float:
        return -sum(n * math.log2(n / counts.total()) for n in counts.values())

    pairs = [(int(o), int(w)) for o, w in zip(old, new, strict=True)]
    changed = [(o, w) for o, w in pairs if o != w]
    plain = places(len(changed), len(pairs)) + steps(Counter(w - o for o, w in changed))
    given = 0.0
    for e in {(o >> 7) & 0xFF for o, _ in changed}:
        members = [(o, w) for o, w in changed if (o >> 7) & 0xFF == e]
        given += places(len(members), sum((o >> 7) & 0xFF == e for o, _ in pairs)) + steps(Counter(w - o for o, w in members))
    return plain / 8 / len(changed), given / 8 / len(changed)


def test_floors_are_what_their_definition_says() -> None:
    old, new = bench_traces.synthetic(20_000, 1e-5)
    found = bench_weights.floors(old, new)
    assert (found["floor_plain"], found["floor_exponent"]) == pytest.approx(plainly(old, new))
    assert found["density"] == np.count_nonzero(old != new) / old.size
    assert bench_weights.floors(old, old) == {"density": 0.0, "floor_plain": 0.0, "floor_exponent": 0.0}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "astraflow", "bench", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)


def test_the_weights_bench_has_all_its_results(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run("weights", "--quick", "--json", str(out))
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["results"]
    assert set(bench_weights.MUST_PULL) <= set(found)
    assert found["full_pull_over_tcp"] == pytest.approx(found["full_pull_s"] / found["plain_tcp_s"])
    for trace in bench_weights.TRACES:
        assert {f"{trace}.{name}" for name in bench_weights.MUST} <= set(found)
        assert found[f"{trace}.dense_bytes_per_change"] < found[f"{trace}.fast_bytes_per_change"] < 1.6


def test_given_files_are_measured_and_unfit_ones_are_refused_in_one_line(tmp_path: Path) -> None:
    old, new = bench_traces.synthetic(200_000, 1e-6)
    np.save(tmp_path / "old.npy", old)
    np.save(tmp_path / "new.npy", new)
    np.save(tmp_path / "short.npy", new[:-1])
    out = tmp_path / "out.json"
    done = run("weights", "--quick", "--old", str(tmp_path / "old.npy"), "--new", str(tmp_path / "new.npy"), "--json", str(out))
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text())["checked"] == {"given.words": old.size}
    for arguments, why in (
        (["weights", "--old", str(tmp_path / "old.npy"), "--new", str(tmp_path / "short.npy")], "expected equal arrays"),
        (["weights", "--old", str(tmp_path / "old.npy")], "belong together"),
        (["dataflow", "--old", str(tmp_path / "old.npy")], "takes no --old"),
    ):
        done = run(*arguments)
        assert (done.returncode, why in done.stderr, "Traceback" in done.stderr) == (2, True, False)
