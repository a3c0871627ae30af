"""Curriculum: prompts by measured pass rate, in bands with weights."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

from astraflow.dataflow.policies.memory import Decay, PassRates, Rated, Share
from astraflow.protocol.errors import ConfigError


class Band(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Prompts whose pass rate lies in [low, high); a high of 1 is inside."""

    low: Share
    high: Share
    weight: Annotated[float, Meta(ge=0)] = 1.0
    """How often a prompt of this band is submitted, relative to one of the band with the largest weight."""


DEFAULT_BANDS = [
    Band(low=0.0, high=0.1, weight=0.25),
    Band(low=0.1, high=0.9, weight=1.0),
    Band(low=0.9, high=1.0, weight=0.25),
]


class Curriculum(Rated):
    """A measured prompt is submitted with probability weight / largest weight of its band; one whose rate lies in no band is not.

    Prompts never measured are accepted: that is how they are measured. The rate is the debiased average of `filter_solved`, with a
    shorter memory, because a prompt has to change its band when the policy has learned. A band of weight 0 is
    left only by a forced draw; a small weight keeps it measured.
    """

    def __init__(self, bands: list[Band] | None = None, decay: Decay = 0.5, correct_threshold: float = 0.5) -> None:
        super().__init__(PassRates(decay, correct_threshold))
        self._bands = sorted(DEFAULT_BANDS if bands is None else bands, key=lambda band: band.low)
        for band in self._bands:
            if not band.low < band.high:
                raise ConfigError(f"option bands: low {band.low:g} is not below high {band.high:g}")
        for below, above in pairwise(self._bands):
            if below.high > above.low:
                raise ConfigError(
                    f"option bands: [{below.low:g}, {below.high:g}) and [{above.low:g}, {above.high:g}) overlap; expected disjoint bands"
                )
        self._largest = max((band.weight for band in self._bands), default=0.0)
        if self._largest <= 0:
            raise ConfigError("option bands: no band has a weight above 0")

    def probability(self, policy: str, task_id: str) -> float:
        """Of being submitted."""
        rate = self._rates.rate(policy, task_id)
        if rate is None:
            return 1.0
        found = next((band for band in self._bands if band.low <= rate < band.high or rate == band.high == 1.0), None)
        return found.weight / self._largest if found is not None else 0.0

    def wants(self, policy: str, task_id: str, chance: float) -> bool:
        return chance < self.probability(policy, task_id)
