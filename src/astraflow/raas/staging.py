"""Where an instance stages weights: a directory in memory that belongs to one live process, and is swept when that one was killed."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import xxhash

from astraflow.protocol.errors import ConfigError

log = logging.getLogger(__name__)

PREFIX = "astraflow-raas-"
LOCK = "lock"
SWEEP_S = 5.0
"""A lock that is held for longer is that of a process that uses the directory; one that sweeps it lets go sooner."""
SHM = Path("/dev/shm")


COPIES = 3
"""Staged files of one model at the same time: what an engine may start again with, what is held, what is being written."""


def staging_path(run_dir: str, instance_id: str, parent: str = "", models: Iterable[str] = ()) -> Path:
    """The directory of this instance of this run: in `parent`, else in shared memory, else in the run directory.

    `models`: HF directories. Where shared memory could never hold their weights (64 MB is usual in a container) it is left alone.
    """
    if parent:
        return Path(parent) / f"{PREFIX}{instance_id}"
    needed = COPIES * sum(file.stat().st_size for model in models for file in Path(model).glob("*.safetensors"))
    if SHM.is_dir() and shutil.disk_usage(SHM).total >= needed:  # not what is free now: a restart must find the same directory
        return _in_memory(run_dir, instance_id)
    return Path(run_dir) / "staging" / f"{PREFIX}{instance_id}"


def sweep(run_dir: str | Path, instance_id: str) -> None:
    """Remove what an instance of this run left in shared memory, if it was killed."""
    _sweep(_in_memory(run_dir, instance_id))


def _in_memory(run_dir: str | Path, instance_id: str) -> Path:
    key = xxhash.xxh3_64_hexdigest(f"{Path(run_dir).resolve()}\0{instance_id}".encode())
    return SHM / f"{PREFIX}{key}"


class StagingDir:
    """Held by a file lock, which the kernel takes from a process that dies: no id or clock is compared."""

    def __init__(self, path: Path, instance_id: str) -> None:
        """Empty directory at `path`; what killed processes left beside it is removed. Raises ConfigError while another one holds it."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        for other in path.parent.glob(PREFIX + "*"):
            if other != path:
                _sweep(other)
        lock = _lock(path)
        if lock is None:
            raise ConfigError(f"instance_id {instance_id!r}: a process with this id runs already in this run directory")
        self._lock = lock
        for entry in path.iterdir():
            if entry.name != LOCK:
                shutil.rmtree(entry, ignore_errors=True)

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _lock(path: Path) -> int | None:
    """Descriptor of the locked file, made when needed; None when another process holds it, and not for a moment only: one that
    starts beside us sweeps what our earlier life left just when we come back.
    """
    end = time.monotonic() + SWEEP_S
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        try:
            descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # swept between the two calls
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_ino == (path / LOCK).stat().st_ino:
                return descriptor
        except BlockingIOError:
            if time.monotonic() >= end:
                os.close(descriptor)
                return None
            time.sleep(0.02)
        except FileNotFoundError:
            log.debug("%s was swept while it was locked", path)
        os.close(descriptor)


def _sweep(path: Path) -> None:
    """Remove a directory whose process is dead; one of another user, or in use, stays."""
    try:
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
        log.info("removed the staged weights of a process that was killed: %s", path)
    except BlockingIOError:
        log.debug("%s is in use", path)
    finally:
        os.close(descriptor)
