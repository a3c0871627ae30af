"""Durable training state: one directory per step, complete or not there at all.

    <run_dir>/checkpoints/<model_id>/step-00000010/{state.safetensors, checkpoint.json}

Tensors go to a safetensors file, everything else to JSON, the size and xxh3-128 of the tensors among it: nothing is unpickled, and
a damaged file is never trained on. A directory is written under a hidden name,
synced and renamed. Writing runs in a thread and reads the live tensors without a copy: they only change inside an optimizer step,
and `wait` (the backend's `before_update`) holds that step back until the file is written. On a laptop a step's forward and
backward pass hide the writing.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import struct
import threading
import time
from pathlib import Path
from typing import Any

import torch
import xxhash

from astraflow.protocol.errors import AstraFlowError, ConfigError
from astraflow.trainer.backends.base import TrainState
from astraflow.trainer.config import CheckpointConfig

logger = logging.getLogger(__name__)

FORMAT = 1
NAME = re.compile(r"step-(\d{8})")
DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
WRITE_BYTES = 16 << 20
"""Piece of a tensor per write call: large enough to be cheap, small enough to let other threads run."""


class DamagedCheckpoint(AstraFlowError):
    """A checkpoint whose files do not hold what was written."""


class Checkpoints:
    """The checkpoints of one policy."""

    def __init__(self, directory: Path, config: CheckpointConfig, run_id: str):
        self.directory = directory
        self.config = config
        self.run_id = run_id
        self.durable = -1
        """Newest version that is safely on disk; −1 = none."""
        self.seconds = 0.0
        """Writing time of the last one."""
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def save(self, version: int, state: TrainState, values: dict[str, Any]) -> None:
        """Begin to write; returns at once. `state.tensors` must not change before `wait` returns."""
        self.wait()
        plain = {"format": FORMAT, "run_id": self.run_id, "version": version, "backend": state.values, "loop": values}
        text = json.dumps(plain)  # in this thread: the values may change as soon as we return
        tensors = dict(state.tensors)
        self._thread = threading.Thread(target=self._write, args=(version, tensors, text), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until the last `save` is durable. Raises the OSError that stopped it (a full disk must not pass silently)."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(self, version: int, tensors: dict[str, torch.Tensor], text: str) -> None:
        begin = time.monotonic()
        try:
            target = self.directory / f"step-{version:08d}"
            staging = self.directory / f".{target.name}.{os.getpid()}.tmp"
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
            size, digest = write_safetensors(staging / "state.safetensors", tensors)
            sealed = json.loads(text) | {"tensors": {"size_bytes": size, "xxh3_128": digest}}
            _write_synced(staging / "checkpoint.json", json.dumps(sealed).encode("utf-8"))
            shutil.rmtree(target, ignore_errors=True)  # of a dead timeline: the same step, trained again
            os.replace(staging, target)
            _sync_directory(self.directory)
            self.durable = version
            self._retire(version)
            self.seconds = time.monotonic() - begin
        except OSError as error:
            self._error = error

    def _retire(self, version: int) -> None:
        """Delete what is older than the `keep` newest, and what a dead timeline left above `version`."""
        found = self.complete()
        old = [step for step in found if step <= version]
        for step in [*old[: -self.config.keep], *(step for step in found if step > version)]:
            shutil.rmtree(self.directory / f"step-{step:08d}", ignore_errors=True)
        for leftover in self.directory.glob(".step-*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)

    def complete(self) -> list[int]:
        """Versions of the complete checkpoints, ascending."""
        if not self.directory.is_dir():
            return []
        names = (NAME.fullmatch(entry.name) for entry in self.directory.iterdir())
        return sorted(int(match[1]) for match in names if match and (self.directory / match[0] / "checkpoint.json").is_file())

    def load_newest(self) -> tuple[int, TrainState, dict[str, Any]] | None:
        """(version, backend state, loop values) of the newest complete checkpoint that is whole, or None.

        With `resume: false` checkpoints of other runs are ignored; a supervised restart of this run continues all the same.
        A damaged one is passed over with a warning. Raises ConfigError when all are damaged, or one is of another format.
        """
        damaged = []
        for version in reversed(self.complete()):
            path = self.directory / f"step-{version:08d}"
            try:
                plain = _plain(path)
                if not self.config.resume and plain["run_id"] != self.run_id:
                    return None
                state = TrainState(_whole_tensors(path / "state.safetensors", plain["tensors"]), plain["backend"])
                found = version, state, plain["loop"]
            except (DamagedCheckpoint, KeyError) as error:
                damaged.append(f"{path}: damaged checkpoint: {error}")
                logger.warning("%s", damaged[-1])
                continue
            self.durable = version
            return found
        if damaged:
            raise ConfigError(f"{damaged[0]}; no other is whole (to begin anew, remove {self.directory})")
        return None


def _plain(path: Path) -> dict[str, Any]:
    """checkpoint.json of a checkpoint. Raises DamagedCheckpoint, or ConfigError for another format."""
    try:
        plain = json.loads((path / "checkpoint.json").read_bytes())
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"checkpoint.json: {error}") from None
    if not isinstance(plain, dict):
        raise DamagedCheckpoint("checkpoint.json: not an object")
    if plain.get("format") != FORMAT:
        raise ConfigError(f"{path}: checkpoint format {plain.get('format')!r}, this version reads {FORMAT}")
    return plain


def _whole_tensors(path: Path, sealed: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors, after their bytes were compared with what was written. Raises DamagedCheckpoint."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        with path.open("rb") as file:
            size, digest = os.fstat(file.fileno()).st_size, xxhash.xxh3_128()
            while piece := file.read(WRITE_BYTES):
                digest.update(piece)
        if (size, digest.hexdigest()) != (sealed["size_bytes"], sealed["xxh3_128"]):
            wrote = f"{sealed['size_bytes']} bytes with xxh3-128 {sealed['xxh3_128']}"
            raise DamagedCheckpoint(f"{path.name}: {size} bytes with xxh3-128 {digest.hexdigest()}, written were {wrote}")
        return load_file(path)
    except (OSError, SafetensorError, TypeError) as error:
        raise DamagedCheckpoint(f"{path.name}: {error}") from None


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> tuple[int, str]:
    """Stream CPU tensors into a synced safetensors file without a second copy in memory; its size in bytes and xxh3-128."""
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
    head = json.dumps(header).encode("utf-8")
    head += b" " * (-len(head) % 8)
    digest = xxhash.xxh3_128()
    with path.open("wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(struct.pack("<Q", len(head)) + head), digest)
        for tensor in tensors.values():
            if tensor.numel():
                raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
                _write_all(file.fileno(), memoryview(raw.numpy().data), digest)
        os.fsync(file.fileno())
    return 8 + len(head) + offset, digest.hexdigest()


def _write_all(descriptor: int, data: memoryview, digest: xxhash.xxh3_128) -> None:
    for low in range(0, len(data), WRITE_BYTES):
        piece = data[low : low + WRITE_BYTES]
        digest.update(piece)
        while len(piece):
            piece = piece[os.write(descriptor, piece) :]


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
