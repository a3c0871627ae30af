from __future__ import annotations

import base64
import json
import pickle
import shutil
import zlib
from pathlib import Path

import pytest

from astraflow.datasets import code
from astraflow.datasets.api import load
from astraflow.datasets.config import DatasetConfig
from astraflow.lib.jsonl import BadRow
from astraflow.protocol import codec

SHIPPED = Path(__file__).parents[2] / "data" / "humaneval"
SHARED = Path(__file__).parents[4] / "shared" / "data" / "humaneval"
PUBLIC = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
PRIVATE = [{"input": "5 6\n", "output": "11\n", "testtype": "stdin"}]
CALLS = [{"input": "[1, 2]\n\"a\"", "output": "[3]", "testtype": "functional"}]


def packed(value):
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def contest(private=PRIVATE, public=PUBLIC, **fields):
    row = {"question_content": "Add.", "starter_code": "", "metadata": "{}", "contest_date": "2024-08-01T00:00:00"}
    return {**row, "public_test_cases": json.dumps(public), "private_test_cases": packed(json.dumps(private)), **fields}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(loader, path, **options):
    return load(DatasetConfig(loader=loader, path=str(path), options=options))


def test_humaneval_rows_carry_what_their_reward_wants():
    tasks = read("human_eval", SHIPPED / "HumanEval.jsonl.gz")
    assert len(tasks) == 16
    assert tasks.tasks == read("human_eval", SHIPPED).tasks
    first = tasks[0].data
    assert set(first) == {"prompt", "starter_code", "test", "entry_point"}
    assert first["entry_point"] == "has_close_elements"
    assert first["starter_code"].strip() in first["prompt"]
    assert "canonical_solution" not in json.dumps([task.data for task in tasks])


def test_the_whole_humaneval_has_164_problems():
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is not on this machine")
    assert len(read("human_eval", SHARED)) == 164


def test_public_and_private_tests_of_a_contest_become_one_list(tmp_path):
    plain = contest(private_test_cases=json.dumps(PRIVATE), question_content="B")
    tasks = read("livecodebench", write(tmp_path / "test.jsonl", contest(), plain))
    for task in tasks:
        assert task.data["tests"] == [{"input": "1 2\n", "output": "3\n"}, {"input": "5 6\n", "output": "11\n"}]
        assert task.data["function"] == ""
    assert tasks[0].data["prompt"].startswith("Add.\n\nRead from standard input")


def test_calls_of_a_contest_become_arguments_and_accepted_values(tmp_path):
    starter = "class Solution:\n    def join(self, xs, s):\n"
    row = contest(private=CALLS, public=CALLS, metadata='{"func_name": "join"}', starter_code=starter)
    (task,) = read("livecodebench", write(tmp_path / "test.jsonl", row))
    assert task.data["function"] == "join"
    assert [unpacked(test) for test in task.data["tests"]] == [{"args": [[1, 2], "a"], "accepted": [[3]]}] * 2
    assert "def join(self, xs, s):" in task.data["prompt"]


def unpacked(test):
    return {key: json.loads(value) for key, value in test.items()}


def test_tests_with_integers_beyond_64_bits_reach_the_reward_as_they_are(tmp_path):
    big = 10**25
    tests = [{"input": str(big), "output": str(-big), "testtype": "functional"}]
    row = contest(private=tests, public=[], metadata='{"func_name": "f"}')
    (task,) = read("livecodebench", write(tmp_path / "test.jsonl", row))
    (test,) = codec.decode(codec.encode(task.data), dict)["tests"]
    assert unpacked(test) == {"args": [big], "accepted": [-big]}


@pytest.mark.parametrize(
    ("loader", "fields", "text"),
    [
        ("livecodebench", contest(metadata="[]"), "metadata: expected an object"),
        ("livecodebench", contest(private_test_cases=[7]), "AttributeError"),
        ("deepcoder", {"problem": "q", "tests": "[1, 2]"}, "a test: expected an object, got 1"),
        ("deepcoder", {"problem": "q", "tests": "3"}, "list of tests"),
        ("deepcoder", {"problem": "q", "tests": '{"inputs": 3}'}, "list of tests"),
        ("human_eval", {"prompt": 3, "test": "", "entry_point": "f"}, "expected text, got int"),
        ("dapo", {"prompt": ["x"], "answer": "1"}, "'x' is no turn"),
        ("dapo", {"prompt": [{"role": "user"}], "answer": "1"}, "is no turn"),
    ],
)
def test_a_row_of_another_shape_is_one_line_that_names_the_record(tmp_path, loader, fields, text):
    with pytest.raises(BadRow, match=r"test\.jsonl: record 1: ") as caught:
        read(loader, write(tmp_path / "test.jsonl", fields))
    assert text in str(caught.value)


def test_releases_dates_and_the_number_of_tests_are_chosen(tmp_path):
    many = [{"input": "x" * size, "output": "", "testtype": "stdin"} for size in (1, 9, 2, 8)]
    write(tmp_path / "test.jsonl", contest(contest_date="2023-05-07T00:00:00"))
    write(tmp_path / "test3.jsonl", contest(contest_date="2024-09-01T00:00:00", private=many))
    write(tmp_path / "test6.jsonl", contest(contest_date="2025-04-01T00:00:00", question_content="new"))
    assert [len(read("livecodebench", tmp_path, release=r)) for r in (1, 2, 3, 6)] == [1, 1, 2, 3]
    (task,) = read("livecodebench", tmp_path, start_date="2024-08-01", end_date="2025-01-31", max_tests=2, wall_s=30)
    assert task.data["wall_s"] == 30.0
    assert [len(test["input"]) for test in task.data["tests"]] == [9, 8]


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


@pytest.mark.parametrize(
    ("private", "text"),
    [
        (packed(Evil()), "builtins.print"),
        (packed(["a"]), "pickled list"),
        (packed("{}"), "list of tests"),
        (packed("[1]"), "a test without"),
        ("!!!", "cannot be read"),
        (base64.b64encode(zlib.compress(b"no pickle")).decode(), "cannot be read"),
        (base64.b64encode(zlib.compress(pickle.dumps("[]"))[:-8]).decode(), "cannot be read"),
        (base64.b64encode(zlib.compress(b"\x8e" + b"\xff" * 7 + b"\x7f.")).decode(), "cannot be read"),
    ],
)
def test_private_tests_that_are_more_or_less_than_text_are_refused(tmp_path, capsys, private, text):
    with pytest.raises(BadRow, match=r"record 1") as caught:
        read("livecodebench", write(tmp_path / "test.jsonl", contest(private_test_cases=private)))
    assert text in str(caught.value)
    assert capsys.readouterr().out == ""


def test_a_small_archive_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(code, "MAX_TEST_BYTES", 10**5)
    with pytest.raises(BadRow, match="more than 100000 bytes"):
        read("livecodebench", write(tmp_path / "test.jsonl", contest(private_test_cases=packed("[" + " " * 10**6 + "]"))))


def test_the_four_forms_of_deepcoder_become_one(tmp_path):
    """Rows built to the source's schema; these are not the set."""
    whole = {"input": "1 2\n", "output": "3\n"}
    rows = {
        "primeintellect": [{**whole, "type": "stdin_stdout"}],
        "codeforces": [{**whole, "testtype": "stdin"}],
        "taco": {"inputs": [["1 2", ""]], "outputs": ["3\n"]},
    }
    for subset, tests in rows.items():
        path = write(tmp_path / f"{subset}.jsonl", {"problem": "Add.", "solutions": ["secret"], "tests": json.dumps(tests)})
        (task,) = read("deepcoder", path, subset=subset)
        assert task.data["tests"] == [whole]
        assert "secret" not in json.dumps(task.data)
    calls = {
        "primeintellect": [{"fn_name": "add", "input": [1, 2], "output": [3], "type": "function_call"}],
        "taco": {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]},
        "lcbv5": [{"input": "1\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}}],
    }
    for subset, tests in calls.items():
        path = write(tmp_path / f"{subset}.jsonl", {"problem": "Add.", "starter_code": "def add(a, b):", "tests": json.dumps(tests)})
        (task,) = read("deepcoder", path, subset=subset)
        test = unpacked(task.data["tests"][0])
        assert (task.data["function"], test["args"]) == ("add", [1, 2])
        assert 3 in test["accepted"]


def test_deepcoder_problems_without_tests_are_left_out_and_counted(tmp_path, caplog):
    path = write(tmp_path / "taco.jsonl", {"problem": "a", "tests": "[]"}, {"problem": "b", "tests": '[{"input": "1", "output": "2"}]'})
    assert len(read("deepcoder", path, subset="taco")) == 1
    assert "1 problems have no test" in caplog.text


def test_a_copy_of_the_hub_s_files_is_found_by_its_own_names(tmp_path):
    shutil.copytree(SHIPPED, tmp_path / "copy" / "data")
    assert len(read("human_eval", tmp_path / "copy")) == 16
