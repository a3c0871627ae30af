"""Durable training state: one directory per step, complete or not there at all.

    <run_dir>/checkpoints/<model_id>/step-00000010/{state-1-of-2.safetensors, state-2-of-2.safetensors, checkpoint.json}

Every rank writes the rows that it holds to a safetensors file of its own, in the layout of torch's distributed checkpoints (DCP) on
Hugging Face storage, which is also what reads them: any number of ranks may go on, in any layout. Everything that is no tensor goes
to JSON, the size and xxh3-128 of each file among it: nothing is unpickled, and a damaged file is never trained on. A directory is
written under a hidden name, synced and renamed.

Writing runs in a thread and reads the live tensors without a copy: they only change inside an optimizer step, and `wait` (the
backend's `before_update`) holds that step back until the file is written. A step's forward and backward pass hide the writing.
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
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from astraflow.protocol.errors import AstraFlowError, ConfigError, RemoteError
from astraflow.trainer.backends.base import TrainState, check_shapes
from astraflow.trainer.config import CheckpointConfig
from astraflow.trainer.ranks import Ranks

T = TypeVar("T")

logger = logging.getLogger(__name__)

FORMAT = 2
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


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk that is whole."""

    version: int
    path: Path
    backend: dict[str, Any]
    """Plain values of the backend's state."""
    loop: dict[str, Any]


class Checkpoints:
    """The checkpoints of one policy, seen from one rank. With several ranks all of them make the same calls."""

    def __init__(self, directory: Path, config: CheckpointConfig, run_id: str, ranks: Ranks | None = None):
        self.directory = directory
        self.config = config
        self.run_id = run_id
        self.durable = -1
        """Newest version that is safely on disk; −1 = none."""
        self.seconds = 0.0
        """Writing time of the last one."""
        self._ranks = (ranks or Ranks()).apart()
        self._thread: threading.Thread | None = None
        self._error: OSError | RemoteError | None = None

    def save(self, version: int, state: TrainState, values: dict[str, Any]) -> None:
        """Begin to write; returns at once. `state.tensors` must not change before `wait` returns."""
        self.wait()
        plain = {"format": FORMAT, "run_id": self.run_id, "version": version, "backend": state.values, "loop": values}
        text = json.dumps(plain)  # in this thread: the values may change as soon as we return
        tensors = dict(state.tensors)
        self._thread = threading.Thread(target=self._write, args=(version, tensors, text), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until the last `save` is durable. Raises the OSError that stopped it (a full disk must not pass silently), RemoteError when
        that was another rank's.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(self, version: int, tensors: dict[str, torch.Tensor], text: str) -> None:
        begin = time.monotonic()
        target = self.directory / f"step-{version:08d}"
        staging = self.directory / f".{target.name}.tmp"
        try:
            self._together(lambda: self._begin(staging))
            file = f"state-{self._ranks.rank + 1}-of-{self._ranks.size}.safetensors"
            sealed = self._together(lambda: [file, *write_safetensors(staging / file, tensors)])
            self._together(lambda: self._finish(staging, target, json.loads(text) | {"files": sealed}))
            self.durable = version
            self.seconds = time.monotonic() - begin
        except (OSError, RemoteError) as error:
            self._error = error

    def _together(self, part: Callable[[], T]) -> list[T]:
        """Do a part on every rank; the results of all. Raises on all ranks when one fails: its own error there, RemoteError elsewhere."""
        failure: OSError | None = None
        told: dict[str, Any] = {}
        try:
            told = {"done": part()}
        except OSError as error:
            failure, told = error, {"trouble": f"rank {self._ranks.rank}: {error}"}
        everybody = [json.loads(data) for data in self._ranks.exchange(json.dumps(told).encode("utf-8"))]
        if failure is not None:
            raise failure
        if trouble := "; ".join(each["trouble"] for each in everybody if "trouble" in each):
            raise RemoteError(f"checkpoint: {trouble}")
        return [each["done"] for each in everybody]

    def _begin(self, staging: Path) -> None:
        if self._ranks.leads:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)

    def _finish(self, staging: Path, target: Path, plain: dict[str, Any]) -> None:
        if self._ranks.leads:
            _write_synced(staging / "checkpoint.json", json.dumps(plain).encode("utf-8"))
            shutil.rmtree(target, ignore_errors=True)  # of a dead timeline: the same step, trained again
            os.replace(staging, target)
            _sync_directory(self.directory)
            self._retire(plain["version"])

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

    def newest(self) -> Saved | None:
        """The newest complete checkpoint that is whole, or None.

        With `resume: false` checkpoints of other runs are ignored; a supervised restart of this run continues all the same.
        A damaged one is passed over with a warning. Raises ConfigError when all are damaged, or one is of another format.
        """
        damaged = []
        for version in reversed(self._together(self.complete)[0]):
            path = self.directory / f"step-{version:08d}"
            if trouble := "; ".join(filter(None, self._together(partial(self._trouble, path)))):
                damaged.append(f"{path}: damaged checkpoint: {trouble}")
                logger.warning("%s", damaged[-1])
                continue
            plain = _plain(path)
            if self._is_foreign(plain):
                return None
            self.durable = version
            return Saved(version, path, plain["backend"], plain["loop"])
        if damaged:
            raise ConfigError(f"{damaged[0]}; no other is whole (to begin anew, remove {self.directory})")
        return None

    def _is_foreign(self, plain: dict[str, Any]) -> bool:
        return not self.config.resume and plain["run_id"] != self.run_id

    def _trouble(self, path: Path) -> str:
        """What is wrong with this rank's share of the files; empty = nothing."""
        try:
            plain = _plain(path)
            if not {"backend", "loop"} <= plain.keys():
                return "checkpoint.json: no values"
            return "" if self._is_foreign(plain) else _damage(path, plain["files"][self._ranks.rank :: self._ranks.size])
        except (DamagedCheckpoint, KeyError, TypeError) as error:
            return str(error)

    def fill(self, saved: Saved, into: dict[str, torch.Tensor]) -> None:
        """Overwrite tensors with the saved ones; of DTensors each rank reads its own rows. Raises ConfigError for another model's."""
        reader = HuggingFaceStorageReader(str(saved.path))
        whole: dict[str, Any] = reader.read_metadata().state_dict_metadata
        check_shapes({name: tuple(found.size) for name, found in whole.items()}, into)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "assuming the intent is to load in a single process": it is
            load(into, storage_reader=reader, process_group=self._ranks.group, no_dist=self._ranks.group is None)


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


def _damage(path: Path, files: list[tuple[str, int, str]]) -> str:
    """What is wrong with these (name, size, xxh3-128) files; empty = they hold what was written."""
    for name, wanted, written in files:
        digest = xxhash.xxh3_128()
        try:
            with (path / name).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                while piece := file.read(WRITE_BYTES):
                    digest.update(piece)
        except OSError as error:
            return f"{name}: {error}"
        if (size, digest.hexdigest()) != (wanted, written):
            return f"{name}: {size} bytes with xxh3-128 {digest.hexdigest()}, written were {wanted} bytes with xxh3-128 {written}"
    return ""


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> tuple[int, str]:
    """Stream the rows that this process holds into a synced safetensors file, without a second copy of more than one tensor; its size
    in bytes and xxh3-128. DTensors that several ranks hold are written by the first of them.
    """
    held = {name: part for name, tensor in tensors.items() if (part := _held(tensor)) is not None}
    offsets = {name: {SAVED_OFFSETS_KEY: list(offset)} for name, (_, offset) in held.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", CUSTOM_METADATA_KEY: json.dumps(offsets)}}
    end = 0
    for name, (tensor, _) in held.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    head = json.dumps(header).encode("utf-8")
    head += b" " * (-len(head) % 8)
    digest = xxhash.xxh3_128()
    with path.open("wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(struct.pack("<Q", len(head)) + head), digest)
        for tensor, _ in held.values():
            if tensor.numel():
                raw = tensor.contiguous().view(-1).view(torch.uint8).cpu()
                _write_all(file.fileno(), memoryview(raw.numpy().data), digest)
        os.fsync(file.fileno())
    return 8 + len(head) + end, digest.hexdigest()


def _held(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]] | None:
    """(rows of this rank, their offset in the whole tensor); None for rows that another rank writes, or none at all."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), (0,) * tensor.ndim
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    if any(place for place, placement in zip(coordinate, tensor.placements, strict=True) if isinstance(placement, Replicate)):
        return None
    rows = tensor.to_local().detach()
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    return (rows, tuple(offset)) if rows.numel() else None


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
