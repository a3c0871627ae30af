"""Configurations are written down and shown, so they hold no secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from astraflow.config.experiment import load_experiment
from astraflow.protocol.errors import ConfigError


def test_a_value_that_looks_like_a_secret_is_refused_by_its_path_and_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    for text in (
        "raas: {engine: {options: {env: {HF_TOKEN: hf-1234567}}}}", "workflow: {options: {tools: [{api-key: hf-1234567}]}}",
        "launch: {token: hf-1234567}", "raas: {engine: {options: {url: 'http://me:hf-1234567@host:1/v1'}}}",
    ):  # fmt: skip
        file.write_text(f"experiment: {{name: x}}\n{text}\n")
        with pytest.raises(ConfigError, match=r"^[a-z]+(\.\w[\w-]*)+: looks like a secret.*environment variable.*recipe.yaml:2") as refused:
            load_experiment([file])
        assert "1234567" not in str(refused.value)
    options = "{generation: {max_new_tokens: 4}, engine: {options: {key_variable: MY_KEY, token_s: 1, env: {HF_TOKEN: ''}}}}"
    file.write_text(f"experiment: {{name: x}}\nraas: {options}\n")
    with pytest.raises(ConfigError, match=r"^models: required"):
        load_experiment([file])
