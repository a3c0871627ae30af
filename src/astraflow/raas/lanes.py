"""Evaluation lanes: sets of versions that must not change under a running evaluation. Pure; `now` is an argument."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from astraflow.protocol.errors import BadMessage, Conflict
from astraflow.protocol.rollout import Serving

CLOSED_REMEMBERED = 64
"""Lanes whose end is remembered, so that a late call hears why its lane is gone."""
MAX_LANES = 64
"""Open ones; an evaluation needs one per instance."""


@dataclass(frozen=True)
class Lane:
    name: str
    versions: dict[str, Serving]
    ends_at: float
    owner: str
    """Incarnation of the Dataflow that opened it."""


def same_weights(one: Serving | None, other: Serving) -> bool:
    """Equal timeline and version, and digests that do not contradict each other (an empty one is unverified)."""
    if one is None or (one.timeline, one.version) != (other.timeline, other.version):
        return False
    return not one.digest or not other.digest or one.digest == other.digest


class Lanes:
    """Open lanes by name. While one is open, nothing is loaded."""

    def __init__(self) -> None:
        self._open: dict[str, Lane] = {}
        self._closed: dict[str, str] = {}

    @property
    def names(self) -> list[str]:
        return list(self._open)

    def open(
        self, name: str, versions: dict[str, Serving], deadline_s: float, serving: Mapping[str, Serving], now: float, owner: str = ""
    ) -> None:
        """Pin `versions`. Raises Conflict when they are not what is served. Opening an open lane again with the same ones is fine."""
        if not name:
            raise Conflict("lane: needs a name; the empty one is training")
        if not 0 < deadline_s < math.inf:  # also NaN: such a lane would never end, and hold all loads for ever
            raise BadMessage(f"lane {name!r}: deadline_s {deadline_s}: expected a number of seconds above 0")
        if name not in self._open and len(self._open) >= MAX_LANES:
            raise Conflict(f"lane {name!r}: {MAX_LANES} lanes are open already")
        for model, wanted in versions.items():
            if not same_weights(serving.get(model), wanted):
                raise Conflict(f"lane {name!r}: {model} serves {_label(serving.get(model))}, wanted {_label(wanted)}")
        self._open[name] = Lane(name, dict(versions), now + deadline_s, owner)
        self._closed.pop(name, None)

    def check(self, name: str) -> None:
        """Raise Conflict, with the reason, unless the lane is open."""
        if name not in self._open:
            raise Conflict(f"lane {name!r} is not open{': ' + self._closed[name] if name in self._closed else ''}")

    def close(self, name: str, reason: str) -> bool:
        """True when it was open."""
        was_open = self._open.pop(name, None) is not None
        if was_open:
            self._closed[name] = reason
            while len(self._closed) > CLOSED_REMEMBERED:
                del self._closed[next(iter(self._closed))]
        return was_open

    def orphans(self, owner: str) -> list[str]:
        """Lanes of another process than this one: a restarted Dataflow begins its evaluation anew and never ends them.

        A caller without an incarnation (a person with curl) is no Dataflow and ends nobody's lane.
        """
        return [lane.name for lane in self._open.values() if owner and lane.owner and lane.owner != owner]

    def due(self, serving: Mapping[str, Serving], now: float) -> list[tuple[str, str]]:
        """Lanes that must close now, with the reason: past the deadline, or no longer on their versions (an engine restart)."""
        out = []
        for lane in self._open.values():
            moved = [model for model, wanted in lane.versions.items() if not same_weights(serving.get(model), wanted)]
            if moved:
                out.append((lane.name, f"{moved[0]} now serves {_label(serving.get(moved[0]))}"))
            elif now >= lane.ends_at:
                out.append((lane.name, "its deadline passed"))
        return out

    def time_left_s(self, now: float) -> float:
        """Until the last open lane must end; 0 without one."""
        return max((lane.ends_at - now for lane in self._open.values()), default=0.0)


def _label(serving: Serving | None) -> str:
    return "nothing" if serving is None else f"timeline {serving.timeline} version {serving.version} ({serving.digest[:8] or 'no digest'})"
