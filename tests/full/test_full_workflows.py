"""Every registered workflow takes one real training step: embedded engines, real trainers, weights published and served."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "flow"))
from system import ROOT, Stage

from astraflow.workflows.api import WORKFLOWS

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]
DEADLINE_S = 240.0
BATCH = 16
SHARED = {"credit": "shared"}
VERDICT = {"yes": r"\d*[0-4]$", "no": r"\d*[5-9]$", "verifier_template": "{problem}"}
CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "rlvr": (["solver"], {}),
    "multi_turn": (["solver"], {"max_turns": 2, "feedback": "{problem}"}),
    "plan_and_solve": (["planner", "solver"], {"planner_template": "{problem}", "solver_template": "{problem}"}),
    "propose_and_solve": (
        ["proposer", "solver"],
        {"attempts": 2, "proposer_template": "{problem}", "proposal": r"(?P<problem>\d+)(?P<answer>\d)", "low": 0.5, "high": 0.5},
    ),
    "solve_and_check": (["solver", "checker"], {"checker_template": "{problem}", "credit": "difference"}),
    "sep_solve_and_check": (["solver", "checker"], {"checker_template": "{problem}", "credit": "team"}),
    "solve_and_verify": (["solver", "verifier"], {"max_rounds": 2, **VERDICT}),
    "actor_and_verify": (["solver", "verifier"], VERDICT),
    "sm_lg_router": (["router", "small", "large"], {"router_template": "{problem}", "small_word": "[0-4]$", "large_word": "[5-9]$"}),
    "spawn": (["agent"], {"system": "", "sub_template": "s{task}", "depth": 2, "breadth": 2, "budget": 4}),
    "code_actor_and_verify": (
        ["coder", "tester"],
        {**SHARED, "retry": "rejected", "tester_template": "{problem}", "repair_template": "{problem}"},
    ),
    "code_solve_and_select": (["coder", "selector"], {"selector_template": "{problem}", "choice": r"([0-9])$", **SHARED}),
    "env": (["agent"], {"environment": "digits_door", "max_turns": 3}),
    "agent": (["solver", "verifier"], {"agent": "two"}),
}
LOCAL = {"spawn": "spawn_by_digits"}
"""What stands for a workflow whose model must say more than digits."""


def test_no_registered_workflow_is_left_out() -> None:
    assert {name for name in WORKFLOWS.names() if WORKFLOWS.get(name).__module__.startswith("astraflow.")} == set(CASES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny solver with room for longer contexts."""
    directory = tmp_path_factory.mktemp("model") / "solver"
    shutil.copytree(ROOT / "assets" / "tiny" / "solver", directory)
    for name, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        content = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps({**content, key: 2048}))
    return directory


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    made.path.append(Path(__file__).parent)
    yield made
    made.close()


def recipe(directory: Path, workflow: str, model: Path) -> Path:
    policies, options = CASES[workflow]
    experiment = {
        "experiment": {"name": workflow.replace("_", "-"), "seed": 0},
        "plugins": ["full_workflows"],
        "models": {policy: {"path": str(model)} for policy in policies},
        "train_dataset": {"loader": "digits_with_tests"},
        "workflow": {
            "workflow": LOCAL.get(workflow, workflow),
            "reward": "" if workflow == "env" else "spread",
            "policies": policies,
            "n_samples": 8,
            "options": options,
            "generation": {"max_new_tokens": 8, "temperature": 1.0},
        },
        "raas": {"engine": {"kind": "embedded", "threads": 1}, "slots": 32, "agents": {"two": {"function": "full_workflows:two_minds"}}},
        "trainer": {"train_batch_size": BATCH, "max_steps": 1, "eval_freq": 0, "threads": 1, "optimizer": {"lr": 3e-4}},
        "launch": {"raas": 1},
    }
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(experiment))
    return path


@pytest.mark.parametrize("workflow", CASES)
def test_a_workflow_takes_one_real_training_step(stage: Stage, tmp_path: Path, model: Path, workflow: str) -> None:
    run = stage.run(recipe(tmp_path, workflow, model))
    assert run.end(DEADLINE_S) == 0, run.text
    run.nothing_left()
    policies, _ = CASES[workflow]
    run.adds_up(dict.fromkeys(policies, 1), BATCH, max_staleness=2)
    assert "error" not in " ".join(run.report["dropped"]), run.report["dropped"]
    for policy in policies:
        (row,) = run.steps(policy)
        assert row["values"]["policy/grad_norm"] > 0, policy
        assert (run.run_dir / "export" / policy / "model.safetensors").read_bytes() != (model / "model.safetensors").read_bytes()
