"""The trainer's ranks on one node: they share one memory and publish a version together or not at all.

The first rank of a node owns the memory and the sender. The others get the memory's descriptor over a unix socket (SCM_RIGHTS) in the
abstract namespace: it has no file that kill -9 could leave behind and no length limit of its path, and unlike /proc/<pid>/fd it needs
neither the same process-id namespace nor the right to trace. The connections stay and carry, per version:

    begin     every rank → first   its tensors are fine      first → every rank   half to write, after the readers left it
    written   every rank → first   its rows are written      first → every rank   published
A rank that fails says so, and one that dies closes its socket: either way all ranks raise, at once, and the half is not published.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from astraflow.lib.aio import one_line
from astraflow.protocol.codec import encode
from astraflow.protocol.errors import AstraFlowError, ConfigError, DeadlinePassed, RemoteError

T = TypeVar("T")

TROUBLE = (AstraFlowError, RuntimeError, OSError, ValueError)
"""What may go wrong while tensors are looked at and copied (torch raises RuntimeError); anything else ends the process, which the
others notice as well."""
GREETING_S = 5.0
MAX_FRAME = 16 << 10
MAX_TROUBLE = 2000


class Hello(msgspec.Struct, tag=True):
    rank: int
    secret: str


class Report(msgspec.Struct, tag=True):
    """One rank's part of a step is done, or failed."""

    what: str
    trouble: str = ""


class Verdict(msgspec.Struct, tag=True):
    what: str
    value: int = -1
    trouble: str = ""


_FRAME = msgspec.msgpack.Decoder[Any](Hello | Report | Verdict)


def place() -> str:
    """Equal for processes that can share memory through an abstract socket: same boot, network namespace and user."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.getuid()}"
    return secrets.token_hex(8)  # a node of its own


class Crew(Protocol):
    """All ranks of a node, seen from one of them."""

    def together(self, what: str, mine: Callable[[], T], lead: Callable[[], int]) -> tuple[T, int]:
        """Run `mine` on every rank, then `lead` on the first one; its result reaches all. Raises on all ranks when one of them fails:
        its own error there, RemoteError elsewhere, DeadlinePassed when a rank does not come.
        """
        ...

    def close(self) -> None: ...


class Leader:
    """The first rank of a node; without other ranks it waits for nobody."""

    def __init__(self, rank: int, others: Sequence[int] = (), wait_s: float = 60.0):
        self._rank, self._wait_s = rank, wait_s
        self._missing = set(others)
        self._ranks: dict[int, socket.socket] = {}
        self._listening: socket.socket | None = None
        self._name, self._secret = f"astraflow-{secrets.token_hex(16)}", secrets.token_hex(16)
        if self._missing:
            try:
                self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._listening.bind(f"\0{self._name}")
                self._listening.listen(len(self._missing) + 16)
            except OSError as error:
                raise ConfigError(f"several ranks on one node need abstract unix sockets (Linux): {error}") from None

    @property
    def address(self) -> str:
        """What the other ranks join with. A secret: whoever knows it gets the weights."""
        return f"{self._name}:{self._secret}"

    def admit(self, fd: int) -> None:
        """Hand the memory to every other rank. Raises DeadlinePassed, naming the ranks that did not come."""
        end = time.monotonic() + self._wait_s
        while self._missing and self._listening is not None:
            self._listening.settimeout(max(0.001, end - time.monotonic()))
            try:
                sock, _ = self._listening.accept()
            except TimeoutError:
                raise DeadlinePassed(f"ranks {sorted(self._missing)} did not join their node within {self._wait_s:g} s") from None
            rank = self._greet(sock)
            if rank in self._missing:
                sock.settimeout(None)
                socket.send_fds(sock, [encode(Verdict("joined"))], [fd])
                self._missing.discard(rank)
                self._ranks[rank] = sock
            else:
                sock.close()
        self._stop_listening()

    def _greet(self, sock: socket.socket) -> int:
        """The rank at the other end; −1 for a stranger."""
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        if uid != os.getuid():
            return -1
        sock.settimeout(GREETING_S)
        with contextlib.suppress(OSError, msgspec.DecodeError):
            frame = _FRAME.decode(sock.recv(MAX_FRAME))
            if isinstance(frame, Hello) and hmac.compare_digest(frame.secret.encode(), self._secret.encode()):
                return frame.rank
        return -1

    def together(self, what: str, mine: Callable[[], T], lead: Callable[[], int]) -> tuple[T, int]:
        """See `Crew`."""
        results: list[T] = []
        try:
            try:
                results.append(mine())
            finally:  # also after a failure of our own: every rank waits for one answer to one report
                trouble = self._collect(what)
            if trouble:
                raise RemoteError(f"{what}: {trouble}")
            value = lead()
        except TROUBLE as error:
            self._tell(Verdict(what, trouble=f"rank {self._rank}: {one_line(error)}"[:MAX_TROUBLE]))
            raise
        self._tell(Verdict(what, value))
        return results[0], value

    def _collect(self, what: str) -> str:
        """One report of every rank; what went wrong."""
        end = time.monotonic() + self._wait_s
        waiting = dict(self._ranks)
        troubles: list[str] = []
        poller = select.poll()
        for sock in waiting.values():
            poller.register(sock, select.POLLIN)
        while waiting:
            ready = {fd for fd, _ in poller.poll(max(0.0, end - time.monotonic()) * 1000)}
            if not ready:
                raise DeadlinePassed(f"{what}: ranks {sorted(waiting)} were not there within {self._wait_s:g} s")
            for rank, sock in [(rank, sock) for rank, sock in waiting.items() if sock.fileno() in ready]:
                frame = _receive(sock, f"{what}: rank {rank}")
                if not isinstance(frame, Report) or frame.what != what:
                    troubles.append(f"rank {rank} is at {getattr(frame, 'what', frame)!r}")
                elif frame.trouble:
                    troubles.append(frame.trouble)
                poller.unregister(sock)
                del waiting[rank]
        return "; ".join(troubles)[:MAX_TROUBLE]

    def _tell(self, verdict: Verdict) -> None:
        for sock in self._ranks.values():
            with contextlib.suppress(OSError):  # a dead rank is noticed by the next collection
                sock.send(encode(verdict))

    def _stop_listening(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    def close(self) -> None:
        """Close the connections; the other ranks notice at their next step."""
        self._stop_listening()
        for sock in self._ranks.values():
            sock.close()
        self._ranks.clear()


class Follower:
    """Any other rank of a node. `patience_s`: how long the first one may take beyond waiting for all reports."""

    def __init__(self, rank: int, address: str, wait_s: float, patience_s: float):
        self._rank, self._wait_s = rank, 2 * wait_s + patience_s
        name, _, secret = address.partition(":")
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(self._wait_s)
        try:
            self._sock.connect(f"\0{name}")
            self._sock.send(encode(Hello(rank, secret)))
            data, fds, _, _ = socket.recv_fds(self._sock, MAX_FRAME, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            self._sock.close()
            raise RemoteError(f"rank {rank} cannot join the ranks of its node: {one_line(error)}") from None
        if not data or len(fds) != 1:
            self._sock.close()
            raise RemoteError(f"rank {rank} was not admitted to the ranks of its node")
        self.fd = fds[0]
        """Descriptor of the shared memory; ours to close."""

    def together(self, what: str, mine: Callable[[], T], lead: Callable[[], int]) -> tuple[T, int]:
        """See `Crew`; `lead` runs elsewhere."""
        try:
            result = mine()
        except TROUBLE as error:
            self._ask(Report(what, f"rank {self._rank}: {one_line(error)}"[:MAX_TROUBLE]))
            raise
        verdict = self._ask(Report(what))
        if verdict.trouble or verdict.what != what:
            raise RemoteError(f"{what}: {verdict.trouble or f'the first rank of the node is at {verdict.what!r}'}")
        return result, verdict.value

    def _ask(self, report: Report) -> Verdict:
        what = f"{report.what}: the first rank of the node"
        try:
            self._sock.send(encode(report))
        except OSError as error:
            raise RemoteError(f"{what} is gone: {one_line(error)}") from None
        verdict = _receive(self._sock, what)
        if not isinstance(verdict, Verdict):
            raise RemoteError(f"{what} sent {verdict!r}")
        return verdict

    def close(self) -> None:
        """Leave."""
        self._sock.close()


def _receive(sock: socket.socket, who: str) -> Any:
    try:
        data = sock.recv(MAX_FRAME)
        if data:
            return _FRAME.decode(data)
    except TimeoutError:
        raise DeadlinePassed(f"{who} did not answer within {sock.gettimeout():g} s") from None
    except ConnectionError:  # it was killed before it read what we sent
        pass
    except (OSError, msgspec.DecodeError) as error:
        raise RemoteError(f"{who}: {one_line(error)}") from None
    raise RemoteError(f"{who} is gone")
