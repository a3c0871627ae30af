"""Rewards that compare texts: pure and cheap, so they run inline."""

from __future__ import annotations

import re
import string
from collections import Counter
from decimal import Decimal, InvalidOperation
from typing import Any

from astraflow.rewards.api import inline

NUMBER = re.compile(r"(?:(?<![\w.)\]])[-+])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?=\.[0-9]))(?:\.[0-9]+)?")
"""Thousands with commas, decimals, a sign."""


@inline
def exact_match(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: Any = None, **data: Any
) -> float | None:
    """1 for the exact answer text (surrounding blanks apart), else 0. A list of answers accepts any. None without an answer."""
    answers = [str(one).strip() for one in (answer if isinstance(answer, list | tuple) else [answer]) if one is not None]
    if not any(answers):
        return None
    return float(completions.strip() in answers)


@inline
def f1(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: Any = None, **data: Any) -> float | None:
    """F1 of the words that answer and completion share, as SQuAD and HotpotQA count them; the best over a list of answers.

    What stands between the last <answer> tags is scored; without tags, the whole text after </think>. Yes, no and "noanswer" share
    nothing with other texts. None without an answer.
    """
    answers = [words(str(one)) for one in (answer if isinstance(answer, list | tuple) else [answer]) if one is not None]
    if not any(answers):
        return None
    found = words(answer_of(completions))
    return max(_overlap(found, wanted) for wanted in answers)


def words(text: str) -> list[str]:
    """Lower case, without punctuation and English articles."""
    plain = "".join(char for char in text.lower() if char not in string.punctuation)
    return [word for word in plain.split() if word not in ("a", "an", "the")]


def _overlap(found: list[str], wanted: list[str]) -> float:
    shared = sum((Counter(found) & Counter(wanted)).values())
    special = {"yes", "no", "noanswer"}
    if not shared or (found != wanted and (special & {" ".join(found), " ".join(wanted)})):
        return 0.0
    return 2 * shared / (len(found) + len(wanted))


def answer_of(text: str) -> str:
    """The part of a completion that is its answer."""
    text = text.rsplit("</think>", 1)[-1]
    if "<answer>" in text:
        text = text.rsplit("<answer>", 1)[1].split("</answer>", 1)[0]
    return text.strip()


@inline
def last_number(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: Any = None, **data: Any
) -> float | None:
    """1 for the exact answer text, 0.2 when only the last number in the text is right, else 0. None when the answer is no number."""
    expected = number(str(answer))
    if answer is None or expected is None:
        return None
    if completions.strip() == str(answer).strip():
        return 1.0
    found = NUMBER.findall(completions)
    return 0.2 if found and number(found[-1]) == expected else 0.0


def number(text: str) -> Decimal | None:
    """The text as a decimal number, commas removed; None when it is none."""
    try:
        value = Decimal(text.strip().replace(",", ""))
    except InvalidOperation:
        return None
    return value if value.is_finite() else None
