from __future__ import annotations

import re

import msgspec
import pytest

from astraflow.datasets.api import DATASETS, load, register_dataset, task_id
from astraflow.datasets.config import DatasetConfig, ValidDatasetConfig
from astraflow.lib.jsonl import BadRow
from astraflow.protocol.errors import ConfigError, UnknownName

ROWS = [{"prompt": "a", "answer": "1"}, {"answer": "1", "prompt": "a"}, {"prompt": "b", "answer": "2"}]


@register_dataset("three_rows")
def three_rows(config: DatasetConfig, seed: int):
    return ROWS


def test_equal_rows_are_merged_and_counted(caplog):
    data = load(DatasetConfig(loader="three_rows"))
    assert [task.data for task in data] == [ROWS[0], ROWS[2]]
    assert data.duplicates == 1
    assert "three_rows" in caplog.text


def test_an_id_is_the_data_set_and_its_content(case):
    data = load(DatasetConfig(loader="three_rows"))
    assert all(re.fullmatch(r"three_rows:[0-9a-f]{16}", task.task_id) for task in data)
    assert data[0].task_id == load(DatasetConfig(loader="three_rows"), seed=9)[0].task_id
    rollouts = case("G10")["input"]["rollouts"]
    ids = {task_id(row["dataset"], {"id": row["id"]}) for row in rollouts}
    assert len(ids) == case("G10")["expected"]["values"]["num_groups"]


def test_two_names_for_the_same_rows_are_two_sets():
    first, second = load(DatasetConfig(loader="three_rows", name="A")), load(DatasetConfig(loader="three_rows"), name="B")
    assert {task.task_id for task in first}.isdisjoint(task.task_id for task in second)


def test_a_limit_takes_the_first_tasks():
    assert len(load(DatasetConfig(loader="three_rows", limit=1))) == 1


def test_a_misspelt_loader_names_the_closest_and_an_empty_one_is_refused():
    with pytest.raises(UnknownName, match="addition"):
        load(DatasetConfig(loader="adition"))
    register_dataset("no_rows")(lambda config, seed: [])
    with pytest.raises(ConfigError, match="no_rows"):
        load(DatasetConfig(loader="no_rows"))


def test_what_a_loader_of_one_s_own_gives_must_be_sendable_too():
    register_dataset("big_rows")(lambda config, seed: [{"prompt": "a"}, {"prompt": "b", "x": [10**25]}])
    with pytest.raises(BadRow, match=r"'big_rows': task 2: field `x\.0` cannot be sent: an integer beyond 64 bits"):
        load(DatasetConfig(loader="big_rows"))


def test_every_listed_loader_is_there():
    for name in DATASETS.names():
        assert callable(DATASETS.get(name))


def test_unknown_keys_of_the_section_are_refused():
    with pytest.raises(msgspec.ValidationError, match="shufle"):
        msgspec.convert({"loader": "addition", "shufle": True}, DatasetConfig)
    assert msgspec.convert({"loader": "addition", "n_samples": 4}, ValidDatasetConfig).n_samples == 4
