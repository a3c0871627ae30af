from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from golden_cases import BAD, CASES, CODE, GOLDEN, GOOD, HERE, SPAWN, Case, golden, play, run

from astraflow.protocol.codec import array
from astraflow.protocol.rollout import Segment
from astraflow.workflows.api import WORKFLOWS

SHARED = [case for case, row in json.loads(GOLDEN.read_text()).items() if any(len(s["credit"]) > 1 for s in row["segments"])]


def test_every_registered_workflow_has_a_golden_episode() -> None:
    ours = {name for name in WORKFLOWS.names() if str(WORKFLOWS.get(name).__module__).startswith("astraflow.")}
    assert {case.partition(" ")[0] for case in CASES} == ours


@pytest.mark.parametrize("case", CASES)
def test_ids_masks_owners_versions_and_credit_are_golden(case: str) -> None:
    assert golden(case) == json.loads(GOLDEN.read_text(encoding="utf-8"))[case]


DEFAULTS = {
    "rlvr": Case({"solver": ["12"]}),
    "multi_turn": Case({"solver": ["9", "9", "12"]}),
    "plan_and_solve": Case({"planner": ["up"], "solver": ["12"]}),
    "propose_and_solve": Case({"proposer": ["<problem>s31</problem><answer>13</answer>"], "solver": ["13"] * 4}),
    "solve_and_check": Case({"solver": ["21"], "checker": ["12"]}),
    "sep_solve_and_check": Case({"solver": ["21"], "checker": ["12"]}),
    "solve_and_verify": Case({"solver": ["21"] * 5, "verifier": ["No."] * 5}),
    "actor_and_verify": Case({"solver": ["21", "12"], "verifier": ["No."]}),
    "sm_lg_router": Case({"router": ["LARGE"], "small": ["12"], "large": ["12"]}),
    "spawn": Case({"agent": [SPAWN, "2", "1", "12"]}),
    "code_actor_and_verify": Case(
        {"coder": [BAD, GOOD], "tester": ['[{"input": "3", "output": "6"}, {"input": "2", "output": "4"}]']}, {}, CODE, f"{HERE}:passes"
    ),
    "code_solve_and_select": Case({"coder": [BAD, GOOD], "selector": ["<final>B</final>"]}, {}, CODE, f"{HERE}:passes"),
    "env": Case({"agent": ["1", "0"]}, {"environment": "countdown"}, {"seed": 2}, "", {"countdown": f"{HERE}:Countdown"}),
    "agent": CASES["agent"],
}


@pytest.mark.parametrize("workflow", DEFAULTS)
def test_a_workflow_s_own_words_ask_everybody_and_waste_no_answer(workflow: str) -> None:
    result, calls = run(workflow, DEFAULTS[workflow])
    assert Counter(call.policy for call in calls) == {policy: len(texts) for policy, texts in DEFAULTS[workflow].answers.items()}
    assert result.trajectory.error is None
    assert result.trajectory.reward is not None


def test_no_workflow_s_own_words_are_left_out() -> None:
    assert set(DEFAULTS) == {case.partition(" ")[0] for case in CASES}


def spans(segment: Segment) -> list[tuple[int, int]]:
    """Stretches of sampled tokens."""
    mask = array(segment.loss_mask).tolist()
    edges = [i for i in range(len(mask) + 1) if (mask[i - 1] if i else 0) != (mask[i] if i < len(mask) else 0)]
    return list(zip(edges[::2], edges[1::2], strict=True))


@pytest.mark.parametrize("case", CASES)
def test_fault_27_what_was_sent_and_sampled_is_what_is_trained_on_token_by_token(case: str) -> None:
    result, calls = play(case)
    sampled = []
    for segment in result.trajectory.segments:
        ids, logprobs, versions = (array(col).tolist() for col in (segment.input_ids, segment.logprobs, segment.versions))
        owner = array(segment.policy_of_token).tolist() if segment.policy_of_token is not None else [0] * len(ids)
        for start, end in spans(segment):
            assert len(set(owner[start:end])) == 1
            policy = segment.policies[owner[start]]
            sampled.append((policy, ids[:start], ids[start:end], pytest.approx(logprobs[start:end], abs=1e-6), versions[start:end]))
    made = [(c.policy, c.input_ids, c.response.output_ids, c.response.logprobs, c.response.versions) for c in calls]
    untrained = [call for call in made if call not in sampled]
    assert len(untrained) == ("by difference" in case), "only what a credit rule asked for besides is left out"
    assert len(sampled) == len(made) - len(untrained)


@pytest.mark.parametrize("case", SHARED)
def test_fault_19_policies_in_one_context_keep_the_order_in_which_they_spoke(case: str) -> None:
    result, calls = play(case)
    (segment,) = result.trajectory.segments
    assert segment.policy_of_token is not None
    owner, ids = array(segment.policy_of_token).tolist(), array(segment.input_ids).tolist()
    told = [(segment.policies[owner[start]], ids[start:end]) for start, end in spans(segment)]
    assert told == [(call.policy, call.response.output_ids) for call in calls if call.input_ids == ids[: len(call.input_ids)]]
    assert [policy for policy, _ in told] == list(CASES[case].answers)
