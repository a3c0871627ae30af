"""Run generated programs: no network, no host files, limits on everything, and a verdict that the program cannot write itself.

    process that asks ──Child──▶ bwrap (namespaces, read-only root) ──▶ runner.py (limits) ──fork──▶ the program (seccomp)
          │  socketpair: requests in, answers out; deadline here: SIGKILL to bwrap, and the kernel ends all of its pid namespace
          └─ compares outputs and values itself: what is right never enters the sandbox

Works as root (the program runs as a user of its own) and as a plain user (in a user namespace). Linux with bubblewrap; where that is
missing nothing runs: `SandboxError`. See `docs/sandbox.md`.
"""

from astraflow.lib.sandbox.box import Answer, Limits, SandboxError, call_function, check_functions, require, run_programs

__all__ = ["Answer", "Limits", "SandboxError", "call_function", "check_functions", "require", "run_programs"]
