"""Child processes: each in a group of its own, dies with its parent, ended by its id; restarted with back-off up to a limit.

The kernel's parent-death signal belongs to the *thread* that forked: it fires when that thread ends, not only when the process
does. `Child` therefore forks from the main thread, or else from one thread that lives as long as the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from astraflow.protocol.errors import Unavailable

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
M_ARENA_MAX = -8
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(parent: int | None = None, sig: int = signal.SIGKILL) -> None:
    """Let the kernel send `sig` to this process when the thread that forked it ends. Linux only; elsewhere nothing happens.

    `parent`: the id that the parent had; ProcessLookupError when it is gone already (the signal would never come).
    """
    if _libc is None:
        return
    _libc.prctl(PR_SET_PDEATHSIG, int(sig), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        raise ProcessLookupError("the parent ended before its child began")


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process, so that `descendants` finds them. Linux only."""
    if _libc is not None:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Every living process below `pid`, in whatever session; empty where there is no /proc."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            for child in map(int, thread.read_text(encoding="ascii").split()):
                found += [child, *descendants(child)]
    return found


def limit_arenas(count: int) -> None:
    """Let all threads share `count` heaps of the C library: otherwise every thread that ever held large buffers keeps its own share
    of them (measured: 400 MiB against 235 MiB of a Dataflow with batches of 14 MB). Call it before threads start; glibc only."""
    if _libc is not None and hasattr(_libc, "mallopt"):
        _libc.mallopt(M_ARENA_MAX, count)


class Child:
    """One child process. `pass_fds` is for pipes and socketpairs; its output goes to `log_path` (appended), to `output_fd` (the caller's
    pipe) or is inherited."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        log_path: Path | str | None = None,
        output_fd: int | None = None,
        cwd: Path | str | None = None,
        pass_fds: Sequence[int] = (),
        name: str = "",
        death_signal: int = signal.SIGKILL,
    ):
        """Start it now. `env` is the whole environment (None = ours). Raises Unavailable when the program cannot be started."""
        self.argv = list(argv)
        self.name = name or Path(self.argv[0]).name
        self._lock = threading.Lock()
        parent = os.getpid()

        def in_child() -> None:
            die_with_parent(parent, death_signal)

        def start(output: IO[bytes] | int | None) -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                self.argv,
                env=None if env is None else dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                start_new_session=True,
                pass_fds=tuple(pass_fds),
                preexec_fn=in_child,
            )

        with contextlib.ExitStack() as stack:
            output: IO[bytes] | int | None = output_fd
            if log_path is not None:
                Path(log_path).parent.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context(open(log_path, "ab"))
            try:
                self._popen = _fork(lambda: start(output))
            except (OSError, subprocess.SubprocessError) as error:
                raise Unavailable(f"{self.name}: cannot start {self.argv[0]!r}: {error}") from None
        self.pid = self._popen.pid

    def poll(self) -> int | None:
        """Exit code (−n: ended by signal n), or None while it runs. What is left of its group is killed when it has ended."""
        with self._lock:
            if self._popen.returncode is None:
                self._reap()
            return self._popen.returncode

    def _reap(self) -> None:
        # WNOWAIT: as long as the ended child is not reaped, its id and that of its group cannot belong to anybody else
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            self._signal(signal.SIGKILL)
            self._popen.poll()

    def _signal(self, sig: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, sig)

    def signal(self, sig: int) -> None:
        """Send a signal to its whole group; nothing happens when it has ended."""
        with self._lock:
            if self._popen.returncode is None:
                self._signal(sig)

    def kill(self) -> int:
        """SIGKILL to its group; returns the exit code."""
        return self.terminate(0.0)

    def terminate(self, deadline_s: float = 5.0) -> int:
        """SIGTERM to its group, SIGKILL after the deadline; waits for the end and returns the exit code."""
        if deadline_s > 0:
            self.signal(signal.SIGTERM)
        code = self.wait(deadline_s)
        if code is None:
            if deadline_s > 0:
                log.warning("%s (pid %d) did not end within %.1f s of SIGTERM: killed", self.name, self.pid, deadline_s)
            self.signal(signal.SIGKILL)
            code = self.wait(30.0)
        if code is None:
            raise Unavailable(f"{self.name} (pid {self.pid}) does not end, not even by SIGKILL")
        return code

    def wait(self, deadline_s: float) -> int | None:
        """Exit code, or None when it still runs after the deadline."""
        end = time.monotonic() + deadline_s
        pause_s = 0.001
        while (code := self.poll()) is None and time.monotonic() < end:
            time.sleep(min(pause_s, max(end - time.monotonic(), 0.0)))
            pause_s = min(pause_s * 2, 0.05)
        return code


_forks: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
_forker: list[threading.Thread] = []
_forker_lock = threading.Lock()


def _fork(start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Fork from a thread that does not end before the process."""
    if threading.current_thread() is threading.main_thread():
        return start()
    with _forker_lock:
        if not _forker or not _forker[0].is_alive():  # not alive: we are a fork of the process that had it
            _forker[:] = [threading.Thread(target=_fork_loop, name="forker", daemon=True)]
            _forker[0].start()
    done: Future[subprocess.Popen[bytes]] = Future()
    _forks.put((start, done))
    return done.result(timeout=60.0)


def _fork_loop() -> None:
    while True:
        start, done = _forks.get()
        try:
            done.set_result(start())
        except (OSError, ValueError, TypeError, subprocess.SubprocessError) as error:  # handed to the caller, who waits for it
            done.set_exception(error)


@dataclass(frozen=True)
class RestartPolicy:
    """When to start an ended child again."""

    limit: int = 5
    """Restarts within `window_s`; one more failure gives up."""
    window_s: float = 300.0
    first_s: float = 0.2
    """Pause before the first restart of a window; doubled each time."""
    factor: float = 2.0
    max_s: float = 10.0


class RestartBook:
    """Pure: the deaths of one child, and when it may be started again."""

    def __init__(self, policy: RestartPolicy):
        self.policy = policy
        self.restarts = 0
        self._deaths: deque[float] = deque()

    def left(self, now: float) -> int:
        """Restarts that there would still be."""
        while self._deaths and now - self._deaths[0] > self.policy.window_s:
            self._deaths.popleft()
        return max(self.policy.limit - len(self._deaths), 0)

    def died(self, now: float) -> float | None:
        """The time at which to start it again, or None to give up."""
        policy, left = self.policy, self.left(now)
        self._deaths.append(now)
        if not left:
            return None
        self.restarts += 1
        pause_s: float = policy.first_s * policy.factor ** (len(self._deaths) - 1)
        return now + min(pause_s, policy.max_s)


def describe_exit(code: int) -> str:
    """`ended with exit code 3` or `was killed by SIGKILL`."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
