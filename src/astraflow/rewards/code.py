"""Programs, graded by running them in the sandbox (`lib/sandbox`): blocking, and only where bubblewrap is.

A case may take `cpu_s` CPU seconds and all cases together `wall_s` seconds; a task may carry its own. `wall_s` must stay below
`raas.rewards.deadline_s`, or slow programs are unscored (timeout) instead of wrong.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Any

from astraflow.lib.sandbox import Answer, Limits, call_function, check_functions, require, run_programs
from astraflow.rewards.api import RewardError

MAX_DIGITS = 100_000
"""Of an integer in a test or a result (Python's own limit is 4300, and contests go beyond); reading it takes quadratic time."""
PYTHON = ("python", "py", "python3")


def livecodebench(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    tests: Sequence[dict[str, Any]] = (),
    function: str = "",
    cpu_s: int = Limits.cpu_s,
    wall_s: float = Limits.wall_s,
    **data: Any,
) -> float | None:
    """1 when the completion's program (`fenced`) passes every test, else 0; None without tests. For contest tasks of any source.

    `tests`: `{input, output}` for whole programs, compared by `same_output`; `{args, accepted}` for calls of `function`, whose value
    must equal one of `accepted` (both lists, or JSON text of lists). What is right never enters the sandbox. Raises SandboxError.
    """
    if not tests:
        return None
    code = fenced(completions)
    if code is None:
        return 0.0
    limits = Limits(cpu_s=cpu_s, wall_s=wall_s)
    if function:
        cases = [(_field(test, "args", list), _field(test, "accepted", list)) for test in tests]
        answers = call_function(code, function, [args for args, _ in cases], limits)
        return float(_all_pass(answers, [partial(_accepted, accepted=accepted) for _, accepted in cases]))
    texts = [(_field(test, "input", str), _field(test, "output", str)) for test in tests]
    answers = run_programs(code, [given for given, _ in texts], limits)
    return float(_all_pass(answers, [partial(_printed, wanted=wanted) for _, wanted in texts]))


def _field(test: Any, name: str, kind: type) -> Any:
    """Raises RewardError(exception) for a test that is none, so that nobody gets a 0 for it."""
    value = test.get(name) if isinstance(test, dict) else None
    if kind is list and isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not isinstance(value, kind):
        raise RewardError("exception", f"tests: {test!r:.80}: `{name}` is no {'list' if kind is list else 'text'}")
    return value


def _all_pass(answers: Iterator[Answer], verdicts: Sequence[Callable[[Answer], bool]]) -> bool:
    with closing(answers):  # type: ignore[type-var]  # generators: the first failure ends the sandbox
        return all(answer.status == "ok" and right(answer) for answer, right in zip(answers, verdicts, strict=True))


def _printed(answer: Answer, wanted: str) -> bool:
    return same_output(answer.payload, wanted)


def _accepted(answer: Answer, accepted: Sequence[Any]) -> bool:
    """By `==`, as LiveCodeBench compares: `True` answers 1, and 1.0 does too."""
    try:
        return answer.value() in accepted
    except (ValueError, RecursionError):  # a program may write whatever it likes to the channel
        return False


def same_output(output: bytes, wanted: str) -> bool:
    """LiveCodeBench's rule: the same lines without outer blanks, where a line of numbers may write them differently (`1.0`, `1`).

    Stricter in one respect: `1_000` and digits of other scripts, which its `Decimal` reads, are no numbers here.
    """
    got, expected = (text.strip().split("\n") for text in (output.decode("utf-8", "replace"), wanted))
    return len(got) == len(expected) and all(_same_line(a.strip(), b.strip()) for a, b in zip(got, expected, strict=True))


def _same_line(got: str, wanted: str) -> bool:
    if got == wanted:
        return True
    try:
        return got.isascii() and "_" not in got and [Decimal(word) for word in got.split()] == [Decimal(word) for word in wanted.split()]
    except InvalidOperation:
        return False


def human_eval(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    test: str = "",
    entry_point: str = "",
    starter_code: str = "",
    cpu_s: int = Limits.cpu_s,
    wall_s: float = Limits.wall_s,
    **data: Any,
) -> float | None:
    """1 when `check(entry_point)` of `test` runs to its end, else 0; None without a test.

    The completion is a fenced block with the whole function, or the body that continues `starter_code` as the benchmark's own form
    has it. Raises SandboxError.
    """
    if not test or not entry_point:
        return None
    code = fenced(completions)
    if code is None:
        if "```" in completions.rsplit("</think>", 1)[-1]:
            return 0.0
        code = completions.rsplit("</think>", 1)[-1]
    name = re.escape(entry_point)
    if not re.search(rf"^(?:(?:async\s+)?def\s+{name}\b|{name}\s*(?::[^=\n]+)?=(?!=))", code, re.MULTILINE):
        code = _body(code)
    answer = check_functions(
        f"{starter_code}\n{code}\n",
        f"{test}\ncheck({entry_point})\n",
        [entry_point],
        context=starter_code,
        limits=Limits(cpu_s=cpu_s, wall_s=wall_s),
    )
    return float(answer.status == "ok")


def _body(text: str) -> str:
    """The indented lines up to the first that is not: what a model says after the function is no part of it."""
    lines = text.split("\n")
    end = next((number for number, line in enumerate(lines) if line.strip() and not line[0].isspace()), len(lines))
    return "\n".join(lines[:end])


def fenced(text: str) -> str | None:
    """The program of a completion: its last block fenced by ``` and marked as Python, else the last block; thoughts do not count.

    None when there is none, and when the last fence is not closed: then the answer was cut off.
    """
    blocks: list[tuple[str, str]] = []
    opening = ""
    lines: list[str] | None = None
    for line in text.rsplit("</think>", 1)[-1].split("\n"):
        if not line.strip().startswith("```"):
            if lines is not None:
                lines.append(line)
        elif lines is None:
            opening, lines = line, []
        else:
            code = "\n".join(lines)
            blocks.append((opening.strip(" `\t\r").lower(), textwrap.dedent(code) if opening[0].isspace() else code))
            lines = None
    if lines is not None or not blocks:
        return None
    return next((code for language, code in reversed(blocks) if language in PYTHON), blocks[-1][1])


def _warm_up() -> None:
    require()  # no grade without a sandbox: refuse to start
    sys.set_int_max_str_digits(MAX_DIGITS)


livecodebench.warm_up = human_eval.warm_up = _warm_up  # type: ignore[attr-defined]
