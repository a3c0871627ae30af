"""The receiving side of weight streams: N connections that share the work, and one verified beginning that grows.

Blocking, with one thread per stream. Each stream takes the next piece of whole chunks before it is done with its last one, so that
all end together and the transfer fills from its beginning. A chunk counts when its checksum is right; a broken connection goes on at
the byte where it stopped, also under a new ticket for the same bytes (the sender was restarted); a damaged chunk is fetched again.
The caller's own thread follows the verified beginning: what can be hashed or decoded is, while the rest still travels.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import xxhash

from astraflow.lib.aio import Backoff
from astraflow.lib.net import host_port
from astraflow.lib.tls import Tls, client_context, not_accepted
from astraflow.protocol.errors import AstraFlowError, AuthError, DeadlinePassed, DigestMismatch, Unavailable, WeightError
from astraflow.protocol.message import PROTOCOL_VERSION
from astraflow.protocol.weights import StreamHello, TransferTicket
from astraflow.weights.config import WeightsConfig
from astraflow.weights.stream import hello_bytes

log = logging.getLogger(__name__)

REFUSALS = 2
"""Connections in a row that the sender closed without a byte, after which the ticket is taken for dead."""
PIECES_PER_STREAM = 4
"""A stream takes this part of its share of what is left."""
AHEAD = 2
"""Pieces that a stream has asked for: the next one's first byte comes without waiting for a round trip."""
MAX_PIECE = 64 << 20
"""Bytes of a piece; more would not hide more of a round trip."""
BUFFER = 1 << 20
"""Bytes that a stream receives, hashes and hands on at a time: few enough to stay in the cache between the three."""


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


@dataclass
class _Piece:
    """A run of chunks and how far it is."""

    position: int
    """The next byte to come."""
    end: int
    best: int
    """The furthest byte ever reached: fetching a damaged chunk again is no progress."""
    running: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)
    """Hash of the present chunk so far."""


class Fetch:
    """Fetches the bytes of one transfer. `write(offset, bytes)` takes them, from all threads, each byte once unless it was damaged.

    `run` may be called again with a new ticket for the same bytes (`fits`).
    """

    def __init__(
        self,
        write: Callable[[int, memoryview], None],
        host: str,
        token: str,
        config: WeightsConfig,
        streams: int,
        counts: FetchCounts,
        tls: Tls | None = None,
    ):
        """`tls`: None = the streams are plain."""
        self.write, self.host, self.token, self.config, self.counts, self.tls = write, host, token, config, counts, tls
        self.ticket: TransferTicket | None = None
        self.end_s = 0.0
        self.stop = threading.Event()
        self._streams = streams
        self._verified = bytearray()
        self._ready_chunks = 0
        """Chunks at the beginning that are all verified."""
        self._pieces: deque[_Piece] = deque()
        self._open: set[socket.socket] = set()
        self._changed = threading.Condition()
        self._running = 0
        self._error: Exception | None = None
        self._aborted = False

    def fits(self, ticket: TransferTicket) -> bool:
        """True when the ticket is for the bytes that are being fetched already."""
        old = self.ticket
        return old is None or (old.chunk_bytes, old.chunk_hashes, old.links) == (ticket.chunk_bytes, ticket.chunk_hashes, ticket.links)

    def run(self, ticket: TransferTicket, end_s: float, follow: Callable[[int], None]) -> None:
        """Fetch all that is missing, until time.monotonic() reaches `end_s`.

        `follow(ready)` is called in this thread, first with what is there already: the first `ready` bytes are verified.
        Raises TicketGone, DeadlinePassed, Unavailable (the network) or DigestMismatch (bytes that stay damaged), and what `follow`
        raises; when it returns, `follow` has seen the whole transfer.
        """
        assert self.fits(ticket)
        if self.ticket is None:
            self._verified = bytearray(len(ticket.chunk_hashes))
            self._pieces = deque([_Piece(0, ticket.size_bytes, 0)])
        self.ticket, self.end_s = ticket, end_s
        threads = self._plan(ticket)
        try:
            for thread in threads:
                thread.start()
            self._follow(ticket, follow)
        except (AstraFlowError, OSError) as error:
            self.fail(error if isinstance(error, AstraFlowError) else WeightError(f"staging: {error}"))
        finally:
            self._halt()
            for thread in threads:
                thread.join()
        if self._error is not None:
            raise self._error
        assert all(self._verified), "without an error every chunk was verified"

    def _plan(self, ticket: TransferTicket) -> list[threading.Thread]:
        """The threads that will fetch what is missing."""
        # Every stream has its first piece before any of them may take a second one: N streams are N connections.
        first_ones = [piece for _ in range(self._streams) if (piece := self.take()) is not None]
        with self._changed:
            if self._aborted:
                assert self._error is not None
                raise self._error
            self._error, self._running = None, len(first_ones)
            self.stop.clear()
        return [threading.Thread(target=self._guard, args=(p,), name=f"weights-{k}", daemon=True) for k, p in enumerate(first_ones)]

    def _follow(self, ticket: TransferTicket, follow: Callable[[int], None]) -> None:
        seen = -1
        while True:
            with self._changed:
                while self._ready_chunks == seen and self._running and self._error is None:
                    self._changed.wait()
                if self._error is not None:
                    return
                chunks, ended = self._ready_chunks, not self._running
            if chunks != seen:
                follow(min(chunks * ticket.chunk_bytes, ticket.size_bytes))
                seen = chunks
            elif ended:
                return

    def abort(self, error: AstraFlowError) -> None:
        """From another thread: `run` raises this error soon, now and whenever it is called again."""
        self.fail(error, for_good=True)

    def fail(self, error: Exception, for_good: bool = False) -> None:
        """The first error ends all streams."""
        with self._changed:
            self._aborted = self._aborted or for_good
            if self._error is None:
                self._error = error
        self._halt()

    def _halt(self) -> None:
        self.stop.set()
        with self._changed:
            for sock in self._open:
                _shut(sock)
            self._changed.notify_all()

    def _guard(self, first: _Piece) -> None:
        """Body of a thread."""
        stream = _Stream(self, first)
        try:
            stream.run()
        except AstraFlowError as error:
            self.fail(error)
        finally:
            self.give_back(stream.mine)
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    # ---- for the streams ----

    def take(self) -> _Piece | None:
        """The next piece that nobody fetches yet; they get smaller towards the end, so that all streams end at about the same time."""
        with self._changed:
            return self._cut() if self._pieces else None

    def _cut(self) -> _Piece:
        piece = self._pieces.popleft()
        left = piece.end - piece.position + sum(other.end - other.position for other in self._pieces)
        assert self.ticket is not None
        step = self.ticket.chunk_bytes
        share = min(MAX_PIECE, left // (self._streams * PIECES_PER_STREAM))
        end = (piece.position // step + max(1, share // step)) * step
        if end < piece.end:
            self._pieces.appendleft(_Piece(end, piece.end, end))
            piece.end = end
        return piece

    def give_back(self, pieces: Iterable[_Piece]) -> None:
        """What a stream that ends early has not finished: the next run goes on at the byte where it stopped."""
        with self._changed:
            self._pieces = deque(sorted([*self._pieces, *pieces], key=lambda piece: piece.position))

    def opened(self, sock: socket.socket) -> None:
        """A connection that has to be cut when something fails."""
        with self._changed:
            self._open.add(sock)

    def closed(self, sock: socket.socket) -> None:
        with self._changed:
            self._open.discard(sock)

    def verified(self, chunk: int) -> None:
        """A chunk is written and its checksum is right."""
        with self._changed:
            self._verified[chunk] = 1
            before = self._ready_chunks
            while self._ready_chunks < len(self._verified) and self._verified[self._ready_chunks]:
                self._ready_chunks += 1
            if self._ready_chunks != before:
                self._changed.notify_all()


class _Stream:
    """One thread: piece after piece, over as many connections as it takes."""

    def __init__(self, fetch: Fetch, first: _Piece):
        self._fetch = fetch
        assert fetch.ticket is not None
        self._ticket = fetch.ticket
        self.mine = deque([first])
        """Pieces that this stream has taken, the one that is being received first."""
        self._new_bytes = 0
        self._buffer = memoryview(bytearray(min(BUFFER, self._ticket.chunk_bytes)))

    def run(self) -> None:
        """Until no piece is left. Raises what ends the whole fetch."""
        fetch, backoff = self._fetch, Backoff(first_s=0.05, max_s=2.0)
        failures = refusals = 0
        while self._fill() and not fetch.stop.is_set():
            before = self._new_bytes
            try:
                self._connect_and_read()
                continue
            except _Refused:
                refusals += 1
                error: AstraFlowError = TicketGone(
                    f"transfer of version {self._ticket.version}: the sender closed the stream without a byte"
                )
                if refusals >= REFUSALS:
                    raise error from None
            except DigestMismatch as damaged:
                error, refusals = damaged, 0
            except OSError as broken:  # of the network: what cannot be kept is a WeightError
                error, refusals = Unavailable(f"weight stream to {fetch.host}:{self._ticket.stream_port}: {broken}"), 0
            fetch.counts.add("broken")
            failures = 1 if self._new_bytes > before else failures + 1
            if failures >= fetch.config.attempts:
                raise error
            log.info("%s (at byte %d of %d); going on", error, self.mine[0].position, self._ticket.size_bytes)
            if self._new_bytes > before:
                backoff.reset()
            fetch.stop.wait(min(backoff.next(), max(0.0, fetch.end_s - time.monotonic())))
            self._check_time()

    def _fill(self) -> bool:
        """Take pieces ahead; False when there is nothing left to do."""
        while len(self.mine) < AHEAD and (piece := self._fetch.take()) is not None:
            self.mine.append(piece)
        return bool(self.mine)

    def _check_time(self) -> None:
        if time.monotonic() >= self._fetch.end_s:
            raise DeadlinePassed(f"transfer of version {self._ticket.version}: not done by its deadline")

    def _limit_s(self) -> float:
        return max(0.01, min(self._fetch.config.io_timeout_s, self._fetch.end_s - time.monotonic()))

    def _connect_and_read(self) -> None:
        """One connection, for as long as it lasts. Raises _Refused, OSError or DigestMismatch."""
        fetch = self._fetch
        fetch.counts.add("connections")
        raw = socket.create_connection((fetch.host, self._ticket.stream_port), self._limit_s())
        with raw if fetch.tls is None else _secured(raw, fetch.host, fetch.tls) as sock:
            fetch.opened(sock)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if isinstance(sock, ssl.SSLSocket):
                    self._prove(sock)
                self._read_pieces(sock)
            finally:
                fetch.closed(sock)

    def _prove(self, sock: ssl.SSLSocket) -> None:
        """The handshake. Raises AuthError for a certificate that is not to be trusted: trying again would not help."""
        assert self._fetch.tls is not None
        try:
            sock.do_handshake()
        except ssl.SSLCertVerificationError as error:
            where = host_port(self._fetch.host, self._ticket.stream_port)
            raise AuthError(f"weight stream to {where}: its certificate is not accepted: {not_accepted(error, self._fetch.tls)}") from None

    def _read_pieces(self, sock: socket.socket) -> None:
        asked, silent = 0, True
        while self._fill() and not self._fetch.stop.is_set():
            sock.settimeout(self._limit_s())
            while asked < len(self.mine):
                sock.sendall(self._hello(self.mine[asked]))
                asked += 1
            piece = self.mine[0]
            while piece.position < piece.end and not self._fetch.stop.is_set():
                self._read(sock, piece, silent)
                silent = False
            if piece.position >= piece.end:
                self.mine.popleft()
                asked -= 1

    def _hello(self, piece: _Piece) -> bytes:
        return hello_bytes(
            StreamHello(
                protocol_version=PROTOCOL_VERSION,
                token=self._fetch.token,
                transfer_id=self._ticket.transfer_id,
                offset=piece.position,
                length=piece.end - piece.position,
            )
        )

    def _read(self, sock: socket.socket, piece: _Piece, silent: bool) -> None:
        """Up to a buffer of the piece. `silent`: nothing has come on this connection so far."""
        chunk_bytes = self._ticket.chunk_bytes
        chunk = piece.position // chunk_bytes
        chunk_end = min((chunk + 1) * chunk_bytes, self._ticket.size_bytes)
        want = min(len(self._buffer), chunk_end - piece.position)
        got = 0
        self._check_time()
        sock.settimeout(self._limit_s())
        try:
            while got < want:
                count = self._receive(sock, self._buffer[got:want], silent and got == 0)
                got += count
        finally:
            if got:
                self._keep(piece, self._buffer[:got])
        if piece.position == chunk_end:
            self._verify(piece, chunk)

    def _receive(self, sock: socket.socket, room: memoryview, silent: bool) -> int:
        try:
            got = sock.recv_into(room)
        except ConnectionResetError:
            if silent:
                raise _Refused from None
            raise
        if got == 0:
            raise _Refused if silent else ConnectionError("closed by the sender")
        return got

    def _keep(self, piece: _Piece, data: memoryview) -> None:
        piece.running.update(data)
        try:
            self._fetch.write(piece.position, data)
        except OSError as error:  # never to be taken for a broken connection
            raise WeightError(f"staging: {error.strerror or error}") from None
        piece.position += len(data)
        self._new_bytes += max(0, piece.position - piece.best)
        piece.best = max(piece.best, piece.position)
        self._fetch.counts.add("received_bytes", len(data))

    def _verify(self, piece: _Piece, chunk: int) -> None:
        right = piece.running.intdigest() == self._ticket.chunk_hashes[chunk]
        piece.running.reset()
        if not right:
            piece.position = chunk * self._ticket.chunk_bytes
            self._fetch.counts.add("damaged_chunks")
            raise DigestMismatch(f"transfer of version {self._ticket.version}: chunk {chunk} is damaged")
        self._fetch.verified(chunk)


def _secured(raw: socket.socket, host: str, tls: Tls) -> ssl.SSLSocket:
    """The handshake comes later, when the connection can be cut from outside."""
    return client_context(tls).wrap_socket(raw, server_hostname=host, do_handshake_on_connect=False)


def _shut(sock: socket.socket) -> None:
    try:
        # not SSLSocket's own: after it the stream's thread would go on to read what has arrived, as if it were not encrypted
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        log.debug("stream was closed already")
