from __future__ import annotations

import pytest

from astraflow.dataflow.config import DataflowProcess
from astraflow.dataflow.policies import CURATORS, FILTERS, ORDERS, SELECTIONS, SHAPERS
from astraflow.dataflow.policies.base import build
from astraflow.dataflow.policies.curate import AcceptAll
from astraflow.datasets.config import ValidDatasetConfig
from astraflow.protocol.errors import ConfigError, UnknownName


def test_every_table_line_loads() -> None:
    for registry in (FILTERS, CURATORS, SHAPERS, ORDERS, SELECTIONS):
        for name in registry.names():
            assert callable(registry.get(name))


def test_a_policy_is_a_name_a_mapping_a_target_or_a_list_of_these() -> None:
    chosen = ["keep_all", {"name": "reward_band", "low": 0.1, "high": 0.9}, "astraflow.dataflow.policies.admit:FilterZeroAdvantage"]
    kinds = [type(policy).__name__ for policy in build(FILTERS, "f", chosen)]
    assert kinds == ["KeepAll", "RewardBand", "FilterZeroAdvantage"]
    assert len(build(CURATORS, "c", "accept_all")) == 1


def test_a_wrong_name_or_option_names_the_field() -> None:
    with pytest.raises(UnknownName, match="keep_all"):
        build(FILTERS, "dataflow.policies.filter", "kep_all")
    with pytest.raises(ConfigError, match=r"dataflow\.policies\.filter: reward_band"):
        build(FILTERS, "dataflow.policies.filter", {"name": "reward_band", "lo": 1})
    with pytest.raises(ConfigError, match="low 1 is above high 0"):
        build(FILTERS, "dataflow.policies.filter", {"name": "reward_band", "low": 1, "high": 0})
    with pytest.raises(ConfigError, match="key `name`"):
        build(FILTERS, "dataflow.policies.filter", {"low": 1})
    with pytest.raises(ConfigError, match="tail 9"):
        build(SHAPERS, "s", {"name": "overlong", "max_len": 8, "tail": 9})


def test_accept_all_has_no_state() -> None:
    curator = AcceptAll()
    curator.restore(curator.state())
    assert curator.accepts("t", 0)


def test_contradictions_in_the_configuration_are_named() -> None:
    def process() -> DataflowProcess:
        return DataflowProcess(run_id="r", run_dir="d")

    one = process()
    one.workflow.n_samples = 1
    with pytest.raises(ConfigError, match="n_samples"):
        one.validate()
    one.group_relative = {"default": False}
    one.validate()
    two = process()
    two.workflow.policies = ["nobody"]
    with pytest.raises(ConfigError, match=r"workflow\.policies"):
        two.validate()
    three = process()
    three.valid_datasets = {"v": ValidDatasetConfig(n_samples=2, generation={"greedy": True})}
    with pytest.raises(ConfigError, match=r"valid_datasets\.v\.n_samples"):
        three.validate()
    three.valid_datasets = {"v": ValidDatasetConfig(workflow="missing")}
    with pytest.raises(ConfigError, match=r"valid_datasets\.v\.workflow"):
        three.validate()
