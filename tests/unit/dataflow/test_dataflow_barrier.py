from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.dataflow.barrier import ModelState, VersionBarrier
from astraflow.protocol.control import NotifyVersion, Ready
from astraflow.protocol.errors import Conflict, Replaced
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


def test_instances_are_spread_over_the_senders_of_a_trainer_and_keep_theirs() -> None:
    b = barrier("a")
    message = ready()
    message.more_senders = ["http://y", "http://z"]
    b.ready(message, 0.0)
    first = {f"raas-{number}": b.sender_for("a", f"raas-{number}") for number in range(30)}
    assert set(first.values()) == {"http://x", "http://y", "http://z"}
    assert first == {name: b.sender_for("a", name) for name in first}
    b.ready(ready(recovered=0), 1.0)
    assert {b.sender_for("a", name) for name in first} == {"http://x"}, "another trainer has taken its place, on one node"


def test_duplicate_and_late_notices_change_nothing() -> None:
    b = barrier("a")
    b.ready(ready(), 0.0)
    assert b.notify(notice(1), 1.0).kind == "new"
    assert b.notify(notice(1), 1.0).kind == "duplicate"
    jump = b.notify(notice(3), 2.0)
    assert (jump.kind, jump.first, jump.skipped) == ("new", 1, 1), "believed: the weights of that number exist"
    assert b.notify(notice(2), 3.0).kind == "duplicate"
    assert b.models["a"].version == 3


def test_other_bytes_under_a_published_version_are_refused_on_the_same_timeline() -> None:
    b = barrier("a")
    b.ready(ready(digest="zero"), 0.0)
    b.notify(notice(1, digest="one"), 0.0)
    with pytest.raises(Conflict, match="version 1 of timeline 0 was published with digest one, the notice says other"):
        b.notify(notice(1, digest="other"), 0.0)
    assert b.models["a"].digests == {0: "zero", 1: "one"}
    assert b.ready(ready(recovered=1, digest="other"), 0.0).bumped, "attaching again with them is a new timeline"


def test_a_trainer_that_was_replaced_is_refused_everywhere_and_its_successor_is_not() -> None:
    b = barrier("a")
    first, second = ready(), ready()
    first.incarnation, second.incarnation = "old", "new"
    b.ready(first, 0.0)
    b.claim("a", "old")
    b.ready(second, 10.0)
    late = notice(1)
    late.incarnation = "old"
    with pytest.raises(Replaced, match="process old, but process new attached later"):
        b.notify(late, 20.0)
    with pytest.raises(Replaced):
        b.claim("a", "old")
    with pytest.raises(Replaced):
        b.finish("a", 20.0, "old")
    assert b.info(20.0)[0].last_seen_s == 10.0, "its calls do not keep the model alive"
    assert (b.models["a"].version, b.models["a"].done) == (0, False)
    late.incarnation = "new"
    assert b.notify(late, 20.0).kind == "new"
    b.claim("a", "")  # a peer that names no incarnation is believed
    with pytest.raises(Replaced):
        b.ready(first, 30.0)  # it takes nothing back, neither now nor with a copy that was long under way
    third = ready(recovered=1, digest="a1")
    third.incarnation = "third"
    assert not b.ready(third, 30.0).bumped, "a new process takes over"
    with pytest.raises(Replaced):
        b.claim("a", "new")
    assert b.finish("a", 30.0, "third")
    assert not b.finish("a", 30.0, "third"), "the same again changes nothing"


def test_the_first_process_is_claimed_by_nobody_before_ready() -> None:
    b = barrier("a")
    b.claim("a", "x")
    with pytest.raises(Conflict, match="before /ready"):
        b.notify(notice(1), 0.0)


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
    assert edge.until == 100.0, "from then on b counts no more, unless it is heard of"
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


def test_a_late_copy_of_a_ready_takes_no_trainer_back() -> None:
    b = barrier("a")
    first = ready(digest="a0")
    first.incarnation = "p1"
    b.ready(first, 0.0)
    for version in (1, 2):
        published = notice(version)
        published.incarnation = "p1"
        b.notify(published, 1.0)
    late = b.ready(first, 2.0)
    assert (late.timeline, late.version, late.bumped, late.fresh, late.commit_through) == (0, 2, False, False, None)
    again = ready(recovered=0, digest="a0", checkpoint=0)
    again.incarnation = "p1"
    assert b.ready(again, 3.0).bumped, "the same process may go back to its checkpoint, and says so in other words"


def test_what_comes_late_of_a_process_that_was_replaced_takes_nothing_from_its_successor() -> None:
    b = barrier("a")
    old, new = ready(digest="a0"), ready(digest="a0")
    old.incarnation, new.incarnation = "p1", "p2"
    b.ready(old, 0.0)
    b.ready(new, 1.0)
    with pytest.raises(Replaced, match="p2 has taken the place of p1"):
        b.ready(old, 2.0)
    assert b.ready(new, 3.0).version == 0
    assert b.models["a"].incarnation == "p2"


def test_a_wanted_checkpoint_is_open_until_that_version_or_a_later_one_is_on_disk() -> None:
    b = barrier("a", "b")
    with pytest.raises(Conflict, match="model a: its trainer is not ready, so it writes no checkpoint"):
        b.want_checkpoint("a")
    for name in ("a", "b"):
        b.ready(ready(name), 0.0)
    b.notify(notice(3), 1.0)
    assert b.want_checkpoint("") == {"a": 3, "b": 0}
    b.ready(ready("b", checkpoint=0), 2.0)
    assert {info.model_id: info.checkpoint_wanted for info in b.info(2.0)} == {"a": 3, "b": -1}
    late = notice(4)
    late.checkpoint_version = 2
    b.notify(late, 3.0)
    assert b.models["a"].checkpoint_wanted == 3, "an older one that ended meanwhile"
    done = notice(4)
    done.checkpoint_version = 4
    assert b.notify(done, 4.0).kind == "duplicate"
    assert b.models["a"].checkpoint_wanted == -1
    assert b.want_checkpoint("a") == {}, "the newest version is on disk already"
    b.notify(notice(5), 5.0)
    b.want_checkpoint("a")
    b.ready(ready(recovered=4, digest="other", checkpoint=4), 6.0)
    assert b.models["a"].checkpoint_wanted == -1, "its timeline is dead"
