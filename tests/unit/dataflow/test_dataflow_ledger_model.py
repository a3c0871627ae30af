"""The ledger against a model that keeps one line per trajectory and policy."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from astraflow.dataflow.journal import BatchRow, LeaseRow, Pick, Result, Settled, ShareResult
from astraflow.dataflow.ledger import Ledger
from astraflow.dataflow.policies.base import GroupStats

POLICIES = ("m", "n")
N = 4


@dataclass
class Row:
    """One trajectory of one policy."""

    lease_id: str
    policy: str
    index: int
    state: str = "leased"
    reason: str = ""
    part: int = 0
    batch: int = -1
    final: bool = False
    version: int = 0
    """Of its tokens."""
    kept: bool = False


class LedgerModel(RuleBasedStateMachine):
    """Any order of events, with a reopen at any moment."""

    @initialize()
    def begin(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="ledger-model-"))
        self.ledger = Ledger(self.path, 1)  # a segment file per payload
        self.rows: list[Row] = []
        self.leases, self.arrivals = 0, 0
        self.version = dict.fromkeys(POLICIES, 0)
        self.timeline = dict.fromkeys(POLICIES, 0)
        self.served: dict[str, list[str]] = {}
        """Policy → leases replayed in its open batch."""
        self.replayed = 0

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.close()
            shutil.rmtree(self.path)

    def parts(self, policy: str, state: str) -> dict[tuple[str, int], list[Row]]:
        found: dict[tuple[str, int], list[Row]] = {}
        for row in self.rows:
            if row.policy == policy and row.state == state:
                found.setdefault((row.lease_id, row.part), []).append(row)
        return dict(sorted(found.items()))

    # --- events ---------------------------------------------------------------------------------------------------------

    @rule()
    def issue(self) -> None:
        lease_id = f"g{self.leases:04d}"
        self.leases += 1
        self.ledger.issue([LeaseRow(lease_id, "t", 0, 0, N, 0, 1, "r", POLICIES)], {})
        self.rows += [Row(lease_id, policy, index) for policy in POLICIES for index in range(N)]

    @precondition(lambda self: any(row.state == "leased" for row in self.rows))
    @rule(data=st.data())
    def end_a_lease(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted({row.lease_id for row in self.rows if row.state == "leased"})))
        mine = [row for row in self.rows if row.lease_id == lease_id]
        if data.draw(st.integers(0, 5)) == 0:
            self.ledger.abandon([lease_id], "max_attempts")
            for row in mine:
                row.state, row.reason, row.final = "dropped", "max_attempts", True
            return
        shares = []
        for policy in POLICIES:
            lost = data.draw(st.sets(st.integers(0, N - 1), max_size=N))
            scored = [index for index in range(N) if index not in lost]
            state = data.draw(st.sampled_from(["buffered", "buffered", "buffered", "rolled", "dropped"])) if scored else "dropped"
            reason = ("zero_variance" if scored else "unscored") if state == "dropped" else ""
            version = self.version[policy]
            self.arrivals += 1
            stats = GroupStats(
                task_id="t", n_samples=N, values=dict.fromkeys(scored, 1.0), shaped=dict.fromkeys(scored, 1.0), mean=1.0, std=0.0,
                all_equal=True, timeline=0, min_version=version, max_version=version, loss_tokens=1,
            )  # fmt: skip
            gone = dict.fromkeys(sorted(lost), "error:engine.x")
            shares.append(ShareResult(policy, state, reason, stats if scored else None, gone, self.arrivals))  # type: ignore[arg-type]
            for row in mine:
                if row.policy == policy:
                    row.version = version
                    row.state, row.reason = ("dropped", "error:engine.x") if row.index in lost else (state, reason)
                    row.final = row.state == "dropped"
        self.ledger.record([Result(lease_id, 1, b"payload of %s" % lease_id.encode(), shares)])

    @rule(data=st.data(), policy=st.sampled_from(POLICIES))
    def settle(self, data: st.DataObject, policy: str) -> None:
        parts = {**self.parts(policy, "rolled"), **self.parts(policy, "buffered")}
        if not parts:
            return
        key = data.draw(st.sampled_from(sorted(parts)))
        back = parts[key][0].state == "rolled" and data.draw(st.booleans())
        self.ledger.settle([Settled(key[0], policy, "buffered" if back else "dropped", "" if back else "stale", key[1])])
        for row in parts[key]:
            row.state, row.reason, row.final = ("buffered", "", False) if back else ("dropped", "stale", True)

    @rule(data=st.data(), policy=st.sampled_from(POLICIES))
    def serve(self, data: st.DataObject, policy: str) -> None:
        buffered = self.parts(policy, "buffered")
        if policy in self.served or not buffered:
            return
        count = data.draw(st.integers(1, len(buffered)))
        picks: list[Pick] = []
        for number, ((lease_id, part), rows) in enumerate(list(buffered.items())[:count]):
            cut = data.draw(st.integers(1, len(rows))) if number == count - 1 else len(rows)
            rest = tuple(row.index for row in rows[cut:])
            picks.append(Pick(lease_id, part, rest))
            for row in rows[:cut]:
                row.state, row.batch = "served", self.version[policy]
            for row in rows[cut:]:
                row.part = rest[0]
        kept = sorted({row.lease_id for row in self.rows if row.policy == policy and row.kept})
        again = data.draw(st.lists(st.sampled_from(kept), unique=True)) if kept else []
        self.ledger.serve(BatchRow(policy, self.timeline[policy], self.version[policy], picks, again), b"bytes")
        self.served[policy] = again

    @rule(data=st.data(), policy=st.sampled_from(POLICIES), lag=st.integers(0, 3), keep=st.booleans())
    def commit(self, data: st.DataObject, policy: str, lag: int, keep: bool) -> None:
        version = self.version[policy]
        served = [row for row in self.rows if row.policy == policy and row.state == "served"]
        done = {
            row.lease_id for row in served
            if all(r.state in ("served", "trained") for r in self.rows if r.policy == policy and r.lease_id == row.lease_id
                   and not (r.state == "dropped" and r.reason.startswith("error")))
        }  # fmt: skip
        wanted = {row.lease_id for row in self.rows if row.policy == policy and row.kept} | (done if keep else set())
        trained = self.ledger.commit(policy, self.timeline[policy], version, version + 1, version + 1 - lag, wanted, {})
        assert trained == len(served)
        for row in served:
            row.state = "trained"
            row.kept = row.lease_id in wanted
        for row in self.rows:
            if row.policy == policy and row.state == "trained" and row.batch < version + 1 - lag:
                row.final = True
        for lease_id in self.served.pop(policy, []):
            self.replayed += sum(row.policy == policy and row.lease_id == lease_id and row.state == "trained" for row in self.rows)
        self.version[policy] = version + 1

    @rule(data=st.data(), policy=st.sampled_from(POLICIES))
    def forget(self, data: st.DataObject, policy: str) -> None:
        kept = sorted({row.lease_id for row in self.rows if row.policy == policy and row.kept} - set(self.served.get(policy, [])))
        if not kept:
            return
        lease_id = data.draw(st.sampled_from(kept))
        self.ledger.forget(policy, [lease_id, "unknown"])
        for row in self.rows:
            if (row.policy, row.lease_id) == (policy, lease_id):
                row.kept = False

    @rule(policy=st.sampled_from(POLICIES), back=st.integers(0, 3))
    def roll_back(self, policy: str, back: int) -> None:
        version = max(self.version[policy] - back, 0)
        found = self.ledger.rollback(policy, version, {})
        expected = set()
        for row in self.rows:
            if row.policy == policy and not row.final and row.state in ("served", "trained") and row.batch >= version:
                expected.add((row.lease_id, row.part))
                row.state, row.batch, row.kept = "buffered", -1, False
        assert [(share.lease_id, share.part) for share in found] == sorted(expected)
        self.served.pop(policy, None)
        self.version[policy], self.timeline[policy] = version, self.timeline[policy] + 1

    @rule()
    def reopen(self) -> None:
        """As after kill -9: nothing was closed first."""
        before = self.ledger
        self.ledger = Ledger(self.path, 1)
        found = self.ledger.recover()
        before.close()
        assert [lease.lease_id for lease in found.leases] == sorted({row.lease_id for row in self.rows if row.state == "leased"})
        shares: dict[tuple[str, str, int], tuple[str, list[int]]] = {}
        for row in self.rows:
            if (not row.final and row.state in ("rolled", "buffered", "served", "trained")) or row.kept:
                shares.setdefault((row.lease_id, row.policy, row.part), (row.state, []))[1].append(row.index)
        assert {(s.lease_id, s.policy, s.part): (s.state, list(s.members or sorted(s.stats.values))) for s in found.shares} == shares
        assert {batch.policy: batch.replayed for batch in found.served} == self.served
        assert found.arrivals == self.arrivals

    # --- always ---------------------------------------------------------------------------------------------------------

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "ledger"):
            return
        counts = self.ledger.check()
        states = Counter(row.state for row in self.rows)
        assert counts.made == len(self.rows)
        assert counts.trained == states["trained"]
        assert counts.in_flight == {name: states[name] for name in ("leased", "rolled", "buffered", "served")}
        assert counts.dropped == dict(sorted(Counter(row.reason for row in self.rows if row.state == "dropped").items()))
        assert counts.replayed == self.replayed
        for policy in POLICIES:
            gaps = Counter(row.batch - row.version for row in self.rows if row.policy == policy and row.state == "trained")
            assert self.ledger.staleness(policy) == gaps
        needed = {
            row.lease_id for row in self.rows
            if row.state in ("rolled", "buffered", "served") or (row.state == "trained" and (not row.final or row.kept))
        }  # fmt: skip
        assert set(self.ledger.places) == needed
        assert all(self.ledger.payload(lease_id) == b"payload of %s" % lease_id.encode() for lease_id in needed)
        files = len(list((self.path / "segments").iterdir()))
        assert len(needed) <= files <= len(needed) + 1, "a file for each payload that is needed, and the one that is written to"


TestLedgerModel = LedgerModel.TestCase
TestLedgerModel.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
