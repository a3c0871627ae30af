"""Who is stuck: roots and chains against hand-made graphs and a brute-force oracle; when a run is stalled, by a clock given to it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.dataflow.stall import StallWatch, as_text, chains, make_report, roots, summary, targets
from astraflow.protocol.batch import WaitEdge
from astraflow.protocol.control import DataflowStatus, Drop, LedgerCounts, QueueInfo, TrainerInfo


def edge(who: str, waits_for: str, since_s: float = 10.0, why: str = "because") -> WaitEdge:
    return WaitEdge(who=who, waits_for=waits_for, why=why, since_s=since_s)


def names(edges: list[WaitEdge]) -> list[tuple[str, str]]:
    return [(one.who, one.waits_for) for one in edges]


STUCK_INSTANCE = [
    edge("trainer:m", "groups", 40),
    edge("dataflow:submit", "trainer:m", 38),
    edge("groups", "raas:r0", 50),
]
STUCK_TRAINER = [
    edge("batch:verifier", "trainer:verifier", 300),
    edge("trainer:solver", "trainer:verifier", 290),
    edge("dataflow:submit", "trainer:solver, trainer:verifier", 280),
]
EMPTY_POOL = [
    edge("trainer:m", "groups", 40),
    edge("groups", "dataflow:submit", 41),
    edge("dataflow:submit", "raas", 42),
]
CIRCLE = [
    edge("trainer:m", "groups", 40),
    edge("groups", "dataflow:submit", 41),
    edge("dataflow:submit", "trainer:m", 42),
    edge("dataflow:eval-1", "trainer:m", 5),
]


@pytest.mark.parametrize(
    ("edges", "stuck"),
    [
        (STUCK_INSTANCE, [("groups", "raas:r0")]),
        (
            STUCK_TRAINER,
            [
                ("batch:verifier", "trainer:verifier"),
                ("trainer:solver", "trainer:verifier"),
                ("dataflow:submit", "trainer:solver, trainer:verifier"),
            ],
        ),
        (EMPTY_POOL, [("dataflow:submit", "raas")]),
        (CIRCLE, [("dataflow:submit", "trainer:m"), ("groups", "dataflow:submit"), ("trainer:m", "groups")]),
        ([], []),
    ],
    ids=["an instance never answers", "a trainer never publishes", "no instance", "everybody waits for everybody", "nobody waits"],
)
def test_the_roots_are_the_edges_that_nobody_else_explains(edges: list[WaitEdge], stuck: list[tuple[str, str]]) -> None:
    assert names(roots(edges)) == stuck


def test_a_chain_leads_from_who_nobody_waits_for_down_to_the_root() -> None:
    (chain,) = chains(STUCK_INSTANCE)
    assert names(chain) == [("dataflow:submit", "trainer:m"), ("trainer:m", "groups"), ("groups", "raas:r0")]
    assert [names(chain) for chain in chains(CIRCLE)] == [
        [("dataflow:eval-1", "trainer:m"), ("trainer:m", "groups")],
        [("dataflow:submit", "trainer:m")],
        [("groups", "dataflow:submit")],
    ]


graphs = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=14, unique=True)


@given(graphs)
def test_roots_are_those_of_a_search_over_all_paths(pairs: list[tuple[int, int]]) -> None:
    edges = [edge(f"n{a}", f"n{b}") for a, b in pairs]
    after: dict[int, set[int]] = {node: {node} for pair in pairs for node in pair}
    for _ in range(8):  # longer than any path
        for a, b in pairs:
            after[a] |= after[b]
    final = {node for node in after if all(node in after[other] for other in after[node])}
    wanted = {(a, b) for a, b in pairs if b in final and (a in final or not any(who == b for who, _ in pairs))}
    assert {(int(one.who[1:]), int(one.waits_for[1:])) for one in roots(edges)} == wanted
    assert bool(roots(edges)) == bool(edges), "whoever waits, somebody is at the root of it"


@given(graphs)
def test_every_chain_is_a_path_that_ends_at_a_root(pairs: list[tuple[int, int]]) -> None:
    edges = [edge(f"n{a}", f"n{b}") for a, b in pairs]
    for chain in chains(edges):
        assert chain[-1] in roots(edges)
        assert all(later.who in targets(earlier) for earlier, later in pairwise(chain))


def test_a_run_is_stalled_when_nothing_has_moved_for_the_limit_and_not_before() -> None:
    watch = StallWatch(limit_s=10.0, moved_at=100.0)
    assert not watch.look((0, 0), 101.0)
    assert not watch.look((0, 0), 110.9)
    assert watch.left_s(110.9) == pytest.approx(0.1)
    assert watch.look((0, 0), 111.0)
    assert watch.idle_s(111.0) == 10.0


def test_a_slow_run_that_moves_is_never_stalled() -> None:
    watch = StallWatch(limit_s=10.0, moved_at=0.0)
    assert not any(watch.look(step, step * 9.9) for step in range(1000))


def test_without_a_limit_nothing_is_a_stall() -> None:
    watch = StallWatch(limit_s=None, moved_at=0.0)
    assert not watch.look(1, 0.0)
    assert not watch.look(1, 1e9)
    assert watch.left_s(1e9) is None


def test_the_report_names_the_root_in_its_first_line_and_holds_everything() -> None:
    trainer = TrainerInfo(model_id="m", timeline=0, version=3, digest="", checkpoint_version=-1, state="live", last_seen_s=2)
    status = DataflowStatus(
        uptime_s=100,
        state="ready",
        service_version=3,
        started=True,
        trainers=[trainer],
        instances=[],
        queues={"m": QueueInfo(fresh_groups=1, fresh_trajectories=4, replay_groups=0, held_groups=0, served=0)},
        ledger=LedgerCounts(made=40, trained=24, dropped={"stale": 4}, in_flight={"leased": 12}),
        waits=STUCK_INSTANCE,
        events=["instance r0 joined"],
        recent_drops=[Drop(lease_id="l", task_id="t", policy="m", reason="stale")],
    )
    report = make_report(status, 50.0, 45.0)
    assert report.summary == "stalled: nothing moved for 50 s; groups waits for raas:r0 since 50 s: because"
    text = as_text(report)
    assert text.splitlines()[0] == report.summary
    for part in ("m: live, version 3", "1 groups queued", "dropped: stale 4", "in flight: leased 12", "instance r0 joined"):
        assert part in text
    assert summary([], 7.0) == "stalled: nothing moved for 7 s, and nobody waits for anybody"
