"""The site of `make docs`: whole, without broken links, and without anything that comes from another host; and the pages made of files."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec
import pytest
import yaml
from rich.console import Console

from astraflow.tools import report
from astraflow.tools.docs_evidence import evidence
from astraflow.tools.report_evidence import Kept

ROOT = Path(__file__).parents[3]
LOADED = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src")}
"""What a browser fetches by itself."""


class Page(HTMLParser):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if (tag, name) in LOADED and value:
                self.loads.append(value)
            if (tag, name) == ("a", "href") and value:
                self.links.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("docs") / "site"
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return directory


def test_the_site_needs_no_other_host_and_every_link_leads_to_a_file(site: Path) -> None:
    pages = [path for path in site.rglob("*.html") if path.name != "404.html"]
    assert len(pages) >= 15
    for path in pages:
        page = Page(path)
        for address in [*page.loads, *page.links]:
            target = urlsplit(address)
            if target.scheme or target.netloc:
                assert address not in page.loads, f"{path.name} loads {address}"
            elif target.path and not target.path.startswith("/"):
                assert (path.parent / unquote(target.path)).resolve().is_file(), f"{path.name}: {address}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", style.read_text(encoding="utf-8")), style.name


def test_the_search_knows_every_page_of_the_site(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    listed = re.findall(r"(\S+)\.md$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert {f"{name}.html" for name in listed} <= found
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} == {name.strip() for name in listed}, "mkdocs.yml: nav"


def test_the_site_is_written_where_git_does_not_look() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    done = subprocess.run(["git", "check-ignore", "-q", settings["site_dir"]], cwd=ROOT, check=False)
    assert done.returncode == 0


def test_every_recipe_and_every_measurement_has_its_place() -> None:
    recipes, measured = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("recipes.md", "evidence.md"))
    for path in (ROOT / "recipes").glob("*.yaml"):
        assert f"\n## {path.stem}\n" in recipes
        assert f"(../recipes/{path.name})" in recipes
    for name, found in evidence():
        section = measured.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
        assert f"(../evidence/{name}.json)" in section
        assert (found.get("commit") or found["machine"]["commit"])[:12] in section
        for claim, holds in found.get("shows", {}).items():
            assert f"- {'yes' if holds else '**no**'}: {claim}\n" in section


def test_the_table_in_the_readme_is_the_one_that_was_measured() -> None:
    kept = msgspec.json.decode((ROOT / "evidence" / "quickstart-seed0.json").read_bytes(), type=Kept).report
    out = io.StringIO()
    report.show(kept, Console(file=out, soft_wrap=True))
    table = out.getvalue().strip().partition("\nwhat happened")[0]
    assert f"```text\n{table}\n```" in (ROOT / "README.md").read_text(encoding="utf-8")
