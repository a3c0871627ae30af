"""A real Chromium at a real run: what the page shows is what /status says, nothing complains, and the keyboard is enough."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "flow"))
from browser import Browser, axe_core, chromium
from system import SCRIPTED, TWO_POLICIES, Run, Stage, version

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
_spec = importlib.util.spec_from_file_location("dashboard_rundir_full", Path(__file__).parents[1] / "unit" / "dashboard" / "rundir.py")
assert _spec is not None
assert _spec.loader is not None
made: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(made)

POLICIES = ("solver", "verifier")
DEADLINE_S = 180.0
TEXTS = """[...document.querySelectorAll('section')].map((part) => [
  part.querySelector('h2').textContent, part.querySelector('.books')?.textContent ?? '',
  [...part.querySelectorAll('tbody tr')].map((row) => [...row.cells].map((cell) => cell.innerText))])"""
CHOOSE = "(() => {{ const list = document.querySelector('#colour'); list.value = '{}'; list.dispatchEvent(new Event('change')); }})()"
COLOURED = "[...document.querySelectorAll('.token')].some((one) => getComputedStyle(one).backgroundColor !== 'rgba(0, 0, 0, 0)')"
SAID = "document.querySelector('.said').textContent"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    program = chromium()
    if program is None:
        pytest.skip("there is no Chromium here (apt-get install chromium)")
    found = Browser(program, tmp_path / "profile")
    yield found
    found.close()


def picture(browser: Browser, name: str) -> None:
    """Into the directory that ASTRAFLOW_SCREENSHOTS names, e.g. docs/images."""
    if directory := os.environ.get("ASTRAFLOW_SCREENSHOTS"):
        browser.screenshot(Path(directory) / f"{name}.png")


def sections(browser: Browser) -> dict[str, tuple[str, list[list[str]]]]:
    """Heading → (the line of the books, cells of its table)."""
    return {head: (books, rows) for head, books, rows in browser.value(TEXTS)}


def shows(browser: Browser, status: Any) -> bool:
    """Every number of the page that does not move by itself is the one of /status."""
    seen = sections(browser)
    counts = status.ledger
    dropped, flying = sum(counts.dropped.values()), sum(counts.in_flight.values())
    books = f"made {counts.made:,} = trained {counts.trained:,} + dropped {dropped:,} + in flight {flying:,}  (adds up)"
    trainers = [[one.model_id, one.state, str(one.version), str(one.timeline)] for one in status.trainers]
    queues = [
        [name, *(str(value) for value in (q.fresh_groups, q.fresh_trajectories, q.held_groups, q.replay_groups, q.served))]
        for name, q in status.queues.items()
    ]
    instances = [
        [one.instance_id, one.state, f"{one.in_flight} in flight, {one.free_slots} of {one.total_slots} free"] for one in status.instances
    ]
    receipts = [[f"{name} v{held.version} {held.digest[:8]}" for name, held in one.serving.items()] for one in status.instances]
    return (
        seen["Rollouts"] == (books, [[reason, f"{rows:,}"] for reason, rows in counts.dropped.items()])
        and [row[:4] for row in seen["Trainers"][1]] == trainers
        and [row[:6] for row in seen["Queues"][1]] == queues
        and [[cell.strip() for cell in row[:3]] for row in seen["Instances"][1]] == instances
        and [row[3].split("\n") for row in seen["Instances"][1]] == receipts
        and [row[:2] for row in seen["Who waits for whom"][1]] == [[edge.who, edge.waits_for] for edge in status.waits]
    )


def agree(browser: Browser, run: Run) -> None:
    """The page and /status, once nothing moves."""
    end = time.monotonic() + DEADLINE_S
    while True:
        before = run.status()
        same = before is not None and shows(browser, before)
        if same:
            return
        assert time.monotonic() < end, (sections(browser), before)
        time.sleep(0.3)


def press_button(browser: Browser, label: str) -> None:
    """By the keyboard alone: Tab until it has the focus, then Enter."""
    for _ in range(60):
        browser.press("Tab")
        if browser.value("document.activeElement.textContent") == label:
            browser.press("Enter")
            return
    raise AssertionError(f"Tab never reached {label!r}")


def check(browser: Browser, name: str) -> None:
    """Light, dark and on a phone: no barrier, nothing wider than the window; and a picture."""
    checker = axe_core()
    for kind, width, height, dark in (("", 1280, 1000, False), ("-dark", 1280, 1000, True), ("-phone", 390, 844, False)):
        browser.look(width, height, dark)
        assert browser.until("document.querySelector('main').innerText.length > 20")
        if checker is not None:
            assert browser.barriers(checker) == [], f"{name}{kind}"
        browser.until(f"document.documentElement.scrollWidth <= {width}")
        picture(browser, name + kind)
    browser.look()


def test_a_browser_sees_a_run_as_it_is_and_operates_it(stage: Stage, browser: Browser, tmp_path: Path) -> None:
    run = stage.run(TWO_POLICIES, *SCRIPTED, "trainer.max_steps=1000", "trainer.eval_freq=5")
    run.until("version 6 of both", lambda status: min(version(status, policy) for policy in POLICIES) >= 6, DEADLINE_S)
    url = (run.run_dir / "dataflow.url").read_text().strip()
    browser.look()
    browser.open(f"{url}/dashboard/")
    browser.until("document.querySelector('[data-key=pause]')?.textContent === 'Pause acquisition'")
    press_button(browser, "Pause acquisition")
    run.until("the pause", lambda status: status.paused, DEADLINE_S)
    run.until("rest", lambda status: status.ledger.in_flight["leased"] == 0, DEADLINE_S)
    browser.until("document.querySelector('[data-key=pause]').textContent === 'Resume acquisition'")
    agree(browser, run)
    paused = run.status()
    assert paused is not None
    check(browser, "live")
    evil = made.record("evil", 0, answer=made.EVIL + " end", data={"prompt": made.EVIL}, workflow=made.EVIL, task_id=made.EVIL)
    made.keep(run.run_dir, [evil], "zz")

    browser.value("location.hash = '#charts'")
    browser.until("document.querySelectorAll('.charts polyline').length >= 8")
    check(browser, "charts")
    browser.value("document.querySelector('svg[role=img]').focus()")
    browser.press("ArrowLeft")
    assert " at step " in browser.until("document.querySelector('.read').textContent")

    browser.value("location.hash = '#rollouts'")
    browser.until("document.querySelector('#state').textContent === '' && document.querySelectorAll('tbody tr').length === 50")
    check(browser, "rollouts")
    browser.value("location.hash = '#rollouts?state=trained&order=best'")
    browser.until("[...document.querySelectorAll('.state.trained')].length >= 50")
    browser.value("document.querySelector('tbody a').click()")
    browser.until("document.querySelectorAll('.token').length > 3")
    tokens = browser.value("document.querySelector('.tokens').innerText.length")
    assert tokens > 5
    for colour in ("advantage", "version", "policy", "sampled or given", "log-prob"):
        browser.value(CHOOSE.format(colour))
        assert browser.value(COLOURED), colour
    check(browser, "rollout")
    browser.value("document.querySelector('a[href^=\"#group\"]').click()")
    browser.until("document.querySelectorAll('article').length === 8")
    check(browser, "group")

    browser.value("location.hash = '#rollouts?q=alert'")
    browser.until("document.querySelectorAll('tbody tr').length === 1")
    browser.value("document.querySelector('tbody a').click()")
    browser.until("document.querySelectorAll('.turns li').length === 2")
    assert made.EVIL in browser.value("document.querySelector('.turns').textContent")
    assert browser.value("document.querySelectorAll('main script, main img').length") == 0
    check(browser, "untrusted")

    browser.value("location.hash = '#live'")
    browser.until("document.querySelector('[data-key=pause]') !== null")
    press_button(browser, "Resume acquisition")
    moved = run.until("work again", lambda status: status.ledger.made > paused.ledger.made, DEADLINE_S)
    press_button(browser, "Evaluate now")
    said = browser.until(f"/eval-[0-9]+ evaluates/.test({SAID}) && {SAID}")
    run.until("the evaluation", lambda status: any(said.split()[0] in event and "operator" in event for event in status.events), DEADLINE_S)
    run.version("solver", version(moved, "solver") + 2, DEADLINE_S)
    assert browser.complaints == []
    run.interrupt()
    assert run.end(DEADLINE_S) == 0, run.text


def test_a_run_that_needs_a_token_shows_nothing_before_it_was_given(stage: Stage, browser: Browser, tmp_path: Path) -> None:
    run = stage.run(TWO_POLICIES, *SCRIPTED, "trainer.max_steps=2", "trainer.eval_freq=0")
    assert run.end(DEADLINE_S) == 0, run.text
    (run.run_dir / "token").write_text("a-token-of-this-run\n")
    view = stage.astraflow("view", str(run.run_dir))
    said = tmp_path / "beside-0.txt"
    end = time.monotonic() + DEADLINE_S
    while "Ctrl-C" not in said.read_text():
        assert view.poll() is None, said.read_text()
        assert time.monotonic() < end
        time.sleep(0.1)
    whole = said.read_text().split()[1]
    url, _, fragment = whole.partition("#")
    assert fragment == "token=a-token-of-this-run"
    browser.look()
    browser.open(url)
    browser.until("document.querySelector('#token') !== null")
    assert "made" not in browser.value("document.body.innerText")
    complaints = [text for text in browser.complaints if "401" not in text]
    assert complaints == []
    check(browser, "token")
    browser.value("document.querySelector('#token').value = 'a-token-of-this-run'")
    browser.value("document.querySelector('form').requestSubmit()")
    browser.until("document.querySelector('.books') !== null")
    browser.value("sessionStorage.clear()")
    browser.open("about:blank")
    browser.open(whole)
    browser.until("document.querySelector('.books') !== null")
    assert browser.value("location.href") == f"{url}#live", "the token stays in no address"
    if (checker := axe_core()) is not None:
        browser.value("document.querySelector('main').append(document.createElement('button'))")
        assert "button-name" in str(browser.barriers(checker)), "the checker does find barriers on this page"
    assert run.report["rollouts"]["made"] == int(browser.value("document.querySelector('.books').textContent").split()[1].replace(",", ""))
    view.terminate()
    assert view.wait(DEADLINE_S) == 0
