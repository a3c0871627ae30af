"""A trainer that is killed and started again: instances attach to its new sender by themselves, and hold what it published."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from astraflow.lib.wire import new_identity
from astraflow.weights.config import WeightsConfig
from astraflow.weights.manager import WeightManager
from astraflow.weights.receiver import Staged, WeightReceiver

TRAINER = """
import sys, torch
from pathlib import Path
from astraflow.lib.wire import new_identity
from astraflow.weights.config import WeightsConfig
from astraflow.weights.manager import WeightManager
manager = WeightManager("policy", WeightsConfig(hash_threads=1), new_identity("run-1", "token"), Path(sys.argv[1]))
for version in (4, 5):
    manager.offload([("w", torch.full((40_000,), float(version)))], version)
    print(manager.published(version, 60), manager.endpoint, *manager._link._ports, manager.sender_pid, flush=True)
sys.stdin.read()
"""


@dataclass
class First:
    """A trainer that published versions 4 and 5 and waits for its end."""

    process: subprocess.Popen[str]
    digest: str
    """Of version 5."""
    endpoint: str
    ports: tuple[int, int]
    sender_pid: int


@contextmanager
def first_trainer(directory: Path) -> Iterator[First]:
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        process.stdout.readline()
        digest, endpoint, http, stream, pid = process.stdout.readline().split()
        yield First(process, digest, endpoint, (int(http), int(stream)), int(pid))
    finally:
        process.kill()
        process.communicate()


def gone(pid: int) -> None:
    end = time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}") and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8"):
        assert time.monotonic() < end, f"sender {pid} outlives its trainer"
        time.sleep(0.01)


def holds(staged: Staged, value: float) -> bool:
    return bool((load_file(staged.path)["w"] == value).all())


@pytest.mark.parametrize("same_address", [False, True])
def test_instances_attach_to_the_sender_of_a_restarted_trainer_and_new_ones_get_everything(tmp_path: Path, same_address: bool) -> None:
    """Fault 3, weights: killed at version 5, resumed at 4, which comes again as it was; 5 comes again with other words."""
    config, identity = WeightsConfig(hash_threads=1), new_identity("run-1", "token")
    receiver = WeightReceiver("policy", "old", tmp_path / "old", config, identity)
    fresh = WeightReceiver("policy", "new", tmp_path / "new", config, identity)
    with first_trainer(tmp_path / "first") as first:
        assert holds(receiver.pull(first.endpoint, 5, first.digest, deadline_s=60), 5.0)
        os.kill(first.process.pid, signal.SIGKILL)
        gone(first.sender_pid)
    port, stream_port = first.ports if same_address else (0, 0)
    second = WeightsConfig(port=port, stream_port=stream_port, hash_threads=1)
    manager = WeightManager("policy", second, identity, tmp_path / "second")
    try:
        manager.offload([("w", torch.full((40_000,), 4.0))], 4)
        assert (manager.endpoint == first.endpoint) == same_address
        back = receiver.pull(manager.endpoint, 4, manager.published(4, 60), full=True, deadline_s=60)
        assert (back.mode, holds(back, 4.0)) == ("full", True), "the notice of a rollback asks for everything"
        other = torch.full((40_000,), 4.0)
        other[7] = 5.5
        manager.offload([("w", other)], 5)
        again = receiver.pull(manager.endpoint, 5, manager.published(5, 60), deadline_s=60)
        assert again.mode == "delta", "attached: it is served as any other"
        assert load_file(again.path)["w"][[6, 7, 8]].tolist() == [4.0, 5.5, 4.0], "version 5 of the new trainer, not the one held before"
        everything = fresh.pull(manager.endpoint, 5, manager.published(5, 60), deadline_s=60)
        assert (everything.mode, torch.equal(load_file(everything.path)["w"], load_file(again.path)["w"])) == ("full", True)
        assert manager.receivers().keys() <= {"old", "new"}
    finally:
        for part in (receiver, fresh, manager):
            part.close()


def test_an_instance_that_holds_the_same_number_of_a_dead_trainer_gets_everything_without_being_told(tmp_path: Path) -> None:
    """Not a rollback by its notice: the digest alone says that what is held is no base."""
    config, identity = WeightsConfig(hash_threads=1), new_identity("run-1", "token")
    receiver = WeightReceiver("policy", "old", tmp_path / "old", config, identity)
    manager = WeightManager("policy", config, identity, tmp_path / "second")
    try:
        with first_trainer(tmp_path / "first") as first:
            receiver.pull(first.endpoint, 5, first.digest, deadline_s=60)
        for version, value in ((5, 5.5), (6, 6.5)):
            manager.offload([("w", torch.full((40_000,), value))], version)
            staged = receiver.pull(manager.endpoint, version, manager.published(version, 60), deadline_s=60)
            assert holds(staged, value)
            assert staged.mode == "full" or version == 6
    finally:
        receiver.close()
        manager.close()
