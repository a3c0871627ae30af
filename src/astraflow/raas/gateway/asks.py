"""What every API of the door has in common: a refusal with an address, a reply, the fields that are taken and the sampling."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import msgspec

from astraflow.lib.registry import closest
from astraflow.protocol.errors import AstraFlowError, Conflict, Retryable, UserError
from astraflow.workflows.api import EpisodeError, is_overlong
from astraflow.workflows.visit import LimitReached, Visit

T = TypeVar("T")

MOST_ANSWERS = 16
"""`n` of one call: each is a conversation of its own."""


class Refusal(AstraFlowError):
    """An answer that is none, with what a client's own error class needs."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


@dataclass
class Reply:
    """To one call; several pieces are a stream of events."""

    pieces: list[bytes]
    stream: bool = False
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


def refusal_of(error: Exception) -> Refusal | None:
    """An error as the client should see it; None = a bug of ours."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, LimitReached):
        return Refusal(403, str(error), code="episode_limit")  # no 429: clients would try again
    if is_overlong(error):
        return Refusal(400, str(error), code="context_length_exceeded", param="messages")
    if isinstance(error, UserError | EpisodeError) and getattr(error, "boundary", "workflow") != "engine":
        return Refusal(400, str(error), code="invalid_value")
    if isinstance(error, Conflict):
        return Refusal(409, str(error), code="conflict")
    if isinstance(error, Retryable) or getattr(error, "boundary", "") == "engine":
        return Refusal(503, str(error), code="unavailable")
    return None


def bad(param: str, message: str) -> NoReturn:
    """Raise the refusal of one field."""
    raise Refusal(400, f"{param}: {message}", code="invalid_value", param=param)


def object_of(body: bytes) -> dict[str, Any]:
    """The body as a JSON object."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refusal(400, f"the body is no JSON: {error}", code="invalid_json") from None
    if not isinstance(found, dict):
        raise Refusal(400, f"the body is {type(found).__name__}, expected a JSON object", code="invalid_json")
    return found


def typed(body: Mapping[str, Any], kind: type[T], neutral: Mapping[str, tuple[Any, ...]]) -> T:
    """The fields of `kind`. Others are refused by name unless they are null or ask for nothing (`neutral`; () = whatever they say)."""
    wanted = set(kind.__struct_fields__)  # type: ignore[attr-defined]
    for name, value in body.items():
        if name in wanted or value is None:
            continue
        if name not in neutral:
            known = sorted({*wanted, *neutral})
            message = f"{name}: unsupported parameter{closest(name, known)}; supported: {', '.join(known)}"
            raise Refusal(400, message, code="unsupported_parameter", param=name)
        if neutral[name] and value not in neutral[name]:
            accepted = ", ".join(msgspec.json.encode(one).decode() for one in neutral[name])
            raise Refusal(400, f"{name}: {value!r:.60} is not supported; accepted: {accepted}", code="unsupported_value", param=name)
    try:
        return msgspec.convert({name: body[name] for name in wanted if body.get(name) is not None}, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None


def _invalid(text: str) -> Refusal:
    """msgspec's `Expected …, got … - at `$.messages[0].role`` with the field in front."""
    what, _, where = text.partition(" - at `$")
    missing = re.search(r"missing required field `(\w+)`", what)
    param = ".".join(part for part in (where.rstrip("`").lstrip("."), missing[1] if missing else "") if part)
    return Refusal(400, f"{param}: {what}" if param else what, code="invalid_type", param=param or None)


def check_model(visit: Visit, name: str) -> str:
    """The policy of that name. Raises Refusal naming those that there are."""
    if name not in visit.policies:
        known = ", ".join(visit.policies)
        message = f"model: there is no {name!r} here{closest(name, visit.policies)}; the models of this episode: {known}"
        raise Refusal(404, message, code="model_not_found", param="model")
    return name


def check_count(n: int) -> int:
    if not 1 <= n <= MOST_ANSWERS:
        bad("n", f"{n}: expected 1 … {MOST_ANSWERS}")
    return n


@dataclass
class Sampling:
    """What a client may say about it; None = the recipe's."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: list[str] = field(default_factory=list)


def generation(visit: Visit, wanted: Sampling, training: bool) -> dict[str, Any]:
    """Overrides of the recipe's generation settings. What may not be trained on (temperature 0, top_p, top_k) stays the recipe's and is
    counted; `max_tokens` never exceeds the recipe's `max_new_tokens`."""
    recipe = visit.context.request([0])
    out: dict[str, Any] = {}
    if wanted.max_tokens is not None:
        if wanted.max_tokens < 1:
            bad("max_tokens", f"{wanted.max_tokens}: expected at least 1")
        out["max_new_tokens"] = min(wanted.max_tokens, recipe.max_new_tokens)
    if not all(wanted.stop):
        bad("stop", "an empty text would end every answer")
    if stops := [*recipe.stop, *wanted.stop]:
        out["stop"] = stops
    ranges = {"temperature": (0.0, 2.0), "top_p": (0.0, 1.0), "top_k": (0, 1 << 30)}
    replaced = False
    for name, (least, most) in ranges.items():
        value = getattr(wanted, name)
        if value is None:
            continue
        if not least <= value <= most or (name == "top_p" and not value):
            bad(name, f"{value:g}: expected {least:g} … {most:g}")
        trainable = value > 0 if name == "temperature" else value == (1 if name == "top_p" else 0)
        if trainable or not training:
            out[name] = value
        else:
            replaced = True
    visit.sampling_replaced += replaced
    return out


def text_of(content: Any, where: str) -> str:
    """A message's content as text: a text, nothing, or a list of text parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        bad(where, f"{type(content).__name__}, expected text or a list of text parts")
    parts = []
    for place, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            bad(f"{where}[{place}]", f"parts of type {kind!r} are not supported; accepted: text")
        parts.append(part["text"])
    return "".join(parts)


def check_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Raises Refusal for a history that nobody can answer."""
    if not messages:
        bad("messages", "empty; expected at least one")
    if messages[-1]["role"] == "assistant":
        bad("messages", "the last one is the assistant's; beginning an answer for a policy is not supported, expected user or tool")
    return messages
