from __future__ import annotations

import json
from pathlib import Path

import pytest

from astraflow.datasets.api import load
from astraflow.datasets.config import DatasetConfig
from astraflow.datasets.math import answer_of
from astraflow.lib.jsonl import BadRow
from astraflow.protocol.errors import ConfigError


def test_the_shipped_gsm8k_rows_need_no_path():
    train = load(DatasetConfig(loader="gsm8k"))
    assert len(train) == 200
    assert train[0].data["answer"] == "72"
    assert train[0].data["prompt"].startswith("Natalia sold clips")
    assert len(load(DatasetConfig(loader="gsm8k", split="test"))) == 100


def test_the_answer_stands_after_the_hashes_without_commas(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text('{"question": "q", "answer": "a #### b\\n#### 1,234"}\n')
    (task,) = load(DatasetConfig(loader="gsm8k", path=str(path)))
    assert task.data == {"prompt": "q", "answer": "1234"}


def test_a_missing_file_and_a_row_of_another_shape_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        load(DatasetConfig(loader="gsm8k", path="nowhere.jsonl"))
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question": "q", "answer": "72"}\n')
    with pytest.raises(BadRow, match="record 1"):
        load(DatasetConfig(loader="gsm8k", path=str(path)))


SHARED = Path(__file__).parents[4] / "shared" / "data"
REAL = {
    "gsm8k": ("gsm8k", 7473, "72", "50"),
    "math500": ("math/math500", 500, r"\left( 3, \frac{\pi}{2} \right)", r"106^\circ"),
    "aime24": ("math/aime24", 30, "204", "902"),
    "aime25": ("math/aime25", 30, "70", "240"),
    "amc23": ("math/amc23", 40, "27", "8"),
    "minerva": ("math/minerva_math", 272, "1.6", "10.1"),
    "olympiadbench": ("math/olympiadbench", 675, "2", "11"),
}


@pytest.mark.parametrize("name", REAL)
def test_every_real_row_has_a_question_and_a_readable_answer(name):
    directory, count, first, last = REAL[name]
    if not (SHARED / directory).is_dir():
        pytest.skip(f"{SHARED / directory} is not on this machine")
    tasks = load(DatasetConfig(loader=name, path=str(SHARED / directory)))
    assert (len(tasks), tasks.duplicates) == (count, 0)
    assert tasks[0].data["answer"] == first
    for task in tasks:
        assert set(task.data) == {"prompt", "answer"}
        assert task.data["prompt"].strip()
        assert isinstance(task.data["answer"], str)
        assert "boxed" not in task.data["answer"]
    assert tasks[-1].data["answer"] == last


def test_the_shipped_math_rows_load_from_a_directory_or_a_file():
    directory = Path(__file__).parents[2] / "data" / "math500"
    by_directory = load(DatasetConfig(loader="math500", path=str(directory)))
    assert by_directory.tasks == load(DatasetConfig(loader="math500", path=str(directory / "test.jsonl"))).tasks
    assert len(by_directory) > 10


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        (27.0, "27"),
        (2.5, "2.5"),
        (27, "27"),
        (["$69$,$84$"], "$69$,$84$"),
        (["1", "2"], "1, 2"),
        ({"ground_truth": "34", "style": "rule"}, "34"),
        ("so\n#### 1,234", "1234"),
        (r"thus \boxed{1} or rather \boxed{\frac{1}{2}} m", r"\frac{1}{2}"),
        (r"cut off \boxed{\frac{1}{2", ""),
        ("  ", ""),
    ],
)
def test_an_answer_is_read_as_its_source_writes_it(value, answer):
    assert answer_of(value) == answer


def test_rows_in_the_schema_of_the_hub_only_sets_load(tmp_path, caplog):
    """Made from rows we have: these are not the sets."""
    chat = [{"role": "user", "content": "Solve: 1+1. The last line is Answer: $Answer."}]
    judge = {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"}
    dapo = {"data_source": "math_dapo", "prompt": chat, "ability": "MATH", "reward_model": judge}
    rows = [{**dapo, "extra_info": {"index": index}} for index in ("a", "b")]
    (tmp_path / "dapo-math-17k.json").write_text(json.dumps(rows))
    tasks = load(DatasetConfig(loader="dapo", path=str(tmp_path)))
    assert [task.data for task in tasks] == [{"messages": chat, "answer": "2"}]
    assert tasks.duplicates == 1, "the source holds every problem about a hundred times"
    (tmp_path / "scaler").mkdir()
    scaled = [{"problem": "1+1", "answer": "2", "solution": "s"}, {"problem": "?", "answer": "", "solution": ""}]
    (tmp_path / "scaler" / "deepscaler.json").write_text(json.dumps(scaled))
    tasks = load(DatasetConfig(loader="deepscaler", path=str(tmp_path / "scaler")))
    assert [task.data for task in tasks] == [{"prompt": "1+1", "answer": "2"}]
    assert "1 rows have no readable answer" in caplog.text
    (tmp_path / "amc.jsonl").write_text('{"question": "q", "answer": 3.0}\n')
    assert load(DatasetConfig(loader="amc24", path=str(tmp_path / "amc.jsonl")))[0].data == {"prompt": "q", "answer": "3"}


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"aime24.*test\.jsonl"):
        load(DatasetConfig(loader="aime24", path=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"options\.split.*test"):
        load(DatasetConfig(loader="aime24", path=str(tmp_path), split="train"))
    (tmp_path / "test.jsonl").write_text('{"text": "q", "answer": "1"}\n')
    with pytest.raises(BadRow, match=r"record 1: expected one of problem, question.*it has answer, text"):
        load(DatasetConfig(loader="aime24", path=str(tmp_path)))
