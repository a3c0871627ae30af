"""The envelope that every message carries."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

PROTOCOL_VERSION = 1

Name = Annotated[str, Meta(max_length=512)]
"""An id, a name or a hash; a receiver keeps many of them."""
Url = Annotated[str, Meta(max_length=2048)]
"""`http://host:port` or `https://host:port`."""
Version = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""A weight version; −1 = none. Token columns hold versions as int32."""
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""How many, from 0."""
Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""A whole number that 64 bits hold: a larger one of a JSON body could not be sent on."""


class Message(msgspec.Struct, kw_only=True):
    """Base of every request and reply. The wire stamps these fields on sending and checks them on receipt."""

    protocol_version: int = PROTOCOL_VERSION
    """Refused with WrongProtocol when the receiver speaks another one."""
    run_id: Name = ""
    """The run this message belongs to; empty = not known yet (a peer learns it from `GET /status`). Another run's id is refused."""
    incarnation: Name = ""
    """Random id made at the start of the sending process: a process that returns at the same address is a new one."""


class Empty(Message, kw_only=True):
    """A request or reply with nothing to say."""


class ErrorReply(Message, kw_only=True):
    """Body of every reply whose HTTP status is not 200."""

    error: str
    """Class name in `protocol/errors.py`."""
    message: str
    """One line for people."""
