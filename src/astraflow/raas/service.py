"""One rollout service: the composition root. `run(process)` is its whole life.

    tasks            what they do                                          wait for
    start            engines up, then registration                         engines, Dataflow (both for ever, visibly)
    lease …          one per lease (executor.py)                           its episodes, at most the lease's deadline
    weights …        one per model while notices are open (sync.py)        sender, lanes, engine
    tick             lane deadlines, metrics                               the clock
Calls come in on the same loop (server.py). Blocking work runs in threads: weight pulls, records. The engine computes in its own
process, rewards in theirs. The end: SIGTERM or /shutdown ─▶ drain ─▶ deregister ─▶ close engines and workers ─▶ exit code.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path

from astraflow.lib import prometheus
from astraflow.lib.aio import Tasks, Waits, deadline, in_daemon_thread, one_line, poll_until
from astraflow.lib.log import setup_logging
from astraflow.lib.metrics import Counter, Metrics
from astraflow.lib.prometheus import Exposition
from astraflow.lib.tokenizer import Tokenizer
from astraflow.lib.trace import TRACE
from astraflow.lib.wire import Server, new_identity
from astraflow.lib.wire_client import Client
from astraflow.protocol.control import Availability, RaaSStatus, RegisterRaaS, RegisterRaaSReply, State
from astraflow.protocol.errors import AstraFlowError, ConfigError, DeadlinePassed, Unavailable, UnknownName, UserError
from astraflow.protocol.metrics import RAAS
from astraflow.protocol.rollout import EvalStart, Serving
from astraflow.protocol.routes import RaaSAPI
from astraflow.raas.canary import PROMPTS, Canary
from astraflow.raas.config import RaaSProcess
from astraflow.raas.engines import ENGINES
from astraflow.raas.engines.base import Engine, EngineSetup
from astraflow.raas.executor import Executor
from astraflow.raas.gateway.door import PREFIX, Door
from astraflow.raas.lanes import Lanes
from astraflow.raas.models import ServedModel
from astraflow.raas.outbox import Outbox
from astraflow.raas.programs import Program, Programs
from astraflow.raas.records import Records
from astraflow.raas.registration import MISTAKES, Registrar
from astraflow.raas.server import Handlers
from astraflow.raas.slots import SlotBook
from astraflow.raas.staging import StagingDir, staging_path
from astraflow.raas.sync import LaneGate, ModelSync
from astraflow.weights.config import ModelConfig
from astraflow.weights.receiver import WeightReceiver

log = logging.getLogger(__name__)

EXIT_USER, EXIT_FAILED = 2, 1
TICK_S = 0.1
METRICS_S = 5.0
COLLECTED_S = 3.0
"""While draining: without a pull for this long nobody collects any more."""
CLOSE_S = 10.0
RECEIVER_CLOSE_S = 5.0
MENDED = ("streams_broken", "damaged_chunks")
"""What transfers survived, for status: a bad network is slow, not wrong, and should be seen."""


class RaaSManager:
    """Engines, workflows, slots, weight updates, registration."""

    def __init__(self, process: RaaSProcess, staging: Path) -> None:
        """Loads tokenizers; nothing runs yet. `staging` is this process's own directory. Raises ConfigError."""
        self.process, config = process, process.raas
        run_dir = Path(process.run_dir)
        self.identity = new_identity(process.run_id, process.token, process.tls)
        self.tasks, self.waits, self.lanes = Tasks(self._task_failed), Waits(), Lanes()
        self.records = Records(run_dir / "rollouts" / process.instance_id, config.records.keep)
        self.staging = staging
        self.models: dict[str, ServedModel] = {}
        self.syncs: dict[str, ModelSync] = {}
        self._counts = Counter()
        door = Door(lambda: process.advertise_url or self.server.url, self._counts)
        self.programs = Programs(
            self.models,
            config.generation,
            config.rewards,
            local_workflows=config.workflows,
            local_rewards=config.reward_functions,
            local_environments=config.environments,
            agents=config.agents,
            door=door,
            plugins=process.plugins,
        )
        self.executor = Executor(
            process.instance_id,
            models=self.models,
            programs=self.programs,
            slots=SlotBook(config.slots, config.outbox_groups),
            outbox=Outbox(self.identity.incarnation[:8]),
            records=self.records,
            tasks=self.tasks,
            engine_retries=config.engine_retries,
            cancel_grace_s=config.cancel_grace_s,
        )
        self.executor.refusal = self._refusal
        self._lanes_idle = asyncio.Event()
        self._lanes_idle.set()
        self._receivers: dict[str, WeightReceiver] = {}
        for model_id, model in process.models.items():
            self._add_model(model_id, model)
        only = {"model": next(iter(self.models))} if len(self.models) == 1 else {}
        shown = Exposition(RAAS, {"process": process.instance_id}, only)
        self.server = Server(
            process.instance_id,
            RaaSAPI,
            Handlers(self).table(),
            self.identity,
            host=process.host,
            port=process.port,
            extra_routes=[prometheus.route(lambda: shown.text(self.numbers())), *door.routes],
            open_paths=[PREFIX],
        )
        self.metrics = Metrics(run_dir, process.instance_id)
        self._registrar: Registrar | None = None
        self._client: Client | None = None
        self._state: State = "starting"
        self._message = "engines start"
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._drain_s = config.drain_s
        self._logged = (time.monotonic(), 0.0)
        self._adapted = time.monotonic()

    def _add_model(self, model_id: str, model: ModelConfig) -> None:
        config = self.process.raas
        directory = Path(model.path)
        if not directory.is_dir():
            raise ConfigError(f"models.{model_id}.path: {model.path!r} is not a directory; expected a Hugging Face model directory")
        tokenizer = Tokenizer.load(model.tokenizer_path or model.path)
        assert tokenizer.hash  # and the templates' are computed here and now: /status shows them, and must not be slow the first time
        assert tokenizer.template_hash
        context = min(tokenizer.context_length, model.context_length or tokenizer.context_length)
        engine = config.engine_of(model_id)
        setup = EngineSetup(
            model_id=model_id,
            model_dir=directory,
            max_slots=config.slots + len(PROMPTS),
            context_length=context,
            eos_ids=list(tokenizer.eos_ids),
            config=engine,
            dtype=engine.dtype or model.dtype,
            architecture=model.options,
            tokenizer=tokenizer,
            staged=lambda: self.syncs[model_id].reload(),
            on_death=lambda reason: self._fatal(f"engine of {model_id}: {reason}", EXIT_FAILED),
            log_path=Path(self.process.run_dir) / "logs" / f"{self.process.instance_id}.engine-{model_id}.log",
            seed=self.process.seed,
        )
        served = ServedModel(model_id, _engine_factory(engine.kind)(setup), tokenizer, context)
        counts, self.models[model_id] = self.executor.counts, served
        canary = Canary(served.engine, directory, tokenizer.vocab_size, context, setup.dtype, config.canary, counts)
        receiver = WeightReceiver(model_id, self.process.instance_id, self.staging, self.process.weights, self.identity)
        self._receivers[model_id] = receiver
        self.syncs[model_id] = ModelSync(
            served,
            receiver,
            lanes=LaneGate(self._lanes_idle, lambda: self.lanes.time_left_s(time.monotonic())),
            rollback=self.executor.rollback,
            tasks=self.tasks,
            waits=self.waits,
            counts=counts,
            pull_s=config.pull_s,
            load_s=engine.load_s,
            canary=canary,
        )

    # --- life -----------------------------------------------------------------------------------------------------------

    async def serve(self) -> int:
        """From the first socket to the last process; returns the exit code."""
        try:
            await self.server.start()
            self.tasks.spawn("start", self._start())
            self.tasks.spawn("tick", self._tick())
            code = await self._end
            await self._drain(code)
        finally:
            await self._close()
        return code

    async def _start(self) -> None:
        """Engines first, Dataflow after: an instance in the pool can take weights at once."""
        try:
            await asyncio.gather(*(model.engine.start() for model in self.models.values()))
        except (AstraFlowError, OSError) as error:
            self._fatal(one_line(error), EXIT_USER if isinstance(error, UserError) else EXIT_FAILED)
            return
        if self._state == "starting":
            self._state, self._message = "idle", ""
        if self.process.dataflow_url:
            self._client = Client(self.process.dataflow_url, self.identity)
            self._registrar = Registrar(
                self._client, self._registration, silence_s=self.process.raas.silence_s, on_registered=self._registered
            )
            try:
                await self._registrar.run()
            except MISTAKES as error:
                self._fatal(f"dataflow_url {self.process.dataflow_url!r}: {one_line(error)}", EXIT_USER)

    def _registration(self) -> RegisterRaaS:
        return RegisterRaaS(
            instance_id=self.process.instance_id,
            url=self.process.advertise_url or self.server.url,
            models=list(self.models),
            total_slots=self.process.raas.slots,
            weight=self.process.raas.weight,
            tokenizer_hash={name: model.tokenizer.hash for name, model in self.models.items()},
            template_hash={name: model.tokenizer.template_hash for name, model in self.models.items()},
            region=self.process.region,
        )

    def _registered(self, reply: RegisterRaaSReply) -> None:
        """An instance that joined by address alone learns its run from the first reply."""
        if not self.identity.run_id and reply.run_id and self._client is not None:
            self.identity = dataclasses.replace(self.identity, run_id=reply.run_id)
            self.server.identity = self._client.identity = self.identity

    def stop(self, reason: str, drain_s: float | None = None, caller: str = "") -> None:
        """Begin the end; calling it again changes nothing. When Dataflow itself asks for it nobody waits for results any more."""
        if self._end.done():
            return
        log.info("ending: %s", reason)
        self._state, self._message = "draining", f"draining: {reason}"
        if self._registrar is not None and caller and caller == self._registrar.known:
            self._registrar.known, drain_s = "", 0.0
        if drain_s is not None:
            self._drain_s = min(self._drain_s, drain_s)
        self._end.set_result(0)

    def _fatal(self, reason: str, code: int) -> None:
        log.error("%s", reason)
        self._state, self._message = "error", reason
        if not self._end.done():
            self._end.set_result(code)

    def _task_failed(self, name: str, error: BaseException) -> None:
        self._fatal(f"task {name} failed: {one_line(error)}", EXIT_FAILED)

    async def _drain(self, code: int) -> None:
        """Finish what runs and hand it out, as long as somebody collects it."""
        if self._registrar is not None:
            await self._registrar.leave(drain=code == 0)
        if code or self.executor.idle or self._drain_s <= 0:
            return
        begun = time.monotonic()

        def finished() -> bool:
            quiet = time.monotonic() - max(begun, self.executor.last_pull) > COLLECTED_S
            return self.executor.idle or (quiet and not self.executor.pullers)

        try:
            await poll_until(finished, self._drain_s, "drain")
        except DeadlinePassed:
            log.warning("drain: %d episodes and %d results are left behind", self.executor.slots.in_flight, len(self.executor.outbox))

    async def _close(self) -> None:
        """Everything, whatever happened before; each part has its own deadline."""
        self.executor.end_pulls()
        self._log_metrics(time.monotonic())
        await self.tasks.stop(CLOSE_S)
        # A pull that waits for a silent sender ends only with its call; the process does not wait for that (it is a daemon thread).
        receivers = [
            deadline(in_daemon_thread(receiver.close, "weights close"), RECEIVER_CLOSE_S, f"weights of {name}")
            for name, receiver in self._receivers.items()
        ]
        results = await asyncio.gather(
            *receivers, *(model.engine.close() for model in self.models.values()), self.programs.close(), return_exceptions=True
        )
        for error in results:
            if isinstance(error, BaseException):
                log.error("close: %s", one_line(error))
        if self._client is not None:
            await self._client.close()
        await self.server.stop(2.0)
        self.metrics.close()

    # --- what the handlers ask --------------------------------------------------------------------------------------------

    def heard(self, incarnation: str, only_dataflow_calls_this: bool) -> None:
        """Every incoming call; the lanes of a Dataflow that was restarted end with the first call of its next life."""
        for lane in self.lanes.orphans(incarnation) if only_dataflow_calls_this else ():
            self.close_lane(lane, "Dataflow was restarted")
        if self._registrar is not None:
            self._registrar.heard(incarnation, only_dataflow_calls_this)

    def sync_of(self, model_id: str) -> ModelSync:
        """Raises UnknownName for a model that is not served here."""
        if model_id not in self.syncs:
            raise UnknownName(f"model_id {model_id!r}: not served here; served: {', '.join(self.syncs)}")
        return self.syncs[model_id]

    def serving(self) -> dict[str, Serving]:
        """Receipts."""
        return {name: serving for name, model in self.models.items() if (serving := model.serving) is not None}

    def _refusal(self, program: Program) -> str:
        if self._state in ("draining", "error"):
            return self._message
        for policy in program.spec.policies:
            if self.models[policy].serving is None:
                return f"{policy} serves no weights: {self.syncs[policy].message or 'none have come yet'}"
            if self.syncs[policy].rolling_back:
                return f"{policy} rolls back to a new timeline"
        return self.programs.complaint(program)

    def availability(self) -> Availability:
        slots = self.executor.slots
        return Availability(
            total_slots=slots.total_slots, free_slots=slots.free_slots, in_flight=slots.in_flight, outbox=len(self.executor.outbox)
        )

    def status(self) -> RaaSStatus:
        """From memory only."""
        reports = {name: model.engine.report() for name, model in self.models.items()}
        state = self._state
        if state == "idle" and self.executor.slots.in_flight:
            state = "ready"
        messages = [self._message, self._registrar.message if self._registrar else "", *(sync.message for sync in self.syncs.values())]
        messages += self.programs.complaints()
        return RaaSStatus(
            instance_id=self.process.instance_id,
            state=state,
            message="; ".join(text for text in messages if text),
            availability=self.availability(),
            models=list(self.models),
            serving=self.serving(),
            engines={name: report.status for name, report in reports.items()},
            workflows=self.programs.ids,
            tokenizer_hash={name: model.tokenizer.hash for name, model in self.models.items()},
            template_hash={name: model.tokenizer.template_hash for name, model in self.models.items()},
            lanes=self.lanes.names,
            metrics=self.numbers(),
        )

    def numbers(self) -> dict[str, float]:
        """Counts since the start, and the engines' own numbers (with the model's name when there are several); `protocol/metrics.py`."""
        slots = self.executor.slots
        counts = {**self.executor.counts.values(), **self._counts.values()}
        out = {**counts, **self.programs.counts(), "raas/slots": float(slots.total_slots)}
        out |= {"raas/free_slots": float(slots.free_slots), "raas/in_flight": float(slots.in_flight)}
        out["raas/outbox_groups"] = float(len(self.executor.outbox))
        for name, model in self.models.items():
            tail = f"/{name}" if len(self.models) > 1 else ""
            own = {f"raas/engine/{key}": value for key, value in model.engine.report().metrics.items()}
            own |= {f"weights/{key}": self._receivers[name].counters[key] for key in MENDED}
            out.update({key + tail: value for key, value in {**own, **self.syncs[name].last}.items()})
        return out

    # --- lanes ------------------------------------------------------------------------------------------------------------

    def open_lane(self, call: EvalStart) -> None:
        """Raises Conflict unless the versions are those served, Unavailable while this instance ends."""
        if self._state in ("draining", "error"):
            raise Unavailable(f"lane {call.lane!r}: {self._message}")
        self.lanes.open(call.lane, call.versions, call.deadline_s, self.serving(), time.monotonic(), call.incarnation)
        self._lanes_idle.clear()

    def close_lane(self, lane: str, reason: str) -> None:
        """Forget the lane's leases and results; loads that were put off go on."""
        if self.lanes.close(lane, reason):
            self.executor.cancel_lane(lane)
            log.info("lane %s closed: %s", lane, reason)
        if not self.lanes.names:
            self._lanes_idle.set()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for lane, reason in self.lanes.due(self.serving(), now):
                self.close_lane(lane, reason)
            if now - self._adapted >= self.process.raas.engine.ping_s:  # the engines' numbers are as old as their last ping
                self._adapted = now
                reports = [model.engine.report() for model in self.models.values()]
                kv_use = max(report.metrics.get("kv_use", 0.0) for report in reports)
                self.executor.slots.adapt(sum(report.status.queued for report in reports), kv_use)
            if now - self._logged[0] >= METRICS_S:
                self._log_metrics(now)

    def _log_metrics(self, now: float) -> None:
        """A line in metrics.jsonl when something was made since the last one."""
        made = self.executor.counts["raas/trajectories"]
        since, before = self._logged
        self._logged = (now, made)
        if made == before:
            return
        values = {**self.executor.means.take(), **self.numbers(), "perf/trajectories_per_s": (made - before) / (now - since)}
        step = max((serving.version for serving in self.serving().values()), default=0)
        try:
            self.metrics.log(step, values)
        except OSError as error:  # a full disk costs lines, not rollouts
            log.warning("metrics not written: %s", error)


def _engine_factory(kind: str) -> Callable[[EngineSetup], Engine]:
    try:
        return ENGINES.resolve(kind)  # type: ignore[no-any-return]
    except UnknownName as error:
        raise ConfigError(f"raas.engine.kind: {one_line(error)}") from None


def run(process: RaaSProcess) -> int:
    """Run one instance until SIGTERM, Ctrl-C or /shutdown. Exit code: 0 = drained, 1 = failed, 2 = the user's mistake."""
    setup_logging(process.instance_id, level=process.log_level)  # to stderr, which the supervisor sends to logs/<name>.log
    if process.trace:
        TRACE.open(process.run_dir, process.instance_id)
    try:
        for plugin in process.plugins:
            _import_plugin(plugin)
        return asyncio.run(_main(process))
    except UserError as error:
        log.error("%s", one_line(error))
        return EXIT_USER
    except (AstraFlowError, OSError) as error:
        log.error("%s", one_line(error))
        return EXIT_FAILED


def _import_plugin(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"plugins: {name!r} cannot be imported: {error}") from None


async def _main(process: RaaSProcess) -> int:
    early: list[str] = []
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, early.append, signal.Signals(number).name)
    models = [model.path for model in process.models.values()]
    staging = StagingDir(staging_path(process.run_dir, process.instance_id, process.staging_dir, models), process.instance_id)
    try:
        manager = RaaSManager(process, staging.path)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, manager.stop, signal.Signals(number).name)
        await asyncio.sleep(0)  # lets a signal that came meanwhile be noted
        if early:
            manager.stop(early[0])
        return await manager.serve()
    finally:
        staging.close()
