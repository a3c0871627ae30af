"""Are two written answers the same? Exact: structures part by part, numbers as fractions, expressions through sympy.

`same` says True, False, or None when the gold answer cannot be read, so that nobody is paid by a misread gold. LaTeX is parsed by
the library only as a whole: whatever its grammar would drop or reinterpret (adjacent numbers, primes, a base) is refused before.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi"
_BARE = re.compile(rf"(?<![A-Za-z\\])({FUNCTIONS})(?![A-Za-z])")
_PLAIN = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt", "°": "", "∪": r"\cup ",
    "²": "^{2}", "³": "^{3}", "½": r"\frac{1}{2}", "≤": r"\le ", "≥": r"\ge ", "±": r"\pm ",
}  # fmt: skip
_DROP = re.compile(r"\\(?:left|right|displaystyle|limits|big|Big|bigl|bigr)(?![A-Za-z])|(?<!\\)\\[,;:! ]|\\(?:quad|qquad)|~|\\\$|\$")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree")
_FONT = re.compile(r"\\(?:mathrm|mathbf|mathit|operatorname|textbf|textit|mathsf|bm)\s*\{([^{}]*)\}")
_TEXT = re.compile(r"\\(?:text|mbox|textrm|textnormal|hbox)\s*\{([^{}]*)\}")
_UNIT = re.compile(
    r"(?<=[\d})])\s*\\text\{[^{}]*\}(?:\^\{?\d\}?)?$"
    r"|(?<=\d)(?:\s+|(?<=\d)(?=[A-Za-z]{2}))[A-Za-z][A-Za-z./ ]*(?:\^\{?\d\}?)?$"
)
_INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = re.compile(rf"[-+]?(?:{_INTEGER}(?:\.\d*)?|\.\d+)")
_RATIO = re.compile(rf"([-+]?)({_INTEGER})/({_INTEGER})")
_FRAC = re.compile(rf"([-+]?)\\frac\{{([-+]?{_INTEGER})\}}\{{({_INTEGER})\}}")
_MIXED = re.compile(r"([-+]?)(\d+)(?:\s+(\d+)/(\d+)|\s*\\frac\{(\d+)\}\{(\d+)\})")
_BASE = re.compile(r"([0-9][0-9A-Za-z]*)_\{?(\d+)\}?")
_MATRIX = re.compile(r"\\begin\{[pbvBV]?matrix\}(.*?)\\end\{[pbvBV]?matrix\}", re.DOTALL)
_RELATIONS = {r"\leq": "<=", r"\le": "<=", r"\geq": ">=", r"\ge": ">=", r"\lt": "<", r"\gt": ">", "<": "<", ">": ">"}
_RELATION = re.compile(r"\\leq?(?![A-Za-z])|\\geq?(?![A-Za-z])|\\[lg]t(?![A-Za-z])|<|>")
_REFUSED = re.compile(r"\d\s+\d|'|\\prime|[0-9)}]_|\\text|[?!]{2}|[^\x20-\x7e]")
"""What the library's grammar takes for something else: `3 4` is 7 to it, `x'` is x, `52_8` is 52."""
POINTS = (
    ("0.7310585786", "1.4142135624"),
    ("-1.2345678901", "2.7071067812"),
    ("2.2360679775", "-0.5772156649"),
    ("3.1622776602", "0.3010299957"),
)
"""Value of the first symbol, and the step to each further one."""
DIGITS = 60


def unwrap(text: str) -> str:
    """A gold answer without dollar signs, `\\( \\)` or a box around it."""
    text = text.strip()
    for start, end in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), (r"\boxed{", "}")):
        if text.startswith(start) and text.endswith(end) and len(text) >= len(start) + len(end):
            text = text[len(start) : -len(end)].strip()
    return text


def with_functions(text: str) -> str:
    """`sqrt(2) pi` → `\\sqrt(2) \\pi`."""
    return _BARE.sub(lambda match: "\\" + match[1], text)


def tidy(text: str) -> str:
    """One way of writing for what LaTeX can write in many."""
    text = re.sub(r",\s*\\!\s*", ",", unwrap(text))
    for plain, latex in _PLAIN.items():
        text = text.replace(plain, latex)
    text = _FONT.sub(r"\1", _DEGREES.sub("", text))
    text = _TEXT.sub(lambda match: rf"\text{{{match[1]}}}", _DROP.sub(lambda match: " " if match[0] in (r"\ ", "~") else "", text))
    text = re.sub(r"\\[dtc]frac", r"\\frac", text.replace(r"\%", "%").replace("**", "^").replace("*", r"\cdot "))
    text = with_functions(text)
    text = re.sub(r"\\frac\s*(\d|[A-Za-z])\s*(?=[\d{A-Za-z\\])", r"\\frac{\1}", text)
    text = re.sub(r"(\\frac\s*\{[^{}]*\})\s*(\d|[A-Za-z])", r"\1{\2}", text)
    text = re.sub(r"\\sqrt\s*(\d|[A-Za-z])", r"\\sqrt{\1}", re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text))
    text = re.sub(r"\\log_\s*(\w)", r"\\log_{\1}", text)
    text = re.sub(r"\}\s+\{", "}{", re.sub(r"\\frac\s+\{", r"\\frac{", text))
    text = _UNIT.sub("", re.sub(r"\s+", " ", text).strip().rstrip(".,;:").strip())
    return text.strip()


def readable(gold: str) -> bool:
    """Can this gold answer be compared with anything but itself?"""
    return same(gold, "\\text{no answer at all}") is not None


def same(gold: str, answer: str) -> bool | None:
    """Equal? None when `gold` cannot be read and the two differ in more than spaces."""
    return _same(tidy(gold), tidy(answer), 0)


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
    gold, answer = _sides(gold, answer)
    left, right = number(gold), number(answer)
    if left is not None and right is not None:
        return _same_number(left, right)
    for read, compare in ((_matrix, _rows), (_union, _unordered), (_bracketed, _sequence), (_listed, _unordered)):
        parts = read(gold)
        if parts is not None:
            other = read(answer)
            return False if other is None else compare(parts, other, depth + 1)
    if _RELATION.search(gold) or "=" in gold:
        return _same_relation(gold, answer)
    return _same_expression(gold, answer)


def _compact(text: str) -> str:
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def _words(text: str, loose: bool = False) -> str | None:
    """The letters of an answer in words (`\\text{(C)}`, `ellipse`), lower case; None for a formula. `loose`: a lone symbol is one too."""
    inner = _TEXT.sub(r"\1", text)
    letters = re.sub(r"[^A-Za-z]+", "", inner).lower()
    if not letters or re.search(r"[\\^_=+*/<>\d{}]", inner):
        return None
    quoted = inner != text
    return letters if loose or quoted or re.search(r"[A-Za-z]{4,}", inner) or re.fullmatch(r"\([A-Za-z]\)", inner) else None


def _sides(gold: str, answer: str) -> tuple[str, str]:
    """Drop `x =` and `x \\in` where only the value is in question: when the other side does not name it, or names it too."""
    named = re.compile(r"[A-Za-z](?:_\{?\w+\}?)?\s*(?:=|\\in(?![A-Za-z]))\s*(?P<value>[^=]+)|[a-zA-Z]\([a-z]\)\s*=\s*(?P<call>[^=]+)")
    left, right = named.fullmatch(gold), named.fullmatch(answer)
    if left and right and gold[0] == answer[0]:
        return _value(left), _value(right)
    if left and "=" not in answer and r"\in" not in answer:
        return _value(left), answer
    if right and "=" not in gold and r"\in" not in gold:
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
        mixed = _MIXED.fullmatch(text)
        if mixed:
            top, bottom = mixed[3] or mixed[5], mixed[4] or mixed[6]
            return (int(mixed[2]) + Fraction(int(top), int(bottom))) * (-1 if mixed[1] == "-" else 1), percent
    except (ZeroDivisionError, ValueError):
        return None
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
    inner = re.sub(r"\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b", ",", braces[1] if braces else text)
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
    return bool(ratio.is_number and ratio.is_finite and ratio != 0 and (left[0] == "=" or ratio.is_positive))


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
    constant = not left.free_symbols and not right.free_symbols
    return _same_constant(left, right) if constant else _same_function(left, right)


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
    """Equal at fixed odd points, to 50 digits: two different formulas of answer size do not agree there by chance."""
    import sympy  # type: ignore[import-untyped,unused-ignore]

    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    agreed = 0
    for real, step in POINTS:
        at = {symbol: sympy.Rational(real) + index * sympy.Rational(step) for index, symbol in enumerate(symbols)}
        values = [side.xreplace(at).evalf(DIGITS) for side in (left, right)]
        if not all(value.is_number and value.is_finite for value in values):
            continue  # outside the domain of one of them
        if not _close(*values):
            return False
        agreed += 1
    return agreed >= 2
