"""A whole job over TLS: it trains, a guest joins, the page of it is served, and who brings the wrong certificate is told so."""

from __future__ import annotations

import json
import signal
import ssl
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import Authority, overrides
from system import BATCH, SCRIPTED, TWO_POLICIES, Stage, instance

from astraflow.lib.tls import Tls

pytestmark = pytest.mark.full
DEADLINE_S = 240.0
STEPS = 3


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.close()


def said(stage: Stage, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a command."""
    process = stage.astraflow(*arguments)
    code = process.wait(DEADLINE_S)
    return code, (stage.directory / f"beside-{len(stage.others) - 1}.txt").read_text()


def options(tls: Tls) -> tuple[str, ...]:
    return tuple(part for name in ("cert", "key", "ca") for part in (f"--tls-{name}", getattr(tls, name)))


def test_a_job_trains_over_tls_with_a_guest_and_refuses_who_is_not_trusted(stage: Stage, tmp_path: Path) -> None:
    tls = Authority(tmp_path / "certificates").certificate()
    other = Authority(tmp_path / "stranger", "stranger").certificate()
    run = stage.run(TWO_POLICIES, *SCRIPTED, "trainer.max_steps=1000", "trainer.eval_freq=0", *overrides(tls))
    run.tls = Tls(ca=tls.ca)
    run.until("an answer", lambda status: True, DEADLINE_S)
    url = (run.run_dir / "dataflow.url").read_text().strip()
    assert url.startswith("https://127.0.0.1:")
    guest = stage.astraflow("raas", "--join", url, "--name", "guest", *options(tls))

    code, text = said(stage, "raas", "--join", url, *options(other))
    assert (code, "certificate is not accepted" in text, "stranger.pem" in text, text.count("\n")) == (2, True, True, 1), text
    code, text = said(stage, "raas", "--join", url)
    assert (code, "give --tls-cert and --tls-key" in text) == (2, True), text
    code, text = said(stage, "raas", "--join", url.replace("https:", "http:"))
    assert (code, "a service with TLS does so" in text, text.count("\n")) == (2, True, 1), text
    code, text = said(stage, "status", url, "--tls-ca", tls.ca, "--json")
    assert (code, {i["url"].partition(":")[0] for i in json.loads(text)["instances"]} <= {"https"}) == (0, True), text

    page = stage.astraflow("view", str(run.run_dir), *options(tls))
    output = stage.directory / f"beside-{len(stage.others) - 1}.txt"
    end = time.monotonic() + DEADLINE_S
    while "https://" not in output.read_text():
        assert page.poll() is None, output.read_text()
        assert time.monotonic() < end
        time.sleep(0.05)
    shown = next(word for word in output.read_text().split() if word.startswith("https://"))
    with urllib.request.urlopen(shown, timeout=60, context=ssl.create_default_context(cafile=tls.ca)) as answer:
        assert answer.status == 200
    page.send_signal(signal.SIGINT)
    assert page.wait(DEADLINE_S) == 0

    joined = run.until("work for the guest", lambda status: (found := instance(status, "guest")) and found.serving, DEADLINE_S)
    assert {found.url.partition(":")[0] for found in joined.instances} == {"https"}
    for policy in ("solver", "verifier"):
        run.version(policy, STEPS, DEADLINE_S)
    run.interrupt()
    assert run.end(DEADLINE_S) == 0, run.text
    assert guest.wait(DEADLINE_S) == 0
    run.nothing_left()
    run.adds_up(run.report["steps"], BATCH, max_staleness=2)
    assert run.report["syncs"]["failures"] == 0


def test_a_run_whose_certificate_nobody_will_accept_is_refused_before_it_starts(stage: Stage, tmp_path: Path) -> None:
    expired = Authority(tmp_path / "certificates").certificate(days=-1)
    code, text = said(stage, "run", TWO_POLICIES, *SCRIPTED, f"experiment.run_dir={tmp_path / 'run'}", *overrides(expired))
    assert (code, text.count("\n")) == (2, 1), text
    assert "launch.tls.cert: " in text
    assert "certificate has expired" in text
    assert not (tmp_path / "run").exists()
