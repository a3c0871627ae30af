"""The scripted engine: deterministic, and able to be right, wrong, slow and broken on request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from astraflow.protocol.errors import ConfigError
from astraflow.raas.engines.base import EngineError
from astraflow.raas.engines.scripted import arithmetic
from astraflow.workflows.api import ModelRequest, ModelResponse


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("2 + 2 =4 5 + 1 =6 7 + 8 =", "15"),
        ("s3142>", "1234"),
        ("r3142>", "2413"),
        ("s3142=1234>", "y"),
        ("s3142=1243>", "n"),
        ("s3142=>", "n"),
        ("hello", None),
    ],
)
def test_the_right_answer_is_found_in_the_prompt(prompt: str, answer: str | None) -> None:
    assert arithmetic(prompt) == answer


def ask(
    scripted: Any, prompt: str = "2 + 3 =", count: int = 1, fields: dict[str, Any] | None = None, **options: Any
) -> list[ModelResponse]:
    async def test() -> list[ModelResponse]:
        engine = scripted(**options)
        await engine.start()
        ids = engine._setup.tokenizer.encode(prompt)
        requests = [ModelRequest(input_ids=ids, max_new_tokens=8, seed=seed, **(fields or {})) for seed in range(count)]
        return list(await asyncio.gather(*(engine.agenerate(request) for request in requests)))

    return asyncio.run(test())


def test_the_share_of_right_answers_grows_with_the_version(scripted: Any) -> None:
    def share(correct: float) -> float:
        answers = ask(scripted, count=400, correct=correct)
        return sum(len(a.output_ids) == 2 and a.output_ids == answers_for_5 for a in answers) / 400

    answers_for_5 = ask(scripted, correct=1.0)[0].output_ids
    assert share(1.0) == 1.0
    assert share(0.0) == 0.0
    assert 0.2 < share(0.3) < 0.4


def test_greedy_is_the_likelier_answer(scripted: Any) -> None:
    right = ask(scripted, correct=1.0)[0].output_ids
    assert {tuple(a.output_ids) for a in ask(scripted, count=9, correct=0.6, fields={"greedy": True})} == {tuple(right)}
    assert tuple(right) not in {tuple(a.output_ids) for a in ask(scripted, count=9, correct=0.4, fields={"greedy": True})}


def test_a_script_is_followed_and_then_the_solver_takes_over(scripted: Any) -> None:
    script = [{"tokens": [9, 9, 9], "logprobs": [-1.0, -2.0, -3.0], "finish": "length"}, {"text": "7"}]
    first, second, third = ask(scripted, count=3, script=script, correct=1.0)
    assert (first.output_ids, first.logprobs, first.finish) == ([9, 9, 9], [-1.0, -2.0, -3.0], "length")
    assert second.output_ids[-1] == 2
    assert second.output_ids != third.output_ids
    assert all(a == b for a, b in zip(ask(scripted, count=4, script=script, script_repeats=True)[::2], [first, first], strict=True))


def test_faults_come_where_they_were_ordered(scripted: Any) -> None:
    with pytest.raises(EngineError) as caught:
        ask(scripted, fail_requests=[0])
    assert caught.value.retryable
    with pytest.raises(EngineError, match="no weights"):
        ask(scripted, initial=False)
    with pytest.raises(ConfigError, match="token"):
        ask(scripted, token=1)
    with pytest.raises(ConfigError, match="arithmetic"):
        ask(scripted, solver="algebra")


def test_random_answers_choose_among_the_given_ones(scripted: Any) -> None:
    answers = ask(scripted, "say", count=60, choices=["y", "n"])
    assert len({tuple(a.output_ids) for a in answers}) == 2
    assert all(-2.0 <= value < 0 for a in answers for value in a.logprobs)
