"""The model directory that a foreign server reads: our config.json, the model's tokenizer, and a link to the staged weights.

Tied models are served untied: some servers load a tied model's new embedding and silently keep the old output matrix. The staged
file then holds the tied tensors a second time (`weights.export_tied`), and config.json says that nothing is tied.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import safetensors

from astraflow.protocol.errors import ConfigError
from astraflow.raas.engines.base import EngineError, Weights

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".gguf")
TIED = "tie_word_embeddings"


class ServedModel:
    """One directory, made anew at each start of the rollout service; the weights behind its link change."""

    def __init__(self, path: Path, model_dir: Path, architecture: dict[str, Any], *, untie: bool) -> None:
        """Raises ConfigError without a readable config.json."""
        self.path, self._untie = path, untie
        try:
            config = {**json.loads((model_dir / CONFIG).read_text(encoding="utf-8")), **architecture}
        except (OSError, ValueError) as error:
            raise ConfigError(f"{model_dir / CONFIG}: {error}") from None
        for part in (config, config.get("text_config")) if untie else ():
            if isinstance(part, dict):
                part[TIED] = False
        path.mkdir(parents=True, exist_ok=True)
        for entry in path.iterdir():
            entry.unlink()
        for entry in model_dir.iterdir():
            if entry.is_file() and entry.name != CONFIG and not entry.name.endswith(WEIGHT_FILES):
                (path / entry.name).symlink_to(entry.resolve())
        (path / CONFIG).write_text(json.dumps(config, indent=1), encoding="utf-8")

    def link(self, weights: Weights | None) -> None:
        """Put these weights in place (None = there are none yet). Blocking. Raises EngineError(load_failed) for what cannot be served."""
        target = self.path / WEIGHTS
        if weights is None:
            target.unlink(missing_ok=True)
            return
        self._check(Path(weights.path))
        fresh = target.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(Path(weights.path).resolve())
        os.replace(fresh, target)

    def _check(self, path: Path) -> None:
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                names, tied = set(file.keys()), json.loads((file.metadata() or {}).get("astraflow.tied", "{}"))
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise EngineError("load_failed", f"{path}: {error}") from None
        missing = [alias for alias in tied if alias not in names]
        if self._untie and missing:
            raise EngineError("load_failed", f"{path}: {', '.join(missing)} is not in it; this engine needs weights.export_tied: true")
        if any(".lora_" in name for name in names):
            raise EngineError("load_failed", f"{path}: adapters alone; this engine needs weights.lora: merged")
