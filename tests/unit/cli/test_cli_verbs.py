"""The verbs that start nothing."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from astraflow import cli
from astraflow.tools.bench import BENCHES

ROOT = Path(__file__).parents[3]


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["astraflow", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert isinstance(end.value.code, int)
    return end.value.code


def test_config_prints_values_with_their_origin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    assert call(monkeypatch, "config", "recipes/quickstart.yaml", "trainer.max_steps=3") == 0
    out = capsys.readouterr().out
    assert "max_steps: 3" in out
    assert "# override" in out
    assert "# recipes/quickstart.yaml:" in out
    assert "# default" in out


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("workflows", "solve_and_verify"),
        ("rewards", "math_verify"),
        ("datasets", "gsm8k"),
        ("engines", "embedded"),
        ("backends", "local"),
        ("policies", "filters/filter_zero_adv"),
        ("policies", "curators/greso"),
        ("policies", "orders/edf"),
        ("policies", "selections/prioritised"),
        ("policies", "shapers/overlong"),
        ("curators", "curriculum"),
    ],
)
def test_list_prints_one_name_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], family: str, name: str) -> None:
    assert call(monkeypatch, "list", family) == 0
    lines = capsys.readouterr().out.splitlines()
    assert name in lines
    assert lines == sorted(lines)
    assert all(" " not in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["list", "workflow"], "did you mean workflows?"),
        (["rnu", "x.yaml"], "rnu"),
        (["config"], "RECIPE"),
        (["config", "recipes/quickstrat.yaml"], "did you mean recipes/quickstart.yaml?"),
        (["config", "recipes/quickstart.yaml", "trainer.max_step=3"], "did you mean trainer.max_steps?"),
        (["bench", "dataflwo"], "did you mean 'dataflow'?"),
        (["raas"], "either --config FILE or --join URL"),
        (["raas", "--join", "localhost:1"], "http://host:port"),
        (["status", "nowhere"], "neither a URL"),
        (["status", "http://127.0.0.1:9"], "no Dataflow answers at http://127.0.0.1:9"),
        (["raas", "--join", "http://127.0.0.1:9"], "--join http://127.0.0.1:9: no Dataflow answers"),
        (["trainer", "--config", "recipes/quickstart.yaml"], "launch.dataflow_port: 0"),
        (["trainer", "--config", "recipes/quickstart.yaml", "--policy", "x", "--set", "launch.dataflow_port=1"], "known: default"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(ROOT)
    assert call(monkeypatch, *arguments) == 2
    err = capsys.readouterr().err.strip()
    assert said in err
    assert err.startswith("astraflow: error: ")
    assert "\n" not in err


def test_version_and_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.strip().count(".") == 2
    assert call(monkeypatch, "--help") == 0
    shown = capsys.readouterr().out
    assert all(verb in shown for verb in ("run", "dataflow", "raas", "trainer", "status", "config", "list"))


def test_overrides_are_told_from_files() -> None:
    assert cli.split_arguments(["a.yaml", "b.yaml", "x.y=1", "p=c.yaml"]) == (["a.yaml", "b.yaml"], ["x.y=1", "p=c.yaml"])


def verbs(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every verb of the command line, also below others."""
    for name, below in getattr(command, "commands", {}).items():
        yield (*path, name), below
        yield from verbs(below, *path, name)


def test_every_help_ends_with_examples_whose_options_exist(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    shown = {path: command for path, command in verbs(typer.main.get_command(cli.app)) if not hasattr(command, "commands")}
    assert ("run",) in shown
    for path, command in shown.items():
        assert call(monkeypatch, *path, "--help") == 0
        lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
        examples = lines[lines.index("Examples:") + 1 :]
        assert examples, path
        for example in examples:
            words = shlex.split(example)
            assert tuple(words[: len(path) + 1]) == ("astraflow", *path), f"{example}: an example of another verb, or help after it"
            command.make_context(path[-1], words[len(path) + 1 :])  # raises for an option or an argument that does not exist
            assert all((ROOT / word).exists() for word in words if word.startswith(("recipes/", "assets/"))), example
    said = {name: {shlex.split(line)[2] for line in shown[name,].epilog.split("\n\n")[1:]} for name in ("bench", "conformance", "list")}
    assert said["bench"] == set(BENCHES.names())
    assert said["conformance"] == {"dataflow", "raas", "trainer"}
    for family in said["list"]:
        assert call(monkeypatch, "list", family) == 0
