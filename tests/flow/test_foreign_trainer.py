"""A trainer from outside trains a policy of a real run: real Dataflow, real rollout service with a real engine, no trainer of ours."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from system import ROOT, Stage, one_policy

EXAMPLE = ROOT / "examples" / "foreign_trainer.py"
DEADLINE_S = 300.0
STEPS, BATCH, MAX_STALENESS = 4, 16, 2


@pytest.mark.full
def test_a_foreign_trainer_trains_and_the_engine_gets_what_it_publishes(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    try:
        overrides = ("launch.trainers=false", "raas.engine={kind: embedded}", f"trainer.max_steps={STEPS}", "trainer.optimizer.lr=1e-3")
        run = stage.run(one_policy(tmp_path), *overrides)
        run.until("an instance", lambda status: status.instances, DEADLINE_S)
        url = (run.run_dir / "dataflow.url").read_text().strip()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
        with (tmp_path / "trainer.txt").open("wb") as output:
            trainer = subprocess.Popen([sys.executable, str(EXAMPLE), url], env=environment, cwd=ROOT, stdout=output, stderr=output)
        stage.others.append(trainer)
        run.version("solver", 1, DEADLINE_S)
        assert run.end(DEADLINE_S, watch=True) == 0, run.text
        assert trainer.wait(DEADLINE_S) == 0, (tmp_path / "trainer.txt").read_text()
        run.nothing_left()
        assert run.exit_codes() == {"dataflow": [0], "raas-0": [0]}
        books = run.adds_up({"solver": STEPS}, BATCH, MAX_STALENESS)
        published = books.digests["solver"]
        assert len({published[at] for at in range(STEPS + 1)}) > 2, "it trained; a batch without a signal changes nothing"
        seen = {held: digest for _, timeline, held, digest in run.served if timeline == 0}
        assert len(seen) >= 2, "the engine was given later versions than the first"
        assert seen == {held: published[held] for held in seen}
    finally:
        stage.close()


def test_the_example_is_short_and_knows_nothing_of_our_trainer() -> None:
    text = EXAMPLE.read_text()
    assert text.count("\n") < 150
    imported = {name for node in ast.walk(ast.parse(text)) for name in names(node)}
    assert not any(name.startswith("astraflow.trainer") or name == "astraflow" for name in imported)
    assert {"astraflow.weights.manager", "astraflow.protocol.routes"} <= imported


def names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
