"""The manager's side of its sender process: start, tell, supervise, restart from shared memory.

One thread ("sender-control") owns the child: it reads its frames and, when the child dies, starts it again on the same ports with
everything that was published. Callers wait for answers under one condition. A sender that keeps dying is given up: `check` and every
waiting call raise then, so that the run ends instead of training on unseen.
"""

from __future__ import annotations

import logging
import select
import signal
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from astraflow.lib.frames import FrameReader, pack
from astraflow.lib.proc import Child, RestartBook, RestartPolicy, describe_exit
from astraflow.protocol.errors import AstraFlowError, BadMessage, ConfigError, DeadlinePassed, RemoteError
from astraflow.weights.buffer import HalfSwitch, Held
from astraflow.weights.config import WeightsConfig
from astraflow.weights.frames import (
    Claim,
    Failed,
    FromSender,
    Granted,
    HalfState,
    Numbers,
    Publish,
    Published,
    Ready,
    Setup,
    Stats,
    Stop,
    ToSender,
    from_sender,
    summed,
)

log = logging.getLogger(__name__)

KEPT_DIGESTS = 64
"""Digests remembered for `published`; callers ask for the newest one or two."""
TICK_S = 0.2
GRACE_S = 30.0
"""Beyond its patience a claim waits this long for cancelled readers to let go (and for a sender that is being restarted)."""


@dataclass
class _Life:
    """One life of the sender process."""

    child: Child
    sock: socket.socket
    reader: FrameReader[FromSender] = field(default_factory=from_sender)
    ready: bool = False


class SenderLink:
    """`setup(halves, newest, ports)` makes the first frame of each life; `fds` are descriptors that the child inherits."""

    def __init__(self, name: str, config: WeightsConfig, log_path: Path, fds: tuple[int, ...], setup: Callable[..., Setup]):
        self._name, self._config, self._log_path, self._fds, self._setup = name, config, log_path, fds, setup
        self._book = RestartBook(RestartPolicy(limit=config.max_restarts, window_s=config.restart_window_s, first_s=0.05, max_s=1.0))
        self._changed = threading.Condition()
        self._switch = HalfSwitch()
        self._claim: Claim | None = None
        self._granted: Granted | None = None
        self._digests: OrderedDict[int, str] = OrderedDict()
        self._past: dict[str, float] = {}
        self._numbers_of_step = Numbers({})
        self._past_receivers: dict[str, dict[str, float]] = {}
        self._stats = Stats({}, {}, {})
        self._ports = (config.port, config.stream_port)
        self._failure: AstraFlowError | None = None
        self._closing = threading.Event()
        self._numbers = 0
        self._life: _Life | None = None
        self._thread = threading.Thread(target=self._supervise, name="sender-control", daemon=True)

    def start(self) -> None:
        """Start the sender and wait until it serves. Raises RemoteError when it cannot be started, DeadlinePassed after `start_s`."""
        self._thread.start()
        self._wait(lambda: bool(self._life and self._life.ready), self._config.start_s, "sender to start")

    @property
    def pid(self) -> int:
        """Process id of the present sender; 0 between two lives."""
        life = self._life
        return life.child.pid if life else 0

    @property
    def port(self) -> int:
        return self._ports[0]

    @property
    def restarts(self) -> int:
        return self._book.restarts

    def target(self) -> int:
        """The half that the next version goes to."""
        with self._changed:
            return self._switch.target()

    def claim(self, half: int, patience_s: float) -> Granted:
        """Wait until nobody reads `half`; it may be written when this returns. Raises DeadlinePassed."""
        with self._changed:
            self._numbers += 1
            self._switch.claim(half, time.monotonic(), patience_s)
            self._claim, self._granted = Claim(self._numbers, half, patience_s), None
            self._send(self._claim)
        wait = (lambda: self._granted is not None, patience_s + GRACE_S, f"readers of half {half} to leave")
        try:
            self._wait(*wait)
        except DeadlinePassed:
            # It cancels readers by itself, so one that does not grant is stuck. Killed, its next life has no readers and grants at once;
            # what its sockets still hold of the half is noticed by the receivers' checksums.
            log.error("%s (pid %d) does not answer: killed", self._name, self.pid)
            self._kill()
            self._wait(*wait)
        granted = self._granted
        assert granted is not None
        return granted

    def publish(self, half: int, version: int) -> None:
        """The half is written: it serves from now on."""
        with self._changed:
            self._switch.publish(half, Held(version))
            self._claim = None
            self._digests.pop(version, None)
            self._send(Publish(half, version))

    def show(self, values: dict[str, float]) -> None:
        """What the sender answers to `GET /metrics` from now on, its next lives too."""
        with self._changed:
            self._numbers_of_step = Numbers(values)
            self._send(self._numbers_of_step)

    def published(self, version: int, deadline_s: float) -> str:
        """The digest of a published version. Raises DeadlinePassed."""
        self._wait(lambda: version in self._digests, deadline_s, f"digest of version {version}")
        return self._digests[version]

    def check(self) -> None:
        """Raise when the sender was given up: RemoteError, or ConfigError when it could not listen in the first place."""
        if self._failure is not None:
            raise self._failure

    def stats(self) -> Stats:
        """Counters over all lives of the sender, and its latest gauges."""
        with self._changed:
            return Stats(summed(self._past, self._stats.counters), dict(self._stats.gauges), self._merged())

    def close(self, deadline_s: float = 5.0) -> int | None:
        """End the sender and return its exit code; None when it was ended before (or given up). Safe to call twice."""
        if self._closing.is_set():
            return None
        with self._changed:
            self._closing.set()
            self._send(Stop())
        if self._thread.is_alive():
            self._thread.join(timeout=GRACE_S)
        if self._life is None:
            return None
        code = self._life.child.wait(deadline_s)
        if code is None:
            code = self._life.child.terminate(deadline_s)
        self._life.sock.close()
        return code

    def _kill(self) -> None:
        with self._changed:
            if self._life is not None:
                self._life.child.signal(signal.SIGKILL)

    def _merged(self) -> dict[str, dict[str, float]]:
        names = self._past_receivers.keys() | self._stats.receivers.keys()
        return {name: summed(self._past_receivers.get(name, {}), self._stats.receivers.get(name, {})) for name in names}

    def _send(self, frame: ToSender) -> None:
        """Under the lock. What a dead sender does not get, its next life learns from Setup."""
        if self._life is None:
            return
        try:
            self._life.sock.sendall(pack(frame))
        except OSError as error:
            log.debug("%s does not take a frame: %s", self._name, error)

    def _wait(self, done: Callable[[], bool], deadline_s: float, what: str) -> None:
        end = time.monotonic() + deadline_s
        with self._changed:
            while not done():
                self.check()
                left = end - time.monotonic()
                if left <= 0:
                    raise DeadlinePassed(f"{self._name}: waited {deadline_s:g} s for {what}")
                self._changed.wait(min(left, 1.0))

    def _supervise(self) -> None:
        """Body of the thread: one life after the other."""
        while not self._closing.is_set():
            why = self._one_life()
            if self._closing.is_set():
                return
            if not self._between_lives(why):
                return

    def _one_life(self) -> str:
        """From start to end; how it ended."""
        try:
            life = self._spawn()
        except (AstraFlowError, OSError) as error:
            return f"could not be started: {error}"
        trouble = ""
        try:
            self._listen(life)
        except BadMessage as error:
            trouble = f" ({error})"
        try:
            life.child.wait(5.0 if self._closing.is_set() else 1.0)  # it ends by itself: a signal on top could only spoil its exit code
            return describe_exit(life.child.terminate(1.0)) + trouble
        except AstraFlowError as error:  # not even SIGKILL ends it; the next life says what comes of that (its port is taken)
            return f"{error}{trouble}"

    def _between_lives(self, why: str) -> bool:
        """Book the death; False when the sender is given up."""
        now = time.monotonic()
        with self._changed:
            if self._life is not None:
                self._life.sock.close()
            self._life = None
            self._past = summed(self._past, self._stats.counters)
            self._past_receivers = self._merged()
            self._stats = Stats({}, self._stats.gauges, {})
            again = self._book.died(now)
            if again is None:
                deaths = f"{self._config.max_restarts + 1} deaths within {self._config.restart_window_s:g} s"
                self._failure = RemoteError(f"{self._name} {why}: {deaths}; see {self._log_path}")
            if self._failure is not None or again is None:
                log.error("%s", self._failure)
                self._changed.notify_all()
                return False
        log.warning("%s %s; starting it again", self._name, why)
        return not self._closing.wait(again - now)

    def _spawn(self) -> _Life:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                child = Child(
                    [sys.executable, "-m", "astraflow.weights.sender", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(), *self._fds),
                    log_path=self._log_path,
                    name=self._name,
                )
            except AstraFlowError:
                ours.close()
                raise
        ours.settimeout(self._config.start_s)  # for sending: a sender that reads nothing is dead
        life = _Life(child, ours)
        with self._changed:
            self._life = life
            states = [None if h is None else HalfState(h.version, h.digest) for h in self._switch.halves]
            self._send(self._setup((states[0], states[1]), self._switch.newest, self._ports))
            self._send(self._numbers_of_step)
            if self._claim is not None:
                self._send(self._claim)
        return life

    def _listen(self, life: _Life) -> None:
        """Read frames until the child ends, fails to come up, or everything is closed."""
        poller = select.poll()
        poller.register(life.sock, select.POLLIN)
        born = time.monotonic()
        while not self._closing.is_set():
            if poller.poll(TICK_S * 1000):
                try:
                    data = life.sock.recv(1 << 16)
                except OSError:
                    return
                if not data:
                    return
                for frame in life.reader.feed(data):
                    self._take(life, frame)
            elif life.child.poll() is not None:
                return
            if not life.ready and time.monotonic() - born > self._config.start_s:
                log.error("%s did not come up within %g s", self._name, self._config.start_s)
                return

    def _take(self, life: _Life, frame: FromSender) -> None:
        with self._changed:
            match frame:
                case Ready():
                    self._ports = (frame.port, frame.stream_port)
                    life.ready = True
                case Failed():
                    if self._book.restarts == 0:  # later the port may be free again in a moment
                        self._failure = ConfigError(f"weights: {frame.message}")
                case Granted():
                    if self._claim is not None and self._claim.number == frame.number and self._granted is None:
                        self._granted = frame
                case Published():
                    held = self._switch.halves[frame.half]
                    if held is not None and held.version == frame.version:
                        self._switch.name(frame.half, frame.digest)
                    if self._switch.find(frame.version) in (None, frame.half):  # not an older publish of the same number
                        self._digests[frame.version] = frame.digest
                    while len(self._digests) > KEPT_DIGESTS:
                        self._digests.popitem(last=False)
                case Stats():
                    self._stats = frame
            self._changed.notify_all()
