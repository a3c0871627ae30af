"""The supervisor with real, small child processes: restarts, ends, messages, and nothing left behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from astraflow.config.sections import LaunchConfig, RestartConfig
from astraflow.launch.local import LocalRun, Outcome, error_line, tail
from astraflow.launch.plan import ProcessSpec, RunBook
from astraflow.launch.watch import Observed, Watch
from astraflow.lib.wire import new_identity

RESTART = RestartConfig(limit=2, first_s=0.05, max_s=0.1)
LAUNCH = LaunchConfig(restart=RESTART, drain_s=60.0, end_s=60.0, term_s=60.0)
HASTY = LaunchConfig(restart=RESTART, end_s=1.0, term_s=1.0)
OBEYS = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *a: sys.exit(0)); print('up', flush=True);"
OBEDIENT = OBEYS + " time.sleep(600)"


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def supervise(
    tmp_path: Path,
    programs: dict[str, str],
    on_show: Callable[[RunBook, Observed, float], None] | None = None,
    launch: LaunchConfig = LAUNCH,
) -> Outcome:
    specs = [ProcessSpec(name, name.split("-")[0], (sys.executable, "-c", code), {}) for name, code in programs.items()]  # type: ignore[arg-type]
    book = RunBook(specs, launch)
    watch = Watch("http://127.0.0.1:9", new_identity("t"), tmp_path, poll_s=0.2)
    return LocalRun(specs, book, watch, tmp_path, on_show or (lambda *seen: None)).run()


def pids(tmp_path: Path) -> list[int]:
    return [int(file.read_text()) for file in tmp_path.glob("*.pid")]


def note_pid(tmp_path: Path, name: str) -> str:
    """Program text: write `name`.pid, whole or not at all."""
    path = str(tmp_path / name)
    return f"import os; open({path!r}, 'w').write(str(os.getpid())); os.replace({path!r}, {path + '.pid'!r});"


def after(tmp_path: Path, *names: str) -> str:
    """Program text: wait until these have written their pids."""
    paths = [str(tmp_path / f"{name}.pid") for name in names]
    return f"import os, time\nwhile not all(map(os.path.exists, {paths!r})): time.sleep(.02)\n"


def test_a_process_that_dies_comes_back_and_the_run_still_ends_with_0(tmp_path: Path) -> None:
    mark = tmp_path / "died"
    done = tmp_path / "done"
    once = f"import os\nif not os.path.exists({str(mark)!r}):\n    open({str(mark)!r}, 'w').close(); os.kill(os.getpid(), 9)\n"
    code = f"{once}open({str(done)!r}, 'w')"
    until = f"import os, time\nwhile not os.path.exists({str(done)!r}): time.sleep(.02)"
    outcome = supervise(tmp_path, {"dataflow": until, "raas-0": until, "trainer-a": code})
    assert outcome.exit_code == 0
    assert outcome.processes["trainer-a"] == {"state": "done", "restarts": 1, "exit_codes": [-9, 0]}
    assert outcome.events == ["trainer-a was killed by SIGKILL", "trainer-a was restarted (restart 1)"]
    assert (tmp_path / "outcome.json").is_file()
    assert (tmp_path / "observed.json").is_file()


def test_a_mistake_ends_everything_with_its_line(tmp_path: Path) -> None:
    wrong = after(tmp_path, "dataflow", "raas-0") + "import sys; sys.stderr.write('astraflow: error: trainer.lr: no\\n'); sys.exit(2)"
    programs = {name: OBEYS + note_pid(tmp_path, name) + "time.sleep(600)" for name in ("dataflow", "raas-0")} | {"trainer-a": wrong}
    outcome = supervise(tmp_path, programs)
    assert (outcome.exit_code, outcome.failure) == (2, "trainer.lr: no")
    assert outcome.processes["raas-0"]["exit_codes"] == [0]
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_a_stubborn_process_is_killed_by_its_deadline(tmp_path: Path) -> None:
    deaf = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); {note_pid(tmp_path, 'raas')} time.sleep(600)"
    ends = after(tmp_path, "raas")
    outcome = supervise(tmp_path, {"dataflow": ends, "raas-0": deaf, "trainer-a": ends}, launch=HASTY)
    assert outcome.exit_code == 1
    assert outcome.processes["raas-0"]["exit_codes"] == [-9]
    assert any("raas-0 did not end without being asked" in event for event in outcome.events)
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_ctrl_c_drains(tmp_path: Path) -> None:
    sent = threading.Event()

    def interrupt(book: RunBook, seen: Observed, age_s: float) -> None:
        ready = all("up" in tail(tmp_path / "logs" / f"{name}.log") for name in book.processes)
        if ready and not sent.is_set():
            sent.set()
            os.kill(os.getpid(), signal.SIGINT)
        if book.phase == "ending":  # Dataflow ends the rollout services; here nobody else would
            pass

    gone = str(tmp_path / "gone")
    followers = OBEYS + f"\nwhile not __import__('os').path.exists({gone!r}): time.sleep(.02)"
    trainer = OBEDIENT.replace("sys.exit(0)", f"(open({gone!r}, 'w').close(), sys.exit(0))")
    outcome = supervise(tmp_path, {"dataflow": followers, "raas-0": followers, "trainer-a": trainer}, interrupt)
    assert (outcome.exit_code, outcome.drained, outcome.failure) == (0, True, "")
    assert outcome.processes["trainer-a"]["exit_codes"] == [0]


def test_children_die_when_the_loop_breaks(tmp_path: Path) -> None:
    def explode(book: RunBook, seen: Observed, age_s: float) -> None:
        if len(pids(tmp_path)) == 2:
            raise RuntimeError("bug in the panel")

    programs = {name: note_pid(tmp_path, name) + OBEDIENT for name in ("dataflow", "trainer-a")}
    with pytest.raises(RuntimeError, match="bug in the panel"):
        supervise(tmp_path, programs, explode)
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_a_program_that_cannot_start_ends_the_run(tmp_path: Path) -> None:
    specs = [ProcessSpec("dataflow", "dataflow", ("/nowhere/python",), {})]
    watch = Watch("http://127.0.0.1:9", new_identity("t"), tmp_path, poll_s=0.2)
    outcome = LocalRun(specs, RunBook(specs, LAUNCH), watch, tmp_path, lambda *seen: None).run()
    assert outcome.exit_code == 1
    assert "cannot start" in outcome.failure


def test_the_error_of_a_log_is_its_last_error_line() -> None:
    log = [
        "2026-01-01 10:00:00,001 ERROR   raas-0 astraflow.raas.service: port 1 is in use",
        "2026-01-01 10:00:00,002 INFO    raas-0 astraflow.raas.service: ending",
    ]
    assert error_line(log) == "port 1 is in use"
    assert error_line([*log, "astraflow: error: better"]) == "better"
    assert error_line(["Traceback", "ValueError: x"]) == "ValueError: x"
    assert error_line([]) == ""
