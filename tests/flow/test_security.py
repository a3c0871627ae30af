"""What a stranger, a careless peer and a pickle can do to the services: real processes, every route, every page, the weight stream."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import pickle
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from conformance_rig import TOKEN
from fuzz import JSON, MSGPACK, Case, Cases, Line, Target, as_json, drive, packed, request
from fuzz_frames import Frames, drive_frames, frame, hello, say

PER_ROUTE, FRAMES = 24, 400
PICKLE = "application/x-python-pickle"


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("torch")
    from fuzz_stage import FuzzStage

    made = FuzzStage(tmp_path_factory.mktemp("fuzz"))
    try:
        made.start()
        yield made
    finally:
        made.close()


def tickets(stage: Any) -> Any:
    """Opens a transfer anew before the sender ends an idle one."""
    from astraflow.protocol.routes import SenderAPI
    from astraflow.protocol.weights import TransferRequest

    asked, found = 0, ("", 0)

    def ticket() -> tuple[str, int]:
        nonlocal asked, found
        if asked % 200 == 0:
            reply = stage.ask_sender(SenderAPI.request_transfer, TransferRequest(instance_id="frames", version=stage.version))
            found = reply.transfer_id, reply.size_bytes
        asked += 1
        return found

    return ticket


def stream_port(stage: Any) -> int:
    from astraflow.protocol.routes import SenderAPI

    return int(stage.ask_sender(SenderAPI.get_buffer_info).stream_port)


def test_without_the_right_token_every_route_answers_401_and_no_stream_gives_a_byte(stage: Any) -> None:
    given = ("", "x", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "é", "Bearer " + TOKEN, f"{TOKEN},{TOKEN}")

    async def routes() -> None:
        line = Line()
        for target in stage.targets():
            body, path = packed(target.bases[0]) if target.method == "POST" else b"", target.path.replace("{ref}", "x")
            for token in given:
                headers = [("Content-Type", MSGPACK), ("Cookie", f"token={TOKEN}"), ("X-Token", TOKEN)]
                answer = await line.ask(target.port, request(target, body, path=path, token=token, query=f"token={TOKEN}", headers=headers))
                assert answer is not None
                if target.path.startswith("/dashboard/"):
                    assert (answer[0], TOKEN.encode() in answer[2]) == (200, False), "the page itself holds nothing of the run"
                else:
                    assert answer[0] == 401, (target.name, token, answer)
                assert answer[1]["x-content-type-options"] == "nosniff"
                assert "frame-ancestors 'none'" in answer[1]["content-security-policy"]
        line.close()

    async def streams() -> None:
        port, (transfer_id, size) = stream_port(stage), tickets(stage)()
        assert len(await say(port, frame(packed(hello(TOKEN, transfer_id, 0, size))))) == size
        for token in given:
            if token != TOKEN:
                assert await say(port, frame(packed(hello(token, transfer_id, 0, size)))) == b"", token
        silent = hello("", transfer_id, 0, size)
        del silent["token"]
        assert await say(port, frame(packed(silent))) == b""

    asyncio.run(routes())
    asyncio.run(streams())


def test_off_loopback_no_service_and_no_sender_of_weights_starts_without_a_token(tmp_path: Path) -> None:
    from astraflow.lib.wire import Server, new_identity
    from astraflow.protocol.errors import ConfigError
    from astraflow.protocol.routes import SERVICES, table
    from astraflow.weights.config import WeightsConfig
    from astraflow.weights.manager import WeightManager

    torch = pytest.importorskip("torch")

    async def nothing(request: Any) -> Any:
        raise AssertionError("never called")

    for host in ("0.0.0.0", "::", "", "10.0.0.7", "some-name"):
        for api in SERVICES.values():
            with pytest.raises(ConfigError, match="token is required"):
                Server("s", api, dict.fromkeys(table(api), nothing), new_identity("r"), host=host)
    manager = WeightManager("m", WeightsConfig(host="0.0.0.0", start_s=60.0), new_identity("r"), tmp_path)
    try:
        with pytest.raises(ConfigError, match=r"^weights: sender: host '0\.0\.0\.0' can be reached.*token is required"):
            manager.offload([("a", torch.zeros(4))], 0)
    finally:
        manager.close()


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self._marker), "w")


def bombs(marker: Path) -> list[bytes]:
    """In every pickle protocol; the first one is plain ASCII."""
    return [pickle.dumps(Bomb(marker), protocol) for protocol in (0, 2, 4, 5)]


def bombed(target: Target, found: list[bytes]) -> Iterator[bytes]:
    """Requests that carry a bomb wherever something can be carried."""
    text, path = quote(found[0].decode("ascii")), target.path.replace("{ref}", "x")
    encoded = base64.b64encode(found[2]).decode()
    types = (MSGPACK, JSON, "application/octet-stream", PICKLE, "application/vnd.python.pickle", "")
    safe, rng = Cases(target, 0).safe, random.Random(target.name)
    for data in found[::2]:
        for media in types:
            yield request(target, safe(data), path=path, headers=[("Content-Type", media)] if media else [])
        yield request(target, safe(data), path=path, headers=[("Content-Type", MSGPACK), ("Content-Encoding", "pickle")])
    plain, query = safe(b""), f"data={text}&{text}={encoded}&model_id={text}"
    yield request(target, plain, path=target.path.replace("{ref}", quote(text, safe="")), query=query)
    yield request(target, plain, path=path, headers=[("X-Data", encoded), ("Cookie", f"session={encoded}"), ("Accept", PICKLE)])
    for base in target.bases:
        for key in (*base, "extra"):
            value = rng.choice((found[2], msgspec.msgpack.Ext(1, found[2]), {"__reduce__": encoded, "py/object": "os.system"}))
            yield request(target, safe(packed({**base, key: value})), path=path, headers=[("Content-Type", MSGPACK)])
            yield request(target, safe(as_json({**base, key: encoded})), path=path, headers=[("Content-Type", JSON)])


def plant(stage: Any, found: list[bytes]) -> None:
    """Files with bombs where services look for files."""
    run_dir: Path = stage.run_dir
    (run_dir / "rollouts" / "zz").mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(found):
        (run_dir / "rollouts" / "zz" / f"evil{number}.json").write_bytes(data)
        for name in ("model.pkl", "pytorch_model.bin", "checkpoint.pt", "state.pkl"):
            (run_dir / name).write_bytes(data)
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(b"\n".join(data.replace(b"\n", b" ") for data in found) + b"\n")


def test_a_pickle_bomb_on_every_route_page_and_stream_never_goes_off(stage: Any, tmp_path: Path) -> None:
    marker = tmp_path / "it-went-off"
    found = bombs(marker)
    for data in found:
        pickle.loads(data).close()
        assert marker.exists(), "the bomb is one"
        marker.unlink()
    plant(stage, found)
    before = stage.counters()

    async def throw() -> None:
        seen = await drive(Case(target, "bomb", raw) for target in stage.targets() for raw in bombed(target, found))
        assert seen.faults == []
        assert {status for _, status in seen.statuses} <= {200, 307, 400, 401, 404, 405, 409, 413, 422, 426, 503}, seen.statuses
        port = stream_port(stage)
        transfer_id, size = tickets(stage)()
        for data in found:
            for said in (data, frame(data), frame(packed(hello(TOKEN, transfer_id, 0, 1) | {"token": data}))):
                assert await say(port, said) == b""
            got = await say(port, frame(packed(hello(TOKEN, transfer_id, 0, size) | {"extra": data})))
            assert len(got) in (0, size)

    asyncio.run(throw())
    assert not marker.exists()
    stage.until("the same counters", lambda: stage.counters() == before)


def test_no_answer_no_log_and_no_file_holds_the_token_or_a_key_of_the_environment(stage: Any) -> None:
    secrets = [TOKEN, *stage.secrets.values()]

    async def answers() -> list[tuple[str, bytes]]:
        line, out = Line(), []
        for target in stage.targets():
            if target.method == "GET":
                for accept in (JSON, MSGPACK):
                    raw = request(target, path=target.path.replace("{ref}", "x"), headers=[("Accept", accept)])
                    answer = await line.ask(target.port, raw)
                    assert answer is not None
                    out.append((target.name, str(answer[1]).encode() + answer[2]))
        line.close()
        return out

    places = asyncio.run(answers())
    for path in sorted(stage.directory.rglob("*")):
        if path.is_file() and path.name != "token":
            with contextlib.suppress(FileNotFoundError):
                places.append((str(path.relative_to(stage.directory)), path.read_bytes()))
    assert len(places) > 40
    assert [(where, secret[:12]) for where, data in places for secret in secrets if secret.encode() in data] == []


def test_odd_requests_and_frames_are_refused_and_leave_no_trace(stage: Any) -> None:
    before, sizes = stage.counters(), stage.sizes()
    targets = stage.targets()

    async def all_of_it() -> None:
        cases = (Cases(target, 1)(number) for target in targets for number in range(PER_ROUTE))
        seen = await drive(cases)
        assert seen.faults == []
        assert seen.cases == PER_ROUTE * len(targets)
        assert sum(count for (_, status), count in seen.statuses.items() if 400 <= status < 500) > seen.cases / 3
        frames = Frames(1, TOKEN, tickets(stage))
        ends, faults = await drive_frames(stream_port(stage), (frames(number) for number in range(FRAMES)))
        assert faults == []
        assert ends["with bytes"] > 0
        assert ends["without a byte"] > FRAMES / 2

    asyncio.run(all_of_it())
    stage.until("the same counters", lambda: stage.counters() == before)
    for name, size in stage.sizes().items():
        assert size.files <= sizes[name].files + 20, name
        assert size.tasks <= sizes[name].tasks + 20, name
        assert size.threads <= sizes[name].threads + 40, "the pools of threads are filled, and no more"
    stage.works()
