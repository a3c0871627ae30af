"""The engine on a GPU against forwards with the published words: both compute dtypes, updates in the middle of sequences, its process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from astraflow.raas.engines.frames import LoadFailed
from astraflow.workflows.api import ModelRequest
from oracle import Published, errors, finish, rollouts, worst_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]

ERROR = {"float32": 1e-3, "bfloat16": 1.0}
"""Largest error of one log-prob: contract for float32; bf16 compute on a CPU came to 0.2, and wrong weights come to 10."""
MEAN = {"float32": 1e-4, "bfloat16": 0.04}
"""Over all tokens; bf16 compute on a CPU came to 0.02, a kept cache to 0.25."""


@pytest.fixture(scope="module")
def three_versions(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(tmp_path_factory.mktemp("versions"), versions=3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen3 tied", "llama biases, llama3 rope", "qwen2"])
def test_every_token_has_the_log_prob_of_its_own_version(tmp_path: Path, name: str, dtype: str) -> None:
    published = Published(tmp_path, name, versions=3)
    core = published.core(device="cuda", dtype=dtype)
    assert (core.device.type, core.dtype) == ("cuda", getattr(torch, dtype))
    assert core.model.weights.norm.is_cuda
    done = rollouts(core, published)
    assert core.counts["recomputed_tokens"] > 500, "updates came in the middle of sequences"
    assert core.counts["prefix_hit_tokens"] > 2000
    assert any(len(set(response.versions)) == 2 for _, response in done)
    found = errors(published, done, list)
    assert len(found) > 2000
    assert (found.max().item() < ERROR[dtype], found.mean().item() < MEAN[dtype]) == (True, True), (found.max(), found.mean())
    # The mutant of the oracle: stamps that are one token late.
    assert worst_error(published, done, lambda stamps: [stamps[0], *stamps[:-1]]) > 2 * ERROR[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_kept_cache_fails_the_oracle(three_versions: Published, dtype: str) -> None:
    done = rollouts(three_versions.core(device="cuda", dtype=dtype, kv_on_update="keep"), three_versions)
    assert errors(three_versions, done, list).mean() > 2 * MEAN[dtype]


def test_chunked_prefill_and_a_crowded_cache_change_nothing(three_versions: Published) -> None:
    core = three_versions.core(device="cuda", dtype="float32", prefill_tokens=13, prefix_cache_bytes=40 * 512)
    assert worst_error(three_versions, rollouts(core, three_versions), list) < ERROR["float32"]


def test_a_gpu_and_its_own_dtype_are_the_default(three_versions: Published) -> None:
    core = three_versions.core(device="auto")
    assert (core.device.type, core.dtype) == ("cuda", torch.bfloat16)


def test_a_failed_load_leaves_the_old_weights_serving(three_versions: Published, tmp_path: Path) -> None:
    core = three_versions.core(device="cuda", dtype="float32")
    request = ModelRequest(input_ids=[5, 6, 8], max_new_tokens=6, greedy=True)
    assert core.submit("before", request) is None
    before = finish(core)["before"]
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 64)
    answer = core.load(str(tmp_path / "broken.safetensors"), timeline=1, version=9, digest="x")
    assert isinstance(answer, LoadFailed)
    assert core.submit("after", request) is None
    after = finish(core)["after"]
    assert (after.output_ids, after.versions) == (before.output_ids, [0] * 6)
    assert worst_error(three_versions, [(request, after)], list) < ERROR["float32"]


def test_loads_do_not_grow_the_memory(three_versions: Published) -> None:
    core = three_versions.core(device="cuda", dtype="float32")
    rollouts(core, three_versions)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for version in (0, 1, 2, 0, 1, 2):
        three_versions.load(core, version)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before, "weights are replaced in place"
