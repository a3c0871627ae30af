"""Staged files appear whole or not at all."""

from __future__ import annotations

import mmap
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open

from astraflow.protocol.errors import WeightError
from astraflow.weights import layout
from astraflow.weights.staging import Staging

SHAPE = layout.build([("w", (100, 32), "BF16"), ("b", (7,), "F32")])


def place(staging: Staging, version: int, byte: int, base: Path | None = None) -> Path:
    draft = staging.draft(SHAPE, export_tied=False)
    draft.create(base)
    data = memoryview(bytearray(bytes([byte]) * SHAPE.size_bytes))
    if base is not None:
        draft.read_base(1, data[1:])
    draft.write(0, data)
    draft.finish(version, f"{byte:02x}" * 16)
    return staging.place(draft, version, f"{byte:02x}" * 16)


def test_a_file_in_place_is_never_written_again(tmp_path: Path) -> None:
    """Fault 31: staged weights are replaced, never rewritten while an engine maps them."""
    staging = Staging(tmp_path, "policy")
    first = place(staging, 1, 0xAA)
    before = first.read_bytes()
    with open(first, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        second = place(staging, 2, 0xBB, base=first)
        again = place(staging, 1, 0xAA)
        assert again == first
        staging.clean({second})
        assert not first.exists()
        assert mapped[:] == before, "an engine that maps the old file keeps its bytes"
    assert second.read_bytes()[-SHAPE.size_bytes :] == b"\xbb" + before[-SHAPE.size_bytes + 1 :]
    with safe_open(second, "np") as opened:
        assert int(opened.metadata()["astraflow.version"]) == 2
    assert [entry.name for entry in staging.directory.iterdir()] == ["v2-bbbbbbbb"]


def test_a_failed_draft_and_an_earlier_process_leave_nothing(tmp_path: Path) -> None:
    staging = Staging(tmp_path, "policy")
    kept = place(staging, 1, 1)
    draft = staging.draft(SHAPE, export_tied=False)
    draft.create(kept)
    staging.discard(draft)
    assert list(staging.directory.iterdir()) == [kept.parent]
    assert list(Staging(tmp_path, "policy").directory.iterdir()) == [], "nothing of an earlier process is used"


def test_a_base_of_another_size_is_a_weight_error(tmp_path: Path) -> None:
    staging = Staging(tmp_path, "policy")
    (tmp_path / "short").write_bytes(b"x" * 100)
    draft = staging.draft(SHAPE, export_tied=False)
    with pytest.raises(WeightError, match="staging"):
        draft.create(tmp_path / "short")
    staging.discard(draft)
    assert list(staging.directory.iterdir()) == []


def test_a_model_id_cannot_leave_its_directory(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.touch()
    names = ("policy", "../../etc", "a/b", "a_b", "..", ".", "", ".hidden")
    places = [Staging(tmp_path / "root", name).directory for name in names]
    assert {place.parent for place in places} == {tmp_path / "root"}
    assert len(set(places)) == len(names), "no two models share one"
    assert all(place.exists() for place in (*places, outside))


def test_a_directory_that_was_removed_is_made_again_and_one_that_cannot_be_is_a_weight_error(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "root", "policy")
    shutil.rmtree(tmp_path / "root")
    staging.clean(set())
    assert place(staging, 1, 0x11).exists()
    shutil.rmtree(tmp_path / "root")
    (tmp_path / "root").write_text("a file")
    with pytest.raises(WeightError, match="staging in "):
        staging.clean(set())
    with pytest.raises(WeightError, match=f"staging {staging.draft(SHAPE, False).size_bytes} bytes in"):
        staging.draft(SHAPE, export_tied=False).create(None)
