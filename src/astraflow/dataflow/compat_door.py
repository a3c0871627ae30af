"""Dataflow's side of the old wire (`compat`): old calls on its port become calls of our own handlers, and old instances callers."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import quote

import numpy as np
import xxhash
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from astraflow.dataflow.compat import PICKLE, POLL_S, WARNING, field, pickled, unpickled
from astraflow.dataflow.compat_raas import OldRaaS
from astraflow.dataflow.config import OLD_WIRE, DataflowProcess
from astraflow.dataflow.surroundings import Listener, Surroundings
from astraflow.lib.wire import Handler, Identity, Server
from astraflow.lib.wire_client import Caller
from astraflow.protocol import codec, control
from astraflow.protocol.batch import Batch, BatchRequest
from astraflow.protocol.errors import AstraFlowError, BadMessage, RemoteError, Unavailable, UnknownName
from astraflow.protocol.message import Empty, Message
from astraflow.protocol.routes import RaaSAPI

log = logging.getLogger(__name__)
BATCH_S, EVAL_S, JOIN_S = 3600.0, 43_200.0, 120.0
"""How long the old clients wait for a batch and an evaluation, and the old Dataflow for an instance that registers."""
WAIT_S = 10.0
"""One question to our own handlers."""
EPS = 1e-4
"""Of normalized_rewards (numerics 7)."""


def spoken(process: DataflowProcess, outside: Surroundings) -> Surroundings:
    """The same surroundings, in which peers of the old wire are understood too."""
    log.warning("%s", WARNING)
    known: dict[str, OldRaaS] = {}

    def old(url: str) -> OldRaaS:
        if url not in known:
            known[url] = OldRaaS(url, process)
        return known[url]

    def connect(url: str, identity: Identity) -> Caller:
        return old(url) if url.startswith(OLD_WIRE) else outside.connect(url, identity)

    def listen(name: str, api: type, handlers: Mapping[str, Handler], identity: Identity, **options: Any) -> Listener:
        server = outside.listen(name, api, handlers, identity, **options)
        assert isinstance(server, Server)
        server.app.add_middleware(Door, server=server, calls=OldCalls(server, handlers, old))
        return server

    return dataclasses.replace(outside, connect=connect, listen=listen)


class Door:
    """ASGI middleware, behind the token: what only a peer of the old wire says goes to `OldCalls`, all else passes untouched."""

    def __init__(self, app: ASGIApp, server: Server, calls: OldCalls) -> None:
        self._app, self._server, self._calls = app, server, calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive) if scope["type"] == "http" else None
        call = self._calls.of(request) if request is not None else None
        if request is None or call is None:
            await self._app(scope, receive, send)
            return
        task = asyncio.current_task()
        assert task is not None
        self._server.in_flight.add(task)
        try:
            body = bytearray()
            async for chunk in request.stream():
                body += chunk
                if len(body) > self._server.max_body_bytes:
                    break
            await self._answer(call, request, bytes(body), receive, send)
        except ClientDisconnect:
            return
        finally:
            self._server.in_flight.discard(task)

    async def _answer(self, call: OldCall, request: Request, body: bytes, receive: Receive, send: Send) -> None:
        try:
            if len(body) > self._server.max_body_bytes:
                raise BadMessage(f"a body of more than {self._server.max_body_bytes} bytes")
            answer = await call(request, body)
        except ClientDisconnect:
            raise
        except Exception as error:
            known = isinstance(error, AstraFlowError)
            log.log(logging.INFO if known else logging.ERROR, "%s failed", request.url.path, exc_info=None if known else error)
            status = 404 if isinstance(error, UnknownName) else 400 if isinstance(error, BadMessage) else 500
            answer = JSONResponse({"error": str(error) if known else f"{type(error).__name__}: {error}"}, status)
        if answer is not None:
            await answer(request.scope, receive, send)
            return
        waiting = [{"type": "http.request", "body": body, "more_body": False}]  # a native call: it reads its body again

        async def again() -> Any:
            return waiting.pop() if waiting else await receive()

        await self._app(request.scope, again, send)


OldCall = Callable[[Request, bytes], Awaitable[Response | None]]


class OldCalls:
    """What peers of the old wire ask of Dataflow, asked of our own handlers. None = it was a native call after all."""

    def __init__(self, server: Server, handlers: Mapping[str, Handler], old: Callable[[str], OldRaaS]) -> None:
        self._server, self._handlers, self._old = server, handlers, old
        self._sent: dict[str, int] = {}
        """Model → version of the batch that was sent last."""
        self._posts: dict[str, OldCall] = {
            "/ready": self.ready, "/notify_version": self.notify, "/save_buffer": self.save_buffer, "/shutdown": self.shutdown,
        }  # fmt: skip
        self._registrations: dict[str, OldCall] = {"/register_raas": self.register, "/deregister_raas": self.deregister}
        self._views: dict[str, OldCall] = {"/status": self.status, "/raas_pool": self.raas_pool}

    def of(self, request: Request) -> OldCall | None:
        """The old call that a request may be, by its head."""
        path, kind, accept = request.url.path, request.headers.get("content-type", ""), request.headers.get("accept", "")
        if request.method == "POST":
            if "json" in kind:
                return self._registrations.get(path)
            bare = not kind and "msgpack" not in accept and "json" not in accept
            return self._posts.get(path) if bare or PICKLE in kind else None
        if request.method != "GET" or "msgpack" in accept:
            return None
        if path == "/batch":
            return self.batch if "timeline" not in request.query_params else None
        return self._views.get(path)

    async def _trainer(self, model_id: str | None) -> control.TrainerInfo:
        """Without a name it is the only model. Raises UnknownName."""
        now: control.DataflowStatus = await self._handlers["status"](Empty())
        trainers = {trainer.model_id: trainer for trainer in now.trainers}
        name = model_id if model_id is not None else next(iter(trainers)) if len(trainers) == 1 else "default"
        if name not in trainers:
            raise UnknownName(f"model_id {name!r}: expected one of {', '.join(trainers)}")
        return trainers[name]

    # --- trainers -------------------------------------------------------------------------------------------------------

    async def ready(self, request: Request, body: bytes) -> Response:
        message, where = await asyncio.to_thread(unpickled, body, "/ready"), "/ready"
        trainer = await self._trainer(field(message, "model_id", str, where, None))
        recovered = field(message, "recovered_version", int, where, 0)
        sender = field(message, "sender_endpoint", str, where, "")
        self._sent.pop(trainer.model_id, None)
        attached = control.Ready(
            model_id=trainer.model_id,
            train_batch_size=field(message, "train_batch_size", int, where),
            sender_endpoint=sender if "://" in sender or not sender else f"http://{sender}",
            version=recovered,
            recovered_version=recovered or None,
        )
        await self._handlers["ready"](attached)
        return flat_ok()

    async def batch(self, request: Request, body: bytes) -> Response:
        """Waits as long as the old clients do. Raises RemoteError for the end of data and the like."""
        given, end = request.query_params.get("version"), time.monotonic() + BATCH_S
        if given is not None and not re.fullmatch(r"[0-9]{1,9}", given):
            raise BadMessage(f"/batch: version: {given!r:.60}, expected int")
        while not self._server.stopping and time.monotonic() < end:
            trainer = await self._trainer(request.query_params.get("model_id"))
            version = int(given) if given is not None else max(trainer.version, self._sent.get(trainer.model_id, -1) + 1)
            wanted = BatchRequest(model_id=trainer.model_id, timeline=trainer.timeline, version=version, wait_s=WAIT_S)
            reply = await self._handlers["batch"](wanted)
            if await request.is_disconnected():
                raise ClientDisconnect
            if reply.kind == "batch":
                answer = await asyncio.to_thread(lambda made: pickled({"batch": rows_of(made.batch), "buffer_stats": made.metrics}), reply)
                self._sent[trainer.model_id] = version
                return Response(answer, media_type=PICKLE)
            if reply.kind not in ("wait", "stale_timeline"):
                raise RemoteError(f"/batch: {reply.kind}: {reply.reason}")
            await asyncio.sleep(POLL_S)
        raise Unavailable("/batch: Dataflow ends" if self._server.stopping else f"/batch: no batch within {BATCH_S:g} s")

    async def notify(self, request: Request, body: bytes) -> Response:
        message, where = await asyncio.to_thread(unpickled, body, "/notify_version"), "/notify_version"
        trainer = await self._trainer(field(message, "model_id", str, where, None))
        known = await self._handlers["eval_results"](control.EvalResultsRequest())
        notice = control.NotifyVersion(
            model_id=trainer.model_id,
            timeline=trainer.timeline,
            version=field(message, "version", int, where),
            run_eval=field(message, "run_eval", bool, where, False),
        )
        reply = await self._handlers["notify_version"](notice)
        return flat_ok(eval_results=await self._scores(reply.eval_id, known.next) if reply.eval_id else None)

    async def _scores(self, eval_id: str, since: int) -> dict[str, float]:
        """`dataset/metric` → value, when the evaluation is over."""
        end = time.monotonic() + EVAL_S
        while not self._server.stopping and time.monotonic() < end:
            answer = await self._handlers["eval_results"](control.EvalResultsRequest(since=since, wait_s=WAIT_S))
            if eval_id not in answer.running:
                named = [(f"{result.dataset}/", result.metrics) for result in answer.results if result.eval_id == eval_id]
                return {prefix + name: value for prefix, metrics in named for name, value in metrics.items() if value is not None}
            await asyncio.sleep(POLL_S)
        raise Unavailable(f"/notify_version: evaluation {eval_id} did not end")

    async def save_buffer(self, request: Request, body: bytes) -> Response:
        await self._handlers["save_buffer"](control.SaveBuffer())
        return flat_ok()

    async def shutdown(self, request: Request, body: bytes) -> Response:
        """One trainer is done; of several models the old wire says none, and all ends."""
        trainers = (await self._handlers["status"](Empty())).trainers
        model_id = trainers[0].model_id if len(trainers) == 1 and trainers[0].state != "expected" else ""
        await self._handlers["shutdown"](control.Shutdown(model_id=model_id, reason="asked to end by a peer of the old wire"))
        return flat_ok()

    # --- rollout services -----------------------------------------------------------------------------------------------

    async def register(self, request: Request, body: bytes) -> Response | None:
        message, where = _json(body), "/register_raas"
        if "uid" not in message:
            return None
        uid, url = field(message, "uid", str, where), field(message, "raas_url", str, where).rstrip("/")
        if not uid or not re.fullmatch(r"https?://[^/\s?#@]+", url):
            raise BadMessage(f"{where}: raas_url: {url!r:.100} of uid {uid!r:.60}, expected http://host:port of a named instance")
        peer = self._old(f"{OLD_WIRE}{url}#{quote(uid, safe='')}")
        for other in (await self._handlers["raas_pool"](Empty())).instances:
            if other.url.startswith(f"{OLD_WIRE}{url}#") and other.url != peer.url:  # another one listens there now
                await self._handlers["deregister_raas"](control.DeregisterRaaS(instance_id=other.instance_id, drain=False))
        peer.renew()
        problem, end = "", time.monotonic() + JOIN_S
        while not self._server.stopping and time.monotonic() < end:
            try:
                problem = (await peer.call(RaaSAPI.status, timeout_s=WAIT_S)).state
            except AstraFlowError as error:
                problem = str(error)
            if problem in ("ready", "idle"):
                joins = control.RegisterRaaS(instance_id=uid, url=peer.url, models=peer.models, total_slots=peer.slots)
                joins.incarnation = peer.incarnation
                reply = await self._handlers["register_raas"](joins)
                return JSONResponse({"ok": True, "uid": uid, "pool_size": reply.pool_size})
            await asyncio.sleep(POLL_S)
        raise Unavailable(f"{where}: {uid} is not ready within {JOIN_S:g} s: {problem}")

    async def deregister(self, request: Request, body: bytes) -> Response | None:
        message, where = _json(body), "/deregister_raas"
        if "uid" not in message:
            return None
        uid, ends = field(message, "uid", str, where), field(message, "shutdown", bool, where, False)
        await self._handlers["deregister_raas"](control.DeregisterRaaS(instance_id=uid, drain=False, shutdown=ends))
        pool = await self._handlers["raas_pool"](Empty())
        return JSONResponse({"ok": True, "uid": uid, "pool_size": len(pool.instances)})

    # --- what is shown: our JSON, and the old keys beside it ---------------------------------------------------------------

    async def status(self, request: Request, body: bytes) -> Response:
        now: control.DataflowStatus = await self._handlers["status"](Empty())
        running = (await self._handlers["eval_results"](control.EvalResultsRequest())).running
        alive = any(instance.state == "live" for instance in now.instances)
        attached = {trainer.model_id: (trainer.state != "expected", trainer.version) for trainer in now.trainers}
        attached.setdefault("default", (all(there for there, _ in attached.values()), now.service_version))
        agents = {
            name: {"raas_ready": alive, "trainer_ready": there, "started": now.started, "version": version}
            for name, (there, version) in attached.items()
        }
        pool = _pool(now.instances, now.service_version)
        return self._shown(now, {"status": "ready", "eval_running": bool(running), "agents": agents, "raas_pool": pool})

    async def raas_pool(self, request: Request, body: bytes) -> Response:
        now = await self._handlers["status"](Empty())
        return self._shown(control.RaaSPool(instances=[]), _pool(now.instances, now.service_version))

    def _shown(self, message: Message, more: dict[str, Any]) -> Response:
        message.run_id, message.incarnation = self._server.identity.run_id, self._server.identity.incarnation
        return JSONResponse(_json(codec.encode_json(message)) | more)


def flat_ok(**more: Any) -> Response:
    """The old envelope, which is flat."""
    return Response(pickled({"ok": True, **more}), media_type=PICKLE)


def _json(body: bytes) -> dict[str, Any]:
    return codec.decode_json(body, dict)


def _pool(instances: list[control.InstanceInfo], version: int) -> dict[str, Any]:
    """Our instances with the old keys."""
    shown = []
    for info in instances:
        old = {"uid": info.instance_id, "version": min((s.version for s in info.serving.values()), default=0), "gpu_count": None}
        old |= {"initialized": info.state != "catching_up", "suspect": info.state == "suspect", "failure_count": info.failures}
        shown.append(_json(codec.encode_json(info)) | old | {"last_availability": info.free_slots})
    return {"size": len(shown), "version": version, "instances": shown}


def rows_of(batch: Batch) -> dict[str, Any]:
    """The old batch: [rows, longest], padded with 0 on the right, and [rows]. A row is a segment of a scored trajectory."""
    lengths = np.diff(codec.array(batch.offsets))
    there = np.arange(lengths.max()) < lengths[:, None]
    found: dict[str, Any] = {"attention_mask": there}
    for name, dtype in (("input_ids", "int32"), ("loss_mask", "int32"), ("logprobs", "float32"), ("versions", "int32")):
        found[name] = np.zeros(there.shape, dtype)
        found[name][there] = codec.array(batch.tokens[name])
    rows = {name: codec.array(col) for name, col in batch.rows.items()}
    rewards, mean, std, groups = rows["reward_shaped"], rows["group_reward_mean"], rows["group_reward_std"], rows["group_index"]
    normalized = np.where(rows["reward_all_equal"], 0.0, (rewards - mean) / (std + EPS))
    named = {"rewards": rewards, "group_reward_mean": mean, "group_reward_std": std, "normalized_rewards": normalized}
    found |= {name: values.astype("float32") for name, values in named.items()}
    ids = np.array([xxhash.xxh3_64_intdigest(lease_id.encode()) >> 1 for lease_id in batch.group_ids], dtype=np.int64)
    return found | {"group_id": ids[groups], "prompt_id": [batch.prompt_ids[group] for group in groups]}
