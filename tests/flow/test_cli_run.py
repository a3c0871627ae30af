"""`astraflow run` and its surroundings: a guest that joins by address, a second Ctrl-C, a terminal that is closed."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from system import ROOT, SCRIPTED, TWO_POLICIES, Run, Stage, instance, version

DEADLINE_S = 120.0
ENDLESS = (*SCRIPTED, "trainer.max_steps=1000", "trainer.eval_freq=0")


def begun(stage: Stage, *overrides: str) -> Run:
    run = stage.run(TWO_POLICIES, *ENDLESS, *overrides)
    run.until("version 1 of both", lambda status: min(version(status, p) for p in ("solver", "verifier")) >= 1, DEADLINE_S)
    return run


def test_an_instance_joins_by_address_and_leaves_by_ctrl_c(stage: Stage) -> None:
    run = begun(stage)
    url = (run.run_dir / "dataflow.url").read_text().strip()
    guest = stage.astraflow("raas", "--join", url, "--name", "guest")
    joined = run.until("work for the guest", lambda status: (found := instance(status, "guest")) and found.in_flight > 0, DEADLINE_S)
    found = instance(joined, "guest")
    assert found is not None
    assert set(found.serving) == {"solver", "verifier"}
    guest.send_signal(signal.SIGINT)
    assert guest.wait(DEADLINE_S) == 0
    run.until("the guest's leave", lambda status: (found := instance(status, "guest")) is None or found.state != "live", DEADLINE_S)
    run.interrupt()
    assert run.end(DEADLINE_S) == 0, run.text
    run.nothing_left()
    assert run.report["adds_up"]


def test_a_second_ctrl_c_stops_at_once_and_is_no_success(stage: Stage) -> None:
    run = begun(stage, "launch.term_s=1")
    os.kill(run.pids()["trainer-solver"], signal.SIGSTOP)  # its step never ends, so neither does the drain
    run.interrupt()
    run.until("the drain", lambda status: "interrupted: trainers finish" in run.text, DEADLINE_S)
    run.interrupt()
    assert run.end(DEADLINE_S) == 1, run.text
    run.nothing_left()
    assert run.report["failure"] == "interrupted twice"


def test_a_closed_terminal_drains_the_run(tmp_path: Path) -> None:
    """The panel can no longer be drawn and SIGHUP comes: trainers finish their step, save, and the report is written."""
    run_dir = tmp_path / "run"
    argv = [sys.executable, "-m", "astraflow", "run", TWO_POLICIES, f"experiment.run_dir={run_dir}", *ENDLESS]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ASTRAFLOW_")} | {"OMP_NUM_THREADS": "1"}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(argv, env=clean, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    closed = threading.Event()
    drinker = threading.Thread(target=drink, args=(ours, closed), daemon=True)
    drinker.start()
    run = Run(run_dir, process, tmp_path / "none")
    try:
        end = time.monotonic() + DEADLINE_S
        while (status := run.status()) is None or version(status, "solver") < 1:
            assert process.poll() is None
            assert time.monotonic() < end, "no step was made"
            time.sleep(0.05)
        closed.set()
        drinker.join(DEADLINE_S)
        process.send_signal(signal.SIGHUP)  # what the kernel does when the terminal is the session's own
        assert run.end(DEADLINE_S) == 0
        assert run.report["drained"]
        assert run.report["adds_up"]
        run.nothing_left()
    finally:
        closed.set()
        run.close()


def drink(descriptor: int, closed: threading.Event) -> None:
    """Read a terminal, so that its writer never blocks, until it is to be closed; nobody else may close what is being read."""
    try:
        while not closed.is_set():
            if select.select([descriptor], [], [], 0.05)[0] and not os.read(descriptor, 65536):
                return
    except OSError:
        return
    finally:
        os.close(descriptor)
