"""Evaluation lanes pin versions, end by themselves, and say why they are gone."""

from __future__ import annotations

import pytest

from astraflow.protocol.errors import BadMessage, Conflict
from astraflow.protocol.rollout import Serving
from astraflow.raas.lanes import MAX_LANES, Lanes, same_weights

V3 = Serving(timeline=1, version=3, digest="aa")


def test_a_lane_opens_only_on_the_versions_that_are_served() -> None:
    lanes = Lanes()
    with pytest.raises(Conflict, match="serves nothing"):
        lanes.open("e", {"p": V3}, 5.0, {}, 0.0)
    with pytest.raises(Conflict, match="version 4"):
        lanes.open("e", {"p": Serving(timeline=1, version=4, digest="aa")}, 5.0, {"p": V3}, 0.0)
    lanes.open("e", {"p": V3}, 5.0, {"p": V3}, 0.0)
    lanes.open("e", {"p": V3}, 5.0, {"p": V3}, 1.0)
    assert lanes.names == ["e"]


def test_an_unverified_digest_contradicts_nothing() -> None:
    assert same_weights(V3, Serving(timeline=1, version=3, digest=""))
    assert not same_weights(V3, Serving(timeline=1, version=3, digest="bb"))
    assert not same_weights(V3, Serving(timeline=2, version=3, digest="aa"))
    assert not same_weights(None, V3)


def test_a_lane_is_due_at_its_deadline_or_when_its_versions_are_gone() -> None:
    lanes = Lanes()
    lanes.open("e", {"p": V3}, 5.0, {"p": V3}, 10.0)
    assert lanes.due({"p": V3}, 14.9) == []
    assert lanes.time_left_s(14.0) == 1.0
    assert lanes.due({"p": V3}, 15.0) == [("e", "its deadline passed")]
    assert "now serves" in lanes.due({"p": Serving(timeline=1, version=4, digest="")}, 11.0)[0][1]


def test_a_late_call_hears_why_its_lane_is_gone() -> None:
    lanes = Lanes()
    lanes.open("e", {}, 5.0, {}, 0.0)
    assert lanes.close("e", "its deadline passed")
    assert not lanes.close("e", "ended")
    with pytest.raises(Conflict, match="its deadline passed"):
        lanes.check("e")
    with pytest.raises(Conflict, match="not open"):
        lanes.check("never")


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_lane_that_would_never_end_is_refused(deadline_s: float) -> None:
    with pytest.raises(BadMessage, match="deadline_s"):
        Lanes().open("e", {}, deadline_s, {}, 0.0)


def test_open_lanes_are_bounded() -> None:
    lanes = Lanes()
    for number in range(MAX_LANES):
        lanes.open(str(number), {}, 5.0, {}, 0.0)
    lanes.open("0", {}, 5.0, {}, 0.0)
    with pytest.raises(Conflict, match="open already"):
        lanes.open("one more", {}, 5.0, {}, 0.0)


def test_lanes_of_an_earlier_life_of_dataflow_are_orphans() -> None:
    lanes = Lanes()
    lanes.open("old", {"p": V3}, 300.0, {"p": V3}, 0.0, "first life")
    assert lanes.orphans("first life") == []
    assert lanes.orphans("second life") == ["old"]
    assert lanes.orphans("") == [], "a person with curl is no Dataflow"
    lanes.close("old", "Dataflow was restarted")
    lanes.open("old", {"p": V3}, 300.0, {"p": V3}, 1.0, "second life")
    assert lanes.orphans("second life") == []
