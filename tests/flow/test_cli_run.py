"""`astraflow run` with real processes, the scripted engine and the tiny models: to the end, through Ctrl-C, kills and a join."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from astraflow.config.experiment import load_experiment
from astraflow.launch.join import dataflow_status
from astraflow.protocol.control import DataflowStatus
from astraflow.protocol.errors import AstraFlowError

ROOT = Path(__file__).parents[2]
RECIPE = "recipes/tiny-two-policies.yaml"
FAST = (
    "raas.engine.kind=scripted",
    "raas.engine.options={token_s: 0.002, load_s: 0.01}",
    "trainer.train_batch_size=32",
    "trainer.eval_freq=4",
    "trainer.checkpoint.every=2",
    "valid_datasets.heldout.options.n=8",
    "launch.restart.first_s=0.1",
)
DEADLINE_S = 45.0


def environment() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ASTRAFLOW_")}
    return clean | {"OMP_NUM_THREADS": "1"}


class Run:
    """One `astraflow run` of the two-policy recipe in the background."""

    def __init__(self, run_dir: Path, *arguments: str) -> None:
        self.run_dir = run_dir
        argv = [sys.executable, "-m", "astraflow", "run", RECIPE, f"experiment.run_dir={run_dir}", *FAST, *arguments]
        self.output = run_dir.parent / f"output-{len(list(run_dir.parent.glob('output-*')))}.txt"
        with self.output.open("w") as file:
            self.process = subprocess.Popen(argv, env=environment(), cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)

    def status(self) -> DataflowStatus | None:
        try:
            return dataflow_status(str(self.run_dir))
        except AstraFlowError:
            return None

    def until(self, what: str, holds: Callable[[DataflowStatus], Any]) -> DataflowStatus:
        """Poll Dataflow until the condition holds."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.text}"
            status = self.status()
            if status is not None and holds(status):
                return status
            time.sleep(0.05)
        raise AssertionError(f"no {what} within {DEADLINE_S} s:\n{self.text}")

    def end(self) -> int:
        return self.process.wait(DEADLINE_S)

    @property
    def text(self) -> str:
        return self.output.read_text()

    @property
    def report(self) -> dict[str, Any]:
        found = json.loads((self.run_dir / "report.json").read_text())
        assert isinstance(found, dict)
        return found

    def pid_of(self, *words: str) -> int:
        """The process of this run whose command line holds all words."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    command = (entry / "cmdline").read_bytes().decode().split("\0")
                except OSError:
                    continue
                if all(word in command for word in (str(self.run_dir / "config.yaml"), *words)):
                    return int(entry.name)
        raise AssertionError(f"no process {words} of {self.run_dir}")

    def left(self) -> list[str]:
        found = []
        for entry in Path("/proc").iterdir():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode() if entry.name.isdigit() else ""
            except OSError:
                continue
            if str(self.run_dir) in command:
                found.append(command)
        return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(*arguments: str) -> Run:
        runs.append(Run(tmp_path / "run", *arguments))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()  # its children die with it
            run.process.wait(10)


def version(status: DataflowStatus, policy: str = "solver") -> int:
    return next(trainer.version for trainer in status.trainers if trainer.model_id == policy)


def adds_up(report: dict[str, Any]) -> bool:
    rows = report["rollouts"]
    return bool(report["adds_up"]) and rows["made"] == rows["trained"] + rows["dropped"] + rows["in_flight"]


def test_two_policies_are_stopped_by_ctrl_c_and_resumed(start: Callable[..., Run]) -> None:
    first = start("trainer.max_steps=60")
    first.until("step 4 of both", lambda status: min(version(status), version(status, "verifier")) >= 4)
    first.process.send_signal(signal.SIGINT)
    assert first.end() == 0, first.text
    stopped = first.report
    assert stopped["drained"]
    assert adds_up(stopped)
    assert {codes[-1] for codes in (process["exit_codes"] for process in stopped["processes"].values())} == {0}
    assert first.left() == []

    target = max(stopped["steps"].values()) + 4
    second = start(f"trainer.max_steps={target}", "--resume")
    assert second.end() == 0, second.text
    report = second.report
    assert report["steps"] == {"solver": target, "verifier": target}
    assert report["run_id"] == stopped["run_id"]
    assert adds_up(report)
    assert report["rollouts"]["trained"] == 32 * target * 2
    assert all(int(gap) <= 2 for histogram in report["staleness"].values() for gap in histogram)
    assert (second.run_dir / "report.png").is_file()
    assert second.left() == []


def test_every_process_may_be_killed_and_the_books_add_up(start: Callable[..., Run]) -> None:
    run = start("trainer.max_steps=14")
    victims = (("raas", "--index"), ("dataflow",), ("trainer", "verifier"))
    for step, words in enumerate(victims, start=1):
        before = run.until(f"step {3 * step - 1}", lambda status, step=step: version(status) >= 3 * step - 1)
        os.kill(run.pid_of(*words), signal.SIGKILL)
        run.until(
            f"life after the kill of {words[0]}",
            lambda status, before=before: status.incarnation and version(status) > version(before) and version(status, "verifier") > 0,
        )
    assert run.end() == 0, run.text
    report = run.report
    assert adds_up(report)
    assert report["steps"] == {"solver": 14, "verifier": 14}
    for name in ("raas-0", "dataflow", "trainer-verifier"):
        assert report["processes"][name]["exit_codes"] == [-9, 0]
        assert any(event.startswith(f"{name} was killed by SIGKILL") for event in report["events"])
    assert all(int(gap) <= 2 for histogram in report["staleness"].values() for gap in histogram)
    assert run.left() == []


def test_an_instance_joins_by_address_and_leaves_by_ctrl_c(start: Callable[..., Run]) -> None:
    run = start("trainer.max_steps=400")
    run.until("step 1", lambda status: version(status) >= 1)
    port = load_experiment([run.run_dir / "config.yaml"]).experiment.launch.dataflow_port
    argv = [sys.executable, "-m", "astraflow", "raas", "--join", f"http://127.0.0.1:{port}", "--name", "guest"]
    guest = subprocess.Popen(argv, env=environment(), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        run.until("work for the guest", lambda status: any(i.instance_id == "guest" and i.in_flight > 0 for i in status.instances))
        guest.send_signal(signal.SIGINT)
        assert guest.wait(30) == 0
        run.until(
            "the guest's leave", lambda status: not any(i.instance_id == "guest" and i.state == "live" for i in status.instances)
        )
    finally:
        guest.kill()
        guest.communicate(timeout=10)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 0, run.text
    assert adds_up(run.report)
