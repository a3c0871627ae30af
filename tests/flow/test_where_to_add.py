"""docs/where-to-add.md as its reader follows it: the page's files in a directory of their own, installed, and the page's experiment."""

from __future__ import annotations

import csv
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from docs_pages import ROOT, blocks
from system import Run, Stage

PAGE = ROOT / "docs" / "where-to-add.md"
STEPS = 2


def install(directory: Path) -> Path:
    """The page's package as pip would leave it on the path: its modules, and its entry points."""
    files = {block.file: block.text for block in blocks(PAGE) if block.file}
    assert len(files) == 11
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    project = tomllib.loads(files["pyproject.toml"])["project"]
    info = directory / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in project["entry-points"].items()]
    (info / "entry_points.txt").write_text("\n".join(points))
    return directory / "mine.yaml"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    directory = tmp_path_factory.mktemp("mine")
    recipe = install(directory)
    stage = Stage(directory)
    stage.path.append(directory)
    try:
        made = stage.run(recipe)
        assert made.end(240.0) == 0, made.text
        yield made
    finally:
        stage.close()


def test_a_package_brings_a_part_of_every_kind_without_touching_ours(run: Run) -> None:
    books = run.adds_up({"whisperer": STEPS, "solver": STEPS}, 8, 2)
    tasks = {share.lease_id for share in books.shares}
    assert tasks
    for policy in ("whisperer", "solver"):
        assert [row["step"] for row in run.steps(policy)] == [1, 2]
    assert any(row["values"]["reward/mean"] > 0 for row in run.steps("solver")), "the page's reward"
    with (run.run_dir / "mine.csv").open(newline="", encoding="utf-8") as file:
        rewards = [float(value) for series, _, _, name, value in csv.reader(file) if (series, name) == ("trainer:solver", "reward/mean")]
    assert rewards == [row["values"]["reward/mean"] for row in run.steps("solver")], "the page's tracker"


def test_its_environment_is_evaluated_in(run: Run) -> None:
    assert run.report["accuracy"]["doors"]["steps"] == [STEPS]
