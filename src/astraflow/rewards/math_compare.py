"""Are two written answers the same? Exact: structures part by part, numbers as fractions, expressions through sympy.

`same` says True, False, or None when the gold answer cannot be read, so that nobody is paid by a misread gold. LaTeX is parsed by
the library only as a whole: whatever its grammar would drop or reinterpret (adjacent numbers, primes, a base) is refused before.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from astraflow.rewards import math_limits, math_text, math_units
from astraflow.rewards.math_text import tidy

_INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = re.compile(rf"[-+]?(?:{_INTEGER}(?:\.\d*)?|\.\d+)")
_RATIO = re.compile(rf"([-+]?)({_INTEGER})/({_INTEGER})")
_FRAC = re.compile(rf"([-+]?)\\frac\{{([-+]?{_INTEGER})\}}\{{({_INTEGER})\}}")
_MIXED = re.compile(r"([-+]?)(\d+)(?:\s+(\d+)/(\d+)|\s*\\frac\{(\d+)\}\{(\d+)\})")
_BASE = re.compile(r"([0-9][0-9A-Za-z]*)_\{?(\d+)\}?")
_MATRIX = re.compile(r"\\begin\{[pbB]?matrix\}(.*?)\\end\{[pbB]?matrix\}", re.DOTALL)
"""`vmatrix` is a determinant, a number, and the parser's."""
_RELATIONS = {
    r"\leq": "<=", r"\le": "<=", r"\geq": ">=", r"\ge": ">=", r"\lt": "<", r"\gt": ">", "<": "<", ">": ">", r"\ne": "!=", r"\neq": "!=",
}  # fmt: skip
_RELATION = re.compile(r"\\leq?(?![A-Za-z])|\\geq?(?![A-Za-z])|\\[lg]t(?![A-Za-z])|\\neq?(?![A-Za-z])|<|>")
_SCIENTIFIC = re.compile(r"([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d{1,4})")
_GOLD_SCIENTIFIC = re.compile(r"([-+]?\d+\.\d+)[eE]([-+]?\d{1,3})|([-+]?\d+)(?:[eE](\d{1,3})|E([-+]\d{1,3}))")
"""`2e-1` is twice Euler's number less one."""
_MEMBER = re.compile(r"=|\\in(?![A-Za-z])")
_REALS = r"(-\infty,\infty)"
_REPEATING = re.compile(r"([-+]?)(\d*)\.(\d*)\\(?:overline|bar)\{(\d+)\}")
_SPACED = re.compile(r"[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_QUOTED_NUMBER = re.compile(rf"^{math_units.SET}\s*\{{\s*(-?\d[^{{}}]*)\}}$")
_LETTER = re.compile(r"\\text\{\s*\(?([A-Za-z])\)?\s*\}")
_REFUSED = re.compile(r"\d\s+\d|'|\\prime|[0-9)}]_|\\text|[?!]{2}|[^\x20-\x7e]")
"""What the library's grammar takes for something else: `3 4` is 7 to it, `x'` is x, `52_8` is 52."""
POINTS = (
    "0.7310585786", "-1.2345678901", "2.2360679775", "-0.0314159265", "17.9671234567", "-8.6602540378", "0.0027182818",
    "-137.0359990837", "4.9876543211", "-3.1622776602", "1511.6180339887", "-0.5772156649", "64.4142135624",
    "-1207.2718281828", "0.9961234567", "-19.0909090909", "10007.2718281828", "-1000033.2236067977", "54321.0123456789",
    "-10009.1414213562", "1000003.1732050808",
)  # fmt: skip
"""Values of the first symbol: of both signs, from thousandths to a million, some just below a whole number. The next symbol has those
`STRIDE` further on, which must have no factor in common with their number."""
STRIDE = 5
NEAR = 16
"""How many of them a formula meets that has exponents on exponents: `e^{e^x}` at a million is not to be computed."""
FAR = 20
"""A value beyond this is no fraction: an exact power of it may have more digits than there is memory."""
DIGITS = 60
TINY = 40
"""Of two values below 10^-TINY nothing is known: cancellation leaves such remnants."""
MAX_CHARS = 1000
NOTHING = r"\text{no answer at all}"


def readable(gold: str) -> bool:
    """Can this gold answer be compared with anything but itself?"""
    return same(gold, NOTHING) is not None


def same(gold: str, answer: str) -> bool | None:
    """Equal? None when `gold` cannot be read and the two differ in more than spaces."""
    answer = re.sub(r"\s+", " ", answer)
    if len(answer) > max(MAX_CHARS, 4 * len(gold)):
        return False if readable(gold) else None
    gold, answer = math_text.bare(gold), math_text.bare(answer)
    if tidy(gold) == tidy(answer) != "":
        return True
    if (hour := math_text.clock(gold)) is not None:
        return _same_hour(hour, math_text.clock(answer))
    if (letter := math_text.choice(gold)) is not None and letter == math_text.choice(answer, loose=True):
        return True
    (left, unit), (right, other) = (math_units.split(_QUOTED_NUMBER.sub(r"\1", text)) for text in (gold, answer))
    if unit and not other and (name := math_units.is_letter_of(right, unit)):
        right, other = right[: name.start()], unit
    if other and not unit and (name := math_units.is_letter_of(left, other)):
        left, unit = left[: name.start()], other
    left, right = tidy(left), tidy(right)
    if math_limits.excessive(right, left):
        return False if _same(left, NOTHING, 0) is not None else None
    found = _same(left, right, 0)
    return False if found and math_units.differ(unit, other) else found


def _same_hour(gold: tuple[int, int, str], answer: tuple[int, int, str] | None) -> bool:
    """One of the two may leave out whether it is before noon or after."""
    return answer is not None and gold[:2] == answer[:2] and (gold[2] == answer[2] or "" in (gold[2], answer[2]))


def _same(gold: str, answer: str, depth: int) -> bool | None:
    if not gold or depth > 6:
        return None
    if not answer:
        return False
    if _compact(gold) == _compact(answer):
        return True
    words = _words(gold)
    if words is not None:
        return words == _words(answer, loose=True)
    based = _BASE.fullmatch(gold)
    if based:
        other_based = _BASE.fullmatch(answer)
        return other_based is not None and other_based.groups() == based.groups()
    gold, answer = (_REALS if side == r"\mathbb{R}" else side for side in _sides(gold, answer))
    if gold == r"\emptyset":
        return answer == gold
    if (power := _GOLD_SCIENTIFIC.fullmatch(gold)) is not None:
        gold = _plain_number(power)
        answer = _plain_number(power) if (power := _SCIENTIFIC.fullmatch(answer)) else answer
    letter = _LETTER.fullmatch(answer)
    if letter and re.fullmatch("[A-Za-z]", gold):
        return letter[1] == gold
    left, right = number(gold), number(answer)
    if left is not None and right is None:
        right = _loose_number(answer)
    if left is not None and right is not None:
        return _same_number(left, right)
    gold, answer = _intervals(gold, answer)
    if _compact(gold) == _compact(answer):
        return True
    for read, compare in ((_matrix, _rows), (_union, _unordered), (_bracketed, _sequence), (_listed, _unordered)):
        parts = read(gold)
        if parts is not None:
            other = read(answer) or (_column(parts, answer) if read in (_matrix, _bracketed) else None)
            return False if other is None else compare(parts, other, depth + 1)
    if _RELATION.search(gold) or "=" in _outside(gold):
        return _same_relation(gold, answer)
    return _same_expression(gold, answer)


def _outside(text: str) -> str:
    """Without what stands in braces: the `=` of `\\sum_{k=1}` is no equation."""
    while (shorter := re.sub(r"\{[^{}]*\}", "", text)) != text:
        text = shorter
    return text


def _compact(text: str) -> str:
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def _words(text: str, loose: bool = False) -> str | None:
    """The letters of an answer in words (`\\text{(C)}`, `ellipse`), lower case; None for a formula. `loose`: a lone symbol is one too."""
    inner = math_text.TEXT.sub(r"\1", text)
    letters = re.sub(r"[^A-Za-z]+", "", inner).lower()
    if not letters or re.search(r"[\\^_=+*/<>\d{}]", inner):
        return None
    quoted = inner != text or letters in ("yes", "no")
    return letters if loose or quoted or re.search(r"[A-Za-z]{4,}", inner) or re.fullmatch(r"\([A-Za-z]\)", inner) else None


def _sides(gold: str, answer: str) -> tuple[str, str]:
    """Drop `x =` and `x \\in` where only the value is in question: when the other side does not name it, or names it too."""
    named = re.compile(r"[A-Za-z](?:_\{?\w+\}?)?\s*(?:=|\\in(?![A-Za-z]))\s*(?P<value>[^=]+)|[a-zA-Z]\([a-z]\)\s*=\s*(?P<call>[^=]+)")
    left, right = named.fullmatch(gold), named.fullmatch(answer)
    if left and right and gold[0] == answer[0]:
        return _value(left), _value(right)
    if left and not _MEMBER.search(answer):
        return _value(left), answer
    if right and not _MEMBER.search(gold):
        return gold, _value(right)
    return gold, answer


def _value(match: re.Match[str]) -> str:
    return (match["value"] or match["call"]).strip()


def number(text: str) -> tuple[Fraction, bool] | None:
    """The exact value of a written number and whether it is a percentage; None for anything else."""
    percent = text.endswith("%")
    text = text.removesuffix("%").strip()
    try:
        if _DECIMAL.fullmatch(text):
            return Fraction(text.replace(",", "")), percent
        match = _RATIO.fullmatch(_compact(text)) if not re.search(r"\d\s+\d", text) else None
        match = match or _FRAC.fullmatch(_compact(text))
        if match:
            sign, top, bottom = match.groups()
            return Fraction(int(top.replace(",", "")), int(bottom.replace(",", ""))) * (-1 if sign == "-" else 1), percent
        if repeating := _REPEATING.fullmatch(_compact(text)):
            return _repeating(*repeating.groups()), percent
        mixed = _MIXED.fullmatch(text)
        if mixed:
            top, bottom = mixed[3] or mixed[5], mixed[4] or mixed[6]
            return (int(mixed[2]) + Fraction(int(top), int(bottom))) * (-1 if mixed[1] == "-" else 1), percent
    except (ZeroDivisionError, ValueError):
        return None
    return None


def _repeating(sign: str, whole: str, fixed: str, period: str) -> Fraction:
    value = Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed)) + Fraction(f"{whole or 0}.{fixed or 0}")
    return -value if sign == "-" else value


def _plain_number(scientific: re.Match[str]) -> str:
    value, power = (group for group in scientific.groups() if group is not None)
    return str(Fraction(value) * Fraction(10) ** int(power))


def _loose_number(text: str) -> tuple[Fraction, bool] | None:
    """Beside a gold that is a number, `1.2e3` is one too (not 1.2 times Euler's number), and so is `10 000`."""
    if scientific := _SCIENTIFIC.fullmatch(text):
        return Fraction(scientific[1]) * Fraction(10) ** int(scientific[2]), False
    return (Fraction(text.replace(" ", "")), False) if _SPACED.fullmatch(text) else None


def _intervals(gold: str, answer: str) -> tuple[str, str]:
    """`1 < x \\le 2` and `x \\le 3` as intervals: where gold is one (a pair of two round brackets may be a point, unless an end is
    infinite), or is such a chain itself. Two single inequalities are left to be compared as they are."""
    chain = _ray(gold)
    other = _ray(answer)
    if chain is not None and (_is_chain(gold) or _bracketed(answer) is not None):
        return chain[0], other[0] if other is not None and other[1] == chain[1] else answer
    if chain is None and other is not None and _bracketed(gold) is not None and (r"\infty" in gold or "[" in gold or "]" in gold):
        return gold, other[0]
    return gold, answer


def _is_chain(text: str) -> bool:
    return len(_RELATION.findall(text)) == 2


def _ray(text: str) -> tuple[str, str] | None:
    """The interval that one or two inequalities say, and the symbol that they say it of; None for any other text."""
    signs = [_RELATIONS[sign] for sign in _RELATION.findall(text)]
    parts = [part.strip() for part in _RELATION.split(text)]
    if "=" in text or not all(parts) or len({sign[0] for sign in signs}) != 1 or signs[0][0] == "!":
        return None
    if signs[0][0] == ">":
        signs, parts = [sign.replace(">", "<") for sign in reversed(signs)], parts[::-1]
    closed = [sign == "<=" for sign in signs]
    letters = [re.fullmatch(r"[A-Za-z]|\\theta", part) is not None for part in parts]
    if len(parts) == 3 and letters == [False, True, False]:
        return f"{'[' if closed[0] else '('}{parts[0]},{parts[2]}{']' if closed[1] else ')'}", parts[1]
    if len(parts) == 2 and letters == [True, False]:
        return f"(-\\infty,{parts[1]}{']' if closed[0] else ')'}", parts[0]
    if len(parts) == 2 and letters == [False, True]:
        return f"{'[' if closed[0] else '('}{parts[0]},\\infty)", parts[1]
    return None


def _same_number(left: tuple[Fraction, bool], right: tuple[Fraction, bool]) -> bool:
    """25 % and 25 answer each other, and so do 25 % and 1/4."""
    if left[0] == right[0]:
        return True
    return left[1] != right[1] and (left[0] / 100 if left[1] else left[0]) == (right[0] / 100 if right[1] else right[0])


def _split(text: str, separator: str = ",") -> list[str] | None:
    """Parts at the top level; None when the brackets do not nest."""
    parts, start, depth = [], 0, 0
    for position, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return None
        if depth == 0 and char == separator:
            parts.append(text[start:position])
            start = position + 1
    return None if depth else [part.strip() for part in [*parts, text[start:]]]


def _matrix(text: str) -> list[str] | None:
    match = _MATRIX.fullmatch(text)
    rows = [row.strip() for row in re.split(r"\\\\(?:\[[^\]]*\])?", match[1])] if match else None
    return [row for row in rows if row] if rows else None


def _column(gold: list[str], answer: str) -> list[str] | None:
    """A column of numbers beside `(1, 2)`, and `(1, 2)` beside a column, in the form of the gold's parts."""
    pair, rows = _bracketed(answer), _matrix(answer)
    if gold[0] + gold[-1] == "()":
        return ["(", *rows, ")"] if rows is not None and not any("&" in row for row in rows) else None
    return pair[1:-1] if pair is not None and pair[0] + pair[-1] == "()" and not any("&" in row for row in gold) else None


def _rows(gold: list[str], answer: list[str], depth: int) -> bool | None:
    if len(gold) != len(answer):
        return False
    cells = [(left.split("&"), right.split("&")) for left, right in zip(gold, answer, strict=True)]
    if any(len(left) != len(right) for left, right in cells):
        return False
    return _all([_same(a.strip(), b.strip(), depth) for left, right in cells for a, b in zip(left, right, strict=True)])


def _union(text: str) -> list[str] | None:
    parts = text.split(r"\cup")
    return [part.strip() for part in parts] if len(parts) > 1 else None


def _bracketed(text: str) -> list[str] | None:
    """`(3,4]` → ["(", "3", "4", "]"]; only with a comma inside: otherwise brackets are part of an expression. Sets are lists."""
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]":
        return None
    parts = _split(text[1:-1])
    return [text[0], *parts, text[-1]] if parts and len(parts) > 1 and all(parts) else None


def _sequence(gold: list[str], answer: list[str], depth: int) -> bool | None:
    if (gold[0], gold[-1], len(gold)) != (answer[0], answer[-1], len(answer)):
        return False
    return _all([_same(left, right, depth) for left, right in zip(gold[1:-1], answer[1:-1], strict=True)])


def _listed(text: str) -> list[str] | None:
    """The members of `{1, 2}`, `1, 2`, `1 and 2`, `1 \\pm 2`; their order does not matter."""
    braces = re.fullmatch(r"\\\{(.*)\\\}", text, re.DOTALL)
    inner = re.sub(r",?\s*(?:\\text\{\s*,?\s*(?:and|or)\s*\}|\b(?:and|or)\b)", ",", braces[1] if braces else text)
    parts = _split(inner)
    if parts is None or not all(parts):
        return None
    members = [re.sub(r"\\pm", sign, part) for part in parts for sign in (("+", "-") if r"\pm" in part else ("",))]
    return members if braces or len(members) > 1 else None


def _unordered(gold: list[str], answer: list[str], depth: int) -> bool | None:
    left = list(answer)
    for member in gold:
        verdicts = [_same(member, other, depth) for other in left]
        if True not in verdicts:
            return None if None in verdicts else False
        del left[verdicts.index(True)]
    return not left


def _all(verdicts: list[bool | None]) -> bool | None:
    return False if False in verdicts else None if None in verdicts else True


def _same_relation(gold: str, answer: str) -> bool | None:
    """`2x + y = 3` and `y = 3 - 2x`: the difference of the sides up to a factor; of an inequality up to a positive one."""
    left, right = _relation(gold), _relation(answer)
    if left is None:
        return None
    if right is None or left[0] != right[0] or left[1].free_symbols != right[1].free_symbols:
        return False
    import sympy  # type: ignore[import-untyped,unused-ignore]

    ratio = sympy.cancel(left[1] / right[1]) if right[1] != 0 else sympy.Integer(0)
    return bool(ratio.is_number and ratio.is_finite and ratio != 0 and (left[0] in ("=", "!=") or ratio.is_positive))


def _relation(text: str) -> tuple[str, Any] | None:
    """Operator and difference of the sides, turned so that the operator is `=`, `<` or `<=`."""
    found = [*_RELATION.finditer(text), *re.finditer("=", text)]
    if len(found) != 1:
        return None
    sides = [expression(text[: found[0].start()]), expression(text[found[0].end() :])]
    if sides[0] is None or sides[1] is None:
        return None
    operator = _RELATIONS.get(found[0].group(), "=")
    difference = sides[0] - sides[1]
    return (operator.replace(">", "<"), -difference) if operator.startswith(">") else (operator, difference)


def _same_expression(gold: str, answer: str) -> bool | None:
    left = expression(gold)
    if left is None:
        return None
    right = expression(answer)
    if right is None:
        return False
    from sympy.core.function import AppliedUndef  # type: ignore[import-untyped,unused-ignore]

    if left.has(AppliedUndef) or right.has(AppliedUndef):  # `I(0)`: nobody said what I is, so there is no value to compare
        return True if left == right else None if left.has(AppliedUndef) else False
    compare = _same_function if left.free_symbols or right.free_symbols else _same_constant
    try:
        return compare(left, right)
    except Exception:  # the boundary to a third-party library: what sum, integral or power it cannot compute raises anything
        return None if gold == answer or not _computes(left) else False


def _computes(gold: Any) -> bool:
    """Whether a gold value comes out beside a plain one, so that a failure was the answer's."""
    import sympy  # type: ignore[import-untyped,unused-ignore]

    try:
        (_same_function if gold.free_symbols else _same_constant)(gold, sympy.Integer(1))
    except Exception:  # as above: then nobody is paid and nobody is charged
        return False
    return True


def expression(text: str) -> Any:
    """A sympy expression of the whole text with decimals as fractions, or None. Imports sympy: worker processes only."""
    if _REFUSED.search(text) or "%" in text or not text.strip() or _split(text) is None:
        return None
    import sympy  # type: ignore[import-untyped,unused-ignore]
    from antlr4 import Token  # type: ignore[import-untyped,unused-ignore]
    from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy  # type: ignore[import-untyped,unused-ignore]

    try:
        parser = _Latex2Sympy().create_parser(text)
        parser.math()
        if parser.getTokenStream().LA(1) != Token.EOF:
            return None  # the grammar stopped half way: what it read is only a prefix
        found = _Latex2Sympy().parse(text)
    except Exception:  # the boundary to a third-party parser, which raises bare Exception
        return None
    if not isinstance(found, sympy.Expr) or found.has(sympy.zoo, sympy.nan):
        return None
    exact = {value: sympy.Rational(str(value)) for value in found.atoms(sympy.Float)}
    return found.xreplace(exact).subs(sympy.Symbol("i"), sympy.I)


def _same_constant(left: Any, right: Any) -> bool:
    """Rational values exactly; others by their difference to 60 digits relative to their size, far below any tolerance that pays."""
    left, right = left.doit(), right.doit()
    if left.is_Rational and right.is_Rational:
        return bool(left == right)
    return left == right or _close(left.evalf(DIGITS), right.evalf(DIGITS))


def _close(left: Any, right: Any) -> bool:
    size = max(abs(left), abs(right))
    if not size.is_finite:
        return bool(left == right)
    return bool(abs(left - right) <= size * 10 ** (10 - DIGITS))


def _same_function(left: Any, right: Any) -> bool:
    """Equal at fixed odd points, to 50 digits, and undefined at the same ones: two different formulas of answer size do not agree by
    chance. Symbols are real; a formula that is equal for positive ones only is another one."""
    import sympy  # type: ignore[import-untyped,unused-ignore]

    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    points = POINTS if not (_stacked(left) or _stacked(right)) else POINTS[:NEAR]
    agreed = 0
    for first in range(len(points)):
        at = {symbol: _point(points[(first + index * STRIDE) % len(points)]) for index, symbol in enumerate(symbols)}
        values = [side.xreplace(at).evalf(DIGITS) for side in (left, right)]
        defined = [bool(value.is_number and value.is_finite) for value in values]
        if defined[0] != defined[1]:
            return False  # two formulas of different domains
        if not defined[0] or max(abs(value) for value in values) < sympy.Rational(1, 10**TINY):
            continue
        if not _close(*values):
            return False
        agreed += 1
    return agreed >= 2


def _stacked(formula: Any) -> bool:
    """Whether an exponent or a factorial of symbols stands in another one."""
    import sympy  # type: ignore[import-untyped,unused-ignore]

    kinds = (sympy.Pow, sympy.exp, sympy.factorial, sympy.gamma)
    growing = [(found.as_base_exp()[1] if found.is_Pow else found.args[0]) for found in formula.atoms(*kinds)]
    return any(inner.as_base_exp()[1].free_symbols or not inner.is_Pow for part in growing for inner in part.atoms(*kinds))


def _point(text: str) -> Any:
    import sympy  # type: ignore[import-untyped,unused-ignore]

    value = sympy.Rational(text)
    return sympy.Float(text, 2 * DIGITS) if abs(value) > FAR else value
