"""The envelope that every message carries."""

from __future__ import annotations

import msgspec

PROTOCOL_VERSION = 1


class Message(msgspec.Struct, kw_only=True):
    """Base of every request and reply. The wire stamps these fields on sending and checks them on receipt."""

    protocol_version: int = PROTOCOL_VERSION
    """Refused with WrongProtocol when the receiver speaks another one."""
    run_id: str = ""
    """The run this message belongs to; empty = not known yet (a peer learns it from `GET /status`). Another run's id is refused."""
    incarnation: str = ""
    """Random id made at the start of the sending process: a process that returns at the same address is a new one."""


class Empty(Message, kw_only=True):
    """A request or reply with nothing to say."""


class ErrorReply(Message, kw_only=True):
    """Body of every reply whose HTTP status is not 200."""

    error: str
    """Class name in `protocol/errors.py`."""
    message: str
    """One line for people."""
