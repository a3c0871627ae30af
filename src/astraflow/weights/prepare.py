"""What a sender does for every published version, in threads: digest, chunk checksums, then the delta against the other half;
and for receivers that are several versions behind, the chains of kept deltas.

The digest goes to the trainer as soon as it is known (it belongs into the notice). All three are readers of their halves, so that a
half is never overwritten under them; the delta gives up when the next offload is in a hurry.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from astraflow.lib.aio import Tasks
from astraflow.weights import codec, delta, layout
from astraflow.weights.buffer import HalfSwitch
from astraflow.weights.chain import Chain, Name, Shelf
from astraflow.weights.config import WeightsConfig
from astraflow.weights.frames import Published
from astraflow.weights.memory import HalfMemory

T = TypeVar("T")

CODECS = (codec.RANKS, codec.GAPS)
REMEMBERED = 20
"""Versions after which a receiver that did not come again is no longer a reason to code deltas as only it needs them."""
READY_CHAINS = 8
"""Chains whose checksums are remembered: receivers that are equally far behind share them."""


@dataclass(frozen=True)
class ReadyChain:
    """A chain with its checksums."""

    chain: Chain
    chunk_bytes: int
    chunk_hashes: list[int]


@dataclass
class Work:
    """What is prepared for one published version."""

    half: int
    version: int
    digest: str = ""
    chunk_bytes: int = 0
    chunk_hashes: list[int] = field(default_factory=list)
    """Checksums of the chunks of the whole half."""
    hashed: asyncio.Event = field(default_factory=asyncio.Event)
    """Digest and checksums are there."""
    delta_ended: asyncio.Event = field(default_factory=asyncio.Event)
    """The delta is on the shelf, or `no_delta` says why not."""
    no_delta: str = ""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set when a half that the delta reads is needed."""

    @property
    def hash_reader(self) -> str:
        return f"hash of half {self.half}"

    @property
    def delta_readers(self) -> tuple[str, str]:
        return f"delta to half {self.half}", f"delta base of half {self.half}"


class Preparer:
    """Used from the sender's event loop. `let_go` is called whenever a half may have become free."""

    def __init__(
        self,
        config: WeightsConfig,
        shape: layout.Layout,
        memory: HalfMemory,
        switch: HalfSwitch,
        tasks: Tasks,
        tell: Callable[[Published], None],
        let_go: Callable[[], None],
    ):
        self._config, self._layout, self._memory, self._switch = config, shape, memory, switch
        self._tasks, self._tell, self._let_go = tasks, tell, let_go
        self.shelf = Shelf(config.kept_deltas, shape.size_bytes)
        self._chains: OrderedDict[tuple[Name, Name], ReadyChain] = OrderedDict()
        self.work: dict[int, Work] = {}
        """By half."""
        self.gauges: dict[str, float] = {}
        self._asked: dict[tuple[str, ...], int] = {}
        """Codecs that a receiver can apply, best first → the newest version that one asked for with them."""

    def begin(self, half: int, version: int) -> None:
        """A half was published, or is found again by a new life of the sender (then its digest is known: the manager remembers it)."""
        held = self._switch.halves[half]
        assert held is not None, "only what a half holds is prepared"
        work = self.work[half] = Work(half, version, held.digest)  # read here: a claim may empty the half before the task runs
        self._switch.enter(work.hash_reader, half, time.monotonic())
        self._tasks.spawn(f"prepare {version}", self._prepare(work, self.work.get(1 - half)))

    def learn(self, codecs: Sequence[str], version: int) -> bool:
        """What a receiver can apply: the next deltas are coded so that all of the last `REMEMBERED` versions' receivers can. False when
        there is no codec in common."""
        known = tuple(name for name in CODECS if name in codecs)
        if known:
            self._asked[known] = max(version, self._asked.get(known, -1))
        return bool(known)

    def _wanted(self, version: int) -> tuple[str, ...]:
        """Codecs that every receiver of late can apply, best first; all where none can be for all."""
        self._asked = {known: at for known, at in self._asked.items() if at >= version - REMEMBERED}
        return tuple(name for name in CODECS if all(name in known for known in self._asked)) or CODECS

    def hurry(self, overdue: Sequence[str]) -> None:
        """Some of these readers may be deltas: they give up."""
        for work in self.work.values():
            if not set(work.delta_readers).isdisjoint(overdue):
                work.stop.set()

    def stop(self) -> None:
        """The process ends."""
        for work in self.work.values():
            work.stop.set()

    async def _prepare(self, work: Work, base: Work | None) -> None:
        view, threads = self._memory.half(work.half), self._config.hash_threads
        began = time.monotonic()
        try:
            work.digest = work.digest or await self._busy([work.hash_reader], lambda: layout.digest(self._layout, view, threads))
            if self._switch.halves[work.half] is not None:  # a writer that waits for us has emptied it
                self._switch.name(work.half, work.digest)
            self.gauges["digest_s"] = time.monotonic() - began
            self._tell(Published(work.half, work.version, work.digest, time.monotonic() - began))
            work.chunk_bytes = layout.chunk_size(len(view), self._config.streams, self._config.chunk_bytes)
            work.chunk_hashes = await self._busy(
                [work.hash_reader], lambda: layout.chunk_hashes(view, work.chunk_bytes, threads)
            )
            work.hashed.set()
        finally:
            self._switch.leave(work.hash_reader)
            self._let_go()
        try:
            work.no_delta = await self._encode(work, base)
        finally:
            work.delta_ended.set()

    async def _busy(self, readers: Sequence[str], call: Callable[[], T]) -> T:
        """A call in a thread, whose readers count as alive all the while."""
        job = asyncio.ensure_future(asyncio.to_thread(call))
        while not (await asyncio.wait({job}, timeout=0.5))[0]:
            for reader in readers:
                self._switch.progress(reader, time.monotonic())
        return job.result()

    async def _encode(self, work: Work, base: Work | None) -> str:
        """Put the delta on the shelf; otherwise the reason why there is none."""
        if not self._config.delta:
            return "deltas are switched off"
        if base is None:
            return "first version of this sender"
        if self.periodic(work.version):
            return "periodic full sync"
        await base.hashed.wait()
        now = time.monotonic()
        for part in (work, base):
            held = self._switch.halves[part.half]
            if held is None or self.work[part.half] is not part:
                return "its base is overwritten already"
        for reader, part in zip(work.delta_readers, (work, base), strict=True):
            self._switch.enter(reader, part.half, now)
        old, new = self._memory.half(base.half), self._memory.half(work.half)
        wanted, config = self._wanted(work.version), self._config

        def encode() -> tuple[str, tuple[bytes, int] | None]:
            name = next(each for each in codec.available() if each in wanted)  # here: the first call may compile
            coding = delta.Coding(name, config.codec, config.zstd_level, config.codec_threads)
            return name, delta.encode(self._layout, old, new, coding, work.stop.is_set)

        try:
            name, encoded = await self._busy(work.delta_readers, encode)
        except delta.Cancelled:
            return "its encoding was cancelled by the next offload"
        finally:
            for reader in work.delta_readers:
                self._switch.leave(reader)
            self._let_go()
        self.gauges["delta_encode_s"] = time.monotonic() - now
        if encoded is None:
            return "the delta is no smaller than a full sync"
        payload, changed = encoded
        self.gauges["delta_size_bytes"] = len(payload)
        self.gauges["changed_fraction"] = changed / max(1, self._layout.words)
        self.shelf.add(delta.Delta(base.version, base.digest, work.version, work.digest, payload, changed, name))
        await self.chain((base.version, base.digest), (work.version, work.digest))  # nearly every receiver will ask for it
        return ""

    async def chain(self, base: Name, target: Name) -> ReadyChain | None:
        """The kept deltas from exactly this base to exactly this version, with their checksums."""
        found = self.shelf.chain(base, target)
        if found is None:
            return None
        known = self._chains.get((base, target))
        if known is not None and known.chain == found:
            return known
        chunk = layout.chunk_size(found.size_bytes, self._config.streams, self._config.chunk_bytes)
        ready = ReadyChain(found, chunk, await asyncio.to_thread(found.chunk_hashes, chunk))
        self._chains[base, target] = ready
        while len(self._chains) > READY_CHAINS:
            self._chains.popitem(last=False)
        return ready

    def periodic(self, version: int) -> bool:
        """True for versions that travel in full whatever is kept."""
        return bool(self._config.full_every) and version % self._config.full_every == 0

    def crosses_periodic(self, base: int, version: int) -> bool:
        """True when a periodic full version lies between: a receiver that was away over it makes its full sync now."""
        every = self._config.full_every
        return bool(every) and base < version and base // every != version // every
