"""Runs a foreign server's command and ends all that it started: `python guard.py COMMAND …`. Standard library only.

A server that is killed leaves its workers behind, and they leave shared memory behind when they are killed too. So after the server's
end, and when the process that wanted it dies (SIGUSR1), its process group is asked to end first and killed a moment later.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

GRACE_S = 10.0
"""Shared memory of hundreds of MB is left behind by workers that do not get it."""
LOOK_S = 0.05


def main(command: list[str]) -> int:
    """The server's exit code, when nothing of its group is left but this process. The group must be our own."""
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # goes to the whole group: the server ends, and so do we
    signal.signal(signal.SIGUSR1, _orphaned)
    signal.signal(signal.SIGALRM, lambda number, frame: os.killpg(0, signal.SIGKILL))
    try:
        code = subprocess.Popen(command).wait()
    except OSError as error:
        sys.exit(f"{command[0]}: {error}")
    end = time.monotonic() + GRACE_S
    os.killpg(0, signal.SIGTERM)
    while time.monotonic() < end and _others():
        time.sleep(LOOK_S)
    return code if code >= 0 else 128 - code


def _orphaned(number: int, frame: object) -> None:
    signal.setitimer(signal.ITIMER_REAL, GRACE_S)
    os.killpg(0, signal.SIGTERM)


def _others() -> bool:
    """Whether a live process of our group is left."""
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        try:
            with open(f"/proc/{name}/stat") as file:
                state, _, group = file.read().rpartition(")")[2].split()[:3]
        except OSError:
            continue  # it has just ended
        if int(group) == os.getpgrp() and int(name) != os.getpid() and state != "Z":
            return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
