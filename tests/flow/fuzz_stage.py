"""Dataflow with its dashboard, a rollout service and a sender agent as real processes, at rest after a first step, for tests of security.

The test plays the trainer: it publishes, takes one batch, says so, and pauses acquisition. From then on nothing moves by itself.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from conformance_rig import ROOT, TOKEN
from conformance_rig import Stage as Processes
from fuzz import Target
from peers import patiently

from astraflow.lib.net import check_url, split_host_port
from astraflow.lib.wire import new_identity
from astraflow.lib.wire_client import SyncClient
from astraflow.protocol import control, rollout, weights
from astraflow.protocol.batch import BatchReply, BatchRequest
from astraflow.protocol.errors import ConfigError
from astraflow.protocol.message import Message
from astraflow.protocol.routes import DataflowAPI, RaaSAPI, Route, SenderAPI, table
from astraflow.weights.config import WeightsConfig
from astraflow.weights.manager import WeightManager
from astraflow.weights.receiver import WeightReceiver

WAIT_S = 90.0
RUN_ID = "fuzz"
BATCH = 8
RECIPE = """\
experiment: {{name: fuzz, seed: 0, run_dir: {directory}/run, run_id: fuzz}}
models: {{solver: {{path: assets/tiny/solver}}}}
train_dataset: {{loader: digits, options: {{task: sort, min_len: 3, max_len: 6}}}}
workflow: {{workflow: rlvr, reward: exact_match, n_samples: 4, generation: {{max_new_tokens: 10, temperature: 1.0}}}}
dataflow: {{pool: {{heartbeat_s: 2.0, status_timeout_s: 5.0, pull_wait_s: 1.0}}}}
raas: {{engine: {{kind: scripted}}, slots: 16, cancel_grace_s: 0.2}}
trainer: {{train_batch_size: 8, max_steps: 50, eval_freq: 0, threads: 1}}
launch: {{dataflow_port: {port}, token_file: {directory}/token}}
plugins: [task_counter]
"""


class FuzzStage:
    """The processes and what a test asks of them."""

    def __init__(self, directory: Path) -> None:
        self._processes = Processes(directory)
        self.directory, self.run_dir = directory, directory / "run"
        self._processes.recipe.write_text(RECIPE.format(directory=directory, port=self._processes.port))
        self.identity = new_identity(RUN_ID, TOKEN)
        config = WeightsConfig(chunk_bytes=4096, hash_threads=1, idle_s=5.0, reader_wait_s=1.0, start_s=WAIT_S, io_timeout_s=WAIT_S)
        self.manager = WeightManager("solver", config, self.identity, directory)
        self.receivers: list[WeightReceiver] = []
        self.dataflow = SyncClient(self._processes.url, self.identity)
        self.raas: SyncClient
        self.sender: SyncClient
        self.version = self.timeline = 0
        names = ("OPENAI_API_KEY", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY")
        self.secrets = {name: f"secret-of-{name.lower()}-{number}" for number, name in enumerate(names)}
        """In the environment of every process."""

    def start(self) -> None:
        """Everything is up, one batch is trained, and nothing moves."""
        path = os.pathsep.join([str(ROOT / "src"), str(Path(__file__).parent)])
        self._processes.environment = {"PYTHONPATH": path, "TASK_COUNTER": str(self.directory / "tasks"), **self.secrets}
        dataflow, raas = self._processes.astraflow("dataflow"), self._processes.astraflow("raas", "--index", "0")
        self.publish(0)
        self.sender = SyncClient(self.manager.endpoint, self.identity)
        ready = control.Ready(
            model_id="solver", train_batch_size=BATCH, sender_endpoint=self.manager.endpoint, digest=self.manager.published(0, WAIT_S)
        )
        self.timeline = patiently(lambda: self.ask(DataflowAPI.ready, ready), WAIT_S).timeline
        (instance,) = self.until("a live instance", lambda: [one for one in self.status().instances if one.state == "live"])
        self.raas = SyncClient(instance.url, self.identity)
        self.pids = {"dataflow": dataflow.pid, "raas": raas.pid, "sender": self.manager.sender_pid}
        self.step()
        self.ask(DataflowAPI.acquisition, control.SetAcquisition(paused=True))
        self.until("rest", lambda: not self.status().ledger.in_flight.get("leased") and not self.raas_status().availability.in_flight)
        held = lambda: self.ask_raas(RaaSAPI.leases).held  # noqa: E731
        self.until("an empty outbox", lambda: not held())
        self.until("the newest weights", lambda: self.raas_status().serving["solver"].version == self.version)

    # --- the trainer --------------------------------------------------------------------------------------------------------

    def publish(self, version: int) -> str:
        base = torch.arange(60_000, dtype=torch.float32).view(-1, 100) * 1e-3 + version
        self.manager.offload([("a.weight", base), ("b.bias", torch.full((33,), float(version)))], version)
        return self.manager.published(version, WAIT_S)

    def batch(self) -> BatchReply:
        request = BatchRequest(model_id="solver", timeline=self.timeline, version=self.version, wait_s=2.0)
        return self.until("a batch", lambda: reply if (reply := self.ask(DataflowAPI.batch, request)).kind != "wait" else None)

    def step(self) -> None:
        """Take the next batch and publish the next version."""
        assert self.batch().kind == "batch"
        digest = self.publish(self.version + 1)
        notice = control.NotifyVersion(model_id="solver", timeline=self.timeline, version=self.version + 1, digest=digest)
        assert self.ask(DataflowAPI.notify_version, notice).trained == BATCH
        self.version += 1

    def works(self) -> None:
        """After everything that was said to them the services do their work: a step, a load, groups, a pull of all bytes."""
        made = self.status().ledger.made
        self.ask(DataflowAPI.acquisition, control.SetAcquisition(paused=False))
        self.step()
        self.until("the next weights are served", lambda: self.raas_status().serving["solver"].version == self.version)
        self.until("new work", lambda: self.status().ledger.made > made)
        ledger = self.status().ledger
        assert ledger.made == ledger.trained + sum(ledger.dropped.values()) + sum(ledger.in_flight.values())
        receiver = WeightReceiver("solver", "late", self.directory / "late", WeightsConfig(io_timeout_s=WAIT_S), self.identity)
        self.receivers.append(receiver)
        digest = self.ask_sender(SenderAPI.get_version).digest
        assert receiver.pull(self.manager.endpoint, self.version, digest, deadline_s=WAIT_S).digest == digest

    # --- asking -------------------------------------------------------------------------------------------------------------

    def ask(self, route: Route[Any, Any], request: Message | None = None) -> Any:
        return self.dataflow.call(route, request, timeout_s=WAIT_S)

    def ask_raas(self, route: Route[Any, Any], request: Message | None = None) -> Any:
        return self.raas.call(route, request, timeout_s=WAIT_S)

    def ask_sender(self, route: Route[Any, Any], request: Message | None = None) -> Any:
        return self.sender.call(route, request, timeout_s=WAIT_S)

    def status(self) -> control.DataflowStatus:
        return patiently(lambda: self.ask(DataflowAPI.status), WAIT_S)

    def raas_status(self) -> control.RaaSStatus:
        return patiently(lambda: self.ask_raas(RaaSAPI.status), WAIT_S)

    def until(self, what: str, holds: Callable[[], Any]) -> Any:
        end = time.monotonic() + WAIT_S
        while not (found := holds()):
            assert time.monotonic() < end, f"not within {WAIT_S:g} s: {what}\n{self.said()[-6000:]}"
            time.sleep(0.05)
        return found

    def said(self) -> str:
        return self._processes.said()

    def close(self) -> None:
        for part in (*self.receivers, self.manager, self._processes):
            part.close()

    # --- what must not grow, and what must not change -----------------------------------------------------------------------

    def counters(self) -> dict[str, Any]:
        """Everything that counts rollouts, versions and places."""
        status, raas = self.status(), self.raas_status()
        return {
            "ledger": msgspec.to_builtins(status.ledger),
            "queues": msgspec.to_builtins(status.queues),
            "trainers": [(one.model_id, one.timeline, one.version, one.digest, one.checkpoint_version) for one in status.trainers],
            "instances": [(one.instance_id, one.state, one.incarnation, one.in_flight) for one in status.instances],
            "served": msgspec.to_builtins(raas.serving),
            "slots": (raas.availability.free_slots, raas.availability.in_flight, raas.availability.outbox),
            "trajectories": raas.metrics.get("raas/trajectories"),
            "published": self.ask_sender(SenderAPI.get_buffer_info).available,
            "rows": {name: self.rows(name) for name in ("shares", "leases", "lost", "batches")},
        }

    def rows(self, name: str) -> int:
        database = sqlite3.connect(f"file:{self.run_dir / 'ledger' / 'ledger.sqlite'}?mode=ro", uri=True)
        try:
            (count,) = database.execute(f"SELECT COUNT(*) FROM {name}").fetchone()
        finally:
            database.close()
        return int(count)

    def sizes(self) -> dict[str, Size]:
        return {name: self.size_of(name, pid) for name, pid in self.pids.items()}

    def size_of(self, name: str, pid: int) -> Size:
        proc = Path(f"/proc/{pid}")
        rss = int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return Size(rss, len(list((proc / "fd").iterdir())), len(list((proc / "task").iterdir())), self._tasks(name, pid))

    def _tasks(self, name: str, pid: int) -> int:
        if name == "sender":  # it imports no plug-ins
            return 0
        told = self.directory / f"tasks.{pid}"
        told.unlink(missing_ok=True)
        os.kill(pid, signal.SIGUSR2)
        self.until(f"the tasks of {name}", told.exists)
        return int(told.read_text().split("\n")[0])

    # --- targets ------------------------------------------------------------------------------------------------------------

    def targets(self) -> list[Target]:
        return [*self._routes("dataflow", DataflowAPI, self.dataflow.url), *self._pages(),
                *self._routes("raas", RaaSAPI, self.raas.url), *self._routes("sender", SenderAPI, self.sender.url)]  # fmt: skip

    def _routes(self, service: str, api: type, url: str) -> Iterator[Target]:
        port, bases = split_host_port(url)[1], messages(self)[service]
        for name, route in table(api).items():
            yield Target(
                f"{service}.{name}", port, route.method, route.path, TOKEN, route.request,
                [msgspec.to_builtins(message) for message in bases.get(name) or [route.request()]],
                lambda message, service=service, name=name: self._harmful(service, name, message),
            )  # fmt: skip

    def _pages(self) -> Iterator[Target]:
        port = self._processes.port
        filters = {
            "q": 'a "b c', "reward_min": 0.5, "tokens_max": 10, "policy": "solver", "version": 0, "state": "trained", "order": "best",
            "reason": "error", "workflow": "rlvr", "instance": "raas-0", "page": 0, "size": 50,
        }  # fmt: skip
        words = [{"q": " ".join(f"w{i}" for i in range(n))} for n in (1, 60, 300)]
        for path, bases in {
            "/dashboard/": [{}], "/dashboard/main.js": [{}], "/dashboard": [{}], "/view/live": [{}], "/view/series": [{"since": 3}],
            "/view/rollouts": [filters, {"size": 5}, *words], "/view/rollout": [{"place": "raas-0/x"}], "/view/group": [{"lease": "x"}],
            "/view/export": [{"size": 2, "q": "nothing"}],
        }.items():  # fmt: skip
            yield Target(f"page {path}", port, "GET", path, TOKEN, None, bases)
        acts = [{"action": "drain", "instance": "x"}, {"action": "pause"}, {"action": "eval"}]
        yield Target("page /view/act", port, "POST", "/view/act", TOKEN, None, acts, lambda body: b"resume" in body or b"raas-0" in body)

    def _harmful(self, service: str, name: str, message: Any) -> bool:
        """What a peer that means it would rightly get done, and what waits for long."""
        if getattr(message, "wait_s", 0.0) > 0.05:
            return True
        mine = getattr(message, "model_id", "") == "solver"
        match f"{service}.{name}":
            case "dataflow.shutdown":
                return message.model_id in ("", "solver")
            case "raas.shutdown" | "sender.shutdown":
                return True
            case "dataflow.deregister_raas":
                return bool(message.instance_id == "raas-0")
            case "dataflow.acquisition":
                return not message.paused
            case "dataflow.ready":
                return mine and message.train_batch_size >= 1 and all(map(usable, (message.sender_endpoint, *message.more_senders)))
            case "dataflow.batch" | "dataflow.notify_version":
                return mine and message.timeline == self.timeline
            case "raas.notify_version":
                return mine and (message.timeline > self.timeline or message.version > self.version)
            case "raas.eval_start":
                return "solver" in message.versions or not message.versions
            case _:
                return False


def usable(url: str) -> bool:
    try:
        return not url or bool(check_url(url, "url"))
    except ConfigError:
        return False


@dataclass(frozen=True)
class Size:
    """What a process holds."""

    rss_bytes: int
    files: int
    threads: int
    tasks: int


def messages(stage: FuzzStage) -> dict[str, dict[str, list[Message]]]:
    """Correct messages by service and call; a call that is not here has nothing to say."""
    spec = rollout.WorkflowSpec(workflow="rlvr", reward="exact_match", options={}, generation={"max_new_tokens": 4}, policies=["solver"])
    lease = rollout.Lease(lease_id="l1", task_id="t", workflow_id="nobody's", n_samples=4, data={"prompt": "2+3", "answer": "5"}, seed=7)
    submit = rollout.Submit(leases=[lease, msgspec.structs.replace(lease, lease_id="l2")])
    digest, serving = "0" * 32, rollout.Serving(timeline=0, version=99, digest="x")
    known = stage.manager.published(stage.version, WAIT_S)
    return {
        "dataflow": {
            "register_raas": [control.RegisterRaaS(
                instance_id="fuzz", url="http://127.0.0.1:9", models=["solver"], total_slots=16, tokenizer_hash={"solver": "x"}
            )],
            "deregister_raas": [control.DeregisterRaaS(instance_id="fuzz")],
            "ready": [
                control.Ready(model_id="solver", train_batch_size=0, sender_endpoint="", version=3, more_senders=["http://127.0.0.1:9"]),
                control.Ready(model_id="nobody", train_batch_size=8, sender_endpoint="http://127.0.0.1:9"),
            ],
            "batch": [BatchRequest(model_id=name, timeline=7, version=1, wait_s=0.0) for name in ("solver", "nobody")],
            "notify_version": [
                control.NotifyVersion(model_id=name, timeline=7, version=1, metrics={"loss": 0.5}) for name in ("solver", "nobody")
            ],
            "eval_results": [control.EvalResultsRequest(since=0)],
            "acquisition": [control.SetAcquisition(paused=True)],
            "shutdown": [control.Shutdown(model_id="nobody")],
        },
        "raas": {
            "register_workflow": [rollout.RegisterWorkflow(workflow_id="fuzz", spec=spec), rollout.RegisterWorkflow(
                workflow_id="fuzz2", spec=msgspec.structs.replace(spec, workflow="multi_turn", options={"max_turns": 2, "discount": 0.9})
            )],
            "submit": [submit],
            "eval_submit": [msgspec.structs.replace(submit, lane="e")],
            "pull": [rollout.Pull(ack=["x-1"], max_items=1)],
            "eval_pull": [rollout.Pull(ack=["x-1"], max_items=1, lane="e")],
            "cancel": [rollout.CancelLeases(lease_ids=["x"])],
            "notify_version": [weights.NotifyRaaS(
                model_id="solver", timeline=0, version=0, digest=digest, sender_endpoint=stage.manager.endpoint
            )],
            "reset_training_engine": [rollout.ResetEngine(deadline_s=0.0)],
            "eval_start": [rollout.EvalStart(lane="e", versions={"nobody": serving})],
            "eval_end": [rollout.EvalEnd(lane="e")],
            "shutdown": [control.Shutdown(reason="x")],
        },
        "sender": {
            "register_receiver": [weights.RegisterReceiver(instance_id="fuzz")],
            "register_sglang_instance": [weights.RegisterReceiver(instance_id="fuzz", layout_hash="x")],
            "request_transfer": [
                weights.TransferRequest(instance_id="fuzz", version=stage.version, digest=known),
                weights.TransferRequest(instance_id="fuzz", version=stage.version, mode="delta", base_version=0, codecs=["gaps-zstd", "x"]),
            ],
            "transfer_done": [weights.TransferDone(instance_id="fuzz", transfer_id="x", ok=False, error="e")],
            "shutdown": [control.Shutdown(reason="x")],
        },
    }  # fmt: skip
