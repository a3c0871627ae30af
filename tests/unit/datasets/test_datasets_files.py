from __future__ import annotations

import ast
import gzip
import json

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
    with pytest.raises(ConfigError, match=r"options\.columns\.prompt: \['a'\], expected the name of a column"):
        load(config(path, columns={"prompt": ["a"]}))
    with pytest.raises(ConfigError, match=r"options\.colums"):
        load(config(path, colums={}))


ROWS = [{"question": "2+2", "gold": "4", "tags": ["a"]}, {"question": "ü\u2028?", "gold": "5", "tags": []}]
COLUMNS = {"prompt": "question", "answer": "gold"}


def write_json(path):
    path.write_text(json.dumps(ROWS, ensure_ascii=False), encoding="utf-8")


def write_zipped(path):
    path.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in ROWS).encode()))


def write_parquet(path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)


@pytest.mark.parametrize(
    ("name", "write"),
    [("rows.json", write_json), ("rows.jsonl.gz", write_zipped), ("rows.parquet", write_parquet), ("rows", write_parquet)],
)
@pytest.mark.parametrize("loader", ["parquet", "jsonl"])
def test_the_file_s_ending_tells_its_format_and_without_one_the_loader_does(tmp_path, name, write, loader):
    path = tmp_path / name
    write(path)
    if name == "rows" and loader == "jsonl":
        with pytest.raises(BadRow, match=":1:"):
            load(DatasetConfig(loader=loader, path=str(path), options={"columns": COLUMNS}))
        return
    tasks = load(DatasetConfig(loader=loader, path=str(path), options={"columns": COLUMNS}))
    assert [task.data for task in tasks] == [{"prompt": r["question"], "answer": r["gold"], "tags": r["tags"]} for r in ROWS]


def test_the_same_rows_have_the_same_ids_in_every_format(tmp_path):
    write_parquet(tmp_path / "a.parquet")
    write_json(tmp_path / "a.json")
    ids = [
        [task.task_id for task in load(DatasetConfig(loader="jsonl", name="mine", path=str(tmp_path / f), options={"columns": COLUMNS}))]
        for f in ("a.parquet", "a.json")
    ]
    assert ids[0] == ids[1]


def test_a_cell_of_a_csv_file_may_be_long(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(f"prompt,tests\na,{'x' * 200_000}\n")
    (task,) = load(DatasetConfig(loader="csv", path=str(path)))
    assert len(task.data["tests"]) == 200_000


@pytest.mark.parametrize(("name", "mark"), [("rows.csv", ","), ("rows.tsv", "\t")])
def test_a_csv_file_with_quotes_line_breaks_and_a_byte_order_mark_is_read(tmp_path, name, mark):
    path = tmp_path / name
    path.write_text(f'\ufeffprompt{mark}answer\n"a{mark} ""b""\nc"{mark}4\n', encoding="utf-8")
    (task,) = load(DatasetConfig(loader="csv", path=str(path)))
    assert task.data == {"prompt": f'a{mark} "b"\nc', "answer": "4"}


DAMAGED = bytearray(gzip.compress(b"".join(b'{"prompt": "%d"}\n' % (n * n) for n in range(999)), mtime=0))
DAMAGED[60:90] = b"\xff" * 30


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.csv", b"prompt,answer\n1,2\n1\n", ":3:"),
        ("a.csv", b"prompt,answer\n1,2,3\n", ":2:"),
        ("a.csv", b'prompt\n"1\n', "a.csv:1: "),
        ("a.csv", b"prompt\n\xff\n", "a.csv"),
        ("a.json", b'{"prompt": "x"}', "array"),
        ("a.json", b"[1]", "record 1"),
        ("a.json", b"[", "a.json"),
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz"),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "x"}\n[]\n', mtime=0), ":2"),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": "x"}\n', mtime=0)[:-9], "a.jsonl.gz"),
        ("a.parquet", b"no parquet", "a.parquet"),
        ("a.csv", b"prompt,answer,answer\na,1,2\n", "'answer' is named twice"),
        ("a.jsonl.gz", gzip.compress(b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000, mtime=0), "record 1: RecursionError"),
        ("a.jsonl.gz", DAMAGED, "a.jsonl.gz: record"),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": "a", "x": {"y": [0, 10000000000000000000000000]}}', "record 2: field `x.y.1`"),
        ("a.jsonl", b'{"prompt": "a\\ud800"}\n', "record 1: field `prompt` cannot be sent"),
        ("a.json", b'[{"messages": []}]', "record 1: messages: expected at least one turn"),
        ("a.json", b'[{"messages": [1]}]', "record 1: messages: 1 is no turn"),
    ],
)
def test_a_file_that_is_not_what_its_ending_says_is_one_line_that_names_it(tmp_path, name, content, text):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadRow) as caught:
        load(DatasetConfig(loader="jsonl", path=str(path)))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
