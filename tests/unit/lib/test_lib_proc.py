from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from astraflow.lib.proc import Child, RestartBook, RestartPolicy, describe_exit
from astraflow.protocol.errors import Unavailable

SLEEPS = [sys.executable, "-S", "-c", "import time; print('up', flush=True); time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-S",
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)",
]


def until(condition: Callable[[], object], deadline_s: float = 20.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "the condition never came true"
        time.sleep(0.005)


def is_gone(pid: int) -> bool:
    """Ended; a zombie that nobody reaped counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        child.kill()


def test_a_child_writes_its_log_and_reports_its_exit_code(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "child.log"
    program = "import os, sys; print(os.environ['WORD'], os.getcwd()); print('to stderr', file=sys.stderr); sys.exit(3)"
    for _ in range(2):
        child = Child([sys.executable, "-S", "-c", program], env={"WORD": "hello"}, log_path=log, cwd=tmp_path)
        assert child.wait(20) == 3
        assert child.poll() == 3
        assert child.terminate() == 3
    lines = log.read_text().splitlines()
    assert lines.count(f"hello {tmp_path}") == 2
    assert lines.count("to stderr") == 2


def test_a_program_that_does_not_exist_is_named() -> None:
    with pytest.raises(Unavailable, match=r"engine: cannot start '/no/such/program'"):
        Child(["/no/such/program"], name="engine")


def test_terminate_asks_first_and_kills_at_the_deadline(tmp_path: Path, children: list[Child]) -> None:
    polite, stubborn = Child(SLEEPS, log_path=tmp_path / "a"), Child(STUBBORN, log_path=tmp_path / "b")
    children += [polite, stubborn]
    until(lambda: "up" in (tmp_path / "a").read_text() and "up" in (tmp_path / "b").read_text())
    assert polite.poll() is None
    assert polite.terminate(20) == -signal.SIGTERM
    assert stubborn.terminate(0.05) == -signal.SIGKILL
    stubborn.signal(signal.SIGTERM)


def test_the_group_of_a_dead_child_is_swept(tmp_path: Path, children: list[Child]) -> None:
    program = f"import os, subprocess; print(subprocess.Popen({SLEEPS!r}, stdout=2).pid, flush=True); os.kill(os.getpid(), 9)"
    child = Child([sys.executable, "-S", "-c", program], log_path=tmp_path / "log")
    children.append(child)
    assert child.wait(20) == -signal.SIGKILL
    grandchild = int((tmp_path / "log").read_text().split()[0])
    until(lambda: is_gone(grandchild))


def test_children_die_with_their_parent_even_when_a_short_lived_thread_started_them(tmp_path: Path) -> None:
    program = f"""
import sys, threading, time
from astraflow.lib.proc import Child
started = []
thread = threading.Thread(target=lambda: started.append(Child({SLEEPS!r}, log_path={str(tmp_path / "threaded")!r})))
thread.start(); thread.join()
started.append(Child({SLEEPS!r}, log_path={str(tmp_path / "main")!r}))
print(*(child.pid for child in started), flush=True)
sys.stdin.readline()
print([child.poll() for child in started], flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdin is not None
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    until(lambda: all("up" in (tmp_path / name).read_text() for name in ("threaded", "main")))
    print("go", file=parent.stdin, flush=True)
    assert parent.stdout.readline().strip() == "[None, None]"
    parent.kill()
    parent.communicate()
    until(lambda: all(map(is_gone, pids)))


def test_children_started_from_a_thread_can_be_awaited_there(tmp_path: Path) -> None:
    codes: list[int | None] = []
    errors: list[str] = []

    def work() -> None:
        codes.append(Child([sys.executable, "-S", "-c", "pass"]).wait(20))
        try:
            Child(["/no/such/program"])
        except Unavailable as error:
            errors.append(str(error))

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(30)
    assert codes == [0, 0]
    assert len(errors) == 2


def test_pauses_grow_within_the_window_and_the_limit_ends_them() -> None:
    book = RestartBook(RestartPolicy(limit=3, window_s=100, first_s=1, factor=2, max_s=3))
    assert [book.died(now) for now in (10.0, 20.0, 30.0)] == [11.0, 22.0, 33.0]
    assert book.died(40.0) is None
    assert book.restarts == 3


def test_old_deaths_are_forgotten() -> None:
    book = RestartBook(RestartPolicy(limit=1, window_s=10, first_s=1))
    assert book.died(0.0) == 1.0
    assert book.died(100.0) == 101.0
    assert book.died(105.0) is None


def test_exit_codes_are_described_for_people() -> None:
    assert describe_exit(2) == "ended with exit code 2"
    assert describe_exit(-signal.SIGTERM) == "was killed by SIGTERM"
    assert describe_exit(-99) == "was killed by signal 99"


def test_a_socketpair_reaches_the_child() -> None:
    import socket

    ours, theirs = socket.socketpair()
    program = "import socket, sys; s = socket.socket(fileno=int(sys.argv[1])); s.sendall(s.recv(4)[::-1])"
    with ours, theirs:
        child = Child([sys.executable, "-S", "-c", program, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        ours.settimeout(20)
        ours.sendall(b"ping")
        assert ours.recv(4) == b"gnip"
        assert child.wait(20) == 0
    assert os.getpid() != child.pid


HEAPS = """
import ctypes, re, sys, threading
from astraflow.lib.proc import limit_arenas
if sys.argv[2] != "0":
    limit_arenas(int(sys.argv[2]))
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
libc.malloc_info.argtypes, libc.fclose.argtypes = [ctypes.c_int, ctypes.c_void_p], [ctypes.c_void_p]
meet = threading.Barrier(8)
def allocate():
    meet.wait()
    libc.malloc(1000)
    meet.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
file = libc.fopen(sys.argv[1].encode(), b"w")
libc.malloc_info(0, file)
libc.fclose(file)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="not glibc")
def test_threads_share_a_limited_number_of_heaps(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    heaps = []
    for limit in (0, 2):
        report = tmp_path / str(limit)
        subprocess.run([sys.executable, "-c", HEAPS, str(report), str(limit)], check=True, timeout=60, env=environment)
        heaps.append(report.read_text().count("<heap nr="))
    assert heaps[1] <= 2 < heaps[0]
