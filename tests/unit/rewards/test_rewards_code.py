"""Code rewards: what counts as the program, how outputs are compared, and real runs in the sandbox."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from astraflow.rewards.api import RewardError
from astraflow.rewards.code import fenced, human_eval, livecodebench, same_output

needs_sandbox = pytest.mark.usefixtures("sandbox")

with gzip.open(Path(__file__).parents[2] / "data" / "humaneval" / "HumanEval.jsonl.gz", "rt") as shipped:
    PROBLEMS = [json.loads(line) for line in shipped]
DOUBLE = [{"input": "2\n", "output": "4\n"}, {"input": "5\n", "output": "10\n"}]
TWICE = [{"args": [2], "accepted": [4]}, {"args": [[5]], "accepted": [[[5, 5]], [5, 5]]}]


def block(code, language="python"):
    return f"Here it is:\n```{language}\n{code}\n```\nDone."


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (block("a = 1"), "a = 1"),
        (block("a = 1", ""), "a = 1"),
        (block("a = 1") + block("b = 2"), "b = 2"),
        (block("a = 1", "py") + block("3", "text"), "a = 1"),
        ("<think>" + block("a = 1") + "</think>" + block("b = 2"), "b = 2"),
        ("<think>" + block("a = 1") + "</think> no idea", None),
        ("1. so\n   ```python\n   if a:\n       b\n   ```", "if a:\n    b"),
        ("```python\n    return 1\n```", "    return 1"),
        (block("a = 1") + "\n```python\nb = ", None),
        ("a = 1", None),
        ("", None),
    ],
)
def test_the_program_is_the_last_closed_block_after_the_thoughts(text, code):
    assert fenced(text) == code


@pytest.mark.parametrize(
    ("got", "wanted", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("  1 2  \n3 ", "1 2\n3\n", True),
        ("1.0 2", "1 2.00", True),
        ("1  2", "1 2", True),
        ("a  b", "a b", False),
        ("1\n2", "1 2", False),
        ("1", "1\n2", False),
        ("", "1", False),
        ("Yes", "yes", False),
        ("0.3333", "0.33333", False),
        ("1000000006", "1000000007", False),
        ("NaN", "1", False),
        ("1_000", "1000", False),
        ("\uff11", "1", False),
        ("sNaN", "1", False),
        ("1e999999999999999999999", "2", False),
        ("\ufffd", "1", False),
    ],
)
def test_outputs_are_compared_as_livecodebench_does(got, wanted, same):
    assert same_output(got.encode(), wanted) is same


@needs_sandbox
def test_results_of_thousands_of_digits_and_tests_as_text_are_compared_as_they_are():
    livecodebench.warm_up()
    ten = 10**5000
    tests = [{"args": f"[{ten}]", "accepted": f"[{2 * ten}]"}, {"args": [10**25], "accepted": [2 * 10**25]}]
    assert livecodebench("", block("def f(x): return 2 * x"), [], [], tests=tests, function="f") == 1.0
    assert livecodebench("", block("def f(x): return 2 * x + (x > 10**99)"), [], [], tests=tests, function="f") == 0.0
    assert livecodebench("", block("def f(x): return True"), [], [], tests=[{"args": [1], "accepted": [1]}], function="f") == 1.0


@pytest.mark.parametrize("function", ["", "f"])
@pytest.mark.parametrize("test", [{"args": 1, "accepted": [1], "input": 1, "output": ""}, {"inp": 1}, 3, {"args": "[", "accepted": "[]"}])
def test_tests_of_another_shape_are_no_wrong_answer(function, test):
    with pytest.raises(RewardError, match="tests: ") as caught:
        livecodebench("", block("print(1)"), [], [], tests=[test], function=function)
    assert caught.value.kind == "exception"


def test_bytes_that_are_no_text_are_no_answer():
    assert not same_output(b"\xff\xfe", "1")


def test_without_tests_a_program_is_unscored_and_without_a_program_it_is_wrong():
    assert livecodebench("", block("print(4)"), [], []) is None
    assert human_eval("", block("print(4)"), [], [], test="", entry_point="f") is None
    assert livecodebench("", "I do not know.", [], [], tests=DOUBLE) == 0.0
    assert human_eval("", "```python\ndef f(): ret", [], [], test="def check(f): pass", entry_point="f") == 0.0


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "score"),
    [
        ("print(2 * int(input()))", 1.0),
        ("n = int(input())\nprint(4 if n == 2 else 11)", 0.0),
        ("print(4)\nprint(10)", 0.0),
        ("import os\nprint(2 * int(input()), flush=True)\nos._exit(0)", 1.0),
        ("import os\nos._exit(0)", 0.0),
        ("print(2 * int(input()))\nraise ValueError", 0.0),
        ("print('PASSED', 4)", 0.0),
        ("import time\ntime.sleep(60)", 0.0),
        ("def f(:", 0.0),
    ],
)
def test_a_whole_program_must_be_right_on_every_input(code, score):
    assert livecodebench("", block(code), [], [], tests=DOUBLE, wall_s=1.5 if "sleep" in code else 30.0) == score


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "score"),
    [
        ("class Solution:\n    def twice(self, x):\n        return x * 2", 1.0),
        ("def twice(x):\n    return x * 2", 1.0),
        ("def twice(x):\n    return 4", 0.0),
        ("def thrice(x):\n    return x * 3", 0.0),
        ("class T(int):\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\ndef twice(x):\n    return T(0)", 0.0),
        ("import os\ndef twice(x):\n    os.write(3, b'\\0\\0\\0\\5K[[[[')\n    return x * 2", 0.0),
        ("import os\nos._exit(0)", 0.0),
    ],
)
def test_a_function_must_return_an_accepted_value_for_every_call(code, score):
    assert livecodebench("", block(code), [], [], tests=TWICE, function="twice", wall_s=30.0) == score


@needs_sandbox
@pytest.mark.parametrize("row", PROBLEMS, ids=lambda row: row["task_id"])
def test_shipped_humaneval_solutions_pass_and_stubs_do_not(row):
    data = {"test": row["test"], "entry_point": row["entry_point"], "starter_code": row["prompt"], "wall_s": 60.0}
    assert human_eval("", block(row["prompt"] + row["canonical_solution"]), [], [], **data) == 1.0
    assert human_eval("", block(row["prompt"] + "    return None"), [], [], **data) == 0.0


@needs_sandbox
def test_a_completion_may_be_the_function_alone_or_the_body_that_goes_on():
    row = PROBLEMS[0]
    data = {"test": row["test"], "entry_point": row["entry_point"], "starter_code": row["prompt"], "wall_s": 60.0}
    function = row["prompt"].split("\n\n\n", 1)[1] + row["canonical_solution"]
    for completion in (block(function), row["canonical_solution"] + "\nprint('so it is')\n", block(row["canonical_solution"])):
        assert human_eval("", f"<think>hm</think>{completion}", [], [], **data) == 1.0, completion
    assert human_eval("", "That is easy.", [], [], **data) == 0.0
    test = "def check(f):\n    assert f(1) == 2\n"
    data = {"test": test, "entry_point": "f", "starter_code": "def f(x):\n    \"\"\"One more.\"\"\"\n", "wall_s": 60.0}
    for code, right in (("f = lambda x: x + 1", 1.0), ("f: object = lambda x: x + 1", 1.0), ("f = lambda x: x", 0.0), ("f == 1", 0.0)):
        assert human_eval("", block(code), [], [], **data) == right, code


@needs_sandbox
def test_the_recorded_forgers_are_not_paid(case):
    candidates = case("G06")["input"]["candidates"]
    test = "def check(f):\n    assert f(2) == 4\n    assert f(5) == 10\n"
    calls = [{"args": [2], "accepted": [4]}, {"args": [5], "accepted": [10]}]
    by_check = [human_eval("", block(c["code"]), [], [], test=test, entry_point="f", wall_s=60.0) for c in candidates]
    by_value = [livecodebench("", block(c["code"]), [], [], tests=calls, function="f", wall_s=60.0) for c in candidates]
    assert by_check == by_value == case("G06")["expected"]["values"]["rewards"]
