"""The canary against engines that load properly and engines that only say so, and what its word does to the receipt."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from astraflow.lib.aio import Tasks, Waits
from astraflow.lib.metrics import Counter
from astraflow.protocol.control import EngineStatus
from astraflow.protocol.rollout import Lease, Serving
from astraflow.protocol.weights import NotifyRaaS
from astraflow.raas.canary import NEW_TOKENS, PROMPTS, Canary, Verdict, prompts
from astraflow.raas.config import CanaryConfig
from astraflow.raas.engines.base import EngineError, EngineReport, Weights
from astraflow.raas.engines.embedded_core import EmbeddedEngineCore
from astraflow.raas.engines.frames import Done
from astraflow.raas.episode import Episode
from astraflow.raas.models import ServedModel
from astraflow.raas.sync import LaneGate, ModelSync
from astraflow.weights.receiver import Staged
from astraflow.workflows.api import ModelRequest, ModelResponse

sys.path.insert(0, str(Path(__file__).parents[2]))
from oracle import MODELS, VOCABULARY, Published

WAIT_S = 60.0
Fault = Callable[["InProcess", Weights], None]


class InProcess:
    """The embedded engine without a process around it; `fault` is done to it right after a load that went well."""

    def __init__(self, published: Published, fault: Fault | None = None, **options: Any) -> None:
        self.core: EmbeddedEngineCore = published.core(load=False, **options)
        self.fault = fault
        self.deaths = 0
        """Requests that still fail as if the process had died."""

    async def start(self) -> None: ...

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        if self.deaths:
            self.deaths -= 1
            raise EngineError("crash", "it died", retryable=True)
        refusal = self.core.submit(request.request_id, request)
        while refusal is None and self.core.busy:
            for answer in self.core.step():
                if isinstance(answer, Done):
                    return answer.response
                refusal = answer
        assert refusal is not None
        raise EngineError(refusal.kind, refusal.message, retryable=refusal.kind == "engine")

    async def load(self, weights: Weights) -> None:
        self.core.load(weights.path, timeline=weights.timeline, version=weights.version, digest=weights.digest)
        if self.fault is not None:
            self.fault(self, weights)

    def report(self) -> EngineReport:
        core = self.core
        serving = None if core.version < 0 else Serving(timeline=core.timeline, version=core.version, digest=core.digest)
        return EngineReport(status=EngineStatus(kind="embedded", state="ready"), serving=serving)

    async def close(self) -> None: ...


def weights_of(published: Published, version: int) -> Weights:
    return Weights(path=published.paths[version], timeline=1, version=version, digest=f"d{version}")


def canary_of(published: Published, engine: InProcess, dtype: str = "float32", **config: Any) -> tuple[Canary, Counter]:
    counts = Counter()
    return Canary(engine, published.directory, VOCABULARY, 512, dtype, CanaryConfig(**config), counts), counts


async def loaded(engine: InProcess, canary: Canary, published: Published, *versions: int) -> list[Verdict]:
    out = []
    for version in versions:
        await engine.load(weights_of(published, version))
        out.append(await canary.check(weights_of(published, version)))
    return out


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt2"])
def test_an_engine_that_serves_the_published_words_passes(tmp_path: Path, name: str) -> None:
    published = Published(tmp_path, name, versions=2)
    engine = InProcess(published)
    canary, counts = canary_of(published, engine)
    verdicts = asyncio.run(loaded(engine, canary, published, 0, 1))
    assert [verdict.complaint for verdict in verdicts] == ["", ""]
    assert all(0 <= verdict.metrics["raas/canary/mean_error"] <= verdict.metrics["raas/canary/max_error"] < 1e-4 for verdict in verdicts)
    assert counts.values() == {"raas/canary/passed": 2}


def loads_instead(engine: InProcess, weights: Weights, words: dict[str, torch.Tensor]) -> None:
    """Under the name that was asked for."""
    path = f"{weights.path}.other"
    save_file(words, path)
    engine.core.load(path, timeline=weights.timeline, version=weights.version, digest=weights.digest)


def old(*names: str) -> Fault:
    """Version 1 leaves these tensors as they were in version 0 (all of them without names)."""

    def leave(engine: InProcess, weights: Weights) -> None:
        if weights.version == 1:
            new, before = load_file(weights.path), load_file(weights.path.replace("v1", "v0"))
            left = [key for key in new if not names or any(name in key for name in names)]
            loads_instead(engine, weights, new | {key: before[key] for key in left})

    return leave


def late_stamp(engine: InProcess, weights: Weights) -> None:
    engine.core.version -= 1


def not_finite(engine: InProcess, weights: Weights) -> None:
    words = load_file(weights.path)
    loads_instead(engine, weights, words | {"model.norm.weight": words["model.norm.weight"] * torch.nan})


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (old("lm_head"), "differ"),
        (old(), "differ"),
        (old("layers.1.mlp.down_proj"), "differ"),
        (old("layers.0.input_layernorm"), "differ"),
        (late_stamp, "stamped"),
        (not_finite, "not finite"),
    ],
    ids=["old head", "all old", "one matrix", "one norm", "old stamp", "nan"],
)
def test_an_engine_that_only_says_so_is_found_out(tmp_path: Path, fault: Fault, why: str) -> None:
    published = Published(tmp_path, versions=2)
    engine = InProcess(published, fault)
    canary, counts = canary_of(published, engine)
    verdict = asyncio.run(loaded(engine, canary, published, 0, 1))[-1]
    assert why in verdict.complaint, verdict
    assert counts["raas/canary/failed"] == (2 if fault in (late_stamp, not_finite) else 1)


def test_a_prefix_cache_that_outlives_a_load_is_found_out(tmp_path: Path) -> None:
    """The prompts are the same each time, so that their keys would be found there."""
    published = Published(tmp_path, versions=2)
    engine = InProcess(published)
    engine.core.cache.flush = lambda epoch: setattr(engine.core.cache, "epoch", epoch)  # type: ignore[method-assign]
    canary, _ = canary_of(published, engine)
    before, after = asyncio.run(loaded(engine, canary, published, 0, 1))
    assert not before.complaint
    assert "differ" in after.complaint
    assert engine.core.counts["prefix_hit_tokens"] > 0


def test_rounding_of_bf16_compute_is_no_complaint_and_gross_errors_are(tmp_path: Path) -> None:
    published = Published(tmp_path, versions=2)
    for fault, passes in ((None, True), (old(), False)):
        engine = InProcess(published, fault, dtype="bfloat16")
        canary, _ = canary_of(published, engine, "bfloat16")
        assert (not asyncio.run(loaded(engine, canary, published, 0, 1))[-1].complaint) is passes


def test_an_engine_that_dies_is_asked_again_and_one_that_keeps_dying_is_a_complaint(tmp_path: Path) -> None:
    published = Published(tmp_path)
    for deaths, passes in ((2, True), (100, False)):
        engine = InProcess(published)
        engine.deaths = deaths
        canary, _ = canary_of(published, engine)
        assert (not asyncio.run(loaded(engine, canary, published, 0))[0].complaint) is passes


def test_what_cannot_be_compared_is_counted_and_served(tmp_path: Path) -> None:
    (tmp_path / "g").mkdir()
    unknown = Published(tmp_path / "g", "gpt2")
    engine = InProcess(unknown)
    canary, counts = canary_of(unknown, engine)
    assert asyncio.run(loaded(engine, canary, unknown, 0)) == [Verdict()]
    assert counts.values() == {"raas/canary/unchecked": 1}
    assert "version 0 was not checked: its architecture" in canary.note

    published = Published(tmp_path)
    engine = InProcess(published)
    slow, counts = canary_of(published, engine, deadline_s=1e-9)
    assert asyncio.run(loaded(engine, slow, published, 0)) == [Verdict()]
    assert counts.values() == {"raas/canary/unchecked": 1}
    assert "not done within" in slow.note


def test_only_the_versions_that_were_asked_for_are_checked(tmp_path: Path) -> None:
    published = Published(tmp_path, versions=3)
    for every, passed in ((0, 0), (1, 3), (2, 2)):
        engine = InProcess(published)
        canary, counts = canary_of(published, engine, every=every)
        asyncio.run(loaded(engine, canary, published, 0, 1, 2))
        assert counts["raas/canary/passed"] == passed


@pytest.mark.parametrize(("vocabulary", "context"), [(99, 0), (150_000, 4096), (5, 20), (99, 9), (99, 3)])
def test_prompts_are_the_same_everywhere_and_fit(vocabulary: int, context: int) -> None:
    found = prompts(vocabulary, context)
    assert found == prompts(vocabulary, context)
    assert all(0 <= token < vocabulary for prompt in found for token in prompt)
    assert found
    assert all(prompt for prompt in found)
    if not context or context > max(PROMPTS) + NEW_TOKENS:
        assert [len(prompt) for prompt in found] == list(PROMPTS)
        assert len({token for prompt in found for token in prompt}) > min(vocabulary, 60) // 2
    elif context > NEW_TOKENS:
        assert all(len(prompt) + NEW_TOKENS <= context for prompt in found)


class Shelf:
    """The receiver's contract over the files of `Published`."""

    def __init__(self, published: Published) -> None:
        self.published = published

    def pull(self, sender_endpoint: str, version: int, digest: str, **options: Any) -> Staged:
        return Staged(Path(self.published.paths[version]), version, f"d{version}", "full", "", 1, 0.0, -1)

    def intact(self, path: Path, digest: str) -> bool:
        return path.exists()

    def abandon(self, stop: threading.Event) -> None: ...

    def close(self) -> None: ...


def sync_of(
    name: str, engine: InProcess, canary: Canary, counts: Counter, published: Published, tasks: Tasks, cancelled: list[tuple[str, int]]
) -> ModelSync:
    idle = asyncio.Event()
    idle.set()
    return ModelSync(
        ServedModel(name, engine, None, 512),  # type: ignore[arg-type]
        Shelf(published),
        lanes=LaneGate(idle, lambda: 0.0),
        rollback=lambda name, timeline: cancelled.append((name, timeline)),
        tasks=tasks,
        waits=Waits(),
        counts=counts,
        pull_s=WAIT_S,
        load_s=WAIT_S,
        canary=canary,
    )


async def told(sync: ModelSync, version: int) -> tuple[str, int | None]:
    """A notice and its end: what it says, and the receipt's version."""
    name = sync.model.model_id
    notice = NotifyRaaS(model_id=name, timeline=1, version=version, digest="", sender_endpoint="x", wait_s=WAIT_S)
    outcome = await sync.notice(notice)
    return outcome.state, None if sync.model.serving is None else sync.model.serving.version


class Slow(InProcess):
    """Its loads wait."""

    hold: asyncio.Event

    async def load(self, weights: Weights) -> None:
        await self.hold.wait()
        await super().load(weights)


def test_policies_of_one_service_are_updated_and_sampled_independently(tmp_path: Path) -> None:
    """While one load stands, the other policy's update ends and its requests pass; a workflow over both waits for the one alone."""

    async def test() -> None:
        tasks, syncs, counts = Tasks(lambda name, error: None), {}, Counter()
        for name, kind in (("slow", Slow), ("quick", InProcess)):
            (tmp_path / name).mkdir()
            published = Published(tmp_path / name, versions=2)
            engine = kind(published)
            syncs[name] = sync_of(name, engine, canary_of(published, engine)[0], counts, published, tasks, [])
        held = syncs["slow"].model.engine
        assert isinstance(held, Slow)
        held.hold = asyncio.Event()
        held.hold.set()
        assert [await told(sync, 0) for sync in syncs.values()] == [("loaded", 0)] * 2
        held.hold.clear()
        loading = asyncio.create_task(told(syncs["slow"], 1))
        assert await told(syncs["quick"], 1) == ("loaded", 1)
        lease = Lease(lease_id="l", task_id="t", workflow_id="w", n_samples=1, data={})
        group = Episode(lease, 0, training=True).engines({name: sync.model for name, sync in syncs.items()}, list(syncs))
        ask = ModelRequest(input_ids=[3, 4], max_new_tokens=4)
        assert (await group["quick"].agenerate(ask)).versions == [1] * 4
        waits = asyncio.create_task(group["slow"].agenerate(ask))
        await asyncio.sleep(0)
        assert syncs["slow"].model.gate.closed
        assert not waits.done()
        held.hold.set()
        assert await loading == ("loaded", 1)
        assert (await waits).versions == [1] * 4
        await tasks.stop(WAIT_S)

    asyncio.run(asyncio.wait_for(test(), 4 * WAIT_S))


def test_the_receipt_moves_when_the_canary_has_passed_and_is_taken_back_when_it_fails(tmp_path: Path) -> None:
    """In rotation, out of it at the version that was loaded wrongly (what ran is cancelled), and in again when a later load passes."""
    published = Published(tmp_path, versions=3)

    async def test() -> None:
        engine = InProcess(published, old("lm_head"))
        canary, counts = canary_of(published, engine)
        asked: list[Mapping[str, Any]] = []
        check = canary.check

        async def watched(weights: Weights) -> Verdict:
            asked.append({"engine": model.loaded, "receipt": model.serving, "loading": sync.loading, "gate": model.gate.closed})
            return await check(weights)

        canary.check = watched  # type: ignore[method-assign]
        cancelled: list[tuple[str, int]] = []
        tasks = Tasks(lambda name, error: None)
        sync = sync_of("default", engine, canary, counts, published, tasks, cancelled)
        model = sync.model

        async def notify(version: int) -> tuple[str, int | None]:
            return await told(sync, version)

        assert await notify(0) == ("loaded", 0)
        assert await notify(1) == ("failed", None)
        assert "canary of version 1" in sync.message
        assert cancelled == [("default", 1)]
        assert model.loaded is not None, "the engine itself is well, and says version 1"
        assert model.loaded.version == 1
        assert await notify(1) == ("failed", None), "it is loaded and checked again, as often as it is asked for"
        assert await notify(2) == ("loaded", 2)
        receipts = [None if one["receipt"] is None else one["receipt"].version for one in asked]
        assert receipts == [None, 0, None, None], "during a check the receipt is the one before"
        assert [one["engine"].version for one in asked] == [0, 1, 1, 2]
        assert all(one["loading"] and not one["gate"] for one in asked), "a lane waits for the check, requests do not"
        assert (counts["raas/canary/passed"], counts["raas/canary/failed"], counts["weights/failures"]) == (2, 2, 2)
        assert sync.last["raas/canary/max_error"] < 1e-4
        await tasks.stop(WAIT_S)

    asyncio.run(test())
