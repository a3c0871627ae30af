"""The fsdp backend with a GPU per rank, over NCCL: near the local backend's steps on the CPU."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "flow"))
import trainer_ranks

from astraflow.launch.ranks import run_ranks
from astraflow.trainer.backends.local import LocalBackend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]
LAYOUTS = {1: [{}], 2: [{}, {"tensor": 2}, {"context": 2}], 4: [{"replicate": 2}, {"tensor": 2}]}
RANK = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import trainer_ranks
from astraflow.trainer.ranks import Ranks
from astraflow.trainer.backends.fsdp import FsdpBackend
config = trainer_ranks.config_of("m2po", int(sys.argv[3]), **json.loads(sys.argv[4]))
config.backend = "fsdp"
ranks = Ranks.join(config)
backend = trainer_ranks.backend_of(FsdpBackend, config, Path(sys.argv[2]))
metrics = [backend.train_step(trainer_ranks.batch_of(step), lambda: None) for step in range(trainer_ranks.STEPS)]
words = {name: tensor.full_tensor().cpu() for name, tensor in backend.published()}
if ranks.leads:
    from safetensors.torch import save_file
    save_file(words, Path(sys.argv[2]) / "words.safetensors")
    (Path(sys.argv[2]) / "metrics.json").write_text(json.dumps(metrics))
ranks.close()
"""


@pytest.mark.parametrize(("count", "layout"), [(count, layout) for count, layouts in LAYOUTS.items() for layout in layouts])
def test_steps_on_gpus_are_those_of_the_local_backend(count: int, layout: dict[str, int], tmp_path: Path) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"{count} GPUs are needed, {torch.cuda.device_count()} are visible")
    from safetensors.torch import load_file

    trainer_ranks.helpers().write_tiny_model(tmp_path / "model")
    local = trainer_ranks.backend_of(LocalBackend, trainer_ranks.config_of("m2po"), tmp_path)
    expected = [local.train_step(trainer_ranks.batch_of(step), lambda: None) for step in range(trainer_ranks.STEPS)]
    flow = str(Path(trainer_ranks.__file__).parent)
    argv = [sys.executable, "-c", RANK, flow, str(tmp_path), str(count), json.dumps(layout)]
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # fp32 products as the CPU makes them
    assert run_ranks(argv, count) == (0, "")
    found = json.loads((tmp_path / "metrics.json").read_text())
    for step, wanted in enumerate(expected):
        for name in ("loss/policy", "policy/grad_norm", "policy/entropy", "loss/kl"):
            assert found[step][name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-4), (step, name)
    words = load_file(tmp_path / "words.safetensors")
    for name, tensor in local.published():
        assert (words[name] - tensor).abs().max() <= 2**-7 * tensor.abs().max(), name
