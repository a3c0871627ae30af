"""What a receiver needs beside the file that it holds: one more file, and buffers. As a program this file is that receiver."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from astraflow.lib.wire import Identity
from astraflow.weights import codec
from astraflow.weights.config import WeightsConfig
from astraflow.weights.receiver import WeightReceiver

sys.path.insert(0, str(Path(__file__).parent))

WORDS = 40_000_000
SIZE_BYTES = 2 * WORDS
BUFFERS_BYTES = 40_000_000
"""Half a model: six streams of 1 MB each, two blocks of 8 MB, an encoded delta of a thousandth, and what Python needs for it."""


def peak_rss_bytes() -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(text.split("VmHWM:")[1].split()[0])


def staged_bytes(staging: Path) -> int:
    found = 0
    for path in staging.rglob("*.safetensors"):
        try:
            found += path.stat().st_blocks * 512
        except OSError:  # moved meanwhile
            continue
    return found


def main(staging: str) -> None:
    """A line {endpoint, version, digest} per pull, answered by the mode and the peaks."""
    receiver = WeightReceiver("policy", "raas-0", Path(staging), WeightsConfig(), Identity("run-1", "child", "secret-token"))
    codec.available()  # code, loaded once whatever the size of the model
    idle = peak_rss_bytes()
    for line in sys.stdin:
        wanted, peak, ended = json.loads(line), [0], threading.Event()

        def watch(peak: list[int] = peak, ended: threading.Event = ended) -> None:
            while not ended.wait(0.002):
                peak[0] = max(peak[0], staged_bytes(Path(staging)))

        watcher = threading.Thread(target=watch)
        watcher.start()
        staged = receiver.pull(wanted["endpoint"], wanted["version"], wanted["digest"], deadline_s=60)
        ended.set()
        watcher.join()
        said = {"mode": staged.mode, "staged": peak[0], "grown": peak_rss_bytes() - idle}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()
    receiver.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    from weights_rig import rigs

    with rigs(tmp_path) as make:
        yield make


def test_a_pull_needs_one_more_file_and_buffers(rig: Callable[..., Any], tmp_path: Path) -> None:
    import torch

    here = rig(chunk_bytes=4 << 20)
    words = torch.randn(WORDS)
    command = [sys.executable, __file__, str(tmp_path / "staging")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdin is not None
        assert receiver.stdout is not None
        said = []
        for version in (1, 2, 3):
            words[version::1000] += 1.0
            digest = here.publish(version, {"w": words})
            receiver.stdin.write(json.dumps({"endpoint": here.manager.endpoint, "version": version, "digest": digest}) + "\n")
            receiver.stdin.flush()
            said.append(json.loads(receiver.stdout.readline()))
        receiver.communicate()
    assert [each["mode"] for each in said] == ["full", "delta", "delta"]
    slack = 1 << 20
    assert said[0]["staged"] <= SIZE_BYTES + slack, "the new file"
    assert said[1]["staged"] <= 2 * SIZE_BYTES + slack, "what is held, and the new file"
    assert said[2]["staged"] <= 2 * SIZE_BYTES + slack
    assert said[2]["grown"] < BUFFERS_BYTES, said


if __name__ == "__main__":
    main(*sys.argv[1:])
