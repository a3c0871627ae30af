"""The book of open transfers, without sockets."""

from __future__ import annotations

import asyncio

import pytest

from astraflow.protocol.errors import BadMessage, Conflict, Unavailable
from astraflow.weights.buffer import HalfSwitch, Held
from astraflow.weights.chain import Chain
from astraflow.weights.delta import Delta
from astraflow.weights.transfers import Transfer, TransferBook


def made(most: int = 3) -> tuple[TransferBook, HalfSwitch]:
    switch = HalfSwitch([Held(1, "a"), Held(2, "b")], newest=1)
    return TransferBook(switch, most), switch


def opened(book: TransferBook, name: str, half: int = 0) -> Transfer:
    return book.open(name, half + 1, half, 1000, None, 0.0)


def test_a_transfer_holds_its_half_from_ticket_to_verdict() -> None:
    """Fault 6: size, version and half of a transfer are fixed together, and stay until its end."""
    book, switch = made()
    transfer = opened(book, "r")
    switch.claim(0, 1.0, 5.0)
    assert not switch.may_write()
    book.done("r", transfer.id, ok=True, now=3.0)
    assert switch.may_write()
    assert book.receivers["r"] == {"full_transfers": 1, "full_bytes": 1000, "full_s": 3.0}
    with pytest.raises(Conflict):
        book.done("r", transfer.id, ok=True, now=3.0)


def test_only_its_own_receiver_may_end_a_transfer() -> None:
    book, _ = made()
    transfer = opened(book, "r")
    with pytest.raises(Conflict):
        book.done("somebody else", transfer.id, ok=True, now=1.0)


def test_a_delta_holds_no_half_but_is_watched() -> None:
    book, switch = made()
    transfer = book.open("r", 2, 1, 3, Chain((Delta(1, "a", 2, "b", b"xyz", 1),)), 0.0)
    switch.claim(0, 0.0, 0.0)
    assert switch.may_write()
    assert switch.overdue(61.0, 60.0) == [transfer.id]
    book.end_overdue([transfer.id, "hash of half 0"])
    assert len(book) == 0
    assert book.counters == {"cancelled_transfers": 1.0}


def test_a_receiver_that_asks_again_replaces_its_transfer_and_there_is_a_limit() -> None:
    """Fault 7: the state of an old transfer is never taken for that of the new one; faults 34 and 38: the book is bounded."""
    book, switch = made(most=2)
    first = opened(book, "r")
    second = opened(book, "r")
    assert (len(book), switch.readers(0)) == (1, [second.id])
    with pytest.raises(Conflict):
        book.for_stream(first.id, 0, 10, 8, None)
    opened(book, "s")
    with pytest.raises(Unavailable):
        opened(book, "t")


def test_ranges_outside_of_the_transfer_are_refused() -> None:
    book, _ = made()
    transfer = opened(book, "r")
    assert book.for_stream(transfer.id, 990, 10, 8, None) is transfer
    for offset, length in ((-1, 5), (0, 0), (0, -1), (991, 10), (1000, 1), (0, 1 << 63)):
        with pytest.raises(BadMessage):
            book.for_stream(transfer.id, offset, length, 8, None)


def test_a_cancelled_half_is_free_only_when_the_last_stream_has_let_go() -> None:
    async def scene() -> None:
        book, switch = made()
        transfer = opened(book, "r")
        task = asyncio.get_running_loop().create_task(asyncio.sleep(60))
        transfer.streams.add(task)
        switch.claim(0, 0.0, 1.0)
        book.end_overdue(switch.overdue(1.0, 60.0))
        assert not switch.may_write()
        assert book.cancelled_for_writer == 1
        with pytest.raises(asyncio.CancelledError):
            await task
        book.stream_ended(transfer, task)
        assert switch.may_write()

    asyncio.run(scene())
