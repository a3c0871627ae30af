from __future__ import annotations

import ast
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.lib.jsonl import BadRow, append_jsonl, read_jsonl
from astraflow.protocol.errors import UserError

SEPARATORS = "\u2028\u2029\u0085\f\v\x1c\x1d\x1e\r"
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(blacklist_categories=["Cs"])) | st.text(SEPARATORS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(SEPARATORS + "ab", max_size=3), inner, max_size=3),
    max_leaves=6,
)
rows_of = st.lists(st.dictionaries(st.text(SEPARATORS + "ab", max_size=4), json_values, max_size=3), max_size=5)


def test_only_newlines_separate_records(tmp_path: Path, case: Callable[[str], dict[str, Any]]) -> None:
    g33 = case("G33")
    text = ast.literal_eval(g33["input"]["file_utf8_repr"])
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text.encode("utf-8"))
    records = list(read_jsonl(path))
    assert len(records) == g33["expected"]["values"]["records_read"]
    assert [ord(letter) for letter in records[0]["text"]] == g33["expected"]["values"]["first_text_codepoints"]


def test_a_file_that_is_not_there_is_named_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing\.jsonl: No such file"):
        list(read_jsonl(tmp_path / "missing.jsonl"))
    with pytest.raises(UserError, match="directory"):
        list(read_jsonl(tmp_path))


@pytest.mark.parametrize("ending", ["", "\n", "\n\n", "\n \t\n", "\r\n"])
def test_the_end_of_the_file_may_look_any_way(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(('\ufeff{"id": 1}\n{"id": 2}' + ending).encode())
    assert [row["id"] for row in read_jsonl(path)] == [1, 2]


@pytest.mark.parametrize("tail", [b'{"id": 2, "te', b"{", b'{"id": 2, "text": "\xe2\x80', b"[", b"nul"])
def test_a_half_written_last_line_is_skipped_with_a_warning(tmp_path: Path, tail: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"id": 1}\n' + tail)
    assert [row["id"] for row in read_jsonl(path)] == [1]
    assert "rows.jsonl:2" in caplog.text


@pytest.mark.parametrize("broken", [b'{"id": 2', b"[1]", b'"text"', b"\xff\xfe", b"{'id': 2}", b"[" * 100_000])
def test_a_broken_row_names_file_and_line_after_the_earlier_ones(tmp_path: Path, broken: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    for rest in (b'\n{"id": 3}\n', b"\n"):
        path.write_bytes(b'{"id": 1}\n\n' + broken + rest)
        read = read_jsonl(path)
        assert next(read) == {"id": 1}
        with pytest.raises(BadRow, match=r"rows\.jsonl:3: ") as caught:
            next(read)
        assert "\n" not in str(caught.value)


@given(rows_of, st.integers(0, 20), st.booleans())
def test_what_is_appended_is_read_back_even_after_a_crash_in_the_middle_of_a_line(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], cut: int, one_by_one: bool
) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "rows.jsonl"
    if one_by_one:
        for row in rows:
            append_jsonl(path, row)
    else:
        append_jsonl(path, rows)
    data = path.read_bytes() if path.exists() else b""
    assert list(read_jsonl(path) if data else []) == rows

    kept = data[: max(0, len(data) - cut)]
    path.write_bytes(kept)
    survivors = list(read_jsonl(path))
    assert survivors == rows[: len(survivors)]
    assert kept.count(b"\n") <= len(survivors) <= kept.count(b"\n") + 1
    append_jsonl(path, {"after": True})
    assert list(read_jsonl(path)) == [*survivors, {"after": True}]


def test_lines_of_several_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"

    def write(writer: int) -> None:
        for index in range(50):
            append_jsonl(path, {"writer": writer, "index": index, "text": "x" * 3000})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    rows = list(read_jsonl(path))
    assert len(rows) == 200
    for writer in range(4):
        assert [row["index"] for row in rows if row["writer"] == writer] == list(range(50))


def test_a_long_half_written_line_is_cut_off_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"id": 1}\n{"text": "' + b"x" * 200_000)
    append_jsonl(path, {"id": 2})
    assert [json.loads(line) for line in path.read_bytes().split(b"\n") if line] == [{"id": 1}, {"id": 2}]
