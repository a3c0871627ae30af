"""Unmodified agents on the real SDKs train end to end: `astraflow run`, their programs as they are, three steps, exact books."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "flow"))
from system import ROOT, Run, Stage

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
STEPS, BATCH, TURNS = 3, 4, 3
LIMIT_S = 840.0
CHARS = ROOT / "tests" / "data" / "chars-model"
SMALL = (f"trainer.max_steps={STEPS}", f"trainer.train_batch_size={BATCH}", "workflow.n_samples=2", "raas.slots=4")
"""Three turns are some 400 tokens of a model of 135M parameters: a minute of computing for sixteen of them."""
HALF_RIGHT = ("raas.engine.options={solver: 'gateway_agents:tool_loop', correct: 0.7, correct_per_version: 0}", "raas.engine.kind=scripted")
"""Two tool calls and the sum; three answers in ten are spoilt, so that there is something to learn."""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a few thousand parameters that knows nothing, with room for a tool loop of one token per character."""
    transformers = pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("tiny")
    shutil.copytree(CHARS, directory, dirs_exist_ok=True)
    config = transformers.AutoConfig.from_pretrained(CHARS, max_position_embeddings=4096)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    made.path.append(ROOT / "tests" / "unit" / "raas")
    yield made
    made.close()


def trained(stage: Stage, sdk: str, *overrides: str) -> Run:
    found = importlib.util.find_spec(sdk)
    if found is None or found.origin is None:
        pytest.skip(f"the package {sdk} is not installed: pip install 'astraflow[agents]'")
    stage.path.append(Path(found.origin).parents[1])
    command = f'raas.agents.calculator.command=[python, examples/agent_{sdk}.py, "{{prompt}}"]'
    run = stage.run("recipes/agent-openai.yaml", command, *SMALL, *overrides)
    assert run.end(LIMIT_S) == 0, run.text
    run.nothing_left()
    run.adds_up({"small": STEPS}, BATCH, 2)
    assert [row["step"] for row in run.steps("small")] == [1, 2, 3]
    return run


def captured(run: Run) -> list[dict[str, Any]]:
    """The records of rollouts that did not fail, each with one segment that holds exactly what the engine said, call by call."""
    records = [json.loads(path.read_text()) for path in (run.run_dir / "rollouts").glob("*/*.json")]
    good = [record for record in records if record["error"] is None]
    for record in good:
        (spans,) = record["segments"]
        said = ["".join(span["tokens"]) for span in spans if "tokens" in span]
        assert len(said) == len(record["calls"])
        for call, text in zip(record["calls"], said, strict=True):
            assert text.startswith(call["answer"]), "what is trained on is what the engine said"
        assert {turn["role"] for turn in record["turns"]} >= {"user", "assistant", "output"}
    return good


@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
def test_a_program_of_an_sdk_with_a_tool_loop_trains_three_steps(stage: Stage, tiny: Path, sdk: str) -> None:
    run = trained(stage, sdk, *HALF_RIGHT, f"models.small.path={tiny}", "workflow.generation.max_new_tokens=256")
    records = captured(run)
    assert max(len(record["calls"]) for record in records) == TURNS, "some went all the way through their tool loop"
    assert 1.0 in {record["reward"] for record in records}
    assert sum(row["values"].get("rollout/rewritten", 0.0) for row in run.metrics("raas-0")) == 0


def test_the_recipe_trains_smollm2_by_what_it_says_itself_to_the_program(stage: Stage) -> None:
    """Whether it learns is another matter: 135M parameters without examples are seldom right."""
    records = captured(trained(stage, "openai"))
    assert len(records) >= STEPS * BATCH
    assert all(record["calls"] for record in records)
