"""`astraflow replay` on logs written by hand, against sums over the same groups."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from astraflow import cli
from astraflow.dataflow.admission import statistics
from astraflow.dataflow.journal import BatchRow, LeaseRow, Pick, Result, ShareResult
from astraflow.dataflow.ledger import Ledger
from astraflow.dataflow.logbook import Logbook
from astraflow.dataflow.policies.base import GroupStats
from astraflow.dataflow.policies.greso import Greso
from astraflow.protocol.errors import ConfigError
from astraflow.tools.replay import Outcome, replay

EASY, HARD, MIXED = [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]


class Run:
    """A ledger, written as Dataflow would: one group after the other."""

    def __init__(self, run_dir: Path, policies: tuple[str, ...] = ("m",)) -> None:
        self.dir, self.policies = run_dir, policies
        self.ledger = Ledger(run_dir / "ledger", 1 << 20)
        self.groups: list[tuple[str, str]] = []
        self.arrivals, self.version = 0, 0

    def group(self, task: str, *rewards: list[float], reason: str = "", lengths: list[int] | None = None, epoch: int = 0) -> str:
        """`rewards` per policy; the group is queued unless there is a reason."""
        lease_id = f"g{len(self.groups):04d}"
        self.groups.append((lease_id, task))
        self.ledger.issue([LeaseRow(lease_id, task, 0, epoch, 2, 0, 1, "r", self.policies)], {})
        shares = []
        for policy, values in zip(self.policies, rewards, strict=True):
            self.arrivals += 1
            stats = made(task, values, lengths or [3, 5])
            lost = {} if stats is not None else dict.fromkeys(range(2), "unscored")
            state: Any = "dropped" if reason or stats is None else "buffered"
            why = reason if stats is not None else "unscored"
            shares.append(ShareResult(policy, state, why, stats, lost, self.arrivals))
        self.ledger.record([Result(lease_id, 1, b"x", shares)])
        return lease_id

    def train(self, *leases: str, policy: str = "m") -> None:
        row = BatchRow(policy=policy, timeline=0, version=self.version, fresh=[Pick(lease) for lease in leases], replayed=[])
        self.ledger.serve(row, b"batch")
        self.version += 1
        self.ledger.commit(policy, 0, self.version - 1, self.version, -1, set(), {})


def made(task: str, rewards: list[float], lengths: list[int]) -> GroupStats | None:
    if not rewards:
        return None
    values, (mean, std, equal) = dict(enumerate(rewards)), statistics(rewards)
    return GroupStats(
        task_id=task, n_samples=2, values=values, shaped=values, mean=mean, std=std, all_equal=equal, timeline=0, min_version=0,
        max_version=0, loss_tokens=sum(lengths), lengths=dict(enumerate(lengths)), finishes={1: "length"},
    )  # fmt: skip


@pytest.fixture
def logged(tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    kept = [run.group("a", MIXED, lengths=[2, 4]), run.group("b", EASY, lengths=[1, 1])]
    run.train(*kept)
    run.group("c", HARD, reason="stale", lengths=[8, 8])
    run.group("d", [], reason="unscored")
    run.group("a", MIXED, lengths=[3, 3])
    run.group("b", [1.0], reason="too_few_scored", lengths=[6])
    run.ledger.close()
    return run


def one(outcomes: list[Outcome], **wanted: str) -> Outcome:
    (found,) = [o for o in outcomes if all(getattr(o, key) == value for key, value in wanted.items())]
    return found


def test_what_really_happened_and_what_a_filter_would_have_kept(logged: Run) -> None:
    answer = replay(logged.dir, filters=["keep_all", "filter_zero_adv", "{name: reward_band, low: .5, high: .5}"])
    assert answer.groups == 6
    real = one(answer.outcomes, filter="as logged")
    assert (real.kept.groups, real.reasons, real.under_way) == (2, {"stale": 1, "too_few_scored": 1, "unscored": 1}, 1)
    assert (real.kept.tokens, real.kept.length, real.kept.reward) == (8, 2.0, 0.75)
    assert (real.dropped.tokens, real.dropped.length, real.dropped.reward) == (22, 22 / 3, 1 / 3)
    assert real.rollouts_per_kept_group == 10 / 2, "five groups of two came to an end"
    whole = one(answer.outcomes, filter="keep_all")
    assert (whole.kept.groups, whole.reasons) == (4, {"too_few_scored": 1, "unscored": 1}), "what came too late belongs to the run"
    assert whole.seen.groups == whole.kept.groups + whole.dropped.groups == 6
    assert whole.rollouts_per_kept_group == 12 / 4
    varied = one(answer.outcomes, filter="filter_zero_adv")
    assert (whole.kept.varied, varied.kept.varied, real.kept.varied) == (2, 2, 1)
    assert (varied.kept.groups, varied.reasons) == (2, {"too_few_scored": 1, "unscored": 1, "zero_variance": 2})
    assert (varied.kept.trajectories, varied.kept.tokens, varied.kept.reward, varied.rollouts_per_kept_group) == (4, 12, 0.5, 6.0)
    band = one(answer.outcomes, filter="{name: reward_band, low: 0.5, high: 0.5}")
    assert band.reasons == {"reward_band": 2, "too_few_scored": 1, "unscored": 1}


def test_a_shaper_changes_what_a_filter_sees_by_lengths_and_finishes(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.group("a", EASY, lengths=[2, 7])
    run.group("b", EASY, lengths=[2, 3])
    run.ledger.close()
    shaper = "{name: overlong, max_len: 8, tail: 4}"
    answer = replay(run.dir, filters=["filter_zero_adv"], shapers=["none", shaper])
    plain, shaped = one(answer.outcomes, shaper="none"), one(answer.outcomes, shaper=shaper)
    assert (plain.kept.groups, plain.reasons) == (0, {"zero_variance": 2})
    assert (shaped.kept.groups, shaped.reasons) == (1, {"zero_variance": 1}), "a member of a is too long"
    assert (shaped.kept.reward, shaped.kept.length) == (1.0, 4.5), "rewards are told as they were"
    assert plain.rollouts_per_kept_group is None


def test_a_curator_decides_before_it_sees_and_never_sees_what_it_refused(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    for _ in range(3):
        run.group("solved", EASY)
        run.group("open", MIXED)
    run.ledger.close()
    outcome = one(replay(run.dir, curators=["filter_solved"]).outcomes, curator="filter_solved")
    assert (outcome.kept.groups, outcome.reasons) == (4, {"not_submitted": 2})
    assert outcome.rollouts_per_kept_group == 2.0, "what was not submitted cost nothing"
    both = one(replay(run.dir, curators=["[filter_solved, greso]"]).outcomes, curator="[filter_solved, greso]")
    assert both.reasons == {"not_submitted": 2}


def test_versions_move_between_the_arrivals_between_which_they_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run")
    for epoch in range(3):
        leases = [run.group("a", EASY, epoch=epoch), run.group("b", MIXED, epoch=epoch)]
        run.train(*leases)
    run.ledger.close()
    seen: list[Any] = []
    monkeypatch.setattr(Greso, "wants", lambda self, policy, task, chance: seen.append(task) or True)
    monkeypatch.setattr(Greso, "on_version", lambda self, policy, version, epoch: seen.append((policy, version, epoch)))
    replay(run.dir, curators=["greso"])
    assert seen == ["a", "b", ("m", 1, 0), "a", "b", ("m", 2, 1), "a", "b", ("m", 3, 2)]


def test_a_prompt_that_some_model_wants_is_submitted_for_all(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", ("solver", "verifier"))
    for _ in range(2):
        run.group("t", EASY, MIXED)
        run.group("u", EASY, EASY)
    run.ledger.close()
    outcomes = replay(run.dir, curators=["filter_solved"]).outcomes
    for policy in ("solver", "verifier"):
        assert one(outcomes, policy=policy, curator="filter_solved").reasons == {"not_submitted": 1}


def test_after_256_refusals_in_a_row_a_prompt_is_forced(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    for _ in range(300):
        run.group("t", EASY)
    run.ledger.close()
    outcome = one(replay(run.dir, curators=["filter_solved"]).outcomes, curator="filter_solved")
    assert (outcome.forced, outcome.kept.groups, outcome.reasons) == (1, 2, {"not_submitted": 298})


def test_a_run_that_goes_on_can_be_read_and_a_group_in_two_batches_counts_once(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    lease_id = run.group("t", MIXED)
    row = BatchRow(policy="m", timeline=0, version=0, fresh=[Pick(lease_id, 0, (1,))], replayed=[])
    run.ledger.serve(row, b"batch")
    run.ledger.commit("m", 0, 0, 1, -1, set(), {})
    answer = replay(run.dir, filters=["filter_zero_adv"])
    assert answer.groups == 1
    assert one(answer.outcomes, filter="as logged").kept.trajectories == 2
    assert one(answer.outcomes, filter="filter_zero_adv").kept.groups == 1
    run.group("u", MIXED)
    assert replay(run.dir).groups == 2
    run.ledger.close()


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["astraflow", "replay", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(str(end.value.code))


def test_the_verb_shows_a_table_writes_json_and_leaves_the_directory_as_it_was(
    logged: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def files() -> dict[str, str]:
        return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(logged.dir.rglob("*")) if p.is_file()}

    before, out = files(), tmp_path / "out.json"
    code = call(
        monkeypatch, str(logged.dir), "--curator", "{name: greso, p_easy: .4}", "--filter", "filter_zero_adv", "--json", str(out)
    )
    assert code == 0
    assert files() == before
    shown = capsys.readouterr().out
    for word in ("as logged", "{name: greso, p_easy: 0.4}", "filter_zero_adv", "zero_variance", "unscored", "6 groups in the log"):
        assert word in shown
    found = json.loads(out.read_text())
    assert [o["filter"] for o in found["outcomes"]] == ["as logged", "filter_zero_adv"]
    assert msgspec.convert(found["outcomes"][1], Outcome).reasons["zero_variance"] == 2


def test_a_wrong_directory_name_or_option_is_one_line_and_status_2(
    logged: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = tmp_path / "foreign" / "ledger"
    foreign.mkdir(parents=True)
    (foreign / "ledger.sqlite").write_bytes(b"no data base at all, but long enough to look like one" * 50)
    other = tmp_path / "other" / "ledger"
    other.mkdir(parents=True)
    with sqlite3.connect(other / "ledger.sqlite") as db:
        db.execute("CREATE TABLE shares(x)")
    torn = tmp_path / "torn"
    shutil.copytree(logged.dir, torn)
    data = (torn / "ledger" / "ledger.sqlite").read_bytes()
    (torn / "ledger" / "ledger.sqlite").write_bytes(data[:4096])
    for arguments, said in [
        ([str(tmp_path / "nowhere")], "not the directory of a run"),
        ([str(foreign.parent)], "cannot be read"),
        ([str(other.parent)], "cannot be read"),
        ([str(torn)], "cannot be read"),
        ([str(logged.dir), "--curator", "gresso"], "did you mean 'greso'?"),
        ([str(logged.dir), "--curator", "{name: greso, p_esy: 1}"], "--curator: greso: unknown option 'p_esy'"),
        ([str(logged.dir), "--filter", "{name: reward_band, low: 1"], "--filter: '{name: reward_band, low: 1': expected a name"),
        ([str(logged.dir), "--filter", "3"], "--filter: '3': expected a name"),
        ([str(logged.dir), "--shaper", "{name: overlong, max_len: 4}"], "--shaper: overlong: option tail is required"),
        ([str(logged.dir), "--json", str(tmp_path / "no" / "where.json")], "--json: cannot write"),
    ]:
        assert call(monkeypatch, *arguments) == 2, arguments
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


def test_damage_that_a_reader_meets_is_one_line_and_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)
    for number in range(200):
        run.group(f"t{number}", MIXED, reason="stale" if number % 2 else "")
    run.ledger.close()
    path = tmp_path / "ledger" / "ledger.sqlite"
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(size // 2 // 4096 * 4096)
        file.write(b"\xff" * (size - file.tell()))
    for verb in ("replay", "explain"):
        monkeypatch.setattr(sys, "argv", ["astraflow", verb, str(tmp_path)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        error = capsys.readouterr().err
        assert (end.value.code, error.count("\n")) == (2, 1), error
        assert "ledger.sqlite' cannot be read: database disk image is malformed" in error


def test_every_question_to_a_damaged_log_is_answered_by_its_name(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for number in range(200):
        run.group(f"t{number}", MIXED)
    run.ledger.close()
    path = tmp_path / "ledger" / "ledger.sqlite"
    whole = path.read_bytes()
    questions: dict[str, Callable[[Logbook], object]] = {
        "counts": lambda log: log.counts(),
        "staleness": lambda log: log.staleness(),
        "reasons": lambda log: log.reasons(),
        "shares": lambda log: list(log.shares()),
        "count": lambda log: log.count(),
        "moves": lambda log: log.moves(),
        "lost": lambda log: log.lost("g0001", "m"),
        "flows": lambda log: log.flows(),
        "policies": lambda log: log.policies(),
    }
    for what, ask in questions.items():
        path.write_bytes(whole)
        with Logbook(tmp_path) as log:
            with path.open("r+b") as file:
                file.seek(4096)
                file.write(b"\xff" * (len(whole) - 4096))
            with pytest.raises(ConfigError, match="cannot be read: database disk image is malformed"):
                pytest.fail(f"{what}: {ask(log)}")
