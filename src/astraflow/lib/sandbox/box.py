"""The outside of the sandbox: start it, ask it, end it."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import marshal
import math
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from astraflow.lib.proc import describe_exit
from astraflow.lib.sandbox import runner, seccomp
from astraflow.lib.sandbox.prelude import prelude
from astraflow.protocol.errors import AstraFlowError

START_S = 60.0
"""From the start of bubblewrap to the first word of the runner; not charged to the program."""
END_S = 30.0
"""From SIGKILL to the end: only a process stuck in the kernel takes longer than milliseconds."""
FIRST_UID = 0x70000000
"""Users that systemd's list of reserved ranges leaves unassigned: nobody else's processes count against RLIMIT_NPROC."""
UIDS_PER_PROCESS = 64
VARIABLES = {"PATH": "/usr/bin:/bin", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
"""The whole environment (and LD_LIBRARY_PATH); the last two keep threads and heaps out of the address space's limit."""
_slots = itertools.count()
_QUIET: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


class SandboxError(AstraFlowError):
    """The sandbox cannot be used on this machine; says why and what to do. Never a verdict on a program."""


@dataclass(frozen=True)
class Limits:
    """What a program may use."""

    cpu_s: int = 6
    """CPU seconds of one case (one standard input, one call, one test program). A program that is called can lift that of a call, and
    has `wall_s` CPU seconds for all of them at most."""
    wall_s: float = 8.0
    """All cases together, from the moment the sandbox stands; below the default deadline of a reward (10 s)."""
    memory_bytes: int = 1024**3
    """Address space of a process; the program has one (RLIMIT_AS)."""
    threads: int = 32
    """Child processes: none."""
    tmp_bytes: int = 64 * 1024**2
    """Size of its private /tmp, the only place it can write to."""
    output_bytes: int = 16 * 1024**2
    """Standard output of a case, a returned value, or any file."""
    open_files: int = 64


Status = Literal["ok", "error", "timeout", "crash"]


@dataclass(frozen=True)
class Answer:
    """What came of one case."""

    status: Status
    """`ok`: there is a result; `error`: the program raised, or exited with another code than 0; `timeout`: CPU or wall clock;
    `crash`: it ended the process it ran in, or its result was too large."""
    payload: bytes = b""
    """Standard output, value as JSON, or nonce."""
    text: str = ""
    """What went wrong, for people and models; the program's own words, so never part of a verdict."""

    def value(self) -> Any:
        """The returned value. Raises ValueError, RecursionError for what a program sent instead of JSON."""
        return json.loads(self.payload)


def run_programs(code: str, inputs: Iterable[str], limits: Limits | None = None) -> Iterator[Answer]:
    """Run a whole program once per standard input, lazily: who stops asking saves the rest. `payload` is its standard output.

    After a timeout or a crash the answers of the remaining cases are the same one. Raises SandboxError.
    """
    with Sandbox("programs", code, limits or Limits(), prelude=prelude(code)) as box:
        for text in inputs:
            yield box.ask(text.encode("utf-8", "surrogatepass"))


def call_function(code: str, name: str, calls: Iterable[Sequence[Any]], limits: Limits | None = None) -> Iterator[Answer]:
    """Load a program once and call its function (or the method of its `Solution`) with each list of arguments; `value()` is the result.

    Lazily, as in `run_programs`. Arguments are plain data. Raises SandboxError.
    """
    with Sandbox("calls", code, limits or Limits(), prelude=prelude(code)) as box:
        for args in calls:
            yield box.ask(marshal.dumps((name, tuple(args), {})))


def check_functions(code: str, test: str, functions: Sequence[str], *, context: str = "", limits: Limits | None = None) -> Answer:
    """Judge functions of `code` by a test program: `ok` iff all of `test` ran and nothing was raised.

    The test runs in a process of its own, in the scope of `context` (trusted helpers); there `functions` are proxies that take and
    return plain data, so a program cannot answer with objects that claim to be equal to everything. Raises SandboxError.
    """
    nonce = secrets.token_bytes(16)
    with Sandbox("check", code, limits or Limits(), functions=tuple(functions), context=context) as box:
        answer = box.ask(marshal.dumps((test, nonce)))
    if answer.status == "ok" and not secrets.compare_digest(answer.payload, nonce):
        return Answer("error", text="the checker's answer is forged")
    return answer


class Sandbox:
    """One program in one sandbox, as a context manager; everything in it is dead when the block ends."""

    def __init__(
        self, mode: str, code: str, limits: Limits, *, prelude: str = "", functions: tuple[str, ...] = (), context: str = ""
    ) -> None:
        self._limits, self._code = limits, code
        self._setup = {
            "mode": mode, "code": code, "prelude": prelude, "functions": functions, "context": context,
            "cpu_s": limits.cpu_s, "total_cpu_s": max(limits.cpu_s, math.ceil(limits.wall_s)), "output_bytes": limits.output_bytes,
        }  # fmt: skip
        self._ended: Answer | None = None

    def __enter__(self) -> Sandbox:
        program = _bubblewrap()
        root = _is_real_root()
        uid = FIRST_UID + os.getpid() * UIDS_PER_PROCESS + next(_slots) % UIDS_PER_PROCESS if root else 0
        self._setup |= {"uid": uid, "rlimits": _rlimits(self._limits, root), "filter": seccomp.program(platform.machine())}
        self._socket, theirs = socket.socketpair()
        with theirs:
            bootstrap = [runner.BOOTSTRAP, str(theirs.fileno()), str(len(_runner()))]
            argv = [*_command(program, self._limits.tmp_bytes, root, _packages(self._code)), *_python(), *bootstrap]
            # not `Child`: its preexec_fn makes a whole fork of this process, and bubblewrap asks for the parent's death signal itself
            self._process = subprocess.Popen(argv, env={}, **_QUIET, start_new_session=True, pass_fds=[theirs.fileno()])
        try:
            started = self._exchange(marshal.dumps(self._setup), time.monotonic() + START_S, before=_runner())
            if started != runner.READY:
                raise SandboxError(f"sandbox: it did not start: {_trial(program) or 'bubblewrap ended'}")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self._deadline = time.monotonic() + self._limits.wall_s
        return self

    def ask(self, request: bytes) -> Answer:
        """One case. Never raises for what the program does."""
        if self._ended is None:
            answer = self._exchange(request, self._deadline)
            if answer is not None and answer[:1] == runner.OK:
                return Answer("ok", answer[1:])
            if answer is not None:
                return Answer("timeout" if answer[:1] == runner.TIMEOUT else "error", text=answer[1:].decode("utf-8", "replace"))
        assert self._ended is not None
        return self._ended

    def _exchange(self, request: bytes, deadline: float, before: bytes = b"") -> bytes | None:
        """The answer's frame; without one the sandbox has ended, and `_ended` says how."""
        try:
            self._patience(deadline)
            self._socket.sendall(before + len(request).to_bytes(4, "big") + request)
            size = int.from_bytes(self._receive(4, deadline), "big")
            if size <= self._limits.output_bytes + 1:
                return self._receive(size, deadline)
            self._end("crash", f"a result of {size} bytes; the limit is {self._limits.output_bytes}")
        except TimeoutError:
            self._end("timeout", f"not done within {self._limits.wall_s:g} s")
        except (EOFError, ConnectionError):
            self._end("crash")
        return None

    def _receive(self, size: int, deadline: float) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            self._patience(deadline)
            part = self._socket.recv(min(size - len(parts), 1 << 20))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def _patience(self, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._socket.settimeout(left_s)

    def _end(self, status: Status, text: str = "") -> None:
        if status == "crash" and not text:  # it is ending: hear how
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
        self._kill()
        code = self._process.returncode - 128 if self._process.returncode > 128 else -self._process.returncode
        if status == "crash" and code == runner.SIGXCPU:
            status, text = "timeout", "out of CPU time"
        self._ended = Answer(status, text=text or f"the program's process {describe_exit(-code)}")

    def _kill(self) -> None:
        """Bubblewrap's group: with its first process the kernel ends the whole pid namespace, whoever left the group."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # not reaped yet, so the id is still its own
            self._process.wait(END_S)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._kill()
        self._socket.close()


def require() -> None:
    """Raise SandboxError, saying why and what to do, where programs cannot be run."""
    problem = _trial(_bubblewrap())
    if problem:
        raise SandboxError(f"sandbox: bubblewrap cannot make namespaces here: {problem}")


def _bubblewrap() -> str:
    program = shutil.which("bwrap")
    if sys.platform != "linux" or platform.machine() not in seccomp.MACHINES:
        raise SandboxError(f"sandbox: {sys.platform} on {platform.machine()}: needs Linux on {' or '.join(seccomp.MACHINES)}")
    if program is None:
        raise SandboxError("sandbox: bubblewrap is missing, and generated code runs nowhere else: apt-get install bubblewrap")
    return program


def _trial(program: str) -> str:
    """What bubblewrap says when it cannot run a program that does nothing; empty when it can."""
    argv = [*_command(program, 4096, _is_real_root()), *_python(), "pass"]
    done = subprocess.run(argv, env={}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=START_S)
    return " ".join((done.stderr or describe_exit(done.returncode)).split()) if done.returncode else ""


def _is_real_root() -> bool:
    """Root of the machine, whom RLIMIT_NPROC does not bind; root of a container's user namespace is a plain user."""
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]


def _rlimits(limits: Limits, root: bool) -> dict[str, int]:
    """Kernels before 5.14 count a plain user's threads outside of the sandbox too."""
    return {
        "NPROC": limits.threads + 4 + (0 if root else _own_threads()),  # runner, checker, program, and one of the kernel's
        "AS": limits.memory_bytes,
        "FSIZE": limits.output_bytes,
        "NOFILE": limits.open_files,
        "CORE": 0,
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
    }


def _own_threads() -> int:
    own, count = os.getuid(), 0
    for entry in os.scandir("/proc"):
        try:
            if entry.name.isdigit() and entry.stat().st_uid == own:
                count += len(os.listdir(f"{entry.path}/task"))
        except OSError:
            continue  # ended while we counted
    return count


def _command(program: str, tmp_bytes: int, root: bool, packages: Sequence[Path] = ()) -> list[str]:
    """Without a user namespace as root: the runner takes a user of its own, which needs the two capabilities and loses them by it."""
    user = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if root else ["--unshare-user", "--cap-drop", "ALL"]
    argv = [program, *user, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--hostname", "sandbox"]
    argv += ["--die-with-parent"]
    libraries = {} if sys.base_prefix == "/usr" else {"LD_LIBRARY_PATH": "/python/lib"}  # where it was built with a shared libpython
    for name, value in (VARIABLES | libraries).items():
        argv += ["--setenv", name, value]
    argv += ["--perms", "1777", "--size", str(tmp_bytes), "--tmpfs", "/tmp", "--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache"):
        if os.path.islink(name):
            argv += ["--symlink", os.readlink(name), name]
        elif os.path.exists(name):
            argv += ["--ro-bind", name, name]
    if sys.base_prefix != "/usr":
        argv += ["--ro-bind", sys.base_prefix, "/python"]
    argv += ["--perms", "0755", "--dir", "/packages"]  # parents that bubblewrap makes by itself are closed to others
    for package in packages:
        argv += ["--ro-bind", str(package), f"/packages/{package.name}"]
    # bubblewrap's own root and /dev are writable file systems without a limit
    return [*argv, "--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--"]


def _packages(code: str) -> list[Path]:
    """numpy, for programs that name it; compiled for this very interpreter."""
    found = importlib.util.find_spec("numpy") if "numpy" in code else None
    if found is None or found.origin is None:
        return []
    home = Path(found.origin).parent
    return [path for path in (home, home.parent / "numpy.libs") if path.is_dir()]


def _python() -> list[str]:
    prefix = "/usr" if sys.base_prefix == "/usr" else "/python"
    return [f"{prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}", "-I", "-S", "-c"]


@lru_cache(maxsize=1)
def _runner() -> bytes:
    """The runner's code: the interpreter inside is the one outside."""
    return marshal.dumps(compile(Path(runner.__file__).read_bytes(), "<sandbox>", "exec"))
