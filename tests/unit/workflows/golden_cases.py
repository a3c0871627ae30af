"""One episode per registered workflow, with exact answers: what test_workflows_golden.py compares with golden.json.

`python tests/unit/workflows/golden_cases.py` writes golden.json anew; read the difference before you keep it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.types import ASGIApp

from astraflow.lib.metrics import Counter
from astraflow.lib.tokenizer import Tokenizer
from astraflow.protocol.codec import array
from astraflow.protocol.rollout import Lease, RegisterWorkflow, Segment, WorkflowSpec
from astraflow.raas.config import EngineConfig, GenerationConfig, RewardsConfig
from astraflow.raas.engines.base import EngineSetup, Weights
from astraflow.raas.engines.scripted import ScriptedEngine
from astraflow.raas.episode import Call, Episode
from astraflow.raas.gateway.door import Door
from astraflow.raas.models import ServedModel
from astraflow.raas.programs import Programs
from astraflow.raas.trajectory import to_episode, version_spans
from astraflow.rewards.api import inline
from astraflow.workflows.api import Episode as Result
from astraflow.workflows.api import ModelRequest, ModelResponse
from astraflow.workflows.config import AgentConfig

TINY = Path(__file__).parents[3] / "assets" / "tiny" / "solver"
GOLDEN = Path(__file__).with_name("golden.json")
HERE = "golden_cases"


class Stepping:
    """The scripted engine with new weights in the middle of every call: each answer has two versions of its own, as one that was
    interrupted, of different lengths, so that no other order of them is the same."""

    def __init__(self, policy: str, tokenizer: Tokenizer, answers: list[str], first: int) -> None:
        lines = [{"text": text.rstrip("…"), "finish": "length" if text.endswith("…") else "stop"} for text in answers]
        self.engine = ScriptedEngine(
            EngineSetup(
                model_id=policy,
                model_dir=TINY,
                tokenizer=tokenizer,
                eos_ids=list(tokenizer.eos_ids),
                context_length=1024,
                max_slots=64,
                config=EngineConfig(kind="scripted", options={"initial": True, "verify": False, "script": lines}),
                dtype="float32",
                staged=lambda: None,
                on_death=lambda reason: None,
                log_path=Path("/dev/null"),
            )
        )
        self.version = first
        self.one_by_one = asyncio.Lock()

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        async with self.one_by_one:
            await self.engine.load(Weights(path="", timeline=0, version=self.version, digest=""))
            response = await self.engine.agenerate(request)
            first = self.version
            self.version += 2
            # The engine loads between two calls only; what comes of a load in the midst of one is written down here.
            early = len(response.versions) // 3
            return msgspec.structs.replace(response, versions=[first] * early + [first + 1] * (len(response.versions) - early))


@dataclass
class Case:
    """Answers per policy in the order of their calls; "…" at the end = cut off."""

    answers: dict[str, list[str]]
    options: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=lambda: {"prompt": "s21", "answer": "12"})
    reward: str = "exact_match"
    environments: dict[str, str] = field(default_factory=dict)
    agents: dict[str, AgentConfig] = field(default_factory=dict)


DOOR: dict[str, ASGIApp] = {}
"""Where the agent of the running case comes in."""


async def two_minds(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """An agent: the solver answers, the verifier is asked about it, the solver goes on."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(DOOR["app"]), headers={"x-api-key": api_key}) as http:

        async def ask(model: str, *texts: str) -> str:
            messages = [{"role": "assistant" if place % 2 else "user", "content": text} for place, text in enumerate(texts)]
            reply = await http.post(f"{base_url}/chat/completions", json={"model": model, "messages": messages})
            return str(reply.raise_for_status().json()["choices"][0]["message"]["content"])

        first = await ask("solver", task["prompt"])
        verdict = await ask("verifier", f"{task['prompt']}={first}")
        await ask("solver", task["prompt"], f"{first}\n", verdict)


@inline
def passes(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], tests: list[Any], **data: Any) -> float:
    """1 when the program `lambda x: …` gives every test's output, else 0: a sandbox for answers that this file wrote itself."""
    program = completions.strip("`").removeprefix("python").strip()
    try:
        return float(all(str(eval(program)(int(test["input"]))) == test["output"] for test in tests))
    except Exception:
        return 0.0


class Countdown:
    """Say a smaller number until 0."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.step_reward = float(options.get("step_reward", 0.25))

    def reset(self, data: Mapping[str, Any]) -> str:
        self.left = int(data["seed"])
        return f"at {self.left}"

    def step(self, action: str) -> tuple[str, float, bool]:
        self.left = int(action)
        return f"at {self.left}", self.step_reward, self.left == 0

    def close(self) -> None:
        self.left = -1


VERDICT = {"yes": "y$", "no": "n$", "verifier_template": "{problem}={answer}"}
CODE = {"prompt": "twice", "tests": [{"input": "2", "output": "4"}, {"input": "5", "output": "10"}], "solution": "lambda x: 2 * x"}
GOOD, BAD = "```python\nlambda x: 2 * x\n```", "```python\nlambda x: x * x\n```"
TESTED = {"tester_template": "{problem}?{code}", "repair_template": "{problem}:{feedback}", "cases": 1}
SPAWN = '<tool_call>{"name": "spawn", "arguments": {"tasks": ["2", "1"]}}</tool_call>'
CASES: dict[str, Case] = {
    "rlvr": Case({"solver": ["12"]}),
    "rlvr cut off": Case({"solver": ["1…"]}),
    "multi_turn": Case({"solver": ["21", "12"]}, {"feedback": "no", "discount": 0.5}),
    "plan_and_solve": Case({"planner": ["up"], "solver": ["12"]}, {"planner_template": "{problem}!", "solver_template": "go"}),
    "plan_and_solve by difference": Case(
        {"planner": ["up"], "solver": ["21", "12"]}, {"planner_template": "{problem}!", "solver_template": "go", "credit": "difference"}
    ),
    "propose_and_solve": Case(
        {"proposer": ["<problem>s31</problem><answer>13</answer>"], "solver": ["13", "31"]},
        {"attempts": 2, "proposer_template": "like {problem}"},
    ),
    "solve_and_check": Case({"solver": ["21"], "checker": ["12"]}, {"checker_template": "check", "credit": "own"}),
    "sep_solve_and_check": Case({"solver": ["21"], "checker": ["12"]}, {"checker_template": "{problem}={answer}", "credit": "difference"}),
    "solve_and_verify": Case({"solver": ["21", "12"], "verifier": ["n", "y"]}, {**VERDICT, "feedback_template": "?{verdict}"}),
    "actor_and_verify": Case({"solver": ["21", "12"], "verifier": ["n"]}, {**VERDICT, "feedback_template": "{problem}?{answer}{verdict}"}),
    "actor_and_verify as a team": Case(
        {"solver": ["21", "21"], "verifier": ["n"]}, {**VERDICT, "feedback_template": "{problem}?", "credit": "team"}
    ),
    "sm_lg_router": Case({"router": ["large, no: small"], "small": ["12"], "large": ["12"]}, {"router_template": "{problem}?"}),
    "sm_lg_router without comparison": Case(
        {"router": ["?"], "small": [], "large": ["12"]}, {"router_template": "{problem}?", "compare": False}
    ),
    "spawn": Case({"agent": [SPAWN, "2", "1", "12"]}, {"system": "H", "sub_template": "{problem}/{task}"}),
    "code_actor_and_verify": Case(
        {"coder": [BAD, GOOD], "tester": ['[{"input": "3", "output": "6"}]']}, TESTED, CODE, f"{HERE}:passes"
    ),
    "code_solve_and_select": Case(
        {"coder": [BAD, GOOD], "selector": ["<final>B</final>"]}, {"selector_template": "{code_a}{code_b}"}, CODE, f"{HERE}:passes"
    ),
    "env": Case(
        {"agent": ["go 1", "?", "go 0"]},
        {"environment": "countdown", "action": r"go (\d)", "no_action": "what"},
        {"seed": 2},
        "",
        {"countdown": f"{HERE}:Countdown"},
    ),
    "agent": Case({"solver": ["21", "12"], "verifier": ["No."]}, agents={"two": AgentConfig(function=f"{HERE}:two_minds")}),
}


def play(case: str) -> tuple[Result, list[Call]]:
    """Run one of CASES."""
    return run(case.partition(" ")[0], CASES[case])


def run(workflow: str, given: Case) -> tuple[Result, list[Call]]:
    """One episode as the rollout service does it: registered by name, engines of one episode, the result checked."""
    tokenizer = Tokenizer.load(TINY)
    engines = {policy: Stepping(policy, tokenizer, answers, 10 * place) for place, (policy, answers) in enumerate(given.answers.items())}
    models: dict[str, Any] = {policy: ServedModel(policy, engine, tokenizer, 1024) for policy, engine in engines.items()}
    door = Door(lambda: "http://door", Counter())
    sys.modules[HERE].DOOR["app"] = Starlette(routes=door.routes)  # type: ignore[attr-defined]
    rewards = {"passes": given.reward} if ":" in given.reward else {}
    programs = Programs(
        models,
        GenerationConfig(max_new_tokens=128),
        RewardsConfig(),
        local_rewards=rewards,
        local_environments=given.environments,
        agents=given.agents,
        door=door,
    )
    policies = list(given.answers)
    spec = WorkflowSpec(workflow=workflow, reward="passes" if rewards else given.reward, options=given.options, policies=policies)

    async def episode() -> tuple[Result, list[Call]]:
        programs.register(RegisterWorkflow(workflow_id="w", spec=spec))
        program = programs.get("w")
        assert program is not None
        lease = Lease(lease_id="l", task_id="t", workflow_id="w", n_samples=1, data=given.data)
        running = Episode(lease, 0, training=True)
        result = to_episode(await program.workflow.arun_episode(running.engines(models, policies), dict(given.data)), policies)
        await programs.close()
        return result, running.calls

    return asyncio.run(episode())


def shown(segment: Segment, tokenizer: Tokenizer) -> dict[str, Any]:
    """A segment for people: its text cut where the speaker or the version changes; context has neither."""
    ids, mask, versions = (array(col).tolist() for col in (segment.input_ids, segment.loss_mask, segment.versions))
    owner = array(segment.policy_of_token).tolist() if segment.policy_of_token is not None else [0] * len(ids)
    pieces: list[list[Any]] = []
    for token, sampled, version, who in zip(ids, mask, versions, owner, strict=True):
        name = f"{segment.policies[who]}@{version}" if sampled else ""
        if not pieces or pieces[-1][0] != name:
            pieces.append([name, []])
        pieces[-1][1].append(token)
    cut = [[name, tokenizer.decode(ids, skip_special=False), ids] for name, ids in pieces]
    found: dict[str, Any] = {"credit": segment.credit, "pieces": cut}
    return found if segment.parent is None else {"parent": segment.parent, **found}


def golden(case: str) -> dict[str, Any]:
    """What golden.json holds of a case."""
    result, _ = play(case)
    trajectory = result.trajectory
    tokenizer = Tokenizer.load(TINY)
    spans = version_spans([trajectory], {})
    return {
        "reward": trajectory.reward,
        "finish": trajectory.finish,
        "versions": {policy: [span.min, span.max] for policy, span in spans.items()},
        "metrics": dict(sorted(result.metrics.items())),
        "segments": [shown(segment, tokenizer) for segment in trajectory.segments],
    }


if __name__ == "__main__":
    sys.modules[HERE] = sys.modules["__main__"]
    rows = [f" {json.dumps(case)}: {json.dumps(golden(case))}" for case in CASES]
    GOLDEN.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
