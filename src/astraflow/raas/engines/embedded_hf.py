"""Any other causal language model, computed by its Hugging Face class: right, and slow.

The class brings its own attention, so there is no common key-value store: every step runs each sequence from its first token, in
one right-padded batch per step. Good enough to try an architecture; a model that is trained for long belongs in `embedded_model`
or behind a vLLM server. Everything else (admission, stamps, sampling, in-place loads) is the same.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from astraflow.protocol.errors import ConfigError
from astraflow.raas.engines.embedded_arch import read_json, unsupported
from astraflow.raas.engines.embedded_batch import Move, Resize, Segment, Sequence
from astraflow.raas.engines.embedded_weights import check_layout, open_tensors


class NoStore:
    """Keeps no keys. Sequences count as computed all the same: it is the forward that starts from the first token each time."""

    def resize(self, change: Resize) -> None: ...

    def move(self, change: Move) -> None: ...

    def clean(self) -> None: ...

    def read(self, sequence: Sequence, start: int, end: int) -> torch.Tensor:
        return torch.empty(0, end - start, 0)

    def write(self, sequences: list[Sequence], start: int, end: int, words: torch.Tensor) -> None: ...


class HFWeights:
    """The parameters of a Hugging Face model under their own names; tied ones count once."""

    def __init__(self, module: Any) -> None:
        self.by_name: dict[str, torch.Tensor] = {name: parameter.data for name, parameter in module.named_parameters()}
        self._tied = {name for name, _ in module.named_parameters(remove_duplicate=False)} - set(self.by_name)

    @torch.inference_mode()
    def load(self, path: Path) -> None:
        """As `Weights.load`: everything is checked before anything is copied. Raises LayoutMismatch."""
        with open_tensors(path) as files:
            known = {name: file for name, file in files.items() if name not in self._tied}
            check_layout({name: tuple(tensor.shape) for name, tensor in self.by_name.items()}, known, path)
            for name, target in self.by_name.items():
                target.copy_(files[name].get_tensor(name))


class HFModel:
    """The same face as `embedded_model.Model`."""

    def __init__(self, model_dir: Path, dtype: torch.dtype, device: torch.device) -> None:
        import transformers  # only for models that need it: it would double the child's start

        reason = unsupported(read_json(model_dir / "config.json"))
        try:
            config = transformers.AutoConfig.from_pretrained(model_dir)
            auto: Any = transformers.AutoModelForCausalLM
            module = auto.from_config(config, dtype=dtype)
        except (ValueError, KeyError, OSError) as error:
            message = " ".join(str(error).split())[:300]
            text = f"the embedded engine does not know {reason}, nor does transformers: {message}"
            raise ConfigError(f"model_dir: {model_dir}: {text}") from None
        print(f"engine: {reason}: computed by transformers without a key-value cache, slowly", file=sys.stderr, flush=True)  # noqa: T201
        self.device = device
        self._module: Any = module.to(device).eval()
        self.weights = HFWeights(self._module)
        self.kv = NoStore()
        self.vocab_size: int = config.get_text_config().vocab_size
        self.context_length: int = getattr(config.get_text_config(), "max_position_embeddings", 2048)
        self.kv_token_bytes = 0

    @torch.inference_mode()
    def forward(self, segments: list[Segment]) -> torch.Tensor:
        """Float32 logits [segments with `ends`, vocabulary]."""
        rows = [segment.ends[0].tokens for segment in segments if segment.ends]
        if not rows:
            return torch.empty(0, self.vocab_size)
        width = max(map(len, rows))
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self.device)
        lengths = torch.tensor(list(map(len, rows)), device=self.device)
        mask = torch.arange(width, device=self.device) < lengths[:, None]
        logits: torch.Tensor = self._module(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
        return logits[torch.arange(len(rows), device=self.device), lengths - 1].float()
