"""A fuzzer of services over raw HTTP/1.1: seeded cases, many connections, and what every answer must be like.

A case never says what a peer could say in earnest (`Target.harmful`): a correct /shutdown ends a service, and that is right.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

import msgspec

from astraflow.lib.wire import JSON, MSGPACK, decode_body
from astraflow.protocol.errors import BY_NAME, AstraFlowError, Retryable
from astraflow.protocol.message import ErrorReply, Message

ANSWER_S = 45.0
"""Every answer comes within this, on a loaded machine; a service that hangs gives none at all."""
NOT_OURS = ("Invalid HTTP request received.", "Service Unavailable")
"""Texts of the HTTP server itself, about what is no HTTP or too many connections."""
ZEROS = gzip.compress(bytes(20_000_000), 9)
DEEP: list[Any] = []
for _ in range(80):
    DEEP = [DEEP]
ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 255, 2**31, 2**32, 2**53, 2**63 - 1, 2**64 - 1, -(2**63), 10**40, -0.0, 0.5, 1e308, float("nan"),
    float("inf"), float("-inf"), "", " ", "\0", "a\nb\r\n\x1b[31m", "é🙂\u202e", "\ud800", "x" * 600, "y" * 20_000, "../../etc/passwd",
    "<script>alert(1)</script>",
    "{{7*7}}", "%s%n%00", "' OR 1=1 --", "nan", "1e400", "0x10", "solver", "rlvr", "os:system", "http://127.0.0.1:9", "http://127.0.0.1:0",
    "http://169.254.169.254:80", "http://a:b@127.0.0.1:1", "ftp://127.0.0.1:1", "http://[::1", "http://x..y:1", "http://127.0.0.1:99999",
    "http://127.0.0.1:9/../x?y#z", "//127.0.0.1:9", "file:///etc/passwd", "http://0x7f000001:9", b"\x80\x04.", [], {}, [[]], {"a": {}},
    DEEP, {"": None}, {"k" * 600: 1}, [0] * 3000, list(range(50)), {str(i): i for i in range(300)}, [None], ["\0"], [{"lease_id": 1}],
)  # fmt: skip


METHODS = ("GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW", "post", "PROPFIND")
GARBAGE = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET / HTTP/9.9\r\n\r\n",
    b"GET " + b"/x" * 40_000 + b" HTTP/1.1\r\n\r\n", b"\r\n" * 50, b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", b"GET http://evil.example/ HTTP/1.0\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
)  # fmt: skip
"""What is no request of ours, or none at all."""


@dataclass(frozen=True)
class Target:
    """One route, or one page."""

    name: str
    port: int
    method: str
    path: str
    token: str
    kind: type[Message] | None = None
    """None = not of a route table."""
    bases: Sequence[dict[str, Any]] = ({},)
    """Correct messages of which cases are made."""
    harmful: Callable[[Any], bool] = lambda message: False
    """Whether a correct message would change what the test counts on."""


@dataclass(frozen=True)
class Case:
    target: Target
    kind: str
    raw: bytes
    cut: bool = False
    """The request is not whole: the connection is closed on it, and an answer may be missing."""
    head: bool = False


@dataclass
class Seen:
    """What came of many cases."""

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    """(target, status); 0 = closed without an answer."""
    kinds: Counter[tuple[str, int]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    cases: int = 0


def request(
    target: Target, body: bytes = b"", *, method: str = "", path: str = "", query: str = "", headers: Iterable[tuple[str, str]] = (),
    length: int | None = None, token: str | None = None,
) -> bytes:  # fmt: skip
    """Bytes of an HTTP/1.1 request. `token`: instead of the right one; empty = none."""
    given = target.token if token is None else token
    lines = [f"{method or target.method} {path or target.path}{f'?{query}' if query else ''} HTTP/1.1", f"Host: 127.0.0.1:{target.port}"]
    lines += [f"Authorization: Bearer {given}"] if given else []
    lines += [f"{name}: {value}" for name, value in headers]
    chunked = any(name.lower() == "transfer-encoding" for name, _ in headers)
    if not chunked and ((method or target.method) != "GET" or body):
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join(lines).encode("utf-8", "surrogatepass") + b"\r\n\r\n" + body


def mutated(rng: random.Random, value: Any, odd: Sequence[Any] = ODD) -> Any:
    """A copy with one thing changed somewhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        out, key = dict(value), rng.choice(list(value))
        match rng.randrange(8):
            case 0:
                del out[key]
            case 1:
                out[rng.choice(("unknown", "protocol_version", "run_id", "incarnation", "", "__class__"))] = rng.choice(odd)
            case 2:
                out[key] = [out[key]]
            case 3 | 4 | 5:
                out[key] = rng.choice(odd)
            case _:
                out[key] = mutated(rng, out[key], odd)
        return out
    if isinstance(value, list) and value and rng.random() < 0.85:
        position = rng.randrange(len(value))
        often = 1 if any(isinstance(item, list) for item in value) else rng.choice((1, 1, 2, 50))  # lists of lists would explode
        return [*value[:position], mutated(rng, value[position], odd), *value[position + 1 :]] * often
    return rng.choice(odd)


def random_value(rng: random.Random, depth: int = 0) -> Any:
    """Anything that JSON and msgpack can say."""
    if depth > 5 or rng.random() < 0.6:
        return rng.choice(ODD)
    if rng.random() < 0.5:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(5))]
    return {rng.choice(("model_id", "version", "a", "leases", "lane", "data", "run_id")): random_value(rng, depth + 1) for _ in range(4)}


def packed(value: Any) -> bytes:
    """msgpack; what it cannot say (larger integers, lone surrogates) as JSON's text inside of a msgpack string."""
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, ValueError, TypeError):
        return b"\xdb" + len(text := as_json(value)).to_bytes(4, "big") + text


def as_json(value: Any) -> bytes:
    return json.dumps(value, default=lambda other: other.decode("latin-1")).encode()


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else as_json(value).decode()


GET_KINDS = {"query": 60}
POST_KINDS = {"msgpack": 30, "json": 22, "bytes": 6, "values": 8, "short": 5, "cut": 2, "type": 6, "chunked": 6, "packed": 1, "query": 3}
"""Kind of case → its share."""


class Cases:
    """Case number i of a target is the same in every run."""

    def __init__(self, target: Target, seed: int) -> None:
        self.target, self.seed = target, seed

    def __call__(self, number: int) -> Case:
        target = self.target
        rng = random.Random(f"{self.seed}/{target.name}/{number}")
        kinds = (GET_KINDS if target.method == "GET" else POST_KINDS) | {"method": 4, "head": 4, "garbage": 1}
        (kind,) = rng.choices(list(kinds), list(kinds.values()))
        return getattr(self, f"_{kind}")(rng)

    def _message(self, rng: random.Random) -> Any:
        value = rng.choice(list(self.target.bases))
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
            value = mutated(rng, value)
        return value

    def safe(self, body: bytes) -> bytes:
        """The body, or, when a service would rightly do what it says, the same to another run."""
        if self.target.kind is not None:
            for json_body in (False, True):
                try:
                    message = decode_body(body, self.target.kind, json_body) if body else self.target.kind()
                except (AstraFlowError, TypeError):
                    continue
                if message.run_id in ("", "fuzz") and self.target.harmful(message):
                    message.run_id = "another"
                    return msgspec.json.encode(message) if json_body else msgspec.msgpack.encode(message)
        elif self.target.harmful(body):
            return b"{}"
        return body

    def _sent(self, rng: random.Random, kind: str, body: bytes, media: str, **options: Any) -> Case:
        accept = [("Accept", rng.choice((JSON, MSGPACK, "*/*", "text/html")))] if rng.random() < 0.5 else []
        headers = [*([("Content-Type", media)] if media else []), *accept, *options.pop("headers", ())]
        return Case(self.target, kind, request(self.target, body, headers=headers, **options), **({"cut": True} if kind == "cut" else {}))

    def _msgpack(self, rng: random.Random) -> Case:
        return self._sent(rng, "msgpack", self.safe(packed(self._message(rng))), MSGPACK)

    def _json(self, rng: random.Random) -> Case:
        return self._sent(rng, "json", self.safe(as_json(self._message(rng))), JSON)

    def _bytes(self, rng: random.Random) -> Case:
        body = bytearray(packed(self._message(rng)) if rng.random() < 0.7 else rng.randbytes(rng.randrange(1, 400)))
        for _ in range(rng.randrange(1, 6)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        return self._sent(rng, "bytes", self.safe(bytes(body)), rng.choice((MSGPACK, MSGPACK, JSON)))

    def _values(self, rng: random.Random) -> Case:
        value = random_value(rng)
        if rng.random() < 0.5:
            return self._sent(rng, "values", self.safe(as_json(value)), JSON)
        return self._sent(rng, "values", self.safe(packed(value)), MSGPACK)

    def _short(self, rng: random.Random) -> Case:
        """Its end is missing, and its length is said to be right."""
        body, media = (as_json(self._message(rng)), JSON) if rng.random() < 0.5 else (packed(self._message(rng)), MSGPACK)
        return self._sent(rng, "short", self.safe(body[: rng.randrange(len(body) + 1)]), media)

    def _cut(self, rng: random.Random) -> Case:
        body = packed(self._message(rng))
        return self._sent(rng, "cut", body, MSGPACK, length=len(body) + rng.randrange(1, 10**6))

    def _type(self, rng: random.Random) -> Case:
        media = rng.choice((
            "", "text/plain", "text/plain; x=json", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "image/png",
            "application/x-python-pickle", "application/json; charset=utf-16", "APPLICATION/JSON", ";;;", "application/xml", "é",
        ))  # fmt: skip
        return self._sent(rng, "type", self.safe(rng.choice((as_json, packed))(self._message(rng))), media)

    def _chunked(self, rng: random.Random) -> Case:
        body = self.safe(packed(self._message(rng)))
        parts = [body[start : start + 7] for start in range(0, min(len(body), 700), 7)] + [body[700:]] * (len(body) > 700)
        sizes = [f"{len(part):x}" for part in parts]
        if broken := rng.random() < 0.4 and bool(sizes):
            sizes[rng.randrange(len(sizes))] = rng.choice(("-1", "zz", "f" * 30, "", "0x5"))
        raw = b"".join(size.encode() + b"\r\n" + part + b"\r\n" for size, part in zip(sizes, parts, strict=True)) + b"0\r\n\r\n"
        raw = request(self.target, raw, headers=[("Content-Type", MSGPACK), ("Transfer-Encoding", "chunked")])
        return Case(self.target, "chunked", raw, cut=broken)

    def _packed(self, rng: random.Random) -> Case:
        return self._sent(rng, "packed", ZEROS, MSGPACK, headers=[("Content-Encoding", "gzip")])

    def _query(self, rng: random.Random) -> Case:
        target, message = self.target, self._message(rng)
        fields = message if isinstance(message, dict) else {"x": message}
        query = urlencode([(_plain(key), _plain(value)[:6000]) for key, value in fields.items()], errors="surrogatepass")
        match rng.randrange(8):
            case 0:
                query += "&" + query
            case 1:
                query = quote(rng.randbytes(rng.randrange(200)))
            case 2:
                query = "&".join(f"a{i}=1" for i in range(rng.choice((10, 600, 3000))))
            case 3:
                query = query[: rng.randrange(len(query) + 1)]
            case _:
                pass
        path = target.path
        if "{ref}" in path:
            refs = ("x", "..", "%2e%2e%2fconfig", "a/b", "%00", "%ff", "é", "x" * 3000, ";", "~".join("abcd"))
            path = path.replace("{ref}", quote(rng.choice(refs), safe="%/"))
        elif rng.random() < 0.05:
            path += rng.choice(("/", "//", "/x", ".json", "%00", "%2f..", ";a=b"))
        body = self.safe(b"" if target.method == "GET" else packed(rng.choice(list(target.bases))))
        return Case(target, "query", request(target, body, path=path, query=self._safe_query(query[:7000].replace(" ", "%20"))))

    def _safe_query(self, query: str) -> str:
        """As `safe` does with bodies."""
        if self.target.kind is None or self.target.method != "GET":
            return query
        fields = dict(parse_qsl(query, keep_blank_values=True, errors="replace"))
        try:
            message = msgspec.convert(fields, self.target.kind, strict=False)
        except msgspec.ValidationError:
            return query
        return f"{query}&run_id=another" if self.target.harmful(message) else query

    def _method(self, rng: random.Random) -> Case:
        method = rng.choice([name for name in METHODS if name != self.target.method])
        path = self.target.path.replace("{ref}", "x")
        raw = request(self.target, packed(self._message(rng)), method=method, path=path)
        return Case(self.target, "method", raw, head=method == "HEAD")

    def _head(self, rng: random.Random) -> Case:
        """Odd headers on a request without a body that could do anything."""
        extra: list[tuple[str, str]] = rng.choice((
            [("X-Nul", "a\0b")], [(f"X-{i}", "1") for i in range(rng.choice((50, 150)))], [("X-Long", "x" * rng.choice((5000, 60_000)))],
            [("Upgrade", "websocket"), ("Connection", "Upgrade")], [("Host", "evil.example")], [("Cookie", "a=b; " * 50)],
            [("Range", "bytes=0-1")], [("Accept", "\x80\x81"), ("Accept-Language", "é")], [("Expect", "100-continue")],
            [("Authorization", "Bearer wrong")], [("X-Forwarded-For", "127.0.0.1"), ("Forwarded", "for=x")], [("Bad Name", "x")],
            [("Transfer-Encoding", "gzip, chunked")], [("Origin", "http://evil.example")], [("Content-Type", JSON), ("Content-Type", "x")],
        ))  # fmt: skip
        path = self.target.path.replace("{ref}", "x")
        method = "GET" if self.target.method == "GET" else "OPTIONS"
        raw = request(self.target, method=method, path=path, headers=extra)
        return Case(self.target, "head", raw, cut=any(name in ("X-Nul", "Bad Name", "Transfer-Encoding", "Host") for name, _ in extra))

    def _garbage(self, rng: random.Random) -> Case:
        raw = rng.choice((rng.randbytes(300), *GARBAGE))
        return Case(self.target, "garbage", raw, cut=True)


# --- driving ------------------------------------------------------------------------------------------------------------


class Line:
    """One connection that is opened anew when it was closed."""

    def __init__(self) -> None:
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._port = 0

    async def ask(self, port: int, raw: bytes, cut: bool = False, head: bool = False) -> tuple[int, dict[str, str], bytes] | None:
        """(status, headers, body); None = the connection was closed without an answer."""
        for fresh in (False, True):  # an idle connection may have been closed meanwhile
            if self._port != port or cut:
                self.close()
            first_use = self._streams is None
            if self._streams is None:
                self._streams, self._port = await asyncio.open_connection("127.0.0.1", port, limit=2**20), port
            reader, writer = self._streams
            try:
                writer.write(raw)
                if cut:
                    writer.write_eof()
                found = await read_answer(reader, head)
            except (ConnectionError, asyncio.IncompleteReadError):
                found = None
            if found is None or cut or "close" in found[1].get("connection", ""):
                self.close()
            if found is not None or first_use or fresh:
                return found
        raise AssertionError("unreachable")

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()  # leaves no port behind that waits for a minute
            self._streams = None


async def read_answer(reader: asyncio.StreamReader, head: bool) -> tuple[int, dict[str, str], bytes]:
    """Raises IncompleteReadError when the connection ends before or inside of it."""
    while True:
        text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *rest = text.split("\r\n")
        status = int(first.split(" ")[1])
        if status != 100:
            break
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in rest if line)}
    if head or status in (204, 304):
        return status, headers, b""
    if "chunked" in headers.get("transfer-encoding", ""):
        parts = []
        while size := int(await reader.readuntil(b"\r\n"), 16):
            parts.append((await reader.readexactly(size + 2))[:-2])
        await reader.readexactly(2)
        return status, headers, b"".join(parts)
    if "content-length" in headers:
        return status, headers, await reader.readexactly(int(headers["content-length"]))
    return status, headers, await reader.read()


def fault_of(case: Case, status: int, headers: dict[str, str], body: bytes) -> str:
    """What is wrong with an answer; empty = nothing."""
    text = body.decode("utf-8", "replace")
    if case.target.token and case.target.token in text + str(headers):
        return "it holds the token"
    if status in (400, 503) and text in NOT_OURS:
        return ""
    if headers.get("x-content-type-options") != "nosniff" or "content-security-policy" not in headers:
        return "it lacks the headers of safety"
    if status < 400 or case.head or not body or headers.get("content-type", "").startswith("text/"):
        return "" if status < 500 else text[:300]
    try:
        reply = decode_body(body, ErrorReply, headers.get("content-type", "").startswith(JSON))
    except AstraFlowError as error:
        return f"no ErrorReply: {error}"
    known = BY_NAME.get(reply.error)
    if known is None or len(reply.message) > 2100:
        return f"an odd ErrorReply: {reply.error}: {len(reply.message)} characters"
    if status >= 500 and not issubclass(known, Retryable):
        return f"{reply.error}: {reply.message[:300]}"
    return ""


async def drive(cases: Iterator[Case], lines: int = 8) -> Seen:
    """All of them, over so many connections at a time."""
    seen = Seen()

    async def work() -> None:
        line = Line()
        for case in cases:
            started = time.monotonic()
            try:
                async with asyncio.timeout(ANSWER_S):
                    found = await line.ask(case.target.port, case.raw, case.cut, case.head)
            except TimeoutError:
                line.close()
                seen.faults.append(f"{case.target.name} {case.kind}: no answer within {ANSWER_S:g} s to {case.raw[:400]!r}")
                continue
            seen.slowest_s = max(seen.slowest_s, time.monotonic() - started)
            seen.cases += 1
            status = found[0] if found else 0
            seen.statuses[case.target.name, status] += 1
            seen.kinds[case.kind, status] += 1
            fault = fault_of(case, *found) if found else "" if case.cut else "closed without an answer"
            if fault:
                seen.faults.append(f"{case.target.name} {case.kind}: HTTP {status}: {fault} — to {case.raw[:600]!r}")
        line.close()

    await asyncio.gather(*(work() for _ in range(lines)))
    return seen
