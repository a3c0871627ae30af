"""What README.md and docs/*.md let their reader do: fenced blocks with their annotations, files, and commands in running text.

An annotation is an HTML comment above a shell block. Without one the block is run by `make test`.

    <!-- run in full: why -->        run by `make test-full`
    <!-- run by: tests/x.py -->      another test runs it, in its own way
    <!-- not run: why -->            nobody runs it: it needs what a test machine does not have
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"sh", "text", "python", "yaml", "toml", "json"}
FENCE = re.compile(
    r"(?:^`(?P<file>[\w/.-]+\.\w+)`:(?:[^\n]|\n(?!\n|```))*\n\n?)?"
    r"(?P<note>^<!--.*?-->\n)?^```(?P<lang>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
NOTE = re.compile(r"<!-- (?P<kind>run in full|run by|not run): (?P<why>.+?) -->")
SPAN = re.compile(r"`(astraflow [^`\n]+)`")


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: str
    line: int
    language: str
    text: str
    file: str
    """Name of the file that it is, where the paragraph above begins with one in backticks and a colon."""
    kind: str
    """`run`, `run in full`, `run by`, `not run`."""
    why: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[list[str]]:
        """Words of each command, comments and a `&` at the end left out; `VAR=value` and `export` stay words."""
        lines = self.text.replace("\\\n", " ").splitlines()
        words = [shlex.split(line, comments=True) for line in lines]
        return [[word for word in one if word != "&"] for one in words if one]


def blocks(page: Path) -> Iterator[Block]:
    """In the order of the page."""
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        note = NOTE.match(found["note"] or "")
        line = text.count("\n", 0, found.start("lang")) + 1
        kind, why = (note["kind"], note["why"]) if note else ("run", "")
        yield Block(page.name, line, found["lang"], found["text"], found["file"] or "", kind, why)


def all_blocks(*languages: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language in languages]


def mentioned() -> Iterator[tuple[str, list[str]]]:
    """(place, words) of every `astraflow …` in running text, in tables, and at the beginning of a line of a text block."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found = [(match.start(), match[1]) for match in SPAN.finditer(FENCE.sub(lambda block: " " * len(block[0]), text))]
        for block in FENCE.finditer(text):
            if block["lang"] == "text":
                found += [(block.start("text"), line) for line in block["text"].splitlines() if line.startswith("astraflow ")]
        for start, command in found:
            yield f"{page.name}:{text.count(chr(10), 0, start) + 1}", re.split(r"\s{3,}", command)[0].replace("'", "").split()
