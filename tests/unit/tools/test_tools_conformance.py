"""The frame of `astraflow conformance`: verdicts, what follows from them, and mistakes of the user."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from astraflow import cli
from astraflow.dataflow.admission import examine
from astraflow.protocol import codec
from astraflow.protocol.errors import BadMessage, Conflict
from astraflow.protocol.rollout import Lease, Serving
from astraflow.tools.conformance import Report, Skipped, Suite, check, expect, run
from astraflow.tools.conformance_pool import DAMAGES, Damage, damage, make_group


class Base(Suite):
    closed = False

    @check("first", "comes first")
    def first(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True


class Example(Base):
    @check("second", "is broken")
    def second(self) -> None:
        expect(False, "two\nlines")

    @check("third", "stands on the second", "first", "second")
    def third(self) -> None:
        raise AssertionError("never run")

    @check("fourth", "meets an error of the wire")
    def fourth(self) -> None:
        raise Conflict("no")

    @check("fifth", "cannot be looked at")
    def fifth(self) -> None:
        raise Skipped("there is nothing")

    @check("first", "comes first, as this class says")
    def first(self) -> None:
        pass


def test_every_check_gets_a_verdict_and_one_failure_is_a_failure(tmp_path: Path) -> None:
    lines, suite = list[str](), Example()
    assert not run(suite, "raas", "http://x", lines.append, tmp_path / "out.json")
    assert suite.closed
    report = msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=Report)
    assert [(found.name, found.verdict, found.reason) for found in report.results] == [
        ("first", "pass", ""),
        ("second", "fail", "two lines"),
        ("third", "skip", "needs second"),
        ("fourth", "fail", "no"),
        ("fifth", "skip", "there is nothing"),
    ]
    assert lines[-1] == "raas at http://x: 1 passed, 2 failed, 2 skipped"
    assert not report.passed


def test_a_bug_of_the_tool_is_no_verdict_and_yet_everything_is_closed() -> None:
    suite = Base()
    with pytest.raises(NotImplementedError):
        run(suite, "raas", "http://x", lambda line: None, None)
    assert suite.closed


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_group_is_one_that_our_own_door_refuses(how: Damage) -> None:
    lease = Lease(lease_id="l", task_id="t", workflow_id="w", n_samples=2, data={})
    group = make_group(lease, ["p"], {"p": Serving(timeline=1, version=3, digest="")})
    assert not examine(codec.encode(group), "l", 1, 2, ["p"], []).shares[0].lost
    damage(group, how)
    try:
        spoiled = examine(codec.encode(group), "l", 1, 2, ["p"], [])
    except BadMessage:
        return
    assert spoiled.group.task_id != lease.task_id, "whether it is the leased task is asked by the intake"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sender", "http://127.0.0.1:1"], "expected dataflow, raas or trainer"),
        (["raas", "http://127.0.0.1:1"], "--model DIR is needed"),
        (["trainer", "127.0.0.1"], "expected http://host:port"),
        (["dataflow", "nowhere"], "expected http://host:port"),
    ],
    ids=["service", "model", "where to play", "url"],
)
def test_a_mistake_of_the_user_is_one_line(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["astraflow", "conformance", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
