"""What the pages let their reader do that takes minutes, in a directory of his own; and the search of the site in a browser."""

from __future__ import annotations

import functools
import http.server
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "flow"))
from browser import Browser, chromium
from docs_pages import ROOT, all_blocks
from test_docs_commands import prepare

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]
LIMIT_S = 1800.0
SEARCH = """(() => {
  const box = document.getElementById("mkdocs-search-query");
  box.value = "staleness";
  box.dispatchEvent(new Event("keyup"));
  return document.querySelectorAll("#mkdocs-search-results article a").length;
})()"""


def test_every_block_that_takes_long_runs_as_it_stands(tmp_path: Path) -> None:
    home = tmp_path / "checkout"
    prepare(home)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ASTRAFLOW_")}
    path = os.pathsep.join((str(Path(sys.executable).parent), clean["PATH"]))
    environment = clean | {"OMP_NUM_THREADS": "1", "PATH": path, "PYTHONPATH": str(ROOT / "src")}
    long = sorted((block for block in all_blocks("sh") if block.kind == "run in full"), key=lambda block: block.page != "quickstart.md")
    assert len(long) >= 5
    for block in long:  # the quick start first: its runs are what other pages look at
        text = block.text.replace("PYTHONPATH=.", f"PYTHONPATH=.:{ROOT / 'src'}")  # the checkout under test, if another one is installed
        done = subprocess.run(
            ["bash", "-e", "-c", text], cwd=home, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == 0, f"{block.place}\n{block.text}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert (home / "runs" / "quickstart" / "report.json").is_file()


def test_the_search_of_the_site_works_from_a_file_server(tmp_path: Path) -> None:
    program = chromium()
    if program is None:
        pytest.skip("there is no Chromium on this machine: make browser")
    site = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(site)], cwd=ROOT, timeout=120, check=True)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    browser = Browser(program, tmp_path / "profile")
    try:
        browser.open(f"http://127.0.0.1:{server.server_address[1]}/index.html")
        browser.until("document.getElementById('mkdocs-search-query') !== null && document.readyState === 'complete'")
        assert browser.until(SEARCH) >= 3
        assert browser.complaints == []
    finally:
        browser.close()
        server.shutdown()
        server.server_close()
