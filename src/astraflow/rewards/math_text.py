"""One way of writing for what LaTeX and plain text can write in many: what is done to a gold answer and to an answer alike."""

from __future__ import annotations

import re

from astraflow.rewards.math_units import SET

FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi"
_BARE = re.compile(rf"(?<![A-Za-z\\])({FUNCTIONS})(?![A-Za-z])")
_PLAIN = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt", "°": "", "∪": r"\cup ",
    "∅": r"\emptyset", r"\varnothing": r"\emptyset", "\\geqslant": r"\ge ", "\\leqslant": r"\le ", "./": "/",
    "²": "^{2}", "³": "^{3}", "½": r"\frac{1}{2}", "≤": r"\le ", "≥": r"\ge ", "±": r"\pm ",
}  # fmt: skip
_DROP = re.compile(r"\\(?:left|right|displaystyle|limits|big|Big|bigl|bigr)(?![A-Za-z])|(?<!\\)\\[,;:! ]|\\(?:quad|qquad)|~|\\\$|\$")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree")
_FONT = re.compile(r"\\(?:mathrm|mathbf|mathit|operatorname|textbf|textit|mathsf|bm)\s*\{([^{}]*)\}")
TEXT = re.compile(r"\\(?:text|mbox|textrm|textnormal|hbox)\s*\{([^{}]*)\}")
_SIZE = re.compile(
    r"\\(?:Large|large|LARGE|huge|Huge|small|normalsize|textstyle|scriptstyle)(?![A-Za-z])\s*|\\(?:text)?color\s*\{[^{}]*\}\s*"
)
_PERCENT = re.compile(rf"(?:\s|\\[ ,])*(?:{SET}\s*\{{\s*(?:\\?%|per ?cent)\s*\}}|(?<=[\d\s])per ?cent\b)")
_OVER = re.compile(r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}")
_SAID = r"(?:the )?(?:final )?answer"
_LABEL = re.compile(rf"(?i:{SET}\s*\{{\s*{_SAID}(?: is)?\s*[:=]?\s*\}}\s*[:=]?|{_SAID}\s*[:=])\s*(?=\S)")
_CLOCK = re.compile(rf"(1?\d)(?::([0-5]\d))?(?:\s|~|\\[ ,])*(?:{SET}\s*\{{\s*)?(?:([AaPp])\.?\s?[Mm]\.?)?\s*\}}?")
_CHOICE = re.compile(r"\(?([A-J])[).:]*")
_NAMED_CHOICE = re.compile(
    r"(?i:option|choice|answer)?:?\s*\(?([A-J])[).:]*|\(([A-J])\)(?:\s|~|\\[ ,;:]|\\q?quad)+(?:\\\$|\\frac|-?\d)[^A-J,]*"
)
"""`B)`, `Option B` and, with the value that was offered, `(B) 12`."""


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
    text = TEXT.sub(lambda match: rf"\text{{{match[1]}}}", _DROP.sub(lambda match: " " if match[0] in (r"\ ", "~") else "", text))
    text = re.sub(r"\\[dtc]frac", r"\\frac", text.replace(r"\%", "%").replace("**", "^").replace("*", r"\cdot "))
    text = with_functions(text)
    text = re.sub(r"\\frac\s*(\d|[A-Za-z])\s*(?=[\d{A-Za-z\\])", r"\\frac{\1}", text)
    text = re.sub(r"(\\frac\s*\{[^{}]*\})\s*(\d|[A-Za-z])", r"\1{\2}", text)
    text = re.sub(r"\\sqrt\s*(\d|[A-Za-z])", r"\\sqrt{\1}", re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text))
    text = re.sub(r"\\log_\s*(\w)", r"\\log_{\1}", text)
    text = re.sub(r"\}\s+\{", "}{", re.sub(r"\\frac\s+\{", r"\\frac{", text))
    return re.sub(r"\s+", " ", text).strip().rstrip(".,;:").strip()


def bare(text: str) -> str:
    """Without sizes, colours, outer braces and a label "Answer:"; thousands, per cent and fractions in their usual form."""
    text = _SIZE.sub("", unwrap(text).replace("{,}", ","))
    label = _LABEL.match(text)
    text = text[label.end() :] if label else text
    text = re.sub(r"\\\{\s*\\\}", r"\\emptyset", _OVER.sub(r"\\frac{\1}{\2}", _PERCENT.sub(r"\\%", text)))
    while (outer := re.fullmatch(r"\{((?:[^{}]|\\[{}]|\{[^{}]*\})*)\}", text.strip())) and not text.rstrip().endswith("\\}"):
        text = outer[1]
    return unwrap(text)


def clock(text: str) -> tuple[int, int, str] | None:
    """Hour, minute and `a`, `p` or nothing for a time of day (`6:30 p.m.`); None for any other text."""
    found = _CLOCK.fullmatch(text.strip())
    if not found or not 1 <= int(found[1]) <= 12 or not (found[2] or found[3]):
        return None
    return int(found[1]), int(found[2] or 0), (found[3] or "").lower()


def choice(text: str, loose: bool = False) -> str | None:
    """The letter of a multiple choice, which nothing but brackets surround; `loose`: also as models write it."""
    inner = re.sub(rf"{SET}\s*\{{([^{{}}]*)\}}", r"\1", text).strip()
    found = (_NAMED_CHOICE if loose else _CHOICE).fullmatch(inner)
    return next(filter(None, found.groups())) if found else None
