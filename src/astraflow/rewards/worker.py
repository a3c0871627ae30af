"""Child process of `AsyncRewardWrapper`: `python -m astraflow.rewards.worker REWARD [PLUGIN …]`.

Frames come on stdin and leave on what was stdout; prints of a reward go to stderr. Ends when stdin closes or the parent dies.
"""

from __future__ import annotations

import importlib
import os
import resource
import sys

from astraflow.lib.frames import FrameReader, pack
from astraflow.lib.proc import adopt_orphans, die_with_parent
from astraflow.rewards.api import RewardError, RewardFunction, Sample, Verdict, checked, load_reward

MEMORY_BYTES = 4 * 1024**3
"""Address space: a power tower must fail here, not push the machine into swap."""
MAX_ERROR = 300


def main(argv: list[str]) -> int:
    die_with_parent()
    adopt_orphans()
    source = sys.stdin.buffer
    sink = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a reward that prints must not break the frames
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    name, *plugins = argv
    try:
        for plugin in plugins:
            importlib.import_module(plugin)
        function = load_reward(name)
        warm_up = getattr(function, "warm_up", None)
        if warm_up is not None:
            warm_up()
    except Exception as error:  # task boundary: whatever the import raises is told to the parent
        sink.write(pack(Verdict(error=_text(error))))
        return 1
    sink.write(pack(Verdict(ready=True)))
    samples: FrameReader[Sample] = FrameReader(Sample, "reward sample")
    home = os.getpid()
    while (sample := samples.read_file(source)) is not None:
        verdict = _judge(function, sample)
        if os.getpid() != home:  # a reward forked, and this is the copy that came back from it: the frames are not its own
            return 0
        verdict.number = sample.number
        sink.write(pack(verdict))
    return 0


def _judge(function: RewardFunction, sample: Sample) -> Verdict:
    try:
        return Verdict(
            score=checked(function(sample.prompt, sample.completions, sample.prompt_ids, sample.completion_ids, **sample.data))
        )
    except RewardError as error:
        return Verdict(error=_text(error))
    except Exception as error:  # task boundary: a raising reward is a verdict, and the worker lives on
        return Verdict(error=_text(error))


def _text(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:MAX_ERROR].encode("utf-8", "replace").decode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
