"""Which suite tests which service, and what each needs to be told."""

from __future__ import annotations

from typing import Any

from astraflow.config.processes import given_token
from astraflow.protocol.errors import ConfigError
from astraflow.tools.conformance import Suite


def make(service: str, url: str, token_file: str, host: str, settings: dict[str, Any]) -> Suite:
    """The suite of a service. Raises ConfigError for an unknown one, or one that lacks a setting."""
    token = given_token(token_file)
    if service == "dataflow":
        from astraflow.tools.conformance_dataflow import DataflowSuite

        return DataflowSuite(url, token, host, settings["batch_size"])
    if service == "raas":
        from astraflow.tools.conformance_raas import RaasSuite

        if not settings["model"]:
            raise ConfigError("conformance raas: --model DIR is needed, the directory of the Hugging Face model that the service serves")
        return RaasSuite(url, token, host, model=settings["model"], workflow=settings["workflow"], reward=settings["reward"])
    if service == "trainer":
        from astraflow.config.experiment import load_experiment
        from astraflow.config.processes import public_config
        from astraflow.tools.conformance_trainer import TrainerSuite

        return TrainerSuite(url, token, public_config(load_experiment([settings["config"]])) if settings["config"] else {})
    raise ConfigError(f"conformance {service!r}: expected dataflow, raas or trainer")
