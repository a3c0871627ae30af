"""New weights while generations are in flight, through the engine's own process: nobody pays for it, and every stamp is proven."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tokenizers import Tokenizer as Words
from tokenizers.models import WordLevel

from astraflow.lib.tokenizer import Tokenizer
from astraflow.raas.config import EngineConfig
from astraflow.raas.engines.base import EngineSetup, Weights
from astraflow.raas.engines.process import ProcessEngine, embedded
from astraflow.workflows.api import ModelRequest, ModelResponse

sys.path.insert(0, str(Path(__file__).parents[1]))
from oracle import VOCABULARY, Published, worst_error

WAIT_S = 60.0
"""For what must come; how soon depends on the machine."""
NEW_TOKENS = 160
TRIES = 10
"""Of catching all generations in their middle: one does unless this process slept while the other one worked."""


def engine_of(published: Published) -> ProcessEngine:
    Words(WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0")).save(str(published.directory / "tokenizer.json"))
    return embedded(
        EngineSetup(
            model_id="policy",
            model_dir=published.directory,
            tokenizer=Tokenizer.load(published.directory),
            eos_ids=[],
            context_length=512,
            max_slots=33,
            config=EngineConfig(threads=1, device="cpu", options={"kv_bytes": 64 << 20}),
            dtype="float32",
            staged=lambda: None,
            on_death=lambda reason: None,
            log_path=published.directory / "engine.log",
        )
    )


async def updated(engine: ProcessEngine, published: Published, attempt: int) -> list[tuple[ModelRequest, ModelResponse]]:
    """32 generations under version 0 that get version 1 as soon as a short one of their batch has ended."""

    async def load(version: int) -> None:
        await engine.load(Weights(path=published.paths[version], timeline=1, version=version, digest=f"d{version}"))
        serving = engine.report().serving
        assert serving is not None
        assert (serving.version, serving.digest) == (version, f"d{version}")

    await load(0)
    requests = [
        ModelRequest(
            request_id=f"{attempt}-{n}",
            input_ids=[*range(10, 30), n // 8, 5],
            max_new_tokens=NEW_TOKENS,
            temperature=(0.7, 1.0, 1.3)[n % 3],
            seed=n,
        )
        for n in range(32)
    ]
    running = [asyncio.ensure_future(engine.agenerate(request)) for request in requests]
    await engine.agenerate(ModelRequest(request_id=f"{attempt}-short", input_ids=[9], max_new_tokens=3))
    await load(1)
    return list(zip(requests, await asyncio.gather(*running), strict=True))


def test_an_update_in_the_middle_of_32_generations_drops_none_cuts_none_and_every_stamp_is_true(tmp_path: Path) -> None:
    published = Published(tmp_path, versions=2)
    engine = engine_of(published)

    async def test() -> list[tuple[ModelRequest, ModelResponse]]:
        try:
            await engine.start()
            for attempt in range(TRIES):
                done = await updated(engine, published, attempt)
                if all(set(response.versions) == {0, 1} for _, response in done):
                    return done
            raise AssertionError("no update came in the middle of all generations")
        finally:
            await engine.close()

    done = asyncio.run(asyncio.wait_for(test(), 4 * WAIT_S))
    for _, response in done:
        assert len(response.output_ids) == len(response.logprobs) == len(response.versions) == NEW_TOKENS
        assert (response.finish, response.timeline) == ("length", 1)
        assert response.versions == sorted(response.versions)
    assert worst_error(published, done, list) < 1e-3
    # Proof that the stamps are not true by chance: either model's log-probs differ from the other's on either side.
    assert worst_error(published, done, lambda stamps: [stamps[0], *stamps[:-1]]) > 1e-2
    assert worst_error(published, done, lambda stamps: [*stamps[1:], stamps[-1]]) > 1e-2
