"""Policies by name and option; filters and shapers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from astraflow.dataflow.admission import examine, statistics
from astraflow.dataflow.config import DataflowProcess
from astraflow.dataflow.policies import CURATORS, FILTERS, ORDERS, SELECTIONS, SHAPERS
from astraflow.dataflow.policies.base import GroupStats, build
from astraflow.datasets.config import ValidDatasetConfig
from astraflow.protocol import codec
from astraflow.protocol.errors import ConfigError, UnknownName

_spec = importlib.util.spec_from_file_location("dataflow_groups", Path(__file__).with_name("groups.py"))
assert _spec is not None
assert _spec.loader is not None
made: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(made)


def stats(rewards: list[float | None], shapers: list[Any] | None = None, lengths: list[int] | None = None) -> GroupStats:
    """As the door makes them."""
    lengths = lengths or [2] * len(rewards)
    members = [made.trajectory(i, reward, [0] * length) for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True))]
    checked = examine(codec.encode(made.group(members)), "g", 1, len(rewards), ["m"], shapers or [])
    assert checked.shares[0].stats is not None
    return checked.shares[0].stats


def one(registry: Any, choice: Any) -> Any:
    (policy,) = build(registry, "f", choice).values()
    return policy


def test_every_table_line_loads() -> None:
    for registry in (FILTERS, CURATORS, SHAPERS, ORDERS, SELECTIONS):
        for name in registry.names():
            assert callable(registry.get(name))


def test_a_policy_is_a_name_a_mapping_a_target_or_a_list_of_these() -> None:
    chosen = ["keep_all", {"name": "reward_band", "low": 0, "high": 0.9}, "astraflow.dataflow.policies.admit:FilterZeroAdvantage"]
    built = build(FILTERS, "f", chosen)
    assert [type(policy).__name__ for policy in built.values()] == ["KeepAll", "RewardBand", "FilterZeroAdvantage"]
    assert list(built) == ["keep_all", "reward_band", "astraflow.dataflow.policies.admit:FilterZeroAdvantage"]


MISTAKES = [
    (FILTERS, "kep_all", "did you mean 'keep_all'"),
    (FILTERS, {"low": 1}, "key `name`"),
    (FILTERS, ["keep_all", "keep_all"], "field: 'keep_all' is named twice"),
    (FILTERS, {"name": "reward_band", "lo": 1}, "field: reward_band: unknown option 'lo' (did you mean 'low'?); accepted: low, high"),
    (FILTERS, {"name": "reward_band", "low": 0}, "field: reward_band: option high is required; accepted: low, high"),
    (FILTERS, {"name": "reward_band", "low": 1, "high": 0}, "field: reward_band: low 1 is above high 0"),
    (FILTERS, {"name": "keep_all", "x": 1}, "field: keep_all: unknown option 'x'; accepted: none"),
    (SHAPERS, {"name": "overlong", "max_len": 8, "tail": 9}, "field: overlong: tail 9: expected 1 to max_len (8)"),
    (SHAPERS, {"name": "overlong", "max_len": 8, "tail": 4, "factor": -1}, "option factor: -1: Expected `float` >= 0"),
    (CURATORS, {"name": "greso", "p_esy": 0.4}, "did you mean 'p_easy'?); accepted: p_easy, p_hard, alpha_easy, alpha_hard, delta_p,"),
    (CURATORS, {"name": "greso", "p_easy": 1.4}, "field: greso: option p_easy: 1.4: Expected `float` <= 1"),
    (CURATORS, {"name": "greso", "p_easy": "high"}, "field: greso: option p_easy: 'high': Expected `float`, got `str`"),
    (CURATORS, {"name": "greso", "p_hard": 0.995}, "field: greso: option p_hard: 0.995, expected p_min (0.01) to p_max (0.99)"),
    (CURATORS, {"name": "filter_solved", "decay": 1.0}, "field: filter_solved: option decay: 1.0: Expected `float` < 1"),
    (CURATORS, {"name": "curriculum", "bands": [{"low": 0.5, "high": 0.5}]}, "curriculum: option bands: low 0.5 is not below high 0.5"),
    (CURATORS, {"name": "curriculum", "bands": [{"low": 0, "high": 0.5}, {"low": 0.4, "high": 1}]}, "[0, 0.5) and [0.4, 1) overlap"),
    (CURATORS, {"name": "curriculum", "bands": [{"low": 0, "high": 1, "weight": 0}]}, "no band has a weight above 0"),
    (CURATORS, {"name": "curriculum", "bands": [{"low": 0, "hih": 1}]}, "hih"),
]  # fmt: skip


@pytest.mark.parametrize(("registry", "choice", "words"), MISTAKES, ids=lambda value: str(value)[:40])
def test_a_wrong_name_or_option_names_the_field_the_value_and_what_is_accepted(registry: Any, choice: Any, words: str) -> None:
    with pytest.raises((UnknownName, ConfigError)) as error:
        build(registry, "field", choice)
    assert words in str(error.value)
    assert str(error.value).count("field: ") <= 1


PLUGIN = """
from typing import Annotated
from msgspec import Meta
from astraflow.protocol.errors import ConfigError

class EvenTasks:
    def __init__(self, modulus: Annotated[int, Meta(ge=1)] = 2, **further) -> None:
        if modulus == 7:
            raise ConfigError("modulus 7 is unlucky")
        self.modulus, self.further = modulus, further

def at_least(count: int):
    class AtLeast:
        def reject(self, policy, stats):
            return "" if stats.size >= count else "too_small"
    return AtLeast()

NOT_A_POLICY = 3
"""


def test_a_policy_in_a_file_of_ones_own_is_built_and_its_options_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugin_of_a_user.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    curator = one(CURATORS, {"name": "plugin_of_a_user:EvenTasks", "modulus": 3, "free": "x"})
    assert (curator.modulus, curator.further) == (3, {"free": "x"})
    rule = one(FILTERS, {"name": "plugin_of_a_user:at_least", "count": 3})
    assert (rule.reject("m", stats([1.0, 0.0, 1.0])), rule.reject("m", stats([1.0, 0.0]))) == ("", "too_small")
    for choice, words in [
        ({"name": "plugin_of_a_user:EvenTasks", "modulus": 0}, "option modulus: 0: Expected `int` >= 1"),
        ({"name": "plugin_of_a_user:EvenTasks", "modulus": 7}, "f: plugin_of_a_user:EvenTasks: modulus 7 is unlucky"),
        ("plugin_of_a_user:at_least", "option count is required"),
        ("plugin_of_a_user:NOT_A_POLICY", "cannot be called"),
        ("plugin_of_a_user:EvenTask", "EvenTasks"),
        ("plugin_of_nobody:EvenTasks", "no module 'plugin_of_nobody'"),
    ]:
        with pytest.raises((UnknownName, ConfigError), match=words):
            build(FILTERS, "f", choice)


def test_groups_of_equal_rewards_are_dropped_by_dynamic_sampling_and_others_kept(case: Any) -> None:
    rule = one(FILTERS, "filter_zero_adv")
    reasons = {name: rule.reject("m", stats(rewards)) for name, rewards in case("G08")["input"]["groups"].items()}
    assert reasons == {"a": "zero_variance", "b": "zero_variance", "c": "zero_variance", "d": "zero_variance", "e": ""}
    assert one(FILTERS, "keep_all").reject("m", stats([1.0, 1.0])) == ""


def test_zero_variance_looks_at_shaped_rewards_and_the_band_at_raw_ones() -> None:
    overlong = one(SHAPERS, {"name": "overlong", "max_len": 4, "tail": 2})
    shaped = stats([1.0, 1.0], [overlong], [2, 4])
    assert (list(shaped.shaped.values()), list(shaped.values.values())) == ([1.0, 0.0], [1.0, 1.0])
    assert one(FILTERS, "filter_zero_adv").reject("m", shaped) == ""
    assert one(FILTERS, {"name": "reward_band", "low": 1, "high": 1}).reject("m", shaped) == ""


def test_the_reward_band_includes_its_ends() -> None:
    rule = one(FILTERS, {"name": "reward_band", "low": 0.25, "high": 0.75})
    rewards = ([0.0] * 4, [1.0] + [0.0] * 3, [1.0] * 2 + [0.0] * 2, [1.0] * 3 + [0.0], [1.0] * 4)
    assert [rule.reject("m", stats(list(group))) for group in rewards] == ["reward_band", "", "", "", "reward_band"]


def test_complete_only_drops_a_group_with_an_unscored_member() -> None:
    rule = one(FILTERS, "complete_only")
    assert [rule.reject("m", stats(group)) for group in ([1.0, 0.0, 1.0], [1.0, None, 0.0])] == ["", "partial"]


@pytest.mark.parametrize(("length", "bonus"), [(1, 0.0), (6, 0.0), (7, -0.25), (8, -0.5), (9, -0.75), (10, -1.0), (50, -1.0)])
def test_the_overlong_penalty_follows_its_formula_truncated_or_not(length: int, bonus: float) -> None:
    shaper = one(SHAPERS, {"name": "overlong", "max_len": 10, "tail": 4})
    assert [shaper.bonus(length, finish) for finish in ("stop", "length")] == [bonus, bonus]
    assert one(SHAPERS, {"name": "overlong", "max_len": 10, "tail": 4, "factor": 0.5}).bonus(length, "stop") == 0.5 * bonus
    assert one(SHAPERS, "none").bonus(length, "length") == 0.0


def test_statistics_hold_what_a_later_shaper_needs() -> None:
    overlong = one(SHAPERS, {"name": "overlong", "max_len": 6, "tail": 4})
    plain, shaped = stats([1.0, None, 0.0], None, [3, 9, 5]), stats([1.0, None, 0.0], [overlong], [3, 9, 5])
    assert plain.lengths == {0: 3, 2: 5}
    assert plain.loss_tokens == 8
    again = {i: value + overlong.bonus(plain.lengths[i], plain.finishes.get(i, "stop")) for i, value in plain.values.items()}
    assert again == shaped.shaped
    assert statistics(list(again.values())) == (shaped.mean, shaped.std, shaped.all_equal)


def test_contradictions_in_the_configuration_are_named() -> None:
    def process() -> DataflowProcess:
        return DataflowProcess(run_id="r", run_dir="d")

    one_sample = process()
    one_sample.workflow.n_samples = 1
    with pytest.raises(ConfigError, match="n_samples"):
        one_sample.validate()
    one_sample.group_relative = {"default": False}
    one_sample.validate()
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
