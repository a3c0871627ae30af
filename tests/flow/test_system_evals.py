"""`astraflow run` with synchronous evaluations: two policies, two rollout services, the scripted engine."""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parent))
from system import BATCH, SCRIPTED, TWO_POLICIES, Stage

from astraflow.protocol.control import EvalResult

DEADLINE_S = 120.0
STEPS, EVERY, MAX_STALENESS = 6, 3, 2


def test_synchronous_evaluations_evaluate_exactly_the_versions_and_the_run_goes_on(stage: Stage) -> None:
    settings = ("dataflow.eval.mode=synchronous", "launch.raas=2", f"trainer.max_steps={STEPS}", f"trainer.eval_freq={EVERY}")
    run = stage.run(TWO_POLICIES, *SCRIPTED, *settings, "trainer.checkpoint.every=2", "raas.engine.options={token_s: 0.02, load_s: 0.01}")
    assert run.end(DEADLINE_S) == 0, run.text
    run.nothing_left()
    books = run.adds_up({"solver": STEPS, "verifier": STEPS}, BATCH, MAX_STALENESS)
    database = sqlite3.connect(f"file:{run.run_dir / 'ledger' / 'ledger.sqlite'}?mode=ro", uri=True)
    rows = database.execute("SELECT result FROM evals ORDER BY number").fetchall()
    in_training = database.execute("SELECT count(*) FROM leases WHERE lease_id LIKE 'eval%'").fetchone()
    database.close()
    results = [msgspec.msgpack.decode(data, type=EvalResult) for (data,) in rows]
    assert [(r.eval_id, r.mode, r.missing, r.note, r.n_tasks) for r in results] == [
        (f"eval-{number:04d}", "synchronous", 0, "", 8) for number in (1, 2, 3)
    ]
    for result, version in zip(results, (0, EVERY, STEPS), strict=True):
        for policy in ("solver", "verifier"):
            served = result.versions[policy]
            assert (served.timeline, served.version, served.digest) == (0, version, books.digests[policy][version])
    assert max(share.attempt for share in books.shares) == 1, "a cancelled lease runs again and has not failed"
    assert not {share.reason for share in books.shares} & {"max_attempts", "unconfirmed", "dead_timeline"}
    assert in_training == (0,), "an evaluation never enters a training queue"
