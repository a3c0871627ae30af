"""The weights that the tool has to give: a model of the right shapes with random words, served by our own sender agent."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from astraflow.lib.wire import Identity
from astraflow.protocol.errors import ConfigError
from astraflow.weights.config import WeightsConfig

CHANGE = 1e-3
"""Deviation of what every version adds to the weights: far above a bf16 rounding for many of them."""


class PlayedSender:
    """One model. Needs torch and transformers (the extra `train`)."""

    def __init__(self, model_dir: str, model_id: str, host: str, identity: Identity) -> None:
        """Raises ConfigError for a directory without a readable config.json."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from astraflow.weights.manager import WeightManager

        torch.manual_seed(0)
        try:
            architecture = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--model {model_dir!r}: expected a Hugging Face model directory: {error}") from None
        self._model: Any = AutoModelForCausalLM.from_config(architecture)  # type: ignore[no-untyped-call]
        self._directory = tempfile.TemporaryDirectory()
        self._weights = WeightManager(model_id, WeightsConfig(host=host), identity, Path(self._directory.name))
        self.digests: dict[int, str] = {}

    def publish(self, version: int) -> str:
        """The digest of a further version, once it can be pulled."""
        import torch

        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=CHANGE)
        self._weights.offload(self._model.named_parameters(remove_duplicate=False), version)
        self.digests[version] = self._weights.published(version)
        return self.digests[version]

    @property
    def endpoint(self) -> str:
        """http address of the agent."""
        return self._weights.endpoint

    @property
    def verified_transfers(self) -> float:
        """Transfers that a receiver reported as staged and verified."""
        stats = self._weights.stats()
        return stats["weights/full_transfers"] + stats["weights/delta_transfers"]

    def close(self) -> None:
        """End the agent."""
        self._weights.close()
        self._directory.cleanup()
