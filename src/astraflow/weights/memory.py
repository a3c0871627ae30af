"""The two halves in anonymous shared memory: a memfd (or, without that call, an unlinked file) that both processes inherit.

It has no name, so nothing can leak: the kernel frees it with the last process that holds it, however that process ended, and a
container's small /dev/shm does not limit it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from pathlib import Path

from astraflow.protocol.errors import WeightError
from astraflow.weights.layout import PAGE

POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14; the mmap module has no name for it."""
SPARE = 0.05
"""Share of the available memory that is left to everybody else."""


def available_bytes() -> int:
    """Memory that can still be had: the machine's, or the control group's where that is less. Very large when it is not known."""
    most = 1 << 62
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                most = int(line.split()[1]) * 1024
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max" = no limit
            most = min(most, int(Path(limit).read_text(encoding="ascii")) - int(Path(used).read_text(encoding="ascii")))
    return most


def require_room(size_bytes: int, what: str, directory: Path | None = None) -> None:
    """Raise WeightError unless so much can be reserved, in memory or on the file system of `directory`.

    Asked first, because shared memory has no limit of its own: reserving too much gets some innocent process killed by the kernel.
    """
    room = int(available_bytes() * (1 - SPARE)) if directory is None or _is_tmpfs(directory) else 1 << 62
    if directory is not None:
        disk = os.statvfs(directory)
        room = min(room, disk.f_bavail * disk.f_frsize)
    if size_bytes > room:
        raise WeightError(f"{what}: {size_bytes} bytes are needed and {max(0, room)} are available")


def _is_tmpfs(directory: Path) -> bool:
    """True where files are memory."""
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            mount, _, kind = line.partition(" - ")
            if mount.split()[2] == number:
                return kind.split()[0] in ("tmpfs", "ramfs")
    return False


def anonymous_file(name: str, size_bytes: int) -> int:
    """Descriptor of a new anonymous file in memory with all its pages reserved. Raises WeightError when there is no room."""
    require_room(size_bytes, f"shared memory for published weights ({name})")
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name[:200], os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile(prefix="astraflow-") as file:
            fd = os.dup(file.fileno())
    try:
        # Reserve now: a page that cannot be had later would be a SIGBUS in the middle of an offload.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size_bytes)
        else:
            os.ftruncate(fd, size_bytes)
    except OSError as error:
        os.close(fd)
        raise WeightError(f"{size_bytes} bytes of shared memory for published weights: {error.strerror}") from None
    return fd


class HalfMemory:
    """Two halves of `half_bytes` each, page-aligned. The owner writes; whoever attaches can only read."""

    def __init__(self, fd: int, half_bytes: int, *, writable: bool):
        self.fd = fd
        self.half_bytes = half_bytes
        self.stride = -(-half_bytes // PAGE) * PAGE
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(fd, 2 * self.stride, mmap.MAP_SHARED, access)

    @classmethod
    def create(cls, name: str, half_bytes: int) -> HalfMemory:
        """New memory of our own; the descriptor is passed to the sender. Raises WeightError when there is no room.

        Its pages are mapped here and now, in one call: measured, the first offload into each half takes 0.10 s per GB then and 0.43 s
        with a page fault per 4 KB. Huge pages (where the kernel offers them for shared memory) made no offload faster and took 3 s per
        GB to clear; locking keeps pages from a swap that machines with accelerators do not have. So neither is asked for.
        """
        made = cls(anonymous_file(name, 2 * (-(-half_bytes // PAGE) * PAGE)), half_bytes, writable=True)
        with contextlib.suppress(OSError):  # an older kernel: page faults then
            made._map.madvise(POPULATE_WRITE)
        return made

    @classmethod
    def attach(cls, fd: int, half_bytes: int) -> HalfMemory:
        """The memory that another rank of this node created, for writing our rows; `fd` becomes ours. Raises WeightError when its size is
        another one."""
        if os.fstat(fd).st_size != 2 * (-(-half_bytes // PAGE) * PAGE):
            size = os.fstat(fd).st_size
            os.close(fd)
            raise WeightError(f"shared memory of {size} bytes for two halves of {half_bytes}")
        return cls(fd, half_bytes, writable=True)

    @property
    def all(self) -> memoryview:
        """Both halves."""
        return memoryview(self._map)

    def offset(self, half: int) -> int:
        """Where a half begins in the file."""
        return half * self.stride

    def half(self, half: int) -> memoryview:
        """The bytes of a half."""
        return memoryview(self._map)[self.offset(half) : self.offset(half) + self.half_bytes]

    def close(self) -> None:
        """Give our side up. Views that somebody still holds keep the mapping alive until they go."""
        with contextlib.suppress(BufferError):
            self._map.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
