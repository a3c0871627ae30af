"""A full sync between two regions: network namespaces behind a shaper with 300 ms round trip and 50 Mbit/s, and cuts of that line.

The shaper is a tool of the workplace beside the checkout; without it, without iperf3 or without root these tests are skipped.
As a program this file is one of the two peers.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "flow"))
from weights_soak import file_hash, words_hash

from astraflow.lib.wire import Identity
from astraflow.weights.config import WeightsConfig

SHAPER = Path(__file__).parents[3] / "shared" / "checks" / "wan.py"
RTT_MS, RATE_MBIT = 300, 50
NEAR, FAR = "wanA", "wanB"
NEAR_IP, FAR_IP = "10.98.0.1", "10.98.0.2"
SIZE_BYTES = 250_000_000
STREAMS = 6
CUT_S = 6.0
"""How long the line is dead; longer than a stream waits for it."""
SETTINGS: dict[str, Any] = {"host": NEAR_IP, "streams": STREAMS, "io_timeout_s": 4.0}
IDENTITY = Identity("wan", "peer", "a-token-of-the-cluster")
DEADLINE_S = 400.0

MISSING = [
    what
    for what, there in (
        (f"the shaper {SHAPER.name} of the workplace", SHAPER.exists()),
        ("root", os.geteuid() == 0),
        ("/dev/net/tun", Path("/dev/net/tun").exists()),
        ("ip (iproute2)", shutil.which("ip") is not None),
        ("iperf3", shutil.which("iperf3") is not None),
    )
    if not there
]
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(MISSING), reason=f"a shaped network needs {', '.join(MISSING)}"),
]


def send(run_dir: str) -> None:
    """Peer: publish version 0 and serve it until standard input ends."""
    import torch

    from astraflow.weights.manager import WeightManager

    manager = WeightManager("policy", WeightsConfig(**SETTINGS), IDENTITY, Path(run_dir))
    made = {f"layers.{k}.weight": torch.randn(1000, SIZE_BYTES // 2 // 10 // 1000) for k in range(10)}
    manager.offload(made.items(), 0)
    say({"endpoint": manager.endpoint, "digest": manager.published(0), "hash": words_hash(made)})
    sys.stdin.read()
    manager.close()


def receive(endpoint: str, digest: str, staging: str) -> None:
    """Peer: one full pull."""
    import mmap

    from astraflow.weights.receiver import WeightReceiver

    receiver = WeightReceiver("policy", "far", Path(staging), WeightsConfig(**SETTINGS), IDENTITY)
    staged = receiver.pull(endpoint, 0, digest, deadline_s=DEADLINE_S)
    with open(staged.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found = file_hash(data)
    say({"seconds": staged.seconds, "size_bytes": staged.size_bytes, "digest": staged.digest, "hash": found, **receiver.counters})
    receiver.close()


def say(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def within(namespace: str, *command: str) -> list[str]:
    return ["ip", "netns", "exec", namespace, *command]


@pytest.fixture
def line() -> Iterator[None]:
    """Two namespaces and the shaped line between them."""
    shaping = [f"--delay-ms={RTT_MS / 2}", f"--rate-mbit={RATE_MBIT}", "--seconds=800"]
    with subprocess.Popen([sys.executable, str(SHAPER), *shaping], stdout=subprocess.PIPE, text=True) as shaper:
        try:
            assert shaper.stdout is not None
            if shaper.stdout.readline().strip() != "up":
                pytest.skip("network namespaces are not permitted here")
            yield
        finally:
            shaper.kill()
            for namespace in (NEAR, FAR):
                subprocess.run(["ip", "netns", "del", namespace], check=False)


@contextlib.contextmanager
def sender(tmp_path: Path) -> Iterator[dict[str, str]]:
    command = within(NEAR, sys.executable, __file__, "send", str(tmp_path))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.communicate()


@contextlib.contextmanager
def receiver(published: dict[str, str], staging: Path) -> Iterator[subprocess.Popen[str]]:
    command = within(FAR, sys.executable, __file__, "receive", published["endpoint"], published["digest"], str(staging))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def ceiling_mbit() -> float:
    """What iperf3 gets through the line with as many streams, after its slow start."""
    with subprocess.Popen(within(FAR, "iperf3", "-s", "-1", "--forceflush"), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        while "listening" not in server.stdout.readline():
            assert server.poll() is None, "iperf3 does not listen"
        client = within(NEAR, "iperf3", "-c", FAR_IP, "-P", str(STREAMS), "-t", "12", "-O", "4", "-J")
        said = subprocess.run(client, capture_output=True, text=True, check=True).stdout
        server.communicate()
    return float(json.loads(said)["end"]["sum_received"]["bits_per_second"]) / 1e6


def arrived_bytes(staging: Path) -> int:
    """Of the file that is being written."""
    with contextlib.suppress(OSError, StopIteration):
        return next(staging.glob("policy/.draft-*/*.safetensors")).stat().st_blocks * 512
    return 0


def test_a_full_sync_uses_four_fifths_of_a_thin_long_line(line: None, tmp_path: Path) -> None:
    before = ceiling_mbit()
    with sender(tmp_path) as published, receiver(published, tmp_path / "staging") as process:
        got = json.loads(process.communicate(timeout=DEADLINE_S)[0])
    after = ceiling_mbit()
    rate = SIZE_BYTES * 8 / got["seconds"] / 1e6
    print(f"{rate:.1f} Mbit/s in {got['seconds']:.1f} s; iperf3 {before:.1f} before and {after:.1f} after")  # noqa: T201
    assert got["hash"] == published["hash"]
    assert got["streams"] == STREAMS
    assert rate >= 0.8 * (before + after) / 2


def test_a_sync_that_is_cut_three_times_resumes_and_is_bit_exact(line: None, tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    with sender(tmp_path) as published, receiver(published, staging) as process:
        for share in (0.2, 0.4, 0.6):
            while arrived_bytes(staging) < share * SIZE_BYTES:
                assert process.poll() is None, "it ended before it was cut"
                time.sleep(0.05)
            for action in ("add", "del"):
                subprocess.run(["ip", "-n", FAR, "route", action, "blackhole", f"{NEAR_IP}/32"], check=True)
                time.sleep(CUT_S if action == "add" else 0.0)
        got = json.loads(process.communicate(timeout=DEADLINE_S)[0])
    print(f"{got['size_bytes'] / SIZE_BYTES:.3f} of its bytes in {got['seconds']:.1f} s, {got['streams_broken']:.0f} times broken")  # noqa: T201
    assert got["streams_broken"] >= 3 * STREAMS
    assert (got["digest"], got["hash"]) == (published["digest"], published["hash"])
    assert got["size_bytes"] < 1.1 * SIZE_BYTES


if __name__ == "__main__":
    {"send": send, "receive": receive}[sys.argv[1]](*sys.argv[2:])
