"""The error tree.

    AstraFlowError
    ├── UserError (ValueError)          a mistake of the user: names the field, the value and what is accepted
    │   ├── ConfigError                 configuration file or override
    │   └── UnknownName                 a registry name that does not exist (names the closest)
    ├── ProtocolError                   a message that breaks the contract; never retried
    │   ├── BadMessage                  cannot be decoded, or a field is out of its range (path in the text)
    │   ├── WrongRun                    the message belongs to another run
    │   └── WrongProtocol               another protocol version
    ├── Refused                         an honest "no" of the receiver; never retried
    │   ├── AuthError                   token missing or wrong
    │   ├── TooLarge                    request over the limit
    │   └── Conflict                    the request does not fit the receiver's state
    │       └── Replaced                another process has taken the caller's place: it should end
    ├── Retryable                       may succeed when tried again
    │   ├── Unavailable                 connection refused, reset, or the service is starting
    │   └── DeadlinePassed              a named wait ended by its deadline
    ├── WeightError                     a weight transfer that must not be served
    │   ├── DigestMismatch              bytes are not those that were published
    │   ├── BaseMismatch                a delta whose base is not the one held
    │   └── LayoutMismatch              names, shapes or dtypes differ
    └── RemoteError                     the other side failed (HTTP 500): its own error name and text

Across HTTP an error is an `ErrorReply` (see `control.py`) whose `error` is the class name here.
"""

from __future__ import annotations


class AstraFlowError(Exception):
    """Root of every error that AstraFlow raises on purpose."""

    http_status = 500


class UserError(AstraFlowError, ValueError):
    """A mistake of the user; one line that names the field, the value and the accepted ones."""

    http_status = 400


class ConfigError(UserError):
    """A configuration key or value that cannot be used."""


class UnknownName(UserError):
    """A registry name that nobody registered."""

    http_status = 404


class ProtocolError(AstraFlowError):
    """A message that breaks the contract."""

    http_status = 400


class BadMessage(ProtocolError):
    """A message that cannot be decoded or whose fields contradict each other."""

    http_status = 422


class WrongRun(ProtocolError):
    """A message stamped with the id of another run."""

    http_status = 409


class WrongProtocol(ProtocolError):
    """A message of another protocol version."""

    http_status = 426


class Refused(AstraFlowError):
    """The receiver understood and said no."""

    http_status = 409


class AuthError(Refused):
    """The cluster token is missing or wrong."""

    http_status = 401


class TooLarge(Refused):
    """A body over the service's limit."""

    http_status = 413


class Conflict(Refused):
    """The request does not fit the receiver's present state."""


class Replaced(Conflict):
    """Another process of the same name has taken the caller's place. The caller should end; trying again or attaching again would
    only take the place back from the one that works."""


class Retryable(AstraFlowError):
    """The same call may succeed later."""

    http_status = 503


class Unavailable(Retryable):
    """Nobody answers at this address, or the service is still starting."""


class DeadlinePassed(Retryable):
    """A named wait ended by its deadline."""

    http_status = 504


class WeightError(AstraFlowError):
    """A weight transfer that must not be served."""

    http_status = 409


class DigestMismatch(WeightError):
    """The bytes are not those that were published."""


class BaseMismatch(WeightError):
    """A delta whose base is not the one that the receiver holds."""


class LayoutMismatch(WeightError):
    """Tensor names, shapes or dtypes differ from those agreed on."""


class RemoteError(AstraFlowError):
    """The other side failed while it handled the call."""


def _tree(root: type[AstraFlowError]) -> dict[str, type[AstraFlowError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


BY_NAME: dict[str, type[AstraFlowError]] = _tree(AstraFlowError)
