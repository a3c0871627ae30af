"""The receiving side of weight streams: N connections, each with its own range, straight into the target's memory.

Blocking, with one thread per stream. A chunk counts when its checksum is right; a broken connection goes on at the byte where it
stopped, a damaged chunk is fetched again. Verified chunks survive a new ticket for the same bytes (the sender was restarted).
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from dataclasses import dataclass, field

import xxhash

from astraflow.lib.aio import Backoff
from astraflow.protocol.errors import AstraFlowError, DeadlinePassed, DigestMismatch, Unavailable
from astraflow.protocol.message import PROTOCOL_VERSION
from astraflow.protocol.weights import StreamHello, TransferTicket
from astraflow.weights.config import WeightsConfig
from astraflow.weights.stream import hello_bytes

log = logging.getLogger(__name__)

REFUSALS = 2
"""Connections in a row that the sender closed without a byte, after which the ticket is taken for dead."""


class TicketGone(Unavailable):
    """The sender no longer knows the ticket (cancelled, or the sender is a new one): ask for another."""


class _Refused(Exception):
    """Closed without a byte."""


@dataclass
class FetchCounts:
    """What went wrong and was repaired."""

    connections: int = 0
    broken: int = 0
    damaged_chunks: int = 0
    received_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, value: int = 1) -> None:
        with self.lock:
            setattr(self, name, getattr(self, name) + value)


class Fetch:
    """Fills `target` with the bytes of one transfer. `run` may be called again with a new ticket for the same bytes."""

    def __init__(self, target: memoryview, host: str, token: str, config: WeightsConfig, streams: int, counts: FetchCounts):
        self._target, self._host, self._token, self._config = target, host, token, config
        self._streams, self._counts = streams, counts
        self._ticket: TransferTicket | None = None
        self._verified = bytearray()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._end_s = 0.0
        self._aborted = False

    def run(self, ticket: TransferTicket, end_s: float) -> None:
        """Fetch all that is missing, until time.monotonic() reaches `end_s`.

        Raises TicketGone, DeadlinePassed, Unavailable (the network) or DigestMismatch (bytes that stay damaged).
        """
        old = self._ticket
        if old is None or (old.chunk_bytes, old.chunk_hashes) != (ticket.chunk_bytes, ticket.chunk_hashes):
            self._verified = bytearray(len(ticket.chunk_hashes))
        self._ticket, self._end_s = ticket, end_s
        with self._lock:
            if not self._aborted:
                self._error = None
                self._stop.clear()
        missing = [i for i, done in enumerate(self._verified) if not done]
        parts = max(1, min(self._streams, len(missing)))
        spans = [missing[len(missing) * k // parts : len(missing) * (k + 1) // parts] for k in range(parts)]
        if self._error is not None:
            raise self._error
        threads = [threading.Thread(target=self._guard, args=(s,), name=f"weights-{k}", daemon=True) for k, s in enumerate(spans) if s]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        assert all(self._verified), "without an error every chunk was verified"

    def abort(self, error: AstraFlowError) -> None:
        """From another thread: `run` raises this error soon, now and whenever it is called again."""
        self._fail(error, for_good=True)

    def _guard(self, chunks: list[int]) -> None:
        """Body of a thread: the first error stops them all."""
        try:
            for first, last in _neighbours(chunks):
                self._span(first, last)
        except AstraFlowError as error:
            self._fail(error)
        except OSError as error:
            self._fail(Unavailable(f"weight stream: {error}"))

    def _fail(self, error: Exception, for_good: bool = False) -> None:
        with self._lock:
            self._aborted = self._aborted or for_good
            if self._error is None:
                self._error = error
            self._stop.set()
            for sock in self._open:
                _shut(sock)

    def _span(self, first: int, last: int) -> None:
        """Chunks first … last, over as many connections as it takes."""
        ticket = self._ticket
        assert ticket is not None
        cursor = _Cursor(first * ticket.chunk_bytes, min((last + 1) * ticket.chunk_bytes, ticket.size_bytes))
        backoff = Backoff(first_s=0.05, max_s=2.0)
        failures = refusals = 0
        while cursor.position < cursor.end and not self._stop.is_set():
            before = cursor.best
            try:
                self._connect_and_read(ticket, cursor)
                continue
            except _Refused:
                refusals += 1
                error: AstraFlowError = TicketGone(f"transfer of version {ticket.version}: the sender closed the stream without a byte")
                if refusals >= REFUSALS:
                    raise error from None
            except DigestMismatch as damaged:
                error, refusals = damaged, 0
            except OSError as broken:
                error, refusals = Unavailable(f"weight stream to {self._host}:{ticket.stream_port}: {broken}"), 0
            self._counts.add("broken")
            failures = 1 if cursor.best > before else failures + 1
            if failures >= self._config.attempts:
                raise error
            log.info("%s (at byte %d of %d); going on", error, cursor.position, ticket.size_bytes)
            if cursor.best > before:
                backoff.reset()
            self._stop.wait(min(backoff.next(), max(0.0, self._end_s - time.monotonic())))
            self._check_time(ticket)

    def _check_time(self, ticket: TransferTicket) -> None:
        if time.monotonic() >= self._end_s:
            raise DeadlinePassed(f"transfer of version {ticket.version}: not done by its deadline")

    def _connect_and_read(self, ticket: TransferTicket, cursor: _Cursor) -> None:
        """One connection for the rest of the span."""
        limit_s = max(0.01, min(self._config.io_timeout_s, self._end_s - time.monotonic()))
        self._counts.add("connections")
        with socket.create_connection((self._host, ticket.stream_port), limit_s) as sock:
            with self._lock:
                self._open.add(sock)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                hello = StreamHello(
                    protocol_version=PROTOCOL_VERSION,
                    token=self._token,
                    transfer_id=ticket.transfer_id,
                    offset=cursor.position,
                    length=cursor.end - cursor.position,
                )
                sock.sendall(hello_bytes(hello))
                self._read(sock, ticket, cursor)
            finally:
                with self._lock:
                    self._open.discard(sock)

    def _read(self, sock: socket.socket, ticket: TransferTicket, cursor: _Cursor) -> None:
        first = True
        while cursor.position < cursor.end and not self._stop.is_set():
            self._check_time(ticket)
            sock.settimeout(max(0.01, min(self._config.io_timeout_s, self._end_s - time.monotonic())))
            chunk = cursor.position // ticket.chunk_bytes
            start, stop = chunk * ticket.chunk_bytes, min((chunk + 1) * ticket.chunk_bytes, cursor.end)
            try:
                got = sock.recv_into(self._target[cursor.position : stop])
            except ConnectionResetError:
                if first:
                    raise _Refused from None
                raise
            if got == 0:
                raise _Refused if first else ConnectionError("closed by the sender")
            first = False
            cursor.position += got
            cursor.best = max(cursor.best, cursor.position)
            self._counts.add("received_bytes", got)
            if cursor.position < stop:
                continue
            if xxhash.xxh3_64_intdigest(self._target[start:stop]) != ticket.chunk_hashes[chunk]:
                cursor.position = start
                self._counts.add("damaged_chunks")
                raise DigestMismatch(f"transfer of version {ticket.version}: chunk {chunk} is damaged")
            self._verified[chunk] = 1


@dataclass
class _Cursor:
    """Where a span is: `position` moves with every byte (and back to the chunk's start when it is damaged)."""

    position: int
    end: int
    best: int = 0
    """The furthest byte ever reached: fetching a damaged chunk again is no progress."""


def _neighbours(chunks: list[int]) -> list[tuple[int, int]]:
    """Runs of consecutive numbers as (first, last)."""
    runs: list[tuple[int, int]] = []
    for chunk in chunks:
        if runs and runs[-1][1] == chunk - 1:
            runs[-1] = (runs[-1][0], chunk)
        else:
            runs.append((chunk, chunk))
    return runs


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        log.debug("stream was closed already")
