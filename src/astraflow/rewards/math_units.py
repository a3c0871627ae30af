"""Units at the end of an answer. One may be missing on one side; two different ones are two different answers.

What is a unit: the measures of `MEASURES` (a single letter only where it is set upright, `\\text{ m}`: plain, it is a variable), an
amount of money, degrees, per cent, and words for what was counted (`10 apples`), which are all alike (`COUNTED`) but are no measure.
Letters after a number that are none of these (`3 n`, `2xy`, `4 abcd`) are a product, and words that say what the number is (`5 million`,
`5 squared`, `5 maybe`; `NEVER`) change it: both are part of the value.
"""

from __future__ import annotations

import re

MEASURES = {
    "mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre", "km": "kilometer kilometre", "in": "inch inches",
    "ft": "foot feet", "yd": "yard", "mi": "mile", "mg": "milligram", "g": "gram", "kg": "kilogram", "lb": "pound", "oz": "ounce",
    "ton": "tonne", "ms": "millisecond", "s": "second sec", "min": "minute", "h": "hour hr", "day": "", "week": "", "month": "",
    "year": "yr", "ml": "milliliter millilitre", "l": "liter litre", "gal": "gallon", "dollar": "usd", "cent": "", "euro": "eur",
    "deg": "degree", "rad": "radian", "hz": "hertz", "j": "joule", "kj": "kilojoule", "n": "newton", "w": "watt", "kw": "kilowatt",
    "v": "volt", "a": "ampere amp", "k": "kelvin", "pa": "pascal", "mph": "", "kph": "", "mol": "mole",
    "nm": "nanometer nanometre", "pm": "picometer picometre", "khz": "kilohertz", "mhz": "megahertz", "ghz": "gigahertz",
    "milliwatt": "", "megawatt": "", "erg": "", "lightyear": "", "parsec": "", "quart": "", "pint": "", "nickel": "", "dime": "",
    "quarter": "", "penny": "pennies", "decade": "", "century": "centuries", "acre": "", "hectare": "",
}  # fmt: skip
"""Canonical name → its other spellings, in lower case; plurals with s are found by themselves."""
CASED = {"MW": "megawatt", "mW": "milliwatt"}
COUNTED = "#"
"""The unit of whatever was counted."""
_VALUE_WORDS = (
    "twenty thirty forty fifty sixty seventy eighty ninety couple score gross lakh crore fold double doubled triple tripled sqrt sum "
    "product difference unless incorrect added subtracted multiplied equals point negated squares inverse reciprocal only up thousandfold "
    "zero one two three four five six seven eight nine ten eleven twelve hundred hundreds thousand thousands million millions billion "
    "billions trillion trillions dozen dozens half halves third thirds fourth fifth squared cubed factorial minus plus times choose not "
    "wrong maybe perhaps approximately percent over divided by to power root log mod modulo pi infinity true false undefined none no yes "
    "and or if when where for all any such is are less more than except"
)
_QUALITY_WORDS = "negative positive odd even prime composite integer real imaginary rational"
_VALUE_WORD = re.compile(r".+(?:teen|illions?|tenths?|undredths?|ousandths?|illionths?)|tenths?|eighths?|sixths?|sevenths?|ninths?")
NEVER = frozenset(_VALUE_WORDS.split())
"""Words that say what a number is, or that it is another one."""
QUALITIES = frozenset(_QUALITY_WORDS.split())
"""As `NEVER`, but for what is counted: `3 real roots`."""
COMPOUND = {"mph": "mi/h", "kph": "km/h"}
PRODUCTS = {"nm", "pm", "mw", "mg", "ms", "ml", "pa", "kj", "kw", "mi", "gal", "rad"}
"""Measures that are as likely a product of letters (mass times gravity) when they are not set upright."""
_NAMES = {word: name for name, others in MEASURES.items() for word in (name, *others.split())}
_COUNTED = re.compile(r"(?:men|man|cup|way|egg|pen|box|bag|boy|cat|dog|car|hen|cow|pig)s?|per|of|an|the", re.IGNORECASE)
_POWER = r"(?:\s*\^\s*\{?-?\d\}?)?"
_SPACE = r"(?:\s|~|\\[ ,;:!])*"
SET = r"\\(?:text|mathrm|mbox|textrm|textnormal|hbox|operatorname|mathsf|textbf|mathbf|textit|mathit)"
_UPRIGHT = re.compile(rf"(?<=[\w}})!]){_SPACE}(?P<unit>(?:{SET}\s*\{{(?!-)[^{{}}]*\}}{_POWER}\s*(?:/\s*)?)+)$")
_PLAIN = re.compile(rf"(?<=[\d}}])(?P<space>{_SPACE})(?P<unit>[A-Za-z][A-Za-z./ ]*{_POWER})$")
_DEGREES = re.compile(r"(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|°)$")
_MONEY = re.compile(r"^(?:\\\$|\$(?=\.?\d))")


def split(text: str) -> tuple[str, str]:
    """The text without the unit at its end, and the unit in one spelling; empty when there is none."""
    text = text.strip().rstrip(".,;:").strip()
    if _MONEY.match(text):
        rest, unit = split(text[1 if text[0] == "$" else 2 :])
        return rest, unit or "dollar"
    if text.endswith("%"):
        return text, "%"
    if found := _DEGREES.search(text):
        return text[: found.start()].strip(), "deg"
    if (found := _UPRIGHT.search(text)) and _is_upright(found["unit"]):
        return text[: found.start()].strip(), _canonical(re.sub(r"\\[a-z]+", " ", found["unit"]))
    if (found := _PLAIN.search(text)) and _is_plain(found["unit"], glued=not found["space"]):
        return text[: found.start()].strip(), _canonical(found["unit"])
    return text, ""


def _words(unit: str) -> list[str]:
    return re.findall(r"[A-Za-z]+", unit)


def _name(word: str) -> str:
    if len(word) == 1 and word not in "lL" and word.isupper() == (word.lower() in "mgsh"):
        return ""  # `5\\text{ n}` is no newton, `5\\text{ M}` no metre
    if word in CASED:
        return CASED[word]
    word = word.lower()
    return _NAMES.get(word) or (_NAMES.get(word[:-1], "") if len(word) > 2 and word.endswith("s") else "")


def _is_upright(unit: str) -> bool:
    """Everything in `\\text`, but for words of one or two letters that are no measure: `2\\mathrm{e}`, `2\\mathrm{ab}`."""
    words = _words(re.sub(r"\\[a-z]+", " ", unit))
    return bool(words) and not _says_value(words) and all(_name(word) or _COUNTED.fullmatch(word) or _is_noun(word) for word in words)


def _says_value(words: list[str]) -> bool:
    lower = [word.lower() for word in words]
    if lower == ["times"] or any(_VALUE_WORD.fullmatch(word) for word in lower):  # `5 times` is a count, `5 times two` is not
        return lower != ["times"]
    return lower[0] in ("per", "of") or not NEVER.isdisjoint(lower) or not (lower[-1].endswith("s") or QUALITIES.isdisjoint(lower))


def _is_noun(word: str) -> bool:
    return len(word) > 2 and word.lower() not in "abcdefghijklmnopqrstuvwxyz"


def _is_plain(unit: str, glued: bool) -> bool:
    words = _words(unit)
    first = words[0]
    if len(first) == 1 or first.lower() in PRODUCTS or (glued and not _name(first)) or _says_value(words):
        return False
    return all(_name(word) or _COUNTED.fullmatch(word) or _is_word(word) for word in words)


def _is_word(word: str) -> bool:
    """Letters in the order of the alphabet (`abcd`, `wxyz`), or two by turns (`abba`), are a product of variables."""
    return len(word) >= 4 and len(set(word)) > 2 and list(word) != sorted(set(word))


def _canonical(unit: str) -> str:
    unit = re.sub(r"\b([Ll])ight[\s-]+year", r"\1ightyear", unit)
    unit = re.sub(r"\b(?:square|sq\.?)\s+([A-Za-z]+)", r"\1^2", re.sub(r"\b[Pp]er\b", "/", unit.replace("~", " ")))
    unit = re.sub(r"\bcubic\s+([A-Za-z]+)", r"\1^3", re.sub(r"[{}\s]*\^[{}\s]*", "^", unit))
    parts = re.findall(r"[A-Za-z]+|\^-?\d|/", re.sub(r"(?<=\w)\s+in\b|\(s\)", "", unit))
    names = [part if part[0] in "^/" else COMPOUND.get(part.lower()) or _name(part) for part in parts]
    return "".join(names).rstrip("/") if any(name[:1].isalpha() for name in names) else COUNTED


def is_letter_of(text: str, unit: str) -> re.Match[str] | None:
    """The plain letters at the end of `text` that the other side has upright: `5 m` beside `5\\text{ m}`."""
    found = re.search(r"(?<=[\d}])\s*([A-Za-z]{1,3})$", text)
    return found if found and _name(found[1]) == unit else None


def differ(unit: str, other: str) -> bool:
    """Two units that cannot be of the same answer. A missing one may be any; things counted are no measure, and all alike."""
    return bool(unit and other) and unit != other
