"""Ranks as one process: started together, ended together. The ranks are small programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from astraflow.launch.ranks import run_ranks

WAIT_S = 60.0
PRELUDE = "import os, signal, sys, time; rank = int(os.environ['RANK']);"


def ranks(code: str, count: int = 3) -> tuple[int, str]:
    return run_ranks([sys.executable, "-c", PRELUDE + code], count)


def test_every_rank_knows_its_place_and_all_of_them_the_same_meeting_point(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ASTRAFLOW_RANKS_STORE")
    code = f"open(f'{tmp_path}/{{rank}}', 'w').write(' '.join(os.environ[name] for name in {names!r}))"
    assert ranks(code) == (0, "")
    told = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert [place[:4] for place in told] == [[str(rank), str(rank), "3", "3"] for rank in range(3)]
    assert len({place[4] for place in told}) == 1
    assert not Path(told[0][4]).parent.exists(), "nothing is left behind"


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", (1, "rank 1 of 3 was killed by SIGKILL; the others were ended")),
        ("sys.exit(2)", (2, "")),
        ("sys.exit(3)", (3, "")),
    ],
)
def test_when_one_rank_fails_the_others_are_ended_and_its_code_is_everybodys(failing: str, expected: tuple[int, str]) -> None:
    begin = time.monotonic()
    assert ranks(f"{failing} if rank == 1 else time.sleep(600)") == expected
    assert time.monotonic() - begin < 300


def test_a_signal_drains_rank_0_alone(tmp_path: Path) -> None:
    up = f"open('{tmp_path}/up{{}}'.format(rank), 'w').close();"
    leave = f"""
def leave(number, frame):
    open('{tmp_path}/left', 'w').close()
    sys.exit(0)
signal.signal(signal.SIGTERM, leave if rank == 0 else signal.SIG_DFL)
{up}
while not os.path.exists('{tmp_path}/left'): time.sleep(0.01)
"""
    argv = f"[sys.executable, '-c', {PRELUDE + leave!r}]"
    program = f"from astraflow.launch.ranks import run_ranks; import sys; sys.exit(run_ranks({argv}, 2)[0])"
    launcher = subprocess.Popen([sys.executable, "-c", program])
    try:
        end = time.monotonic() + WAIT_S
        while not all((tmp_path / f"up{rank}").exists() for rank in range(2)):
            assert time.monotonic() < end, "the ranks did not come up"
            time.sleep(0.01)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(WAIT_S) == 0
    finally:
        if launcher.poll() is None:
            launcher.kill()
            launcher.wait(WAIT_S)


def test_ranks_die_with_their_launcher(tmp_path: Path) -> None:
    code = PRELUDE + f"open('{tmp_path}/{{}}'.format(rank), 'w').write(str(os.getpid())); time.sleep(600)"
    program = f"from astraflow.launch.ranks import run_ranks; import sys; run_ranks([sys.executable, '-c', {code!r}], 2)"
    launcher = subprocess.Popen([sys.executable, "-c", program])
    end = time.monotonic() + WAIT_S
    while not all((tmp_path / str(rank)).exists() and (tmp_path / str(rank)).read_text() for rank in range(2)):
        assert time.monotonic() < end, "the ranks did not come up"
        time.sleep(0.01)
    launcher.kill()
    launcher.wait(WAIT_S)
    for rank in range(2):
        while os.path.exists(f"/proc/{(tmp_path / str(rank)).read_text()}"):
            assert time.monotonic() < end, f"rank {rank} lives on"
            time.sleep(0.01)
