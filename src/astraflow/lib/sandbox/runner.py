"""What runs inside the sandbox, sent there compiled. Standard library only, and little of it: every import is paid per program.

It starts the untrusted program under limits and answers requests over the channel (frames: four bytes of length, then the payload).
It never learns what the right output of a program or the right value of a call is, so nothing in here need be trusted with them.
Only in `check` mode, where a test *program* judges the functions, does the verdict fall inside:

    checker (forked first, reads test and nonce afterwards) ──marshal: name, arguments──▶ functions under test
            ◀── plain data only (`encode`): no object of theirs, with an `__eq__` of its own, gets across ──

The two are separate processes. The one under test holds no descriptor of the channel, was forked before test and nonce were read,
and may neither trace the checker nor open its memory (not dumpable, ptrace denied).
"""

from __future__ import annotations

import builtins
import ctypes
import marshal
import os
import resource
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

OK, ERROR, TIMEOUT = b"K", b"E", b"T"
"""First byte of an answer; the rest is output, encoded value or nonce, or a text that says what went wrong."""
READY = b"R"
CHANNEL = 3
BOOTSTRAP = """
import marshal, os, sys
os.dup2(int(sys.argv[1]), 3)
os.closerange(4, int(sys.argv[1]) + 1)
with open(3, "rb", 0, closefd=False) as channel:
    code = channel.read(int(sys.argv[2]))
exec(marshal.loads(code))
"""
"""What `python -c` runs: it takes this module's code from the channel, because compiling it would take longer than the rest."""
MAX_TEXT = 2000
STACK_BYTES = 120 * 1024**2
"""A cached recursive function takes C stack per level; the kernel keeps 128 MiB free below a stack."""
RECURSION = 50_000
"""As LiveCodeBench's own grader sets it."""
SIGXCPU = 24
PR_SET_DUMPABLE, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 4, 22, 2
_libc = ctypes.CDLL(None, use_errno=True)


def receive(source: int, limit: int = 1 << 31) -> bytes | None:
    """The next frame; None at the end of the stream. Raises ValueError for a frame over the limit."""
    head = _exactly(source, 4)
    if head is None:
        return None
    size = int.from_bytes(head, "big")
    if size > limit:
        raise ValueError(f"frame of {size} bytes")
    return _exactly(source, size)


def _exactly(source: int, size: int) -> bytes | None:
    parts = []
    while size:
        part = os.read(source, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def send(sink: int, payload: bytes) -> None:
    write(sink, len(payload).to_bytes(4, "big") + payload)


def write(sink: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(sink, view) :]


SWALLOWED = ("StopIteration", "StopAsyncIteration")
"""What `map`, `filter`, `iter` and loops take for an ordinary end: raised into a test (`all(map(…))`) it would pass it unseen."""
CONTAINERS = {"l": list, "t": tuple, "s": set, "f": frozenset}


def encode(value: Any) -> bytes:
    """Plain data: a tag, four bytes of length, then text or the encoded items. Subclasses become what they extend.

    Not `json`, whose import would be a fifth of the time that a small program takes. Raises TypeError for anything but plain data.
    """
    tag, content = _parts(value)
    payload = b"".join([encode(item) for item in content]) if isinstance(content, list) else content
    return tag.encode() + len(payload).to_bytes(4, "big") + payload


def _parts(value: Any) -> tuple[str, Any]:
    if value is None or value is True or value is False:
        return "n", repr(value).encode()
    if isinstance(value, int):
        return "i", int.__repr__(value).encode()
    if isinstance(value, float):
        return "r", float.__repr__(value).encode()
    if isinstance(value, str):
        return "u", str.encode(value, "utf-8", "surrogatepass")
    if isinstance(value, bytes | bytearray):
        return "b", bytes(value)
    if isinstance(value, dict):
        return "d", [part for item in value.items() for part in item]
    if isinstance(value, complex):
        return "c", [value.real, value.imag]
    for tag, kind in CONTAINERS.items():
        if isinstance(value, kind):
            return tag, list(value)
    if hasattr(value, "__next__"):
        return "g", list(value)
    if type(value).__module__ == "numpy":
        return _parts(value.tolist())
    raise TypeError(f"a value of type {type(value).__name__} cannot leave the program's process; expected plain data")


def decode(payload: bytes) -> Any:
    """The value of `encode`, made of builtin types. Raises ValueError, TypeError, RecursionError for bytes that are none."""
    (value,) = _items(payload)
    return value


def _items(payload: bytes) -> list[Any]:
    found, start = [], 0
    while start < len(payload):
        end = start + 5 + int.from_bytes(payload[start + 1 : start + 5], "big")
        if end > len(payload):
            raise ValueError("cut off")
        found.append(_value(chr(payload[start]), payload[start + 5 : end]))
        start = end
    return found


def _value(tag: str, content: bytes) -> Any:
    if tag == "n":
        return {b"None": None, b"True": True, b"False": False}.get(content)
    if tag in "ir":
        return (int if tag == "i" else float)(content)
    if tag == "u":
        return content.decode("utf-8", "surrogatepass")
    if tag == "b":
        return content
    items = _items(content)
    if tag == "d":
        return dict(zip(items[::2], items[1::2], strict=True))
    if tag == "c":
        return complex(*items)
    return iter(items) if tag == "g" else CONTAINERS.get(tag, list)(items)


def attempt(function: Callable[..., Any], *args: Any) -> tuple[bool, Any]:
    """Result of the call, or what it raised as text."""
    try:
        return True, function(*args)
    except BaseException as error:  # the boundary to the program: whatever it raises, SystemExit too, is its result
        return False, f"{type(error).__name__}: {error}"[:MAX_TEXT]


def main() -> None:
    """The channel is descriptor 3: see `BOOTSTRAP`."""
    sys.argv = ["program"]
    payload = receive(CHANNEL)
    assert payload is not None
    setup = marshal.loads(payload)
    _limit(setup)
    send(CHANNEL, READY)
    MODES[setup["mode"]](setup)


def _limit(setup: dict[str, Any]) -> None:
    null = os.open("/dev/null", os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    if setup["uid"]:  # started as root: RLIMIT_NPROC binds every user but the real root
        os.setgroups([])
        os.setresgid(setup["uid"], setup["uid"], setup["uid"])
        os.setresuid(setup["uid"], setup["uid"], setup["uid"])
    for name, value in setup["rlimits"].items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard), hard))
    _prctl(PR_SET_DUMPABLE, 0)
    sys.set_int_max_str_digits(0)
    sys.setrecursionlimit(RECURSION)
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # what `site` would have given
    sys.path.append("/packages")


def _prctl(option: int, *args: Any) -> None:
    if _libc.prctl(option, *args) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def confine(setup: dict[str, Any]) -> None:
    """From here on no new process, no tracing, no memory that the limits do not count (`filter`: see `seccomp.py`)."""

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    program = Program(len(setup["filter"]) // 8, setup["filter"])
    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program))


def _cpu(seconds: int, last: bool = True, fresh: bool = False) -> None:
    """Let this process use so many more seconds before SIGXCPU ends it. `last`: for good; who ignores the signal or lifts the limit is
    killed a second later. Otherwise it can be set anew, and is no more than a promise. The limit counts whole seconds, so what was used
    before is rounded up, and nobody gets less than was promised; `fresh`: a new fork, which has used nothing."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    end = seconds if fresh else -int(-(used.ru_utime + used.ru_stime) // 1) + seconds
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if last:
        hard = end + 1 if hard == resource.RLIM_INFINITY else min(end + 1, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (end if hard == resource.RLIM_INFINITY else min(end, hard), hard))


def _module(name: str) -> dict[str, Any]:
    module = type(sys)(name)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    return module.__dict__


def programs(setup: dict[str, Any]) -> None:
    """Every request is a standard input; a fresh fork reads it, so a case costs no start of Python and sees nothing of another."""
    exec(setup["prelude"], {})  # the imports, once for all forks
    compiled, code = attempt(compile, setup["code"], "<program>", "exec")
    while (text := receive(CHANNEL)) is not None:
        streams = [os.open("/tmp", os.O_TMPFILE | os.O_RDWR) for _ in range(3)]
        write(streams[0], text)
        os.lseek(streams[0], 0, os.SEEK_SET)
        child = os.fork()
        if child == 0:
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            os.closerange(CHANNEL, setup["rlimits"]["NOFILE"])
            _cpu(setup["cpu_s"], fresh=True)
            confine(setup)
            _run(setup, code if compiled else setup["code"])
            return  # the interpreter ends as it always does: threads are joined, buffers written
        _, status, used = os.wait4(child, 0)
        late = used.ru_utime + used.ru_stime > setup["cpu_s"]  # it kept SIGXCPU from ending it
        send(CHANNEL, _answer(-SIGXCPU if late else os.waitstatus_to_exitcode(status), streams, setup["output_bytes"]))
        for stream in streams:
            os.close(stream)
        _clear("/tmp")


def _clear(place: str) -> None:
    """Remove all that a case left, so that the next one cannot find it. Directories are emptied into `place` first: neither their depth
    nor the length of their paths matters. Nobody else is at work here: the case has ended, and was one process."""
    number = 0
    while names := os.listdir(place):
        for path in [f"{place}/{name}" for name in names]:
            if not _opened(path):
                os.unlink(path)
                continue
            for inner in [f"{path}/{name}" for name in os.listdir(path)]:
                _opened(inner)  # to be moved, a directory must be writable itself
                while os.path.lexists(f"{place}/{number}"):
                    number += 1
                os.rename(inner, f"{place}/{number}")
            os.rmdir(path)


def _opened(path: str) -> bool:
    """Whether it is a directory, made accessible."""
    found = os.path.isdir(path) and not os.path.islink(path)
    if found:
        os.chmod(path, 0o700)
    return found


def _run(setup: dict[str, Any], code: Any) -> None:
    scope = _module("__main__")
    exec(setup["prelude"], scope)
    try:
        exec(code, scope)
    except SystemExit:
        return  # `exit()` and `sys.exit(1)` after the last line of output are common, and no failure


def _answer(exit_code: int, streams: list[int], limit: int) -> bytes:
    if exit_code == 0:
        return OK + _content(streams[1], 0, limit)
    if exit_code == -SIGXCPU:
        return TIMEOUT + b"out of CPU time"
    size = os.fstat(streams[2]).st_size
    said = _content(streams[2], max(0, size - MAX_TEXT), MAX_TEXT) or b"no message"
    return ERROR + f"exit code {exit_code}: ".encode() + said


def _content(stream: int, start: int, limit: int) -> bytes:
    os.lseek(stream, start, os.SEEK_SET)
    parts = []
    while limit > 0 and (part := os.read(stream, limit)):
        parts.append(part)
        limit -= len(part)
    return b"".join(parts)


def calls(setup: dict[str, Any]) -> None:
    """Answers are JSON: tuples are lists in it, keys are strings."""
    import json

    _cpu(setup["total_cpu_s"])
    serve(CHANNEL, CHANNEL, setup, lambda value: json.dumps(value, default=_plain).encode(), each_s=setup["cpu_s"])


def _plain(value: Any) -> Any:
    if type(value).__module__ == "numpy":
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} is no JSON")


def serve(source: int, sink: int, setup: dict[str, Any], encoded: Callable[[Any], bytes], each_s: int = 0) -> None:
    """Load the program once, then every request is a call: name, positional and named arguments.

    `each_s`: CPU seconds of each call; 0 = there is one limit for all of them, and it cannot be lifted.
    """
    confine(setup)
    _cpu(each_s or setup["cpu_s"], last=not each_s, fresh=not each_s)
    scope = _module("solution")
    loaded, error = attempt(lambda: exec(compile(setup["prelude"] + setup["code"], "<program>", "exec"), scope))
    while (request := receive(source)) is not None:
        if each_s:
            _cpu(each_s, last=False)
        worked, result = attempt(_call, scope, request, encoded) if loaded else (False, error)
        send(sink, OK + result if worked else ERROR + result.encode("utf-8", "replace"))


def _call(scope: dict[str, Any], request: bytes, encoded: Callable[[Any], bytes]) -> bytes:
    """Of the function, or of the method of a new `Solution` (the call-based form of contest sites)."""
    name, args, named = marshal.loads(request)
    solution: Any = scope.get("Solution")
    return encoded((getattr(solution(), name) if hasattr(solution, name) else scope[name])(*args, **named))


def check(setup: dict[str, Any]) -> None:
    """Fork the program under test, then judge it by a test program that calls its functions through proxies."""
    scope = _module("checker")
    usable, error = attempt(exec, setup["context"], scope)
    (requests, to_program), (answers, to_checker) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        for descriptor in (CHANNEL, to_program, answers):
            os.close(descriptor)
        serve(requests, to_checker, setup, encode)
        return
    os.close(requests)
    os.close(to_checker)
    confine(setup)
    request = receive(CHANNEL)
    assert request is not None
    test, nonce = marshal.loads(request)
    _cpu(setup["cpu_s"])

    def proxy(name: str) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            send(to_program, marshal.dumps((name, args, named)))
            return _result(receive(answers, setup["output_bytes"]))

        return call

    scope.update({name: proxy(name) for name in setup["functions"]})
    passed, error = attempt(exec, test, scope) if usable else (False, f"context: {error}")
    if passed:
        send(CHANNEL, OK + nonce)
    else:
        send(CHANNEL, TIMEOUT + b"out of CPU time" if _used_up(child, setup["cpu_s"]) else ERROR + error.encode("utf-8", "replace"))


def _used_up(child: int, seconds: int) -> bool:
    """End the program; whether it had no CPU time left."""
    os.kill(child, 9)  # changes nothing about an end that has begun
    _, status, used = os.wait4(child, 0)
    return os.waitstatus_to_exitcode(status) == -SIGXCPU or used.ru_utime + used.ru_stime > seconds


def _result(answer: bytes | None) -> Any:
    if answer is None:
        raise RuntimeError("the program ended")
    if answer[:1] == OK:
        return decode(answer[1:])
    kind, _, message = answer[1:].decode().partition(": ")
    known = getattr(builtins, kind, None)
    if kind not in SWALLOWED and isinstance(known, type) and issubclass(known, Exception):
        raise known(message)
    raise RuntimeError(f"{kind}: {message}")


MODES = {"programs": programs, "calls": calls, "check": check}

if __name__ == "__main__":
    main()
