from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.dataflow.barrier import ModelState, VersionBarrier
from astraflow.protocol.control import NotifyVersion, Ready
from astraflow.protocol.errors import Conflict
from astraflow.protocol.rollout import Serving


def barrier(*names: str, lead: int = 0, deadline_s: float = 100.0) -> VersionBarrier:
    return VersionBarrier({name: ModelState(model_id=name) for name in names}, lead, deadline_s)


def ready(name: str = "a", recovered: int | None = None, digest: str = "", checkpoint: int = -1) -> Ready:
    version = 0 if recovered is None else recovered
    return Ready(
        model_id=name, train_batch_size=8, sender_endpoint="http://x", version=version, recovered_version=recovered,
        digest=digest, checkpoint_version=checkpoint,
    )  # fmt: skip


def notice(version: int, name: str = "a", timeline: int = 0, digest: str = "") -> NotifyVersion:
    return NotifyVersion(model_id=name, timeline=timeline, version=version, digest=digest or f"{name}{version}")


def serving(version: int, digest: str, timeline: int = 0) -> Serving:
    return Serving(timeline=timeline, version=version, digest=digest)


def test_duplicate_and_late_notices_change_nothing() -> None:
    b = barrier("a")
    b.ready(ready(), 0.0)
    assert b.notify(notice(1), 1.0).kind == "new"
    assert b.notify(notice(1), 1.0).kind == "duplicate"
    assert b.notify(notice(3), 2.0).first == 1
    assert b.notify(notice(2), 3.0).kind == "duplicate"
    assert b.models["a"].version == 3


def test_ready_again_is_harmless_and_a_lower_version_bumps_the_timeline() -> None:
    b = barrier("a")
    assert b.ready(ready(), 0.0).timeline == 0
    assert not b.ready(ready(), 0.0).bumped
    for version in range(1, 6):
        b.notify(notice(version), 0.0)
    assert not b.ready(ready(recovered=5, digest="a5"), 0.0).bumped
    back = b.ready(ready(recovered=3), 0.0)
    assert (back.timeline, back.version, back.bumped) == (1, 3, True)
    again = b.ready(ready(recovered=3), 0.0)
    assert (again.timeline, again.bumped) == (1, False)
    with pytest.raises(Conflict, match="timeline 0 is dead"):
        b.notify(notice(4), 0.0)
    assert b.notify(notice(4, timeline=1), 0.0).kind == "new"


def test_the_same_version_with_other_bytes_is_a_new_timeline() -> None:
    b = barrier("a")
    b.ready(ready(digest="x"), 0.0)
    b.notify(notice(1, digest="one"), 0.0)
    outcome = b.ready(ready(recovered=1, digest="other"), 0.0)
    assert outcome.bumped
    assert not b.on_live_timeline("a", 0, 1)
    assert b.on_live_timeline("a", 0, 0)


def test_a_trainer_that_begins_again_with_other_bytes_shares_nothing_with_the_dead_timeline() -> None:
    b = barrier("a")
    b.ready(ready(digest="x"), 0.0)
    b.notify(notice(1), 0.0)
    assert b.ready(ready(digest="another start"), 0.0).bumped
    assert not b.on_live_timeline("a", 0, 0)
    assert b.on_live_timeline("a", 1, 0)


def test_a_sender_that_was_started_anew_has_nothing_older_than_it_resumed_from() -> None:
    core = barrier("a")
    core.ready(ready(), 0)
    for version in (1, 2, 3):
        core.notify(notice(version), 0)
    assert core.state("a").sent_from == 0
    again = ready(recovered=3)
    again.sender_endpoint = "http://127.0.0.1:2"
    core.ready(again, 1)
    assert (core.state("a").timeline, core.state("a").sent_from) == (0, 3)


def test_a_checkpoint_ahead_of_the_last_notice_commits_its_batch() -> None:
    b = barrier("a")
    b.ready(ready(), 0.0)
    b.notify(notice(1), 0.0)
    outcome = b.ready(ready(recovered=2), 0.0)
    assert (outcome.commit_through, outcome.bumped, outcome.version) == (1, False, 2)


def test_tokens_of_versions_that_only_a_dead_timeline_had_are_recognised() -> None:
    b = barrier("a")
    b.ready(ready(), 0.0)
    for version in range(1, 10):
        b.notify(notice(version), 0.0)
    b.ready(ready(recovered=6), 0.0)
    assert b.on_live_timeline("a", 0, 6)
    assert not b.on_live_timeline("a", 0, 7)
    b.notify(notice(7, timeline=1), 0.0)
    assert b.on_live_timeline("a", 1, 7)
    b.ready(ready(recovered=4), 0.0)
    assert not b.on_live_timeline("a", 0, 6)
    assert not b.on_live_timeline("a", 1, 7)
    assert b.on_live_timeline("a", 1, 4)


def test_the_gate_waits_for_the_slowest_live_policy_and_names_it() -> None:
    b = barrier("a", "b", lead=1)
    b.ready(ready("a"), 0.0)
    assert b.gate(0, "a")[0].waits_for == "trainer:b"
    b.ready(ready("b"), 0.0)
    assert not b.gate(0, "a")
    b.notify(notice(1), 0.0)
    assert not b.gate(1, "a")
    b.notify(notice(2), 0.0)
    edge = b.gate(2, "a")[0]
    assert edge.waits_for == "trainer:b"
    assert "version 0 of 'b' must reach 1" in edge.why
    b.notify(notice(1, "b"), 0.0)
    assert not b.gate(2, "a")
    assert b.service_version == 1


def test_a_dead_trainer_leaves_the_minimum_visibly_until_it_calls_again() -> None:
    b = barrier("a", "b", deadline_s=10.0)
    b.ready(ready("a"), 0.0)
    b.ready(ready("b"), 0.0)
    for version in (1, 2):
        b.notify(notice(version), 1.0)
    assert b.gate(2, "a")
    b.touch("a", 12.0)
    assert b.tick(12.0) == ["b"]
    assert b.tick(13.0) == []
    assert not b.gate(2, "a")
    assert b.service_version == 2
    assert {info.model_id: info.state for info in b.info(12.0)} == {"a": "live", "b": "dead"}
    assert b.touch("b", 14.0)
    assert b.service_version == 0


def test_receipts_confirm_only_published_bytes() -> None:
    b = barrier("a")
    b.ready(ready(digest="zero"), 0.0)
    b.notify(notice(1, digest="one"), 0.0)
    assert not b.confirmed("r", "a", 0, 0)
    assert b.receipt("r", "a", serving(0, "zero")) == ""
    assert b.confirmed("r", "a", 0, 0)
    assert not b.confirmed("r", "a", 0, 1)
    assert "published was one" in b.receipt("r", "a", serving(1, "wrong"))
    assert not b.confirmed("r", "a", 0, 1)
    assert not b.is_current("a", serving(1, "wrong"))
    b.receipt("r", "a", serving(1, "one"))
    assert b.confirmed("r", "a", 0, 1)
    b.forget_instance("r")
    assert not b.confirmed("r", "a", 0, 0)


def test_foreign_peers_without_digests_are_unverified_and_allowed() -> None:
    b = barrier("a")
    b.ready(ready(digest="zero"), 0.0)
    b.receipt("r", "a", serving(0, ""))
    assert b.confirmed("r", "a", 0, 0)
    assert b.is_current("a", serving(0, ""))


@given(st.lists(st.tuples(st.sampled_from(["notify", "crash", "old"]), st.integers(0, 5)), max_size=40))
def test_a_name_of_a_batch_is_never_given_twice(actions: list[tuple[str, int]]) -> None:
    """(timeline, version) moves strictly forward, whatever comes back at whatever version."""
    b = barrier("a")
    b.ready(ready(), 0.0)
    names = [(0, 0)]
    for action, amount in actions:
        state = b.models["a"]
        if action == "notify":
            b.notify(notice(state.version + 1, timeline=state.timeline), 0.0)
        elif action == "old":
            b.notify(notice(max(state.version - amount, 0), timeline=state.timeline), 0.0)
        else:
            b.ready(ready(recovered=max(state.version - amount, 0)), 0.0)
        now = (b.models["a"].timeline, b.models["a"].version)
        assert now >= names[-1]
        if now != names[-1]:
            assert now not in names
            names.append(now)
