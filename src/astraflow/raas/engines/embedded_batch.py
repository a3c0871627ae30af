"""Which sequence sits in which slot and what the next step computes. Decisions only: no torch, no clock, no I/O.

Everything that a sequence can need is one idea: it has `tokens`, of which the first `computed` have keys in the cache; a
step computes tokens [computed, len) and samples one more from the last. Decoding is the case len − computed = 1, a prompt
the case computed = 0, and so are a recompute after a weight load and a sequence that starts behind a cached prefix.

A step is a list of `Segment`s, runs of tokens computed once. Sequences that begin alike (the samples of a group, a
template) form a trie whose shared runs are computed by one of them and copied to the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from astraflow.workflows.api import ModelRequest

MIN_CAPACITY = 128
"""Smallest row of a pool in tokens; larger ones are powers of two, so at most half of a row is unused."""
MIN_SHARED = 4
"""Tokens that a shared run must save before it is worth an attention call of its own."""
_MASK64 = (1 << 64) - 1


def uniform(seed: int, index: int) -> float:
    """Number `index` of the random stream `seed`, in [0, 1), by splitmix64 (Steele, Lea, Flood 2014).

    A counter instead of a generator's state: a token's random number depends on its request and place alone, not on who
    else is in the batch, and a sequence that is interrupted or recomputed goes on as if nothing had happened.
    """
    z = _scramble(seed & _MASK64) + 0x9E3779B97F4A7C15 * (index + 1)
    return (_scramble(z & _MASK64) >> 11) * 2.0**-53


def _scramble(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request from arrival to answer. Identity is the object; ids are the caller's."""

    id: str
    request: ModelRequest
    tokens: list[int]
    """Prompt, then output."""
    prompt_length: int
    stop_ids: frozenset[int]
    computed: int = 0
    """Leading tokens whose keys and values are in the cache."""
    epoch: int = -1
    """Weight load that computed all of those keys; −1 = more than one (kv_on_update: keep)."""
    capacity: int = 0
    """Pool that holds it; 0 = waiting."""
    row: int = -1
    """Row in that pool."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    timeline: int | None = None
    """Oldest timeline among the sampled tokens' weights."""

    @property
    def limit(self) -> int:
        """Most tokens, prompt included; the last one is never computed, only returned."""
        return self.prompt_length + self.request.max_new_tokens

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]


@dataclass(frozen=True, slots=True)
class Resize:
    """Give the pool of this capacity exactly `rows` rows, keeping the first min(old, new)."""

    capacity: int
    rows: int


@dataclass(frozen=True, slots=True)
class Move:
    """Copy a row over a freed one, so that a pool's used rows stay 0 … n − 1 and need no gather."""

    capacity: int
    source: int
    target: int
    length: int


class Slots:
    """Pools of rows by capacity. Allocated rows × capacity never exceeds `kv_tokens`, used rows never `max_slots`."""

    def __init__(self, max_slots: int, kv_tokens: int) -> None:
        self.max_slots = max_slots
        self.kv_tokens = kv_tokens
        self.rows: dict[int, list[Sequence]] = {}
        self.allocated: dict[int, int] = {}

    @property
    def used(self) -> int:
        return sum(map(len, self.rows.values()))

    @property
    def allocated_tokens(self) -> int:
        return sum(capacity * rows for capacity, rows in self.allocated.items())

    @property
    def used_tokens(self) -> int:
        return sum(capacity * len(rows) for capacity, rows in self.rows.items())

    @staticmethod
    def capacity_for(limit: int) -> int:
        """Row size for a sequence of at most `limit` tokens; the last token needs no place."""
        capacity = MIN_CAPACITY
        while capacity < limit - 1:
            capacity *= 2
        return capacity

    def fits_ever(self, limit: int) -> bool:
        return self.capacity_for(limit) <= self.kv_tokens

    def place(self, sequence: Sequence) -> list[Resize] | None:
        """Give it a row. None = no room now; otherwise the resizes to carry out before the row is used."""
        if self.used >= self.max_slots:
            return None
        capacity = self.capacity_for(sequence.limit)
        rows = self.rows.setdefault(capacity, [])
        resizes: list[Resize] | None = []
        if len(rows) == self.allocated.get(capacity, 0):
            resizes = self._grow(capacity, len(rows))
            if resizes is None:
                return None
        sequence.capacity, sequence.row = capacity, len(rows)
        rows.append(sequence)
        return resizes

    def _grow(self, capacity: int, used: int) -> list[Resize] | None:
        """More rows for this pool, taking the spare rows of the others when the bound asks for it. None = no room, nothing changed."""
        wanted = min(max(2 * used, 8), self.max_slots) - used
        free = self.kv_tokens - self.allocated_tokens
        resizes: list[Resize] = []
        if free < wanted * capacity:
            spare = {other: len(self.rows.get(other, ())) for other in self.allocated if other != capacity}
            resizes = [Resize(other, in_use) for other, in_use in spare.items() if in_use < self.allocated[other]]
            free += sum((self.allocated[resize.capacity] - resize.rows) * resize.capacity for resize in resizes)
        gained = min(wanted, free // capacity)
        if gained <= 0:
            return None
        resizes.append(Resize(capacity, used + gained))
        for resize in resizes:
            self.allocated[resize.capacity] = resize.rows
        return resizes

    def release(self, sequence: Sequence) -> Move | None:
        """Free its row; the pool's last row takes its place."""
        rows = self.rows[sequence.capacity]
        last = rows.pop()
        move = None
        if last is not sequence:
            move = Move(sequence.capacity, last.row, sequence.row, last.computed)
            rows[sequence.row] = last
            last.row = sequence.row
        sequence.capacity, sequence.row = 0, -1
        return move


@dataclass(slots=True)
class Segment:
    """Tokens [start, end) of `rows`, equal in all of them: computed by rows[0] on top of its cache, then given to all."""

    rows: list[Sequence]
    start: int
    end: int
    ends: list[Sequence]
    """Sequences whose last token is at end − 1: they sample now."""

    @property
    def owner(self) -> Sequence:
        return self.rows[0]

    @property
    def length(self) -> int:
        return self.end - self.start


def plan(running: Iterable[Sequence], prefill_tokens: int) -> list[Segment]:
    """What one step computes: every decoding sequence's token, then at most `prefill_tokens` of the others'.

    Segments stand after those that they attend to. Decoding ones are sorted by pool and row.
    """
    decoding: list[Segment] = []
    filling: list[Sequence] = []
    for sequence in running:
        length = len(sequence.tokens)
        if length - sequence.computed == 1 and length > sequence.prompt_length:
            decoding.append(Segment([sequence], length - 1, length, [sequence]))
        else:
            filling.append(sequence)
    decoding.sort(key=lambda segment: (segment.owner.capacity, segment.owner.row))
    return decoding + _cut(share(filling), prefill_tokens)


def share(sequences: Iterable[Sequence]) -> list[Segment]:
    """All that these sequences lack, common beginnings once, in depth-first order of the trie."""
    roots: dict[tuple[int, int, tuple[int, ...]], list[Sequence]] = {}
    for sequence in sequences:
        # Keys of more than one weight load (epoch −1) are a sequence's own.
        own = id(sequence) if sequence.epoch < 0 else 0
        roots.setdefault((own, sequence.epoch, tuple(sequence.tokens[: sequence.computed])), []).append(sequence)
    segments: list[Segment] = []
    # A stack of (rows that agree up to `agreed`, start of what is not computed yet, agreed), deepest branch first.
    stack = [(rows, rows[0].computed, rows[0].computed) for rows in roots.values()][::-1]
    while stack:
        rows, start, agreed = stack.pop()
        end = _agreement(rows, agreed)
        ends = [row for row in rows if len(row.tokens) == end]
        if ends or len(rows) == 1 or (len(rows) - 1) * (end - start) >= MIN_SHARED:
            segments.append(Segment(rows, start, end, ends))
            start = end
        branches: dict[int, list[Sequence]] = {}
        for row in rows:
            if len(row.tokens) > end:
                branches.setdefault(row.tokens[end], []).append(row)
        stack += [(branch, start, end) for branch in reversed(branches.values())]
    return [segment for segment in segments if segment.length]


def _agreement(rows: list[Sequence], agreed: int) -> int:
    """Length up to which all rows have equal tokens; they are known to agree on the first `agreed`."""
    if len(rows) == 1:
        return len(rows[0].tokens)
    tails = [row.tokens[agreed:] for row in rows]
    low, high = min(tails), max(tails)  # lexicographic extremes agree exactly where all do
    for offset, (one, other) in enumerate(zip(low, high, strict=False)):
        if one != other:
            return agreed + offset
    return agreed + len(low)


def _cut(segments: list[Segment], budget: int) -> list[Segment]:
    """The first `budget` tokens. What stands behind a cut run waits for the next step, which plans it anew."""
    kept: list[Segment] = []
    for segment in segments:
        if budget <= 0:
            break
        if segment.length > budget:
            kept.append(Segment(segment.rows, segment.start, segment.start + budget, []))
            break
        kept.append(segment)
        budget -= segment.length
    return kept


class Scheduler:
    """Who waits, who runs. Arrival order is kept: the first that does not fit holds back the rest, so none starves."""

    def __init__(self, slots: Slots, max_queue: int) -> None:
        self.slots = slots
        self.max_queue = max_queue
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.by_id: dict[str, Sequence] = {}

    def submit(self, sequence: Sequence) -> bool:
        """False = the queue is full."""
        if len(self.waiting) >= self.max_queue:
            return False
        self.by_id[sequence.id] = sequence
        self.waiting.append(sequence)
        return True

    def admit(self) -> tuple[list[Sequence], list[Resize]]:
        """Move what fits from waiting to running. Returns them and the pool resizes that make their rows exist, smaller pools first."""
        admitted: list[Sequence] = []
        sizes: dict[int, int] = {}
        before = dict(self.slots.allocated)
        while self.waiting:
            resizes = self.slots.place(self.waiting[0])
            if resizes is None:
                break
            sizes.update((resize.capacity, resize.rows) for resize in resizes)
            admitted.append(self.waiting.popleft())
        self.running += admitted
        # Shrink before growing, so that the bound holds at every moment.
        changes = sorted(sizes.items(), key=lambda item: item[1] - before.get(item[0], 0))
        return admitted, [Resize(capacity, rows) for capacity, rows in changes]

    def finish(self, sequence: Sequence) -> Move | None:
        """Forget a sequence, waiting or running, and free its row at once."""
        del self.by_id[sequence.id]
        if not sequence.capacity:
            self.waiting.remove(sequence)
            return None
        self.running.remove(sequence)
        return self.slots.release(sequence)

    def new_weights(self, epoch: int, *, keep: bool) -> int:
        """After a weight load: running sequences forget what they computed, or keep it as a mixture. Returns tokens to recompute."""
        lost = 0
        for sequence in self.running:
            if keep and sequence.computed:
                sequence.epoch = -1
            else:
                lost += sequence.computed
                sequence.computed, sequence.epoch = 0, epoch
        return lost
