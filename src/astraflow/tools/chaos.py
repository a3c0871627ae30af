"""Seeded fault schedules against the real Dataflow service in simulated time. `astraflow chaos --seed N` replays one.

The service's code runs as it is: acquisition, intake, serving, fleet, trainers, evaluation, ledger on disk. Clock, network, threads
and the other processes are simulated (`chaos_loop`, `chaos_network`, `chaos_raas`, `chaos_trainer`), faults come by schedule
(`chaos_schedule`), and every event is followed by a look at the invariants (`chaos_checks`).
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from astraflow.tools.chaos_schedule import Schedule, schedule
from astraflow.tools.chaos_world import World

SHOWN = 40
"""Last events of a broken run; `--trace` shows all."""
MEMORY_DISK = Path("/dev/shm")  # the ledger's files are real, but need not reach a disk


@dataclass(frozen=True)
class Outcome:
    """What became of one schedule."""

    seed: int
    violation: str
    """Empty = every invariant held to the end."""
    events: int
    virtual_s: float
    happened: dict[str, int]
    """Faults that came, by kind."""
    trace: list[tuple[float, str]] = field(repr=False)

    @property
    def digest(self) -> str:
        """Of the trace."""
        return xxhash.xxh3_64_hexdigest("\n".join(lines(self.trace)).encode())


@dataclass
class Tally:
    """What became of many."""

    schedules: int = 0
    events: int = 0
    with_fault: Counter[str] = field(default_factory=Counter)
    """Schedules in which a kind of fault came."""
    broken: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.schedules += 1
        self.events += outcome.events
        self.with_fault.update(kind for kind, count in outcome.happened.items() if count)
        if outcome.violation:
            self.broken.append(outcome)


def lines(trace: Iterable[tuple[float, str]]) -> Iterator[str]:
    """The trace as text."""
    return (f"{when:10.4f}  {text}" for when, text in trace)


def replay(seed: int) -> Outcome:
    """Run the schedule of one seed."""
    return play(schedule(seed))


def play(plan: Schedule) -> Outcome:
    """Run one schedule."""
    with run_directory() as directory, quiet_logs():
        world = World(plan, directory)
        world.run()
    return Outcome(plan.seed, world.violation, world.events, world.loop.time(), dict(world.happened), world.trace)


def replay_many(seeds: Iterable[int], each: Callable[[Outcome], None] = lambda outcome: None) -> Tally:
    """Run many, one after the other."""
    tally = Tally()
    collecting = gc.isenabled()
    gc.disable()  # everything of a schedule is garbage at its end, and little before
    gc.freeze()  # … but the modules never are
    try:
        for number, seed in enumerate(seeds):
            outcome = replay(seed)
            tally.add(outcome)
            each(outcome)
            if number % 25 == 24:
                gc.collect()
    finally:
        gc.unfreeze()
        if collecting:
            gc.enable()
    return tally


def tell(seed: int, count: int, trace: bool, say: Callable[[str], None]) -> int:
    """Replay schedules seed … seed + count − 1 and say what became of them. Returns 1 when one broke an invariant."""

    def each(outcome: Outcome) -> None:
        if count > 1 and not trace and not outcome.violation:
            return
        say(f"seed {outcome.seed}: {schedule(outcome.seed).words()}")
        for line in lines(outcome.trace if trace else outcome.trace[-SHOWN:] if outcome.violation else []):
            say(line)
        came = ", ".join(f"{kind} {number}" for kind, number in sorted(outcome.happened.items()) if number) or "no fault"
        say(f"seed {outcome.seed}: {outcome.events} events in {outcome.virtual_s:.1f} simulated seconds; {came}")
        if outcome.violation:
            say(f"seed {outcome.seed}: BROKEN: {outcome.violation}")
            say(f"replay it with: astraflow chaos --seed {outcome.seed} --trace")

    tally = replay_many(range(seed, seed + count), each)
    say(f"{tally.schedules} schedule{'s' if tally.schedules > 1 else ''}, {len(tally.broken)} broken, {tally.events} events")
    return int(bool(tally.broken))


@contextmanager
def run_directory() -> Iterator[Path]:
    """In memory where the machine has such a place."""
    base = MEMORY_DISK if os.access(MEMORY_DISK, os.W_OK) else None
    directory = Path(tempfile.mkdtemp(prefix="astraflow-chaos-", dir=base))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Thousands of simulated deaths are no news."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
