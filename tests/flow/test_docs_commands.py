"""README.md and docs/*.md as their reader follows them: every command, every piece of code and of configuration."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

sys.path.insert(0, str(Path(__file__).parent))
from docs_pages import LANGUAGES, PAGES, ROOT, Block, all_blocks, blocks, mentioned
from system import Stage

from astraflow import cli

NOT_RUN = {
    "they set up .venv and are what the tests are run by": 1,
    "it installs the environment that the tests run in": 1,
    "needs two machines; tests/flow/test_cli_run.py joins one over loopback": 1,
    "downloads 3.4 GB; tests/full/test_full_vllm.py is what it runs": 1,
}
"""Why a block is run by nobody → how many there are. A new one is added here, where a reviewer sees it."""
SHARED = ("recipes", "assets", "examples", "pyproject.toml")
SMALL = (
    "raas.engine={kind: scripted}",
    "raas.slots=16",
    "dataflow.eval.at_start=false",
    "dataflow.policies.filter=filter_zero_adv",
    "trainer.max_steps=2",
    "trainer.eval_freq=0",
    "trainer.train_batch_size=16",
)
WHOLE = "where-to-add.md"
"""Its package `mine` is installed and run as a whole by test_where_to_add.py."""
DEADLINE_S = 240.0


def prepare(home: Path) -> None:
    """A directory that looks to a reader like the checkout, with the files that the pages let him write."""
    home.mkdir(exist_ok=True)
    for name in SHARED:
        (home / name).symlink_to(ROOT / name)
    for block in all_blocks("python", "yaml", "json"):
        if block.file:
            path = home / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With `runs/quickstart`: a real run, of a model that answers at once."""
    directory = tmp_path_factory.mktemp("reader") / "checkout"
    prepare(directory)
    stage = Stage(directory / "runs")
    try:
        (directory / "runs").mkdir()
        run = stage.run("recipes/tiny-sort.yaml", "experiment.name=quickstart", *SMALL, name="quickstart")
        assert run.end(DEADLINE_S) == 0, run.text
        yield directory
    finally:
        stage.close()


def ran(home: Path, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ASTRAFLOW_")}
    environment = clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    runner = [sys.executable, str(Path(__file__).with_name("docs_runner.py"))]
    done = subprocess.run(
        runner, input=json.dumps(jobs), stdout=subprocess.PIPE, text=True, cwd=home, env=environment, timeout=280, check=True
    )
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    assert len(answers) == len(jobs)
    return answers


def job_of(block: Block, words: list[str], paths: list[str]) -> dict[str, Any] | None:
    """What the runner is to do for one command; None where there is nothing to carry out here."""
    program, rest = words[0], words[1:]
    if program == "astraflow" and block.page == WHOLE and block.kind == "run by":
        return None  # names of a package that only that test installs
    if program == "astraflow":
        return {"kind": "run" if block.kind == "run" else "check", "words": rest, "paths": paths}
    if block.kind == "run":
        assert program == "python", f"{block.place}: {program!r} is run by nothing here: annotate the block (tests/flow/docs_pages.py)"
        return {"kind": "python", "words": rest, "name": "__main__"}
    return None


def exists(block: Block, words: list[str]) -> None:
    """Of a command that is not ours and not run: what it names is there."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    match words:
        case ["make", target]:
            assert target in targets, f"{block.place}: make {target}"
        case ["python", script, *_]:
            assert (ROOT / script).is_file(), f"{block.place}: {script}"
        case ["pip", "install", "."] | [".", ".venv/bin/activate"] | ["export", *_]:
            pass
        case _:
            raise AssertionError(f"{block.place}: {words} is looked at by nobody")


def jobs_of_the_pages() -> dict[str, dict[str, Any]]:
    """Place → job; the same command on several pages once. `view` serves until it is stopped, and has a test of its own."""
    found: dict[str, dict[str, Any]] = {}
    for block in all_blocks("sh"):
        paths: list[str] = []
        for number, words in enumerate(block.commands()):
            paths += ["."] if words == ["export", "PYTHONPATH=."] else []
            if words[0] != "astraflow" and block.kind != "run":
                exists(block, words)
            job = job_of(block, words, paths)
            if job is not None and job not in found.values() and words[:2] != ["astraflow", "view"]:
                found[f"{block.place}.{number}"] = job
    for block in all_blocks("yaml"):
        found[block.place] = {"kind": "layer", "text": block.text}
    for block in all_blocks("python"):
        assert block.file, f"{block.place}: code stands under the name of its file"
        if block.page == WHOLE and block.file.startswith("mine/"):
            continue
        found[block.place] = {"kind": "python", "words": [block.file], "name": "page"}
    for place, words in mentioned():
        if len(words) > 2 and words[2].startswith("recipes/") and "…" not in words and not place.startswith("recipes.md"):
            found[place] = {"kind": "check", "words": words[1:]}
    return found


def test_commands_code_and_configuration_of_the_pages_work(home: Path) -> None:
    jobs = jobs_of_the_pages()
    kinds = Counter(job["kind"] for job in jobs.values())
    assert all(kinds[kind] >= least for kind, least in (("run", 5), ("check", 10), ("layer", 8), ("python", 1))), kinds
    answers = zip(jobs.items(), ran(home, list(jobs.values())), strict=True)
    failed = [f"{place}: {job}\n{answer['output']}" for (place, job), answer in answers if answer["code"]]
    assert failed == [], "\n".join(failed)


def test_the_page_of_a_run_is_served_as_the_pages_say(home: Path) -> None:
    commands = {tuple(words) for block in all_blocks("sh") for words in block.commands() if words[:2] == ["astraflow", "view"]}
    (words,) = commands
    words = tuple("0" if word == "8080" else word for word in words)  # whatever is free here
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    argv = [sys.executable, "-m", *words]
    process = subprocess.Popen(argv, cwd=home, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = re.search(r"http://\S+", line)
        assert url is not None, line + process.stdout.read()
        with urllib.request.urlopen(url[0].partition("#")[0], timeout=60) as page:
            assert page.status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def test_every_block_says_what_it_is_and_every_one_that_is_not_run_is_counted() -> None:
    everything = [block for page in PAGES for block in blocks(page)]
    assert [block.place for block in everything if block.language not in LANGUAGES] == []
    fences = sum(page.read_text(encoding="utf-8").count("\n```") for page in PAGES)
    assert fences == 2 * len(everything), "a fence that the pattern of docs_pages.py does not see"
    shell = [block for block in everything if block.language == "sh"]
    assert dict(Counter(block.why for block in shell if block.kind == "not run")) == NOT_RUN
    for block in shell:
        if block.kind == "run by":
            text = (ROOT / block.why).read_text(encoding="utf-8")
            assert all(words[1] in text for words in block.commands() if words[0] == "astraflow"), block.place
    assert not [block.place for block in everything if block.kind != "run" and block.language != "sh"]
    for block in everything:
        if block.language == "toml":
            tomllib.loads(block.text)
        if block.language == "json":
            assert [json.loads(line) for line in block.text.splitlines()]


def test_verbs_and_options_that_the_text_mentions_exist() -> None:
    group: Any = typer.main.get_command(cli.app)
    for place, words in mentioned():
        for verb in words[1].split("|"):
            if verb == "…":
                continue
            assert verb in group.commands, f"{place}: {words}"
            known = {option for parameter in group.commands[verb].params for option in parameter.opts}
            options = {word.strip("[]") for word in words if word.strip("[]").startswith("--")}
            assert options <= known, f"{place}: {verb} has no {options - known}"


def test_what_troubleshooting_quotes_is_what_the_code_says() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    table = page.partition("## It does not start")[2].partition("\n## ")[0]
    quoted = [text for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for text in re.findall(r"`([^`]+)`", row)]
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    assert len(quoted) >= 20
    assert [text for text in quoted if text not in source] == []
