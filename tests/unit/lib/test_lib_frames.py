"""Frames between a process and its child: whole again however the stream is cut, and nonsense is refused."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.lib import frames
from astraflow.lib.frames import FrameReader, pack
from astraflow.protocol.errors import BadMessage


class Say(msgspec.Struct, tag="say"):
    text: str


class Stop(msgspec.Struct, tag="stop"):
    code: int = 0


class Other(msgspec.Struct, tag="other"):
    pass


Spoken = Say | Stop
SENT = st.lists(st.one_of(st.builds(Say, st.text(max_size=300)), st.builds(Stop, st.integers(0, 9))), max_size=6)


def reader() -> FrameReader[Any]:
    return FrameReader(Spoken, "test")


@given(SENT, st.integers(1, 60))
def test_frames_survive_any_cut_of_the_stream_and_every_way_to_read(sent: list[Spoken], step: int) -> None:
    wire = b"".join(map(pack, sent))
    fed, cut = reader(), [wire[at : at + step] for at in range(0, len(wire), step)]
    assert [frame for part in cut for frame in fed.feed(part)] == sent
    file, from_file = io.BytesIO(wire), reader()
    assert [from_file.read_file(file) for _ in sent] == sent
    assert from_file.read_file(file) is None, "the end of the file"

    async def streamed() -> list[Any]:
        stream, read = asyncio.StreamReader(), reader()
        for part in cut:
            stream.feed_data(part)
        return [await read.read(stream) for _ in sent]

    assert asyncio.run(streamed()) == sent


def test_what_the_caller_does_not_ask_for_stays() -> None:
    """A process takes its first frame, starts up, and reads the rest."""
    fed = reader()
    assert next(fed.feed(pack(Say("a")) + pack(Stop(1)) + pack(Stop(2))[:3])) == Say("a")
    assert list(fed.feed(pack(Stop(2))[3:])) == [Stop(1), Stop(2)]


def test_nonsense_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for wire, what in (
        (b"\xff" * 8, "test: a frame of 4294967295 bytes announced"),
        (pack(Other()), "test: Invalid value 'other'"),
        (pack(Stop())[:4] + b"\xc1" * 40, "test: "),
    ):
        with pytest.raises(BadMessage, match=what):
            list(reader().feed(wire))
        with pytest.raises(BadMessage, match=what):
            reader().read_file(io.BytesIO(wire))
    monkeypatch.setattr(frames, "MAX_BYTES", 100)
    with pytest.raises(BadMessage, match="frame Say: 1"):
        pack(Say("x" * 100))
