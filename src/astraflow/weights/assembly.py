"""From the bytes of a transfer to a verified draft: in full, or as deltas on the held file, while the bytes still come in.

Both follow the transfer's verified beginning (`fetch.py`) and hash what is final in the order of the layout, so that the digest over
all tensors is known when the last byte has come. Patching goes block by block: a block of the held file is read, patched,
written to the draft and hashed while it is still in the cache; the whole model is never in this process's own memory.
"""

from __future__ import annotations

from typing import Protocol

import xxhash

from astraflow.protocol.errors import DigestMismatch
from astraflow.protocol.weights import TransferTicket
from astraflow.weights.chain import Patcher
from astraflow.weights.layout import Layout, digest_of
from astraflow.weights.staging import Draft

BUFFER = 1 << 20
"""Bytes that are read back and hashed at a time."""


class Assembly(Protocol):
    """Takes a transfer's bytes (`write`, from several threads), works on what is there (`follow`) and ends with a verified draft."""

    draft: Draft

    def write(self, offset: int, data: memoryview) -> None: ...

    def follow(self, ready: int) -> None: ...

    def verify(self) -> None: ...


class RunningDigest:
    """`layout.digest` of bytes that come in the order of the layout."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._hashes: list[bytes] = []
        self._running = xxhash.xxh3_128()
        self.at = 0
        """Bytes so far."""

    def update(self, data: memoryview) -> None:
        """The next bytes."""
        while data:
            t = self._layout.tensors[len(self._hashes)]
            part = data[: t.offset + t.size_bytes - self.at]
            self._running.update(part)
            self.at += len(part)
            data = data[len(part) :]
            self._close()

    def _close(self) -> None:
        """Book every tensor that is complete."""
        tensors = self._layout.tensors
        while len(self._hashes) < len(tensors) and self.at >= (t := tensors[len(self._hashes)]).offset + t.size_bytes:
            self._hashes.append(self._running.digest())
            self._running.reset()

    def hexdigest(self) -> str:
        """Of all bytes; every one must have come."""
        self._close()
        assert len(self._hashes) == len(self._layout.tensors)
        return digest_of(self._layout, self._hashes)


class InFull:
    """The transfer is the half itself."""

    def __init__(self, draft: Draft, ticket: TransferTicket) -> None:
        self.draft = draft
        self._version, self._digest = ticket.version, ticket.digest
        self._running = RunningDigest(draft.layout)
        self._buffer = memoryview(bytearray(BUFFER))

    def write(self, offset: int, data: memoryview) -> None:
        """Straight into the draft."""
        self.draft.write(offset, data)

    def follow(self, ready: int) -> None:
        """Hash as far as the bytes are verified: read back, because streams fill several places at once."""
        while self._running.at < ready:
            part = self._buffer[: min(BUFFER, ready - self._running.at)]
            self.draft.read(self._running.at, part)
            self._running.update(part)

    def verify(self) -> None:
        """Raise DigestMismatch unless the draft has the published bytes."""
        _compare(self._version, self._digest, self._running)


class Patched:
    """The transfer is a chain of deltas that starts at the draft's base."""

    def __init__(self, draft: Draft, ticket: TransferTicket, threads: int) -> None:
        self.draft = draft
        self._version, self._digest = ticket.version, ticket.digest
        self._payload = memoryview(bytearray(ticket.size_bytes))
        self._running = RunningDigest(draft.layout)
        self._patcher = Patcher(draft.layout, ticket.links, self._payload, draft.read_base, draft.read, self._patched, threads)

    def write(self, offset: int, data: memoryview) -> None:
        """Deltas are small: they are kept until they are applied."""
        self._payload[offset : offset + len(data)] = data

    def follow(self, ready: int) -> None:
        """Apply every block that is complete. Raises DigestMismatch for what is no delta."""
        self._patcher.advance(ready)

    def _patched(self, offset: int, data: memoryview, final: bool) -> None:
        self.draft.write(offset, data)
        if final:
            self._running.update(data)

    def verify(self) -> None:
        """Raise DigestMismatch unless the draft has the published bytes."""
        if not self._patcher.done:
            raise DigestMismatch(f"delta to version {self._version}: cut off")
        _compare(self._version, self._digest, self._running)


def _compare(version: int, digest: str, running: RunningDigest) -> None:
    got = running.hexdigest()
    if got != digest:
        raise DigestMismatch(f"version {version}: digest {got} of the staged bytes, {digest} was published")
