"""2,000 odd requests to every route and page, 100,000 odd frames on the weight stream, and a whole run that keeps its secrets."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "flow"))
from conformance_rig import TOKEN
from fuzz import Cases, drive
from fuzz_frames import Frames, drive_frames
from fuzz_stage import FuzzStage
from system import SCRIPTED, TWO_POLICIES
from system import Stage as Runs
from test_security import stream_port, tickets

log = logging.getLogger(__name__)
pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
WARM, PER_ROUTE, FRAMES, SEED = 200, 2000, 100_000, 8
GROWTH_BYTES = 64 << 20
"""Of a process after its first 200 requests per route: arenas of the allocator, SQLite's cache, 256 registered workflows."""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[FuzzStage]:
    made = FuzzStage(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.close()


def test_a_hundred_thousand_odd_requests_and_as_many_frames_change_nothing(stage: FuzzStage) -> None:
    before, targets, began = stage.counters(), stage.targets(), time.monotonic()
    asyncio.run(drive(Cases(target, SEED)(number) for number in range(WARM) for target in targets))
    sizes = stage.sizes()
    seen = asyncio.run(drive(Cases(target, SEED)(number) for number in range(WARM, PER_ROUTE + WARM) for target in targets))
    log.warning("%d requests in %.0f s, slowest answer %.2f s", seen.cases, time.monotonic() - began, seen.slowest_s)
    assert seen.faults[:20] == []
    assert seen.cases == PER_ROUTE * len(targets)
    began, frames = time.monotonic(), Frames(SEED, TOKEN, tickets(stage))
    ends, faults = asyncio.run(drive_frames(stream_port(stage), (frames(number) for number in range(FRAMES))))
    log.warning("%d frames in %.0f s: %s", FRAMES, time.monotonic() - began, dict(ends))
    assert faults[:20] == []
    assert ends["without a byte"] > FRAMES / 2
    assert ends["with bytes"] > FRAMES / 20
    stage.until("the same counters", lambda: stage.counters() == before)
    for name, size in stage.sizes().items():
        log.warning("%s: %s -> %s", name, sizes[name], size)
        assert size.rss_bytes <= sizes[name].rss_bytes + GROWTH_BYTES, name
        assert size.files <= sizes[name].files + 20, name
        assert size.threads <= sizes[name].threads + 20, name
        assert size.tasks <= sizes[name].tasks + 20, name
    stage.works()


def test_a_whole_run_writes_down_neither_its_token_nor_a_key_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {"ASTRAFLOW_TOKEN": "the-token-of-this-run-0123456789", "OPENAI_API_KEY": "sk-openai-0123", "HF_TOKEN": "hf-0123456789"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    runs = Runs(tmp_path)
    try:
        run = runs.run(TWO_POLICIES, *SCRIPTED, "trainer.max_steps=2", "trainer.eval_freq=1")
        assert run.end(300.0) == 0, run.text
    finally:
        runs.close()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 15
    assert [str(path) for path in files for value in secrets.values() if value.encode() in path.read_bytes()] == []
