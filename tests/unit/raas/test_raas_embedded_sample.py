"""Drawing tokens: the distribution, log-probs of the processed distribution (numerics 2), greedy, cuts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from astraflow.raas.engines.embedded_sample import Draw, sample


def draw(uniform: float = 0.5, temperature: float = 1.0, greedy: bool = False, top_p: float = 1.0, top_k: int = 0) -> Draw:
    return Draw(temperature=temperature, uniform=uniform, greedy=greedy, top_p=top_p, top_k=top_k)


def test_log_probs_are_those_of_the_distribution_that_sampled_g15(case: Callable[[str], dict[str, Any]]) -> None:
    g15 = case("G15")
    given, expected = g15["input"], g15["expected"]["values"]
    logits = torch.tensor([given["logits"]] * 3)
    # Shares are .817, .154, .030: these numbers fall on tokens 0, 1, 2.
    tokens, logprobs = sample(logits, [draw(u, given["temperature"]) for u in (0.5, 0.9, 0.99)])
    assert tokens == [0, 1, 2]
    assert logprobs == pytest.approx(expected["all_logprobs"], abs=1e-5)


@pytest.mark.parametrize("vocabulary", [3, 128, 1000])
def test_evenly_spread_numbers_reproduce_the_distribution(vocabulary: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(vocabulary) * 2
    logits[::7] = float("-inf")
    n = 4000
    tokens, logprobs = sample(logits.repeat(n, 1), [draw((i + 0.5) / n, 0.8) for i in range(n)])
    wanted = torch.softmax(logits.double() / 0.8, 0)
    counts = torch.bincount(torch.tensor(tokens), minlength=vocabulary)
    assert (counts / n - wanted).abs().max() < 1.01 / n
    assert torch.tensor(logprobs).double().exp() == pytest.approx(wanted[tokens], rel=1e-5)


def test_no_number_draws_a_token_of_probability_zero() -> None:
    logits = torch.full((300,), float("-inf"))
    logits[[5, 127, 128, 299]] = torch.tensor([0.0, -30.0, -20.0, 1.0])
    numbers = [0.0, 1e-300, *[i / 997 for i in range(997)], 1 - 2**-53]
    tokens, _ = sample(logits.repeat(len(numbers), 1), [draw(number) for number in numbers])
    assert set(tokens) <= {5, 127, 128, 299}
    assert {tokens[0], tokens[-1]} == {5, 299}


def test_large_logits_keep_their_precision() -> None:
    logits = torch.tensor([[5e4, 5e4 - 1.0, 0.0]])
    tokens, logprobs = sample(logits.clone(), [draw(0.9)])
    assert tokens == [1]
    assert logprobs == pytest.approx([-1.3132617], abs=1e-6)


def test_greedy_takes_the_best_and_reports_its_log_prob() -> None:
    tokens, logprobs = sample(torch.tensor([[0.0, 3.0, 1.0]]), [draw(0.999, greedy=True)])
    assert tokens == [1]
    assert logprobs == pytest.approx([torch.log_softmax(torch.tensor([0.0, 3.0, 1.0]), 0)[1].item()], abs=1e-6)


def test_cuts_restrict_the_token_but_not_the_log_prob() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    whole = torch.log_softmax(logits, 0)
    numbers = [i / 50 for i in range(50)]
    for cut, allowed in (({"top_k": 2}, {0, 1}), ({"top_p": 0.6}, {0}), ({"top_p": 0.7}, {0, 1}), ({"top_p": 0.7, "top_k": 1}, {0})):
        tokens, logprobs = sample(logits.repeat(50, 1), [draw(number, **cut) for number in numbers])
        assert set(tokens) == allowed
        assert logprobs == pytest.approx([whole[token].item() for token in tokens], abs=1e-6)


def test_a_row_that_is_not_finite_spoils_only_itself() -> None:
    tokens, logprobs = sample(torch.tensor([[0.0, float("nan")], [0.0, 9.0]]), [draw(), draw()])
    assert logprobs[0] != logprobs[0]
    assert tokens[1] == 1
    assert logprobs[1] == pytest.approx(-0.000123, abs=1e-5)
