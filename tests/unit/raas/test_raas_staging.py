"""Staging directories belong to live processes and to nobody else."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from astraflow.protocol.errors import ConfigError
from astraflow.raas import staging
from astraflow.raas.staging import StagingDir, staging_path


def test_the_directory_is_named_after_run_and_instance(tmp_path: Path) -> None:
    names = {staging_path(str(tmp_path / run), instance) for run in "ab" for instance in ("raas-0", "raas-1")}
    assert len(names) == 4
    assert staging_path("run", "raas-0", str(tmp_path)).parent == tmp_path


def test_shared_memory_that_could_never_hold_the_weights_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, model = str(tmp_path / "run"), tmp_path / "model"
    model.mkdir()
    monkeypatch.setattr(staging, "SHM", tmp_path)
    assert staging_path(run, "raas-0", models=[str(model)]).parent == tmp_path
    with (model / "model.safetensors").open("wb") as file:
        file.truncate(shutil.disk_usage(tmp_path).total // 2)
    assert staging_path(run, "raas-0", models=[str(model)]).parent == tmp_path / "run" / "staging"


def test_two_processes_cannot_have_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SWEEP_S", 0.1)
    held = StagingDir(tmp_path / "astraflow-raas-a", "raas-0")
    with pytest.raises(ConfigError, match="raas-0"):
        StagingDir(tmp_path / "astraflow-raas-a", "raas-0")
    held.close()
    assert not held.path.exists()
    StagingDir(tmp_path / "astraflow-raas-a", "raas-0").close()


def test_one_that_comes_back_while_its_old_directory_is_swept_by_another_waits_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "SWEEP_S", 60.0)
    path = tmp_path / "astraflow-raas-a"
    (path / "solver").mkdir(parents=True)
    lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)

    def sweep() -> None:
        time.sleep(0.2)
        shutil.rmtree(path)
        os.close(lock)

    other = threading.Thread(target=sweep)
    other.start()
    mine = StagingDir(path, "raas-0")
    other.join()
    assert [entry.name for entry in path.iterdir()] == ["lock"]
    mine.close()


def test_what_a_killed_process_left_is_swept_and_what_lives_is_not(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from astraflow.raas.staging import StagingDir; "
        "s = StagingDir(Path(sys.argv[1]), 'x'); (s.path / 'solver').mkdir(); os.kill(os.getpid(), 9)"
    )
    for name in ("astraflow-raas-dead", "astraflow-raas-mine"):
        subprocess.run([sys.executable, "-c", code, str(tmp_path / name)], check=False)
        assert (tmp_path / name / "solver").is_dir()
    alive = StagingDir(tmp_path / "astraflow-raas-alive", "y")
    (tmp_path / "astraflow-raas-foreign").mkdir()
    mine = StagingDir(tmp_path / "astraflow-raas-mine", "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["astraflow-raas-alive", "astraflow-raas-foreign", "astraflow-raas-mine"]
    assert [path.name for path in mine.path.iterdir()] == ["lock"]
    mine.close()
    alive.close()
