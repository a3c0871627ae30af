"""What goes on now: asked of Dataflow and the rollout services by their own routes, or, when the run is over, read from what it left.

Mounted or alone it is the same client of the same routes, so the page shows what `/status` says and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from astraflow.dataflow.logbook import Logbook
from astraflow.dataflow.reasons import describe
from astraflow.lib.wire import Identity
from astraflow.lib.wire_client import Client
from astraflow.protocol.control import (
    DataflowStatus,
    DeregisterRaaS,
    EvalResult,
    EvalResultsRequest,
    RaaSStatus,
    RunEval,
    SaveBuffer,
    SaveCheckpoint,
    SetAcquisition,
)
from astraflow.protocol.errors import AstraFlowError, ConfigError, Unavailable, UserError
from astraflow.protocol.routes import DataflowAPI, RaaSAPI

CALL_S = 3.0
ACT_S = 15.0
FRESH_S = 0.5
"""Several open pages share one look."""
EVALS_KEPT = 500


class Seen(msgspec.Struct, kw_only=True):
    """What is read of `observed.json` (launch/watch.py)."""

    status: DataflowStatus | None = None
    instances: dict[str, RaaSStatus] = {}
    evals: list[EvalResult] = []
    events: list[str] = []


class Action(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A button."""

    action: Literal["drain", "pause", "resume", "eval", "save", "checkpoint"]
    instance: str = ""
    """For `drain`."""
    model: str = ""
    """For `checkpoint`: the policy; empty = all."""


class Live:
    """One run directory, whoever works in it. All methods run in one loop."""

    def __init__(self, run_dir: Path, identity: Identity) -> None:
        self._run_dir, self._identity = run_dir, identity
        self._clients: dict[str, Client] = {}
        self._instances: dict[str, RaaSStatus] = {}
        self._evals: list[EvalResult] = []
        self._next_eval, self._incarnation = 0, ""
        self._lock = asyncio.Lock()
        self._last: tuple[float, dict[str, Any]] | None = None

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()
        self._clients.clear()

    async def look(self) -> dict[str, Any]:
        """`{live, note, status, instances, transfers, evals, drops, counts}`; `status` is None when nothing was ever seen."""
        async with self._lock:
            if self._last is None or time.monotonic() - self._last[0] > FRESH_S:
                self._last = time.monotonic(), await self._look()
            return self._last[1]

    async def act(self, action: Action) -> str:
        """Do it, and say in one line what was done. Raises what Dataflow answers, Unavailable when the run is over."""
        client = self._dataflow()
        if client is None:
            raise Unavailable("the run is over, or has not begun: there is nobody to act")
        match action.action:
            case "drain":
                known = await client.call(DataflowAPI.raas_pool, timeout_s=CALL_S)
                if action.instance not in (names := [info.instance_id for info in known.instances]):
                    raise UserError(f"instance: {action.instance!r} is not in the pool; known: {', '.join(names) or 'none'}")
                await client.call(DataflowAPI.deregister_raas, DeregisterRaaS(instance_id=action.instance, drain=True), timeout_s=ACT_S)
                said = f"{action.instance} drains: it finishes what runs and gets no new work"
            case "pause" | "resume":
                await client.call(DataflowAPI.acquisition, SetAcquisition(paused=action.action == "pause"), timeout_s=ACT_S)
                said = "no new work is submitted" if action.action == "pause" else "acquisition goes on"
            case "eval":
                reply = await client.call(DataflowAPI.run_eval, RunEval(), timeout_s=ACT_S)
                said = f"{reply.eval_id} evaluates the present versions" if reply.eval_id else "nothing to evaluate: no validation set"
            case "checkpoint":
                asked = await client.call(DataflowAPI.checkpoint, SaveCheckpoint(model_id=action.model), timeout_s=ACT_S)
                whose = ", ".join(f"{name} (version {version} or later)" for name, version in asked.versions.items())
                said = f"asked for a checkpoint of {whose}" if whose else "the newest version is on disk already"
            case "save":
                said = f"state of Dataflow written to {(await client.call(DataflowAPI.save_buffer, SaveBuffer(), timeout_s=ACT_S)).path}"
        self._last = None
        return said

    # --- a running run --------------------------------------------------------------------------------------------------

    def _dataflow(self) -> Client | None:
        """A client of the address that Dataflow wrote down when it started."""
        try:
            url = (self._run_dir / "dataflow.url").read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None
        return self._client(url) if url else None

    def _client(self, url: str) -> Client:
        if url not in self._clients:
            self._clients[url] = Client(url, self._identity)
        return self._clients[url]

    async def _look(self) -> dict[str, Any]:
        client = self._dataflow()
        note = "Dataflow has not started"
        if client is not None:
            try:
                status = await client.call(DataflowAPI.status, timeout_s=CALL_S)
                await self._ask_more(client, status)
                return shown(True, "", status, self._instances, self._evals, status.events)
            except AstraFlowError as error:
                note = f"Dataflow does not answer: {error}"
        return await asyncio.to_thread(self._left, note)

    async def _ask_more(self, client: Client, status: DataflowStatus) -> None:
        if status.incarnation != self._incarnation:
            self._incarnation, self._next_eval, self._evals = status.incarnation, 0, []
        evals = await client.call(DataflowAPI.eval_results, EvalResultsRequest(since=self._next_eval), timeout_s=CALL_S)
        self._next_eval, self._evals = evals.next, [*self._evals, *evals.results][-EVALS_KEPT:]
        there = {info.instance_id: info.url for info in status.instances if info.state != "gone"}
        answers = await asyncio.gather(*(self._instance(url) for url in there.values()))
        for url in self._clients.keys() - {client.url, *there.values()}:
            await self._clients.pop(url).close()
        self._instances = {
            name: answer or self._instances[name]
            for name, answer in zip(there, answers, strict=True)
            if answer is not None or name in self._instances
        }

    async def _instance(self, url: str) -> RaaSStatus | None:
        """None when it does not answer: Dataflow's own heartbeat judges it, the last answer stays."""
        try:
            return await self._client(url).call(RaaSAPI.status, timeout_s=CALL_S)
        except AstraFlowError:
            return None

    # --- a run that is over ---------------------------------------------------------------------------------------------

    def _left(self, note: str) -> dict[str, Any]:
        """What the supervisor saw last, and the ledger's own counts."""
        try:
            seen = msgspec.json.decode((self._run_dir / "observed.json").read_bytes(), type=Seen)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            seen = Seen()
        if (self._run_dir / "outcome.json").is_file():
            note = "the run is over: this is what was seen last"
        found = shown(False, note, seen.status, seen.instances, seen.evals, seen.events)
        try:
            with Logbook(self._run_dir) as book:
                found["counts"] = msgspec.to_builtins(book.counts())
        except ConfigError as error:
            found["note"] = f"{note}; {error}"
        return found


def shown(
    live: bool,
    note: str,
    status: DataflowStatus | None,
    instances: Mapping[str, RaaSStatus],
    evals: list[EvalResult],
    events: list[str],
) -> dict[str, Any]:
    """All of it as plain values."""
    drops = status.recent_drops if status is not None else []
    return {
        "live": live,
        "note": note,
        "status": msgspec.to_builtins(status, str_keys=True),
        "instances": {name: msgspec.to_builtins(found) for name, found in instances.items()},
        "transfers": [row for found in instances.values() for row in transfers(found)],
        "evals": msgspec.to_builtins(evals),
        "events": events,
        "drops": [msgspec.to_builtins(drop) | {"why": describe(drop.reason)} for drop in drops],
        "counts": msgspec.to_builtins(status.ledger) if status is not None else None,
    }


def transfers(status: RaaSStatus) -> list[dict[str, Any]]:
    """The last weight transfer of each model of an instance: bytes, seconds and bytes per second."""
    found = []
    for model_id in status.models:
        tail = f"/{model_id}" if len(status.models) > 1 else ""  # as a rollout service names them
        size, pull_s = (status.metrics.get(f"weights/{name}{tail}") for name in ("size_bytes", "pull_s"))
        if size is None or pull_s is None:
            continue
        held = status.serving.get(model_id)
        found.append({
            "instance": status.instance_id,
            "model": model_id,
            "version": held.version if held is not None else None,
            "digest": held.digest if held is not None else "",
            "size_bytes": size,
            "pull_s": pull_s,
            "load_s": status.metrics.get(f"weights/load_s{tail}"),
            "bytes_per_s": size / pull_s if pull_s > 0 else None,
        })  # fmt: skip
    return found
