"""What makes a site of docs/ beside MkDocs itself, as a hook (mkdocs.yml).

Pages link to `../evidence/x.json` and the like, which is right in the checkout; the site holds copies, and the links are turned to them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

FOLDERS = ("evidence", "recipes", "examples")
COPIES = "files"
LINK = re.compile(rf"\]\(\.\./((?:{'|'.join(FOLDERS)})/[^)\s]+)\)")


CELL_CODE = re.compile(r"`[^`\n]+`")
HEAD = """<style>@media (max-width: 991px) { .col-md-9 table { display: block; overflow-x: auto; } }</style>
<style id="hljs-light"></style><style id="hljs-dark"></style>
</head>"""
"""Wide tables scroll on a phone. The theme's switch of light and dark asks for two style sheets of a highlighter that is not here."""


def on_files(files: Files, *, config: Any) -> Files:
    """Add the files of these folders."""
    root = Path(config.config_file_path).parent
    for path in sorted(path for folder in FOLDERS for path in (root / folder).iterdir() if path.is_file()):
        files.append(File.generated(config, f"{COPIES}/{path.relative_to(root).as_posix()}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links out of docs/ become links to the copies; a bar in the code of a table's cell needs its backslash on other readers only."""
    lines = LINK.sub(rf"]({COPIES}/\1)", markdown).split("\n")
    return "\n".join(CELL_CODE.sub(_plain, line) if line.startswith("|") else line for line in lines)


def on_post_page(output: str, **_: Any) -> str:
    """Add the styles."""
    return output.replace("</head>", HEAD, 1)


def _plain(code: re.Match[str]) -> str:
    return code[0].replace("\\|", "|")
