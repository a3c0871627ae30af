"""What the runs of test_full_workflows.py load as a plug-in: a reward that always differs, and worlds for models that say digits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import xxhash

from astraflow.datasets.api import DatasetConfig, register_dataset
from astraflow.datasets.procedural import digits
from astraflow.environments.api import register_environment
from astraflow.rewards.api import register_reward
from astraflow.workflows.api import WorkflowContext, register_workflow
from astraflow.workflows.conversation import Conversation
from astraflow.workflows.spawn import Spawn
from astraflow.workflows.tools import ToolBox, ToolCall


@register_dataset("digits_with_tests")
def digits_with_tests(config: DatasetConfig, seed: int) -> Iterator[dict[str, Any]]:
    """Digits to sort, with what programs are tested by."""
    for task in digits(config, seed):
        yield {**task, "tests": [{"input": "", "output": task["answer"]}]}


@register_reward("spread", blocking=False)
def spread(prompt: str, completions: str, prompt_ids: Sequence[int], completion_ids: Sequence[int], **data: Any) -> float:
    """0 … 1 by the hash of the last turn and what came before it, so that the members of a group differ; 1 for about one in three."""
    return min(1.0, (xxhash.xxh3_64_intdigest((prompt + completions).encode()) % 12) / 8)


class DigitCalls(ToolBox):
    """Tells nothing, and reads any answer of three digits or more as a call with two tasks."""

    def told(self, system: str) -> str:
        return system

    def calls(self, talk: Conversation) -> list[ToolCall]:
        return [ToolCall("spawn", {"tasks": [talk.last_text[:1], talk.last_text[1:]]})] if len(talk.last_text) > 2 else []


@register_workflow("spawn_by_digits")
class SpawnByDigits(Spawn):
    """`spawn` for a model that knows digits only."""

    def __init__(self, context: WorkflowContext) -> None:
        super().__init__(context)
        self.tools.__class__ = DigitCalls


@register_environment("digits_door")
class DigitsDoor:
    """Each digit of the answer is worth a bit; a long answer opens."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.worth = options.get("worth", 0.1)

    def reset(self, data: Mapping[str, Any]) -> str:
        return str(data["prompt"])

    def step(self, action: str) -> tuple[str, float, bool]:
        return "s21", self.worth * spread("", action, [], []), len(action) > 4

    def close(self) -> None:
        return


async def two_minds(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """An agent: the solver answers, the verifier is shown that, and the solver goes on with what it said."""
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}, timeout=120.0) as http:

        async def ask(model: str, *texts: str) -> str:
            messages = [{"role": "assistant" if place % 2 else "user", "content": text} for place, text in enumerate(texts)]
            reply = await http.post(f"{base_url}/chat/completions", json={"model": model, "messages": messages})
            return str(reply.raise_for_status().json()["choices"][0]["message"]["content"])

        first = await ask("solver", task["prompt"])
        verdict = await ask("verifier", f"{task['prompt']}={first}")
        await ask("solver", task["prompt"], first, f"s{verdict}")
