"""Hostile programs, as the user who runs the tests and, when that is root, as a plain user too."""

from __future__ import annotations

import json
import os
import pwd
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import astraflow
from astraflow.lib.sandbox import Limits, SandboxError, call_function, check_functions, require, run_programs
from astraflow.lib.sandbox.box import FIRST_UID, UIDS_PER_PROCESS
from astraflow.lib.sandbox.runner import decode, encode

needs_sandbox = pytest.mark.usefixtures("sandbox")

SMALL = {"cpu_s": 1, "wall_s": 60.0, "memory_bytes": 256 * 1024**2, "tmp_bytes": 4 * 1024**2, "output_bytes": 1024**2}
STRANGER = 54321
SOURCES = str(Path(astraflow.__file__).parents[1])
DRIVER = """
import json, sys
from astraflow.lib.sandbox import Limits, check_functions, run_programs
task = json.load(sys.stdin)
limits = Limits(**task["limits"])
answers = run_programs(task["code"], task["inputs"], limits)
if task["test"]:
    answers = [check_functions(task["code"], task["test"], ["f"], limits=limits)]
print(json.dumps([[a.status, a.payload.decode("latin-1"), a.text] for a in answers]))
"""
SYSTEM_PYTHON = "/usr/bin/python3"


def python_for_strangers() -> str:
    """An interpreter that another user may read: this one may lie in root's home."""
    for path in (sys.executable, SYSTEM_PYTHON):
        try:
            subprocess.run([path, "-c", "import tomllib"], user=STRANGER, group=STRANGER, extra_groups=[], check=True)
            return path
        except (OSError, subprocess.CalledProcessError):
            continue
    pytest.skip(f"neither {sys.executable} nor {SYSTEM_PYTHON} of version 3.11 or later can be run by another user")


@pytest.fixture(params=["self", pytest.param("stranger", marks=pytest.mark.full)])
def run(request):
    """`run(code, inputs, **limits)` → (status, standard output, text) of each case; with `test` its function `f` is checked."""

    def here(code, inputs=("",), test="", **limits):
        if test:
            answers = [check_functions(code, test, ["f"], limits=Limits(**{**SMALL, **limits}))]
        else:
            answers = run_programs(code, inputs, Limits(**{**SMALL, **limits}))
        return [(a.status, a.payload.decode("latin-1"), a.text) for a in answers]

    def as_stranger(code, inputs=("",), test="", **limits):
        task = {"code": code, "inputs": list(inputs), "test": test, "limits": {**SMALL, **limits}}
        done = subprocess.run(
            [request.getfixturevalue("stranger_python"), "-c", DRIVER],
            input=json.dumps(task), capture_output=True, text=True, check=True, timeout=120, cwd="/",
            user=STRANGER, group=STRANGER, extra_groups=[], env={**os.environ, "PYTHONPATH": SOURCES},
        )  # fmt: skip
        return [tuple(answer) for answer in json.loads(done.stdout)]

    if request.param == "self":
        return here
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    return as_stranger


@pytest.fixture(scope="module")
def stranger_python():
    return python_for_strangers()


def wait_until_nobody_is_left():
    """The kernel ends a pid namespace by itself: its first process is killed when the answer comes, the rest within moments."""
    wait_for(lambda: not users_of_the_sandbox())


def wait_for(come):
    end = time.monotonic() + 60.0
    while not come():
        assert time.monotonic() < end, users_of_the_sandbox()
        time.sleep(0.01)


def users_of_the_sandbox(pid=0):
    """Processes of the users that this process (or `pid`) gives to programs, or of the plain user of these tests."""
    first = FIRST_UID + (pid or os.getpid()) * UIDS_PER_PROCESS
    ours = {*range(first, first + UIDS_PER_PROCESS), STRANGER}
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and entry.stat().st_uid in ours and "State:\tZ" not in (entry / "status").read_text():
                found.append(entry.name)
        except OSError:
            continue  # ended while we looked
    return found


@needs_sandbox
def test_a_program_reads_each_input_in_a_process_of_its_own(run):
    code = "import sys\nseen = globals().setdefault('seen', 0) + 1\nn = int(input())\nprint(n * 2, seen)\nprint(sys.stdin.read().upper())"
    answers = run(code, ["4\nä\u2028b\n", "5\n", "x\n"])
    seen = [(status, output.encode("latin-1").decode()) for status, output, _ in answers]
    assert seen == [("ok", "8 1\nÄ\u2028B\n\n"), ("ok", "10 1\n\n"), ("error", "")]
    assert "ValueError: invalid literal" in answers[2][2]


@needs_sandbox
@pytest.mark.parametrize("end", ["", "import sys; sys.exit(3)", "import os; sys.stdout.flush(); os._exit(0)", "exit()"])
def test_a_whole_output_counts_however_the_program_ends(run, end):
    assert run(f"import sys\nprint(1)\n{end}")[0][:2] == ("ok", "1\n")


@needs_sandbox
def test_threads_exit_handlers_the_usual_names_and_recursion_deeper_than_the_usual_stack_work(run):
    code = """
import atexit, sys, threading
sys.setrecursionlimit(10**6)
atexit.register(lambda: print("last"))
@lru_cache(maxsize=None)
def down(n): return 0 if n == 0 else 1 + down(n - 1)
print(down(40000))
threading.Thread(target=lambda: print(Counter("aa")["a"], pow(3, 2, 5))).start()
print(open("/dev/stdin").read())
"""
    (answer,) = run(code, ["in"], memory_bytes=1024**3, cpu_s=6)
    assert (answer[0], sorted(answer[1].split())) == ("ok", ["2", "4", "40000", "in", "last"]), answer


HOSTILE = {
    "fork bomb": ("import os\nwhile True: os.fork()", "error", "PermissionError"),
    "subprocess": ("import subprocess\nsubprocess.run(['/usr/bin/true'])", "error", "PermissionError"),
    "thread bomb": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "error", "new thread",
    ),
    "memory bomb": ("x = []\nwhile True: x.append(bytearray(10**7))", "error", "MemoryError"),
    "endless output": ("while True: print('x' * 10**5)", "error", "File too large"),
    "endless loop": ("while True: pass", "timeout", "CPU"),
    "lifting the CPU limit": (
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (resource.getrlimit(resource.RLIMIT_CPU)[1],) * 2)\nwhile True: pass",
        "timeout", "CPU",
    ),
    "no ear for the CPU limit": (
        "import signal, time\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile time.process_time() < 1.5: pass", "timeout", "CPU",
    ),
    "killing everybody": ("import os\nos.kill(-1, 9)", "crash", "SIGKILL"),
    "killing the parent": ("import os\nos.kill(os.getppid(), 9)", "crash", "SIGKILL"),
    "killing itself": ("import os\nos.kill(os.getpid(), 9)", "error", "-9"),
    "filling the disk": ("i = 0\nwhile True:\n    open(f'/tmp/{i}', 'wb').write(b'x' * 10**6)\n    i += 1", "error", "exit code"),
    "syntax": ("def f(:", "error", "SyntaxError"),
    "an endless expression": ("(" * 10**5, "error", "parenthes"),
}  # fmt: skip


@needs_sandbox
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_gets_its_verdict_and_leaves_nothing(run, name):
    code, status, text = HOSTILE[name]
    answers = run(code, ["", ""] if status == "crash" else [""])
    assert [answer[:2] for answer in answers] == [(status, "")] * len(answers), answers
    assert text in answers[0][2], answers
    wait_until_nobody_is_left()


@needs_sandbox
def test_a_case_finds_nothing_of_an_earlier_one_however_it_was_left(run):
    code = """
import os
print(os.listdir("/tmp"))
os.makedirs("/tmp/0/1"); open("/tmp/0/1/state", "w").write(input()); open("/tmp/1", "w"); os.symlink("/tmp/0", "/tmp/link")
for _ in range(2000): os.mkdir("d" * 200); os.chdir("d" * 200)
os.chmod("/tmp/0/1", 0); os.chmod("/tmp/0", 0)
"""
    assert run(code, ["a\n", "b\n", "c\n"], tmp_bytes=64 * 1024**2, cpu_s=6) == [("ok", "[]\n", "")] * 3


@needs_sandbox
@pytest.mark.parametrize("kind", ["StopIteration", "StopAsyncIteration", "type('StopIteration', (Exception,), {})"])
def test_what_builtins_take_for_an_end_reaches_the_test_as_an_error(kind):
    answer = check_functions(f"def f(x): raise {kind}", "assert all(map(lambda t: f(t[0]) == t[1], [(1, 2), (5, 6)]))", ["f"])
    assert (answer.status, answer.text[:12]) == ("error", "RuntimeError"), answer


@needs_sandbox
def test_who_ignores_signals_and_leaves_the_group_is_dead_after_the_deadline(run):
    code = """
import os, signal, time
for number in set(range(1, 65)) - {9, 19, 32, 33}: signal.signal(number, signal.SIG_IGN)
try: os.setsid()
except PermissionError: pass
while True: time.sleep(1)
"""
    assert run(code, ["", ""], wall_s=1.5) == [("timeout", "", "not done within 1.5 s")] * 2
    wait_until_nobody_is_left()


@needs_sandbox
def test_no_host_can_be_reached(run):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.0)
        code = f"""
import socket
for family, address in ((socket.AF_INET, ("127.0.0.1", {server.getsockname()[1]})), (socket.AF_INET, ("8.8.8.8", 53))):
    try: socket.socket(family).connect(address)
    except OSError: print("closed")
print(len(socket.if_nameindex()))
"""
        assert run(code) == [("ok", "closed\nclosed\n1\n", "")]
        with pytest.raises(BlockingIOError):
            server.accept()


@needs_sandbox
def test_no_file_process_or_variable_of_the_host_is_seen(run, tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("key")
    tmp_path.chmod(0o755)
    monkeypatch.setenv("ASTRAFLOW_TOKEN", "key")
    files = [str(tmp_path / "secret"), str(Path(__file__).parents[3]), pwd.getpwuid(os.getuid()).pw_dir]
    files += ["/etc/passwd", "/etc/shadow", "/proc/kcore"]
    code = f"""
import os
for path in {files!r}:
    if os.path.exists(path) and os.access(path, os.R_OK): print("sees", path)
print(sorted(set(os.environ) - {{"PATH", "PWD", "LC_CTYPE", "OPENBLAS_NUM_THREADS", "MALLOC_ARENA_MAX", "LD_LIBRARY_PATH"}}))
processes = [name for name in os.listdir("/proc") if name.isdigit()]
print(len(processes) <= 4)
for name in processes:
    try: print(b"key" in open(f"/proc/{{name}}/environ", "rb").read())
    except OSError: print(False)
print(os.uname().nodename, os.getuid() != 0, os.listdir("/tmp"))
"""
    (answer,) = run(code)
    assert answer[0] == "ok"
    assert set(answer[1].splitlines()) == {"[]", "True", "False", "sandbox True []"}, answer


@needs_sandbox
def test_nothing_but_the_private_tmp_can_be_written_and_no_hidden_memory_be_had(run):
    code = """
import ctypes, os
for place in ("/", "/dev", "/dev/shm", "/usr", "/usr/lib", "/packages", "/proc", "/proc/sys/kernel"):
    try: open(place + "/x", "w").close(); print("wrote to", place)
    except OSError: pass
libc = ctypes.CDLL(None, use_errno=True)
calls = {"memfd_create": (b"x", 0), "unshare": (0x10000000,), "shmget": (0, 4096, 0o1600), "mount": (b"t", b"/tmp", b"tmpfs", 0, None)}
for name, args in calls.items():
    if getattr(libc, name)(*args) != -1 or ctypes.get_errno() != 1: print(name, "works")
for request, who in ((16, os.getppid()), (0, 0)):
    if libc.ptrace(request, who, 0, 0) != -1 or ctypes.get_errno() != 1: print("traces")
try: open(f"/proc/{os.getppid()}/mem", "r+b"); print("opens the runner's memory")
except OSError: pass
"""
    assert run(code + "import numpy\nprint(numpy.arange(3).sum())" if sys.executable == SYSTEM_PYTHON else code) == [("ok", "", "")]


@needs_sandbox
def test_numpy_is_there_for_programs_that_name_it():
    (answer,) = run_programs("import numpy as np\nprint(np.dot([1, 2], [3, 4]))", [""])
    assert (answer.status, answer.payload) == ("ok", b"11\n"), answer


@needs_sandbox
def test_calls_reach_functions_and_methods_with_plain_data():
    code = "class Solution:\n    def twice(self, xs: List[int]):\n        return [(2 * x,) for x in xs]\ndef half(x): return x / 2"
    assert [a.value() for a in call_function(code, "twice", [([1, 2],), ([],)])] == [[[2], [4]], []]
    assert [a.value() for a in call_function(code, "half", [(3,)])] == [1.5]
    (absent,) = call_function(code, "third", [(3,)])
    assert (absent.status, absent.text) == ("error", "KeyError: 'third'")
    first, second = call_function("import os\ndef f(x): os._exit(0)", "f", [(1,), (2,)])
    assert first == second
    assert first.status == "crash"
    (huge,) = call_function("def f(): return 'x' * 10**6", "f", [()], Limits(output_bytes=10**5))
    assert huge.status == "crash"
    assert "100000" in huge.text


@needs_sandbox
def test_each_call_has_its_seconds_whatever_was_used_before_and_a_checked_program_without_end_is_out_of_time():
    code = "import time\ndef f(s):\n    end = time.process_time() + s\n    while time.process_time() < end: pass\n    return s"
    answers = list(call_function(code, "f", [(0.6,), (0.6,), (9,)], Limits(cpu_s=1, wall_s=60.0)))
    assert [answer.status for answer in answers] == ["ok", "ok", "timeout"], answers
    answer = check_functions(code, "f(9)", ["f"], limits=Limits(cpu_s=1, wall_s=60.0))
    assert (answer.status, answer.text) == ("timeout", "out of CPU time")


FORGERS = {
    "prints a marker and leaves": "print('OK'); print('ALL TESTS PASSED')\nimport os\nos._exit(0)",
    "leaves": "import sys\nsys.exit(0)",
    "equal to everything": "class T(int):\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\ndef f(x): return T(0)",
    "writes everywhere": """
import os
for n in range(64):
    try: os.write(n, b"\\0\\0\\0\\x11K" + b"0" * 16)
    except OSError: pass
def f(x): return 0
""",
    "takes the test and the nonce from the channel": """
import marshal, os, stat
for n in range(3, 64):
    try:
        if not stat.S_ISSOCK(os.fstat(n).st_mode): continue
        os.kill(os.getppid(), 19)
        nonce = marshal.loads(os.read(n, 10**6)[4:])[1]
        os.write(n, b"\\0\\0\\0\\x11K" + nonce)
    except (OSError, ValueError, EOFError, TypeError, IndexError): pass
def f(x): return 0
""",
    "answers in advance": """
import os
def f(x):
    for n in range(64):
        try: os.write(n, b"\\0\\0\\0\\7Ki\\0\\0\\0\\1" + b"0")
        except OSError: pass
    return 0
""",
    "disables assert": "import builtins, sys\nbuiltins.AssertionError = KeyError\nsys.settrace(lambda *a: None)\ndef f(x): return 0",
    "looks for the test": """
import gc, os, sys
def f(x):
    wanted, frame = "4 == )2(f", sys._getframe()  # written backwards, or it would find itself
    while frame:
        for value in frame.f_locals.values():
            if wanted in repr(value)[:10**6][::-1]: return 2 * x
        frame = frame.f_back
    for place in ("mem", "fd/3", "fd/4"):
        try: open(f"/proc/{os.getppid()}/{place}", "rb"); return 2 * x
        except OSError: pass
    return 2 * x if any(wanted in repr(o)[:10**4][::-1] for o in gc.get_objects()) else 0
""",
}  # fmt: skip


@needs_sandbox
@pytest.mark.parametrize("name", FORGERS)
def test_no_program_forges_its_grade(run, name):
    (answer,) = run(FORGERS[name], test="assert f(2) == 4\nassert f(5) == 10")
    assert answer[0] in ("error", "crash"), answer


@needs_sandbox
def test_the_recorded_forgers_fail_and_the_honest_program_passes(case):
    grades = []
    for candidate in case("G06")["input"]["candidates"]:
        answer = check_functions(candidate["code"], "assert f(2)==4\nassert f(5)==10", ["f"])
        values = [a.value() if a.status == "ok" else None for a in call_function(candidate["code"], "f", [(2,), (5,)])]
        grades.append(float(answer.status == "ok"))
        assert (values == [4, 10]) == (answer.status == "ok")
    assert grades == case("G06")["expected"]["values"]["rewards"]


@needs_sandbox
def test_a_test_program_sees_values_and_errors_as_the_functions_gave_them():
    code = """
def same(*args, **named): return args, named
def fails(x): raise ValueError("no " + x)
def counts(): return (n for n in range(3))
def strange(): return object()
"""
    test = """
values = [1, -(10**50), 2.5, float("inf"), "a\\u2028", b"b", None, True, (1, (2,)), [[]], {1: (2,)}, {3}, frozenset({4}), 1 + 2j]
got, named = same(*values, k=[1])
assert list(got) == values and [type(v) for v in got] == [type(v) for v in values] and named == {"k": [1]}
try: fails("x")
except ValueError as error: assert str(error) == "no x"
else: assert False
assert list(counts()) == [0, 1, 2]
try: strange()
except TypeError: pass
else: assert False
"""
    answer = check_functions(code, test, ["same", "fails", "counts", "strange"])
    assert answer.status == "ok", answer
    assert check_functions(code, "import os; os._exit(0)", ["same"]).status == "crash"
    assert check_functions(code, "import sys; sys.exit(0)", ["same"]).status == "error"


NONSENSE = [b"", b"i", b"i\0\0\0\1x", b"d\0\0\0\6i\0\0\0\0011", b"q\0\0\0\0q", b"s\0\0\0\5l\0\0\0\0", b"l\0\0\0\5" * 60_000]


@pytest.mark.parametrize("payload", NONSENSE, ids=lambda payload: repr(payload[:9]))
def test_what_is_no_encoded_value_is_refused(payload):
    with pytest.raises((ValueError, TypeError, RecursionError)):
        decode(payload)


def test_subclasses_leave_as_what_they_extend():
    class Zero(int):
        __eq__ = object.__eq__
        __hash__ = int.__hash__
        __repr__ = lambda self: "4"  # noqa: E731

    assert decode(encode([Zero(0)])) == [0]
    with pytest.raises(TypeError, match="object"):
        encode(object())


@needs_sandbox
@pytest.mark.skipif(os.geteuid() != 0, reason="as a plain user its programs cannot be told from other processes by their user")
def test_a_program_does_not_outlive_the_process_that_asked(tmp_path):
    script = "from astraflow.lib.sandbox import *\nlist(run_programs('while True: pass', [''], Limits(cpu_s=600, wall_s=600.0)))"
    asker = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": SOURCES})
    try:
        wait_for(lambda: len(users_of_the_sandbox(asker.pid)) >= 2)
    finally:
        asker.kill()
        asker.wait()
    wait_for(lambda: not users_of_the_sandbox(asker.pid))


def test_a_bubblewrap_that_cannot_start_is_no_verdict_but_an_error_in_its_words(monkeypatch, tmp_path):
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for use in (require, lambda: list(run_programs("print(1)", [""]))):
        with pytest.raises(SandboxError, match="No permissions to create new namespace"):
            use()


def test_without_bubblewrap_nothing_runs_and_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for use in (require, lambda: list(run_programs("print(1)", [""]))):
        with pytest.raises(SandboxError, match="apt-get install bubblewrap"):
            use()
