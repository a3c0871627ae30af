"""The double buffer's rules, apart from memory, sockets and clocks: which half may be written, and who is in the way.

One half holds the newest version and serves; the other holds the one before it and serves too, until a writer claims it. A claimed
half takes no new readers; it may be written when its last reader has left. Readers that are silent for too long, or still there when
the claim's patience ends, are named by `overdue`: cancel them, and `leave` once they really stopped reading. So a half with readers
is never written, and a cancelled reader never sees a mixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NEITHER = -1
"""The "half" of a reader that reads no half (an encoded delta lies in the sender's own memory)."""


@dataclass(frozen=True)
class Held:
    """What a half contains."""

    version: int
    digest: str = ""
    """Empty while it is being computed."""


@dataclass
class _Reader:
    half: int
    seen_s: float


class HalfSwitch:
    """State of the two halves. Times are seconds of any monotonic clock, given as arguments."""

    def __init__(self, halves: Sequence[Held | None] = (None, None), newest: int = -1) -> None:
        assert len(halves) == 2
        self.halves: list[Held | None] = list(halves)
        self.newest = newest
        """Index of the half with the newest version; −1 before the first publish."""
        self._readers: dict[str, _Reader] = {}
        self._claimed = -1
        self._patience_ends_s = 0.0

    def target(self) -> int:
        """The half that the next version goes to: never the newest."""
        return 0 if self.newest == -1 else 1 - self.newest

    def claim(self, half: int, now: float, patience_s: float) -> None:
        """The writer wants this half: it takes no new readers from now on. Claiming again changes the patience only."""
        assert half != self.newest, "the newest version is never overwritten"
        self.halves[half] = None
        self._claimed = half
        self._patience_ends_s = now + patience_s

    def may_write(self) -> bool:
        """True when a half is claimed and nobody reads it."""
        return self._claimed >= 0 and not self.readers(self._claimed)

    @property
    def claimed(self) -> int:
        """The half that a writer waits for or writes; −1 for none."""
        return self._claimed

    def publish(self, half: int, held: Held) -> None:
        """The writer is done: the half serves, as the newest version."""
        assert half == self._claimed, "publish follows a claim"
        assert self.may_write(), "publish follows a claim that was granted"
        self.halves[half] = held
        self.newest = half
        self._claimed = -1

    def name(self, half: int, digest: str) -> None:
        """The digest of a half became known."""
        held = self.halves[half]
        assert held is not None
        self.halves[half] = Held(held.version, digest)

    def find(self, version: int, digest: str = "") -> int | None:
        """The half that serves this version (and digest, unless empty); the newest first."""
        for half in (self.newest, 1 - self.newest) if self.newest >= 0 else ():
            held = self.halves[half]
            if held is not None and held.version == version and digest in ("", held.digest):
                return half
        return None

    def versions(self) -> list[int]:
        """What can be read now, newest first."""
        order = (self.newest, 1 - self.newest) if self.newest >= 0 else ()
        return [held.version for half in order if (held := self.halves[half]) is not None]

    def enter(self, reader: str, half: int, now: float) -> None:
        """A reader begins; with `half` = NEITHER only its silence is watched."""
        assert half == NEITHER or self.halves[half] is not None
        assert reader not in self._readers
        self._readers[reader] = _Reader(half, now)

    def progress(self, reader: str, now: float) -> None:
        """A reader got on."""
        if reader in self._readers:
            self._readers[reader].seen_s = now

    def leave(self, reader: str) -> None:
        """A reader has stopped (leaving twice is fine)."""
        self._readers.pop(reader, None)

    def readers(self, half: int) -> list[str]:
        return [name for name, reader in self._readers.items() if reader.half == half]

    def overdue(self, now: float, idle_s: float) -> list[str]:
        """Readers to cancel: silent for `idle_s`, or in the way of a writer whose patience has ended."""
        late = self._claimed >= 0 and now >= self._patience_ends_s
        return [
            name
            for name, reader in self._readers.items()
            if now - reader.seen_s >= idle_s or (late and reader.half == self._claimed)
        ]
