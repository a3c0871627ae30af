"""Tables and records of the ledger."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from astraflow.dataflow.policies.base import GroupStats
from astraflow.protocol.control import EvalResult

ShareState = Literal["leased", "rolled", "buffered", "served", "trained", "dropped"]

SCHEMA_VERSION = 3
"""In the file's `user_version`; a ledger of another one is refused by name."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS leases(
  lease_id TEXT PRIMARY KEY, task_id TEXT NOT NULL, task_index INTEGER NOT NULL, epoch INTEGER NOT NULL,
  n_samples INTEGER NOT NULL, seed INTEGER NOT NULL, attempt INTEGER NOT NULL, instance TEXT NOT NULL,
  state TEXT NOT NULL,          -- open, rolled, closed (given up)
  place BLOB                    -- segments.Location of the payload
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS leases_open ON leases(state) WHERE state = 'open';
CREATE TABLE IF NOT EXISTS shares(
  lease_id TEXT NOT NULL, policy TEXT NOT NULL,
  part INTEGER NOT NULL DEFAULT 0,      -- 0, or the first trajectory of the rest that was left in the queue by a split
  members BLOB,                 -- trajectory indices of this part, ascending; NULL = all that are scored
  n INTEGER NOT NULL,           -- rows made
  live INTEGER NOT NULL,        -- rows not in `lost`
  state TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '',
  arrival INTEGER, stats BLOB,          -- of the whole group, in every part
  min_version INTEGER,
  timeline INTEGER, version INTEGER,    -- name of the batch that holds it; training it makes version + 1
  final INTEGER NOT NULL DEFAULT 0,     -- dropped, or trained and in a durable checkpoint
  kept INTEGER NOT NULL DEFAULT 0,      -- in the replay queue
  uses INTEGER NOT NULL DEFAULT 0,      -- times replayed
  PRIMARY KEY(lease_id, policy, part)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS shares_open ON shares(policy, state) WHERE final = 0;
CREATE INDEX IF NOT EXISTS shares_kept ON shares(kept) WHERE kept = 1;
CREATE TABLE IF NOT EXISTS lost(
  lease_id TEXT NOT NULL, policy TEXT NOT NULL, idx INTEGER NOT NULL, reason TEXT NOT NULL,
  PRIMARY KEY(lease_id, policy, idx)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS batches(
  policy TEXT NOT NULL, timeline INTEGER NOT NULL, version INTEGER NOT NULL,
  state TEXT NOT NULL,          -- served, trained, dead
  fresh BLOB NOT NULL, replayed BLOB NOT NULL,
  length INTEGER NOT NULL, checksum BLOB NOT NULL,    -- of its file; xxh3-64
  PRIMARY KEY(policy, timeline, version)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS evals(number INTEGER PRIMARY KEY, result BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS prompts(          -- what curators know per (model, prompt)
  curator TEXT NOT NULL, policy TEXT NOT NULL, task_id TEXT NOT NULL, state BLOB NOT NULL,
  PRIMARY KEY(curator, policy, task_id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS moves(            -- versions as they moved, among the arrivals
  number INTEGER PRIMARY KEY, policy TEXT NOT NULL, timeline INTEGER NOT NULL, version INTEGER NOT NULL, arrival INTEGER NOT NULL
);
"""


@dataclass(frozen=True)
class LeaseRow:
    """A lease that is open."""

    lease_id: str
    task_id: str
    task_index: int
    epoch: int
    n_samples: int
    seed: int
    attempt: int
    instance: str
    policies: tuple[str, ...] = ()
    """Only needed when it is issued."""


@dataclass(frozen=True)
class ShareResult:
    """What became of one policy's share at the door."""

    policy: str
    state: Literal["rolled", "buffered", "dropped"]
    """`rolled` = held until its receipt comes."""
    reason: str = ""
    stats: GroupStats | None = None
    lost: dict[int, str] = field(default_factory=dict)
    arrival: int = 0


@dataclass(frozen=True)
class Result:
    """A delivered group. The payload is not stored when every share is dropped."""

    lease_id: str
    attempt: int
    payload: bytes
    shares: list[ShareResult]


@dataclass(frozen=True)
class PromptRow:
    """What a curator knows of one prompt for one model; `state` is msgpack."""

    curator: str
    policy: str
    task_id: str
    state: bytes


@dataclass(frozen=True)
class Learned:
    """What curators learned from the groups of one transaction."""

    prompts: list[PromptRow] = field(default_factory=list)
    meta: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Settled:
    """A later decision on a share that is rolled or buffered."""

    lease_id: str
    policy: str
    state: Literal["buffered", "dropped"]
    reason: str = ""
    part: int = 0


@dataclass(frozen=True)
class Pick:
    """A queued group, or a part of one, that a batch takes."""

    lease_id: str
    part: int = 0
    rest: tuple[int, ...] = ()
    """Trajectories of it that stay in the queue, as a part that is named by the first of them. Empty = it is taken whole."""


@dataclass(frozen=True)
class BatchRow:
    """A batch by name, and its groups."""

    policy: str
    timeline: int
    version: int
    fresh: list[Pick]
    replayed: list[str]
    """Leases: replay takes whole groups."""


@dataclass(frozen=True)
class ShareRow:
    """A share as it is found again."""

    lease_id: str
    policy: str
    state: str
    arrival: int
    stats: GroupStats
    version: int | None
    instance: str
    kept: bool
    part: int = 0
    members: tuple[int, ...] = ()
    """Empty = all that are scored."""


class Totals(msgspec.Struct):
    """Running sums over all shares, written with each transaction that changes them: a start reads no finished row."""

    made: int = 0
    states: dict[str, int] = {}
    """Rows per state, `dropped` left out."""
    dropped: dict[str, int] = {}
    """Rows per reason."""
    replayed: int = 0
    gaps: dict[str, dict[int, int]] = {}
    """Policy → gap at serving → trained trajectories."""
    arrivals: int = 0
    """Newest arrival number."""


@dataclass(frozen=True)
class Recovered:
    """What a restart finds."""

    meta: dict[str, bytes]
    leases: list[LeaseRow]
    shares: list[ShareRow]
    served: list[BatchRow]
    evals: list[EvalResult]
    arrivals: int
    """Newest arrival number."""
    prompts: list[PromptRow] = field(default_factory=list)
