"""A trainer that publishes version after version, receivers in processes of their own, and kill -9 on sender or receivers.

Everything is drawn from a seed before it happens; a kill comes when its victim has reached a moment, never after a time. `play` returns
what came of it, `judge` says what must hold. As a program this file is one receiver.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from astraflow.lib.wire import new_identity
from astraflow.weights.config import WeightsConfig
from astraflow.weights.receiver import WeightReceiver

NAMES = ("near", "middle", "far")
DEADLINE_S = 120.0
"""Only a pull that hangs needs this long."""
SETTINGS: dict[str, Any] = {
    "chunk_bytes": 1 << 16, "full_every": 10, "max_restarts": 1000, "hash_threads": 1, "io_timeout_s": 10.0,
    "delta_wait_s": DEADLINE_S, "reader_wait_s": DEADLINE_S,  # a slow machine is no reason for a full sync here
}  # fmt: skip


def main(name: str, staging: str) -> None:
    """One receiver: a line {endpoint, version, digest} per pull, answered by what it staged."""
    receiver = WeightReceiver("policy", name, Path(staging), WeightsConfig(**SETTINGS), new_identity("soak"))
    before: tuple[mmap.mmap, str] | None = None
    for line in sys.stdin:
        wanted = json.loads(line)
        staged = receiver.pull(wanted["endpoint"], wanted["version"], wanted["digest"], deadline_s=DEADLINE_S)
        with open(staged.path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        torn = before is not None and file_hash(before[0]) != before[1]  # what an engine maps must not move under it
        before = (mapped, file_hash(mapped))
        said = {"digest": staged.digest, "mode": staged.mode, "links": staged.links, "fallback": staged.fallback, "hash": before[1]}
        sys.stdout.write(json.dumps({**said, "version": staged.version, "torn": torn}) + "\n")
        sys.stdout.flush()
    receiver.close()


def file_hash(data: mmap.mmap) -> str:
    """Over (name, bytes) of every tensor of a safetensors file, in the order of the names."""
    (length,) = struct.unpack_from("<Q", data)
    table = json.loads(data[8 : 8 + length])
    total = xxhash.xxh3_128()
    for name in sorted(table.keys() - {"__metadata__"}):
        start, end = table[name]["data_offsets"]
        total.update(name.encode() + b"\0" + data[8 + length + start : 8 + length + end])
    return total.hexdigest()


@dataclass
class Soak:
    """What happened."""

    versions: int
    published: dict[int, str] = field(default_factory=dict)
    words: dict[int, str] = field(default_factory=dict)
    """Version → `file_hash` of what was published, computed here from the tensors."""
    pulls: list[dict[str, Any]] = field(default_factory=list)
    """Answers of the receivers, with their names."""
    kills: Counter[str] = field(default_factory=Counter)
    senders: set[int] = field(default_factory=set)
    leftovers: list[str] = field(default_factory=list)

    @property
    def chains(self) -> int:
        return sum(pull["links"] > 1 for pull in self.pulls)


class _Receiver:
    """A receiver's process, started again after a kill."""

    def __init__(self, name: str, staging: Path) -> None:
        self.name, self._staging = name, staging
        self.start()

    def start(self) -> None:
        command = [sys.executable, __file__, self.name, str(self._staging)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._wanted = ""

    def ask(self, **wanted: Any) -> None:
        assert self.process.stdin is not None
        self._wanted = json.dumps(wanted) + "\n"
        self.process.stdin.write(self._wanted)
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"{self.name} ended with {self.process.wait(10)}"
        return {**json.loads(line), "name": self.name}

    def in_the_middle(self) -> bool:
        """It writes a file, or has ended doing so."""
        return any(self._staging.glob("policy/.draft-*")) or self.process.poll() is not None

    def kill_and_ask_again(self) -> None:
        self.process.kill()
        self.process.communicate()
        wanted = self._wanted
        self.start()
        if wanted:
            self.ask(**json.loads(wanted))

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.communicate()  # closes its standard input: the end of its loop


def tensors(seed: int, version: int) -> dict[str, Any]:
    """Every version has words of its own; most are those of the version before."""
    import torch

    torch.manual_seed(seed)
    made = {"a.weight": torch.randn(900, 500), "b.weight": torch.randn(301, 7), "scale": torch.tensor(0.0)}
    for k, tensor in enumerate(made.values()):
        flat = tensor.view(-1)
        flat[(version + k) % 13 :: 97] += 0.01 * version
    return made


def words_hash(made: dict[str, Any]) -> str:
    """`file_hash` of the file that these tensors should become."""
    import torch

    total = xxhash.xxh3_128()
    for name in sorted(made):
        total.update(name.encode() + b"\0" + made[name].to(torch.bfloat16).view(torch.int16).numpy().tobytes())
    return total.hexdigest()


def play(seed: int, versions: int, run_dir: Path) -> Soak:
    """`versions` versions with three receivers; about every fifth one somebody is killed."""
    from astraflow.weights.manager import WeightManager

    rng, soak = random.Random(seed), Soak(versions)
    shared = Path("/dev/shm")
    place = (shared if shared.is_dir() else run_dir) / f"astraflow-soak-{os.getpid()}-{seed}"
    manager = WeightManager("policy", WeightsConfig(**SETTINGS), new_identity("soak"), run_dir)
    receivers = [_Receiver(name, place / name) for name in NAMES]
    try:
        for version in range(1, versions + 1):
            made = tensors(seed, version)
            manager.offload(made.items(), version)
            soak.published[version], soak.words[version] = manager.published(version, DEADLINE_S), words_hash(made)
            soak.senders.add(manager.sender_pid)
            asked = [receiver for receiver in receivers if version == versions or rng.random() < 0.75]
            victim = rng.choice(["sender", *asked]) if rng.random() < 0.25 else None
            for receiver in asked:
                receiver.ask(endpoint=manager.endpoint, version=version, digest=soak.published[version])
            if victim is not None:
                _kill(soak, victim, rng.random() < 0.5, asked, manager)
            soak.pulls += [receiver.answer() for receiver in asked]
            manager.check()
    finally:
        for receiver in receivers:
            receiver.end()
        soak.senders.add(manager.sender_pid)
        manager.close()
        soak.leftovers = [str(path) for path in place.rglob("*")] + [str(pid) for pid in soak.senders if pid and _alive(pid)]
        shutil.rmtree(place, ignore_errors=True)
    return soak


def _kill(soak: Soak, victim: Any, in_the_middle: bool, asked: list[_Receiver], manager: Any) -> None:
    watched = asked if victim == "sender" else [victim]
    end = time.monotonic() + DEADLINE_S
    while in_the_middle and watched and not any(receiver.in_the_middle() for receiver in watched) and time.monotonic() < end:
        if any(_has_answered(receiver) for receiver in watched):
            break  # it was too quick: killed afterwards
    if victim == "sender":
        if pid := manager.sender_pid:
            soak.kills["sender"] += 1
            os.kill(pid, signal.SIGKILL)
    else:
        soak.kills[victim.name] += 1
        victim.kill_and_ask_again()


def _has_answered(receiver: _Receiver) -> bool:
    import select

    return bool(select.select([receiver.process.stdout], [], [], 0.001)[0])


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def judge(soak: Soak) -> None:
    """Every confirmed digest is the published one, nothing was torn or left, and nothing travelled in full without a reason."""
    assert len(soak.pulls) >= soak.versions
    for pull in soak.pulls:
        version = pull["version"]
        assert pull["digest"] == soak.published[version], pull
        assert pull["hash"] == soak.words[version], f"the file of version {version} has other words: {pull}"
        assert not pull["torn"], pull
    assert soak.leftovers == []
    periodic = soak.versions // SETTINGS["full_every"]
    for name in NAMES:
        full = [pull for pull in soak.pulls if pull["name"] == name and pull["mode"] == "full"]
        most = 1 + periodic + soak.kills["sender"] + soak.kills[name]
        assert len(full) <= most, (soak.kills, [(pull["version"], pull["fallback"]) for pull in full])


if __name__ == "__main__":
    main(*sys.argv[1:])
