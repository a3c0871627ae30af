"""Mathematical answers: find the final answer of a completion, compare it exactly with the gold one.

The library math-verify reads a matching prefix out of what it cannot parse, takes bare LaTeX for its leading number and compares
within tolerances, so it pays for wrong answers (case G03). Here its LaTeX parser is used (`rewards/math_compare.py`) only on whole
strings, and everything around it is ours: what counts as the answer, structures, and exact comparison. Runs in worker processes;
no timer of the library's is on: a deadline that kills the process is the only one that holds (case G04).
"""

from __future__ import annotations

import re
from typing import Any

from astraflow.rewards import math_compare, math_text

BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)|\\boxed(?![A-Za-z])")
BOXED_TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|[A-Za-z])(?![\w{\\^/(+*.,-]*[\w{\\])")
STATED = re.compile(r"(?i:answer)(?:\s*\*\*)?\s*(?:(?:is|are|equals)\b|:|=)\s*:?\s*(?:\*\*)?")
MATH = re.compile(
    r"\$\$(?P<a>.{1,1000}?)\$\$|\\\[(?P<b>.{1,1000}?)\\\]|\\\((?P<c>.{1,1000}?)\\\)"
    r"|\$(?=\S)(?P<d>[^$]*?\S)\$(?!\d)",
    re.DOTALL,
)
"""The single-dollar rule is pandoc's, so that `$5 and $7` is two prices. A bound, because each of
thousands of openings without an end would read on to the end of the text."""
_NUMBER = r"(?:(?<![\w.)])-)?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d+)?"
NUMBERS = re.compile(rf"{_NUMBER}(?:\s+\d+\s*/\s*\d+|\s*/\s*\d+)?\s?%?")
"""With what belongs to a number: a fraction, the fraction of a mixed number, a per cent sign."""
PLAIN_CHARS = 80
WORD = re.compile(r"(?<!\\)[A-Za-z]{3,}")


def math_verify(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: Any = None, **data: Any
) -> float | None:
    """1 when the final answer equals `answer`, 0 when not or when there is none; None (unscored) without a readable `answer`.

    The answer is what stands in the last \\boxed{} (an unclosed one is a cut-off answer: 0), else after `####`, after "answer is",
    in the last formula, the whole of a short expression, or the last number; thoughts up to </think> never count.
    """
    gold = math_text.unwrap("" if answer is None else str(answer))
    if not gold:
        return None
    found = final_answer(completions)
    if found is None:
        return 0.0 if math_compare.readable(gold) else None
    same = math_compare.same(gold, found)
    return None if same is None else float(same)


def final_answer(text: str) -> str | None:
    """The part of a completion that is its answer; None when it gives none."""
    text = text.rsplit("</think>", 1)[-1]
    if "<think>" in text or not text.strip():
        return None
    boxes = list(BOX.finditer(text))
    if boxes:
        return _box(text, boxes[-1].end())
    if "####" in text:
        return _first_line(text.rsplit("####", 1)[1])
    stated = list(STATED.finditer(text))
    if stated:
        return _statement(text[stated[-1].end() :])
    formulas = [match[match.lastgroup or 0] for match in MATH.finditer(text)]
    if formulas:
        return formulas[-1].strip()
    plain = text.strip()
    if "\n" not in plain and len(plain) <= PLAIN_CHARS and not WORD.search(math_text.with_functions(plain)):
        return plain.rstrip(".")
    numbers = [match.group() for match in NUMBERS.finditer(text)]
    return numbers[-1].strip() if numbers else None


def _box(text: str, start: int) -> str | None:
    """The braces' content, or the number or letter that follows without them; None when they are not closed or hold nothing."""
    if not text[start:].lstrip().startswith("{"):
        token = BOXED_TOKEN.match(text, start)
        return token[1] if token else None
    start = text.find("{", start)
    depth = 0
    for position in range(start, len(text) if start >= 0 else 0):
        escaped = position > 0 and text[position - 1] == "\\"
        if text[position] == "{" and not escaped:
            depth += 1
        elif text[position] == "}" and not escaped:
            depth -= 1
            if depth == 0:
                return text[start + 1 : position].strip() or None
    return None


def _first_line(text: str) -> str | None:
    return next((line.strip().rstrip(".") for line in text.splitlines() if line.strip()), None)


def _statement(text: str) -> str | None:
    """What follows "the answer is": its formula, or the words up to the end of the sentence."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    formula = MATH.match(line)
    if formula:
        return (formula[formula.lastgroup or 0]).strip()
    sentence = re.split(r"[.!?](?:\s|$)|\*\*", line, maxsplit=1)[0]
    return sentence.strip() or None


def _warm_up() -> None:
    math_compare.same("\\frac{1}{2}+x", "x+0.5")  # imports sympy and builds the parser's tables


math_verify.warm_up = _warm_up  # type: ignore[attr-defined]
