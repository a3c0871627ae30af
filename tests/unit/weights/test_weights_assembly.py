"""What came is compared with what was published, whatever the checksums of its parts say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from astraflow.protocol.errors import DigestMismatch
from astraflow.protocol.weights import DeltaLink, TransferTicket
from astraflow.weights import delta, layout
from astraflow.weights.assembly import Assembly, InFull, Patched
from astraflow.weights.staging import Draft, Staging

SHAPE = layout.build([("w", (100, 32), "BF16"), ("b", (7,), "F32")])
OLD = np.random.default_rng(0).integers(0, 256, SHAPE.size_bytes, dtype=np.uint8)
NEW = OLD.copy()
NEW[::97] ^= 1


def digest(half: np.ndarray) -> str:
    return layout.digest(SHAPE, memoryview(half))


def draft(tmp_path: Path, base: np.ndarray | None = None) -> Draft:
    staging = Staging(tmp_path, "policy")
    held: Path | None = None
    if base is not None:
        first = staging.draft(SHAPE, export_tied=False)
        first.create(None)
        first.write(0, memoryview(base))
        first.finish(0, digest(base))
        held = staging.place(first, 0, digest(base))
    made = staging.draft(SHAPE, export_tied=False)
    made.create(held)
    return made


def ticket(size: int, **fields: object) -> TransferTicket:
    where = {"transfer_id": "t", "mode": "full", "chunk_bytes": 4096, "chunk_hashes": [], "stream_port": 1, "deadline_s": 9.0}
    return TransferTicket(version=1, digest=digest(NEW), size_bytes=size, **where, **fields)


def take(assembly: Assembly, data: bytes) -> None:
    assembly.write(0, memoryview(data))
    assembly.follow(len(data))
    assembly.verify()


def test_a_full_transfer_of_other_bytes_is_refused(tmp_path: Path) -> None:
    take(InFull(draft(tmp_path), ticket(SHAPE.size_bytes)), NEW.tobytes())
    for at in (0, SHAPE.size_bytes - 1):
        wrong = NEW.copy()
        wrong[at] ^= 0x40
        with pytest.raises(DigestMismatch, match="was published"):
            take(InFull(draft(tmp_path), ticket(SHAPE.size_bytes)), wrong.tobytes())


def patched(place: Draft, changes: int = 0) -> tuple[Patched, bytes]:
    encoded = delta.encode(SHAPE, memoryview(OLD), memoryview(NEW), delta.Coding(), lambda: False)
    assert encoded is not None
    payload, changed = encoded
    link = DeltaLink(
        base_version=0, base_digest=digest(OLD), version=1, digest=digest(NEW), size_bytes=len(payload), changed_elements=changed + changes
    )
    return Patched(place, ticket(len(payload), links=[link]), threads=1), payload


def test_a_right_delta_on_a_held_file_that_was_damaged_is_refused(tmp_path: Path) -> None:
    take(*patched(draft(tmp_path, OLD)))
    for at in (1, SHAPE.size_bytes - 2):  # where nothing changed and the delta has nothing to say
        damaged = OLD.copy()
        damaged[at] ^= 0x40
        with pytest.raises(DigestMismatch, match="was published"):
            take(*patched(draft(tmp_path, damaged)))


def test_a_delta_with_another_number_of_changes_than_announced_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DigestMismatch, match="announced"):
        take(*patched(draft(tmp_path, OLD), changes=1))
