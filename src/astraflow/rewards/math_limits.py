"""Which answers are out of all proportion to their gold answer, told from the text before a parser spends its deadline on them."""

from __future__ import annotations

import math
import re

MAX_DEPTH, MAX_TOWER, MAX_DIGITS = 24, 2, 10_000
MAX_EXPONENT, MAX_FACTORIAL, MAX_CHOSEN = 9_999, 9_999, 9_999
MAX_STORIES = 10**8
"""What an exponent that is a power itself may come to: of those below, the deadline decides."""
MAX_TERMS = 10_000
"""Of several sums, all ranges multiplied, since they may be nested."""
HUGE = 10**18
_HEAVY = re.compile(r"\\(?:sum|prod|int|lim)(?![A-Za-z])")
_RANGE = re.compile(r"\\(?:sum|prod)\s*_\s*\{[^{}]*\}\s*\^\s*\{?(\d{1,5})(?!\d)")
_INTEGERS = re.compile(r"(?<![\d.])\d+")
_BINOMIAL = re.compile(r"\\[dt]?binom(?![A-Za-z])")
_ENDLESS = re.compile(r"\\prod\s*_\s*\{[^{}]*\}\s*\^\s*\{?\s*\\infty|\\exp\s*[({][^(){}]*\\exp\s*[({][^(){}]*\\exp")
_GAMMA = re.compile(r"\\Gamma(?![A-Za-z])")
_OPENS, _CLOSES = "([{", ")]}"


def excessive(answer: str, gold: str) -> bool:
    """An answer that is out of all proportion is wrong, before a parser spends its deadline on it, which would leave it unscored.

    What stays below these bounds and still takes too long to compute (`3^{20^6}`) is the deadline's: unscored, and counted (case G04).
    """
    if _depth(answer) > max(MAX_DEPTH, _depth(gold)):
        return True
    if _tower(answer) > max(MAX_TOWER, _tower(gold)) and _power(answer) is None:
        return True
    for measure, limit in ((_exponent, MAX_EXPONENT), (_factorial, MAX_FACTORIAL), (_chosen, MAX_CHOSEN)):
        if measure(answer) > max(limit, measure(gold)):
            return True
    if _ENDLESS.search(answer) and not _ENDLESS.search(gold):
        return True
    heavy = len(_HEAVY.findall(answer))
    ranges = [int(upper) for upper in _RANGE.findall(answer)]
    few = len(ranges) == heavy and math.prod(ranges) <= MAX_TERMS
    if heavy > max(1, len(_HEAVY.findall(gold))) and not few:
        return True
    return heavy > 0 and answer != gold and (_tower(answer) > 1 or re.search(r"\d{6}", answer) is not None)


def _power(text: str) -> int | None:
    """The value of a tower of whole numbers (`2^{2^{2^2}}`), when it has less than `MAX_DIGITS` digits; None for any other text."""
    levels = re.sub(r"[{}\s]", "", text).split("^")
    if len(levels) < 2 or not all(re.fullmatch(r"\d{1,9}", level) for level in levels):
        return None
    value = 1
    for base in map(int, reversed(levels)):
        if base > 1 and value * math.log10(base) >= MAX_DIGITS:
            return None
        value = base**value
    return value


def _bound(text: str) -> int:
    """About how large the whole numbers in `text` become, from above: their sum, or their product where they are multiplied."""
    if (power := _power(text)) is not None:
        return power
    if found := re.fullmatch(r"[({\s]*([1-7])\s*![)}\s]*", text):
        return math.factorial(int(found[1]))
    numbers = [int(digits) if len(digits) < 18 else HUGE for digits in _INTEGERS.findall(text)]
    if numbers and ("!" in text or ("^" in text and not re.search(r"[A-Za-z]", text))):
        return HUGE
    return math.prod(numbers) if re.search(r"\\cdot|\\times|\)\s*\(|\d\s*\(", text) else sum(numbers)


def _argument(text: str, start: int) -> tuple[str, int]:
    """The group or the token that begins at `start`, without its brackets, and where it ends."""
    while start < len(text) and text[start] == " ":
        start += 1
    if start >= len(text) or text[start] not in _OPENS:
        token = re.match(r"[-+]?\d+|\\[A-Za-z]+|.|$", text[start:], re.DOTALL)
        return (token[0], start + token.end()) if token else ("", start)
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] in _OPENS) - (text[position] in _CLOSES)
        if depth == 0:
            return text[start + 1 : position], position + 1
    return text[start + 1 :], len(text)


def _before(text: str, end: int) -> str:
    """The group or the number that ends at `end`, without its brackets."""
    text = text[:end].rstrip()
    if not text or text[-1] not in _CLOSES:
        digits = re.search(r"\d+$", text)
        return digits[0] if digits else ""
    depth = 0
    for position in range(len(text) - 1, -1, -1):
        depth += (text[position] in _CLOSES) - (text[position] in _OPENS)
        if depth == 0:
            return text[position + 1 : -1]
    return text[:-1]


def _exponent(text: str) -> int:
    """The largest exponent of one story, times the one in its base: of `(9^{999})^{999}`, 998001. Towers are measured by `_tower`."""
    largest = 0
    for found in re.finditer(r"\^", text):
        above, base = _argument(text, found.end())[0], _before(text, found.start())
        power = _power(above)
        if "^" not in above or (power is not None and power > MAX_STORIES):
            largest = max(largest, _bound(above) * (max(1, _exponent(base)) if "^" in base else 1))
    return largest


def _factorial(text: str) -> int:
    operands = [_before(text, found.start()) for found in re.finditer("!", text)]
    operands += [_argument(text, found.end())[0] for found in _GAMMA.finditer(text)]
    return max(map(_bound, operands), default=0)


def _chosen(text: str) -> int:
    """The smaller number of a binomial coefficient; both must be large for it to be."""
    largest = 0
    for found in _BINOMIAL.finditer(text):
        above, end = _argument(text, found.end())
        largest = max(largest, min(_bound(above), _bound(_argument(text, end)[0])))
    return largest


def _depth(text: str) -> int:
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _tower(text: str) -> int:
    """How many exponents stand on one another: 1 for `x^2y^3`, 3 for `x^{x^{x^x}}` and `x^x^x^x`."""
    level = highest = below = 0  # of the exponent that was just read (0 = none was), at most, of the group that is open
    opened: list[tuple[int, int]] = []
    power = False
    for token in re.findall(r"\\[A-Za-z]+|\d+|\S", text):
        if token == "^":
            level = max(level, below) + 1
            highest, power = max(highest, level), True
        elif token in "([{":
            opened.append((below, level if power else 0))
            below, level, power = (level if power else below), 0, False
        elif token in ")]}":
            below, level = opened.pop() if opened else (0, 0)
        elif not (power and token in "+-"):
            level, power = (level if power else 0), False
    return highest
