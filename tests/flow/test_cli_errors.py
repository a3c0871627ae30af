"""Bad input through the real command line: one line that names the field and the nearest right value, exit status 2, nothing left."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from astraflow.lib.wire import new_identity
from astraflow.lib.wire_client import SyncClient
from astraflow.protocol.errors import Unavailable
from astraflow.protocol.routes import DataflowAPI

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "assets" / "tiny" / "solver"
RECIPE = """\
experiment: {name: bad, run_dir: RUN}
models: {default: {path: MODEL}}
train_dataset: {loader: digits, options: {task: sort}}
workflow: {workflow: rlvr, reward: exact_match, n_samples: 4, generation: {max_new_tokens: 6}}
raas: {engine: {kind: scripted}, slots: 8}
trainer: {train_batch_size: 8, max_steps: 2}
launch: {raas: 1, end_s: 5, term_s: 5}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "bad.yaml"
    path.write_text(RECIPE.replace("RUN", str(tmp_path / "run")).replace("MODEL", str(MODEL)))
    return path


def environment(**own: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ASTRAFLOW_")}
    return clean | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | own


def astraflow(*arguments: str | Path, **own: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "astraflow", *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=100, env=environment(**own), cwd=ROOT, check=False)


def left_running(tmp_path: Path) -> list[str]:
    """Command lines of living processes that belong to this test's directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if str(tmp_path) in command and state != "Z" and "pytest" not in command:
                found.append(command)
    return found


def nothing_left(tmp_path: Path) -> None:
    """Children die with their parent; the kernel needs a moment."""
    end = time.monotonic() + 30
    while left := left_running(tmp_path):
        assert time.monotonic() < end, f"left running: {left}"
        time.sleep(0.05)


def refused(done: subprocess.CompletedProcess[str], tmp_path: Path, *said: str) -> None:
    errors = [line for line in done.stderr.splitlines() if line.startswith("astraflow: error: ")]
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(errors) == 1, done.stderr
    for part in said:
        assert part in errors[0]
    assert "Traceback" not in done.stderr + done.stdout
    nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.max_step=3", "trainer.max_step: unknown key; did you mean trainer.max_steps?"),
        ("trainer.optimizer.lr=fast", "trainer.optimizer.lr: 'fast' is not a number"),
        ("workflow.workflow=rlvrr", "workflow.workflow: 'rlvrr' is unknown; did you mean rlvr?"),
        ("train_dataset.path=nowhere.jsonl", "train_dataset.path: 'nowhere.jsonl': no such file"),
        ("models.default.path=nowhere", "models.default.path: 'nowhere': no such directory"),
        ("dataflow.buffer=null", "dataflow.buffer: null is no value for it"),
    ],
)
def test_a_mistake_in_the_configuration_starts_nothing(recipe: Path, tmp_path: Path, override: str, said: str) -> None:
    done = astraflow("run", recipe, override)
    refused(done, tmp_path, said)
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_missing_recipe_names_its_neighbour(recipe: Path, tmp_path: Path) -> None:
    refused(astraflow("run", tmp_path / "bat.yaml"), tmp_path, "no such file; did you mean", "bad.yaml?")


def test_a_used_port_ends_the_run_with_its_address(recipe: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(astraflow("run", recipe, f"launch.dataflow_port={port}"), tmp_path, f"127.0.0.1:{port}")


def test_a_broken_row_ends_the_run_with_file_and_line(recipe: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "s21", "answer": "12"}\n{"prompt": "s31", "answer"\n{"prompt": "s1", "answer": "1"}\n')
    done = astraflow("run", recipe, "train_dataset.loader=jsonl", f"train_dataset.path={data}", "train_dataset.options={}")
    refused(done, tmp_path, "rows.jsonl:2")


def test_a_run_that_exists_is_not_overwritten(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("experiment: {name: bad, run_id: x}\n")
    refused(astraflow("run", recipe), tmp_path, "--resume", "experiment.name")


def test_an_address_where_nobody_answers(recipe: Path, tmp_path: Path) -> None:
    refused(astraflow("raas", "--join", "http://127.0.0.1:9"), tmp_path, "--join http://127.0.0.1:9: no Dataflow answers")
    refused(astraflow("status", "http://127.0.0.1:9"), tmp_path, "no Dataflow answers at http://127.0.0.1:9")


@pytest.fixture
def guarded(recipe: Path, tmp_path: Path) -> Iterator[str]:
    """A Dataflow that asks for the token `right`; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    recipe.write_text(recipe.read_text().replace("launch: {", f"launch: {{dataflow_port: {port}, "))
    argv = [sys.executable, "-m", "astraflow", "dataflow", "--config", str(recipe)]
    process = subprocess.Popen(argv, env=environment(ASTRAFLOW_TOKEN="right"), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + 60
        with SyncClient(url, new_identity("", "right")) as client:
            while True:
                try:
                    client.call(DataflowAPI.status, timeout_s=20)
                    break
                except Unavailable:
                    assert process.poll() is None, process.communicate()[1]
                    assert time.monotonic() < end, "Dataflow did not answer within 60 s"
                    time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_a_wrong_token_is_said_by_every_verb_that_calls(guarded: str, recipe: Path, tmp_path: Path) -> None:
    for arguments in (["status", guarded], ["raas", "--join", guarded]):
        for token in ({}, {"ASTRAFLOW_TOKEN": "wrong"}):
            done = astraflow(*arguments, **token)
            assert done.returncode == 2
            assert "token" in done.stderr
            assert done.stderr.count("\n") == 1
    done = astraflow("raas", "--config", recipe, ASTRAFLOW_TOKEN="wrong")
    assert done.returncode == 2
    assert "token" in done.stderr
    assert "Traceback" not in done.stderr
    assert [line for line in left_running(tmp_path) if " raas " in line] == []
    assert astraflow("status", guarded, ASTRAFLOW_TOKEN="right").returncode == 0
