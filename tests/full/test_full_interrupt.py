"""Ctrl-C at every phase of `astraflow run`: it ends in order, soon, with exit status 0, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "flow"))
from system import TWO_POLICIES, Run, Stage, one_policy, version

from astraflow.lib.net import split_host_port
from astraflow.lib.wire import new_identity
from astraflow.lib.wire_client import SyncClient
from astraflow.protocol.control import EvalResultsRequest
from astraflow.protocol.routes import DataflowAPI
from astraflow.raas.staging import staging_path

pytestmark = pytest.mark.full
DEADLINE_S = 240.0
SOON_S = 30.0
"""10 s on a machine that does nothing else."""
ENDLESS = "trainer.max_steps=100000"
SLOW = "raas.engine.options={token_s: 5.0, load_s: 0.01}"


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    made.path.append(Path(__file__).parent)
    yield made
    made.close()


def until(what: str, run: Run, holds: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert run.process.poll() is None, f"the run ended before: {what}\n{run.text}"
        assert time.monotonic() < end, f"not within {DEADLINE_S:g} s: {what}\n{run.text}"
        time.sleep(0.005)


def drained(run: Run) -> None:
    """Ctrl-C now."""
    began = time.time()
    run.interrupt()
    assert run.end(DEADLINE_S) == 0, run.text
    soon(run, began)
    left_nothing(run)


def soon(run: Run, began: float) -> None:
    """The processes have ended soon; how long the report takes after that is a matter of the machine alone."""
    file = run.run_dir / "outcome.json"
    ended = file.stat().st_mtime if file.exists() else time.time()
    assert ended - began < SOON_S, f"{ended - began:.1f} s\n{run.text}"


def left_nothing(run: Run) -> None:
    run.nothing_left()
    assert not staging_path(str(run.run_dir), "raas-0").exists()
    file = run.run_dir / "dataflow.url"
    if file.exists():
        with socket.socket() as sock:
            assert sock.connect_ex(split_host_port(file.read_text().strip())) != 0, "the port of Dataflow is free again"


def reported(run: Run) -> None:
    """Table and picture."""
    assert run.report["drained"]
    assert run.report["adds_up"]
    assert (run.run_dir / "report.png").is_file()
    assert "trained" in run.text


def test_in_preflight_nothing_was_started(stage: Stage, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    run = stage.run(one_policy(tmp_path), "train_dataset.loader=full_slow_data:slow", f"train_dataset.options={{begun: {begun}}}")
    until("the preflight", run, begun.exists)
    drained(run)
    assert "interrupted: nothing was started" in run.text
    assert not (run.run_dir / "config.yaml").exists()


def test_while_the_processes_start(stage: Stage, tmp_path: Path) -> None:
    run = stage.run(one_policy(tmp_path), ENDLESS)
    until("the first processes", run, lambda: len(run.pids()) == 3)
    drained(run)
    assert run.outcome["drained"]


def test_while_a_slow_workflow_generates(stage: Stage, tmp_path: Path) -> None:
    run = stage.run(one_policy(tmp_path), ENDLESS, SLOW)
    run.until("episodes", lambda status: any(instance.in_flight for instance in status.instances), DEADLINE_S)
    drained(run)
    reported(run)


@pytest.mark.parametrize("when", ["at_start", "at_end"])
def test_while_an_evaluation_runs(stage: Stage, when: str) -> None:
    steps = ENDLESS if when == "at_start" else "trainer.max_steps=1"
    fast = "raas.engine.options={token_s: 0.002, load_s: 0.01}"
    evals = ("trainer.eval_freq=1", f"dataflow.eval.at_start={when == 'at_start'}".lower(), "valid_datasets.heldout.options.n=2000")
    run = stage.run(TWO_POLICIES, "raas.engine.kind=scripted", fast, "trainer.train_batch_size=32", steps, *evals)
    if when == "at_end":
        run.until("the last step", lambda status: min(version(status, policy) for policy in ("solver", "verifier")) >= 1, DEADLINE_S)
    run.until("Dataflow", lambda status: status.instances, DEADLINE_S)
    with SyncClient((run.run_dir / "dataflow.url").read_text().strip(), new_identity("")) as client:
        request = EvalResultsRequest(since=0)
        until("an evaluation", run, lambda: client.call(DataflowAPI.eval_results, request, timeout_s=DEADLINE_S).running)
        drained(run)
    reported(run)


def test_while_a_checkpoint_is_written(stage: Stage, tmp_path: Path) -> None:
    run = stage.run(one_policy(tmp_path), ENDLESS, "trainer.checkpoint.every=1")
    directory = run.run_dir / "checkpoints" / "solver"
    until("a checkpoint", run, lambda: directory.is_dir() and len(list(directory.iterdir())) > 1)
    drained(run)
    reported(run)
    again = stage.run(one_policy(tmp_path), f"trainer.max_steps={run.report['steps']['solver'] + 1}", resume=True)
    assert again.end(DEADLINE_S) == 0, again.text


def test_at_the_report_it_is_written_all_the_same(stage: Stage, tmp_path: Path) -> None:
    run = stage.run(one_policy(tmp_path), "trainer.max_steps=2")
    until("the end", run, (run.run_dir / "outcome.json").exists)
    run.interrupt()
    assert run.end(DEADLINE_S) == 0, run.text
    left_nothing(run)
    assert run.report["steps"] == {"solver": 2}
    assert (run.run_dir / "report.png").is_file()


def test_a_second_one_kills_what_does_not_end_and_sweeps_after_it(stage: Stage, tmp_path: Path) -> None:
    run = stage.run(one_policy(tmp_path), ENDLESS, SLOW)
    run.until("episodes", lambda status: any(instance.in_flight for instance in status.instances), DEADLINE_S)
    assert staging_path(str(run.run_dir), "raas-0").exists()
    for name in ("raas-0", "trainer-solver"):  # neither ends by itself
        os.kill(run.pids()[name], signal.SIGSTOP)
    run.interrupt()
    until("the drain", run, lambda: "interrupted: trainers finish" in run.text)
    began = time.time()
    run.interrupt()
    assert run.end(DEADLINE_S) == 1, run.text
    soon(run, began)
    left_nothing(run)
    assert (run.run_dir / "report.png").is_file()
