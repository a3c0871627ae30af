from __future__ import annotations

import ast

import pytest

from astraflow.datasets.api import load
from astraflow.datasets.config import DatasetConfig
from astraflow.lib.jsonl import BadRow
from astraflow.protocol.errors import ConfigError


def config(path, **options):
    return DatasetConfig(loader="jsonl", path=str(path), options=options)


def test_columns_are_renamed_and_the_others_kept(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "2+2", "gold": "4", "level": 1}\n')
    (task,) = load(config(path, columns={"prompt": "question", "answer": "gold"}))
    assert task.data == {"prompt": "2+2", "answer": "4", "level": 1}


def test_unicode_separators_inside_a_record_are_text(tmp_path, case):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(ast.literal_eval(case("G33")["input"]["file_utf8_repr"]).encode())
    data = load(config(path, columns={"prompt": "text"}))
    wanted = case("G33")["expected"]["values"]
    assert len(data) == wanted["records_read"]
    assert [ord(char) for char in data[0].data["prompt"]] == wanted["first_text_codepoints"]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"prompt": "a"}\n{"prompt": \n{"prompt": "b"}\n', ":2:"),
        ('{"prompt": "a"}\n{"text": "b"}\n', "record 2"),
        ('{"prompt": 5}\n', "record 1"),
    ],
)
def test_a_broken_row_is_one_line_that_says_where(tmp_path, text, where):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(BadRow) as caught:
        load(config(path))
    assert str(path) in str(caught.value)
    assert where in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_column_or_file_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(BadRow, match="'gold'"):
        load(config(path, columns={"answer": "gold"}))
    with pytest.raises(ConfigError, match="path"):
        load(config(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match=r"options\.colums"):
        load(config(path, colums={}))
