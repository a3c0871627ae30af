"""Anonymous shared memory, control frames and settings."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from astraflow.protocol.errors import WeightError
from astraflow.weights import frames
from astraflow.weights.config import ModelConfig, WeightsConfig
from astraflow.weights.memory import HalfMemory, available_bytes, require_room


def test_what_the_owner_writes_the_other_side_reads_and_cannot_change() -> None:
    owner = HalfMemory.create("test", 5000)
    other = HalfMemory(os.dup(owner.fd), 5000, writable=False)
    owner.half(0)[:3] = b"abc"
    owner.half(1)[-3:] = b"xyz"
    assert bytes(other.half(0)[:3]) == b"abc"
    assert bytes(other.half(1)[-3:]) == b"xyz"
    assert other.offset(1) % 4096 == 0
    with pytest.raises(TypeError):
        other.half(0)[0] = 1
    assert os.readlink(f"/proc/self/fd/{owner.fd}").startswith("/memfd:"), "it has no name that could be left behind"
    for memory in (owner, other):
        memory.close()
        memory.close()


def test_memory_that_is_not_there_is_refused_before_anything_is_reserved(tmp_path: Path) -> None:
    assert 0 < available_bytes() < 1 << 50
    # Only the question is tried: really reserving all memory would get other processes of this machine killed.
    for directory in (None, tmp_path, Path("/dev/shm")):
        with pytest.raises(WeightError, match=r"weights: \d+ bytes are needed and \d+ are available"):
            require_room(1 << 60, "weights", directory)
        require_room(1 << 12, "weights", directory)


def test_counters_are_added_by_name() -> None:
    assert frames.summed({"a": 1, "b": 2}, {"b": 3}, {}) == {"a": 1, "b": 5}


@pytest.mark.parametrize("field", ["streams", "chunk_bytes", "port", "attempts", "zstd_level", "hash_threads"])
def test_a_setting_out_of_range_is_named_with_the_accepted_ones(field: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=rf"weights\.{field}: -1 is outside"):
        msgspec.convert({field: -1}, WeightsConfig)


def test_unknown_settings_and_dtypes_are_refused() -> None:
    for wrong in ({"stream": 3}, {"dtype": "int8"}, {"streams": "six"}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, WeightsConfig)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({}, ModelConfig)


def test_no_torch_comes_in_with_the_torch_free_parts() -> None:
    import subprocess
    import sys

    parts = "config layout buffer delta codec sender receiver stream control shards node lora"
    code = "import sys; " + "; ".join(f"import astraflow.weights.{part}" for part in parts.split()) + "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=False).returncode == 0
