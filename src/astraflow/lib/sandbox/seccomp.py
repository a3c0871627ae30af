"""The system calls that a program in the sandbox is refused, as a classic BPF filter.

Refused is what would make more than the limits count: processes (threads are allowed, and counted), namespaces and mounts, memory
outside the address space (memfd, System V and POSIX queues), and what could reach into another process.
"""

from __future__ import annotations

import errno
import struct

CLONE_THREAD = 0x10000
X32_BIT = 0x40000000
LD_WORD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
ABSENT = 0x00050000 | errno.ENOSYS
"""For clone3, whose flags lie in memory where a filter cannot look: the C library falls back to clone."""
CLONE3 = 435
NEWER = (425, 428, 429, 430, 431, 432, 433, 438, 447)
"""The same everywhere: io_uring_setup, open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, pidfd_getfd, memfd_secret."""

_X86_64 = {
    "fork": 57, "vfork": 58, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "unshare": 272, "setns": 308,
    "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "memfd_create": 319, "shmget": 29, "msgget": 68, "semget": 64,
    "mq_open": 240, "keyctl": 250, "add_key": 248, "request_key": 249, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
    "name_to_handle_at": 303, "open_by_handle_at": 304,
}  # fmt: skip
_AARCH64 = {
    "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "unshare": 97, "setns": 268, "mount": 40, "umount2": 39,
    "pivot_root": 41, "chroot": 51, "memfd_create": 279, "shmget": 194, "msgget": 186, "semget": 190, "mq_open": 180, "keyctl": 219,
    "add_key": 217, "request_key": 218, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "name_to_handle_at": 264,
    "open_by_handle_at": 265,
}  # fmt: skip
MACHINES = {"x86_64": (0xC000003E, 56, _X86_64), "aarch64": (0xC00000B7, 220, _AARCH64)}
"""`platform.machine()` → audit code, number of clone, numbers of the refused calls (from the kernel's tables; run on x86_64 only)."""


def program(machine: str) -> bytes:
    """The filter for `machine`, eight bytes an instruction. Raises KeyError for one that is not in `MACHINES`."""
    audit, clone, refused = MACHINES[machine]
    code = [(LD_WORD, 0, 0, ARCHITECTURE), (JUMP_EQUAL, 1, 0, audit), (RETURN, 0, 0, KILL), (LD_WORD, 0, 0, NUMBER)]
    code += [(JUMP_AT_LEAST, 0, 1, X32_BIT), (RETURN, 0, 0, REFUSE), (JUMP_EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, ABSENT)]
    for number in (*refused.values(), *NEWER):
        code += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    code += [(JUMP_EQUAL, 1, 0, clone), (RETURN, 0, 0, ALLOW), (LD_WORD, 0, 0, FIRST_ARGUMENT)]
    code += [(JUMP_BITS, 0, 1, CLONE_THREAD), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
