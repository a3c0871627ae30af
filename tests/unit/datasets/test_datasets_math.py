from __future__ import annotations

import pytest

from astraflow.datasets.api import load
from astraflow.datasets.config import DatasetConfig
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
