"""The whole of HumanEval through the reward's worker processes, and what the sandbox costs."""

from __future__ import annotations

import asyncio
import gzip
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from astraflow.lib.sandbox import Limits, check_functions, run_programs
from astraflow.rewards.api import AsyncRewardWrapper

DATA = Path(__file__).parents[1] / "data" / "humaneval" / "HumanEval.jsonl.gz"
WHOLE = Path(__file__).parents[3] / "shared" / "data" / "humaneval" / "HumanEval.jsonl.gz"

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("sandbox")]


def problems():
    with gzip.open(WHOLE if WHOLE.exists() else DATA, "rt") as file:
        return [json.loads(line) for line in file]


def test_every_canonical_humaneval_solution_passes_and_no_stub_does():
    rows = problems()
    assert len(rows) == (164 if WHOLE.exists() else 16)

    async def grade(body):
        reward = AsyncRewardWrapper("human_eval", workers=2, deadline_s=120.0)
        try:
            return await asyncio.gather(
                *(
                    reward(
                        "", f"```python\n{row['prompt']}{body(row)}\n```", [], [],
                        test=row["test"], entry_point=row["entry_point"], starter_code=row["prompt"], wall_s=90.0,
                    )
                    for row in rows
                )
            )  # fmt: skip
        finally:
            await reward.close()

    assert asyncio.run(grade(lambda row: row["canonical_solution"])) == [1.0] * len(rows)
    assert asyncio.run(grade(lambda row: "    pass")) == [0.0] * len(rows)


def timed(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def cost(pairs):
    """Median of sandboxed over plain time, pair by pair, so that what else the machine does falls on both; the best of three rounds."""
    return min(statistics.median(timed(boxed) / timed(plain) for boxed, plain in pairs) for _ in range(3))


def plainly(path, inputs):
    for text in inputs:
        subprocess.run([sys.executable, path], input=text.encode(), check=True, capture_output=True)


def test_good_programs_cost_less_than_twice_a_plain_process(tmp_path, record_property):
    pairs = []
    for index, row in enumerate(problems()[:30]):
        test, code, name = f"{row['test']}\ncheck({row['entry_point']})\n", row["prompt"] + row["canonical_solution"], row["entry_point"]
        path = tmp_path / f"{index}.py"
        path.write_text(f"{code}\n{test}")

        def boxed(code=code, test=test, name=name, context=row["prompt"]):
            assert check_functions(code, test, [name], context=context, limits=Limits(wall_s=60.0)).status == "ok"

        pairs.append((boxed, lambda path=path: plainly(path, [""])))
    humaneval = cost(pairs)
    code = "import sys\nn = int(input())\nprint(sum(i * i for i in range(n)))\n"
    inputs = [f"{n}\n" for n in range(10)]
    path = tmp_path / "contest.py"
    path.write_text(code)

    def contest():
        assert all(answer.status == "ok" for answer in run_programs(code, inputs, Limits(wall_s=60.0)))

    contests = cost([(contest, lambda: plainly(path, inputs))] * 5)
    record_property("sandboxed over plain", f"HumanEval problems {humaneval:.2f}, ten inputs of a contest task {contests:.2f}")
    assert humaneval < 2
    assert contests < 1
