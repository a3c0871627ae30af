"""AstraFlowService: the composition root of the Dataflow process. One asyncio loop; who runs and who blocks whom:

    task                    waits for                                        is woken by
    submit                  trainers ready, a live instance, room (pace)     notices, batches, drops, results
    submit <instance>       one POST /submit                                 its deadline
    collect <instance>      one long-poll POST /pull, then the ledger        results; the ledger thread
    notify <instance> <m>   newer weights than its receipt                   notices; its load never blocks another's
    assemble <model>        the ledger thread (a batch is durable first)     one per batch request that can be met
    watch <instance>        its pause, or one GET /status                    `fleet.trouble`, a drain
    introduce <instance>    POST /register_workflow                          a process that does not know the workflows yet
    evals                   a queued evaluation; versions, instances         trainers, receipts; its deadlines
    lane <instance>         its part of an evaluation                        results; the evaluation's deadline
    janitor                 half a second                                    receipts (held groups), deadlines
    stall                   a second                                         ends the run when nothing moves for `stall_s`
    GET /batch              groups, other policies' versions                 pulse; answers `wait` at its deadline

The ledger has a thread of its own (calls in order), decoding and collation run in worker threads. Nothing else blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import logging
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import xxhash

from astraflow.dataflow.acquisition import DataAcquisition
from astraflow.dataflow.barrier import ModelState, VersionBarrier
from astraflow.dataflow.buffer import RolloutBuffer
from astraflow.dataflow.config import OLD_WIRE, DataflowProcess, WorkflowConfig
from astraflow.dataflow.eval_run import EvalSet
from astraflow.dataflow.evals import EvalManager
from astraflow.dataflow.fleet import RaaSFleet
from astraflow.dataflow.intake import Intake
from astraflow.dataflow.leases import LeaseBook
from astraflow.dataflow.ledger_lives import LedgerDamaged
from astraflow.dataflow.policies import CURATORS, FILTERS, SHAPERS
from astraflow.dataflow.policies.base import build
from astraflow.dataflow.policies.curation import Curation
from astraflow.dataflow.pool import RaaSPool
from astraflow.dataflow.recovery import restore
from astraflow.dataflow.server import Handlers
from astraflow.dataflow.serving import DataServing
from astraflow.dataflow.shelf import Shelf
from astraflow.dataflow.source import TaskSource
from astraflow.dataflow.stall_guard import StallGuard
from astraflow.dataflow.surroundings import MACHINE, Surroundings
from astraflow.dataflow.trainers import Trainers
from astraflow.dataflow.waits import WaitBook
from astraflow.datasets import api as datasets
from astraflow.datasets.api import Task
from astraflow.lib import prometheus
from astraflow.lib.aio import Tasks, Waits
from astraflow.lib.log import setup_logging
from astraflow.lib.metrics import Metrics
from astraflow.lib.proc import limit_arenas
from astraflow.lib.trace import TRACE
from astraflow.protocol.errors import ConfigError, UserError
from astraflow.protocol.rollout import WorkflowSpec
from astraflow.protocol.routes import DataflowAPI

log = logging.getLogger("astraflow.dataflow")
JANITOR_S = 0.5
FAILED, MISTAKE, STALLED = 1, 2, 3
"""Exit codes beside 0. Whoever supervises this process does not start it again after the last two."""


class AstraFlowService:
    """Builds the parts, finds the earlier state again, runs until the end."""

    def __init__(
        self, process: DataflowProcess, tasks: Sequence[Task], valid: Mapping[str, Sequence[Task]], outside: Surroundings = MACHINE
    ) -> None:
        """`valid`: tasks per name in `process.valid_datasets`. Raises UserError for what cannot work."""
        process.validate()
        if process.allow_pickle:
            from astraflow.dataflow.compat_door import spoken  # the only way to it: otherwise nothing here can unpickle

            outside = spoken(process, outside)
        config, run_dir = process.dataflow, Path(process.run_dir)
        self.process = process
        self._ended = asyncio.Event()
        self._failure: BaseException | None = None
        filters = list(build(FILTERS, "dataflow.policies.filter", config.policies.filter).values())
        shapers = list(build(SHAPERS, "dataflow.policies.shaper", config.policies.shaper).values())
        self._curation = Curation(build(CURATORS, "dataflow.policies.curator", config.policies.curator), process.seed)
        specs, train_id, sets = workflows(process, valid)
        ledger = outside.ledger(run_dir / "ledger", config.ledger.segment_bytes)
        found = ledger.recover()
        identity = dataclasses.replace(outside.identity(process.run_id, process.token), tls=process.tls)
        epochs = process.train_dataset.repeat
        self.shelf = shelf = Shelf(
            process=process,
            identity=identity,
            ledger=ledger,
            thread=outside.thread(),
            barrier=VersionBarrier(
                {model_id: ModelState(model_id=model_id) for model_id in process.models},
                config.buffer.max_policy_lead,
                config.pool.trainer_deadline_s,
            ),
            pool=RaaSPool(
                config.pool.max_failures,
                alive_s=config.pool.pull_wait_s + config.pool.status_timeout_s,
                drain_s=config.pool.lease_deadline_s + config.pool.call_timeout_s,
            ),
            leases=LeaseBook(found.meta.get("ledger_id", b"").decode() or identity.incarnation[:6], config.pool.max_attempts),
            source=TaskSource(tasks, process.seed, shuffle=process.train_dataset.shuffle, epochs=epochs),
            buffers={model_id: RolloutBuffer(model_id, config.buffer, process.seed) for model_id in process.models},
            metrics=Metrics(run_dir, "dataflow"),
            tasks=Tasks(self._task_failed),
            clock=outside.clock,
            waits=Waits(outside.clock),
        )
        self.fleet = RaaSFleet(shelf, specs, outside.connect)
        self.intake = Intake(shelf, filters, shapers, self._curation, found.arrivals)
        self.serving = DataServing(shelf, self.intake)
        self.evals = EvalManager(shelf, self.fleet, sets, self.serving.can_serve)
        self.trainers = Trainers(shelf, self.serving, self.intake, self.fleet, self._curation, self.evals.request)
        self.acquisition = DataAcquisition(shelf, self.fleet, self.intake, self._curation, train_id)
        self.fleet.on_lost, self.fleet.collect = self.acquisition.lost, self.acquisition.collect_loop
        self.fleet.on_joined = self.evals.joined
        self.guard = StallGuard(shelf, WaitBook(shelf, self.fleet, self.intake, self.serving, self.evals))
        self._handlers = Handlers(
            shelf, self.fleet, self.acquisition, self.intake, self.serving, self.trainers, self.evals, self.guard, self.save, self.finish
        )
        self.server = outside.listen(
            "dataflow",
            DataflowAPI,
            self._handlers.table(),
            shelf.identity,
            host=process.host,
            port=process.port,
            extra_routes=[prometheus.route(self._handlers.prometheus)],
        )
        self.evals.restore(found.evals, found.meta)
        self._dropped_at_start = restore(shelf, self.serving, self.intake, self._curation, found)

    def _task_failed(self, name: str, error: BaseException) -> None:
        self._failure = self._failure or error
        self.finish(f"task {name} failed: {error}")

    def _stalled(self, reason: str) -> None:
        self.shelf.stalled = reason
        self.finish(reason)

    def finish(self, reason: str) -> None:
        """The end begins."""
        if not self._ended.is_set():
            self.shelf.event(f"ending: {reason}")
            self._ended.set()

    async def save(self) -> str:
        """Write all state that is not written with each change (the ledger is always durable). Returns its path."""
        shelf = self.shelf
        state = {"ledger_id": shelf.leases.prefix.encode(), "steps": msgspec.msgpack.encode(shelf.steps), "ended": b""}
        state |= self._curation.meta()
        await shelf.write(shelf.ledger.put, state | shelf.versions_meta() | shelf.pool_meta() | shelf.source_meta())
        return str(shelf.ledger.path)

    async def run(self) -> int:
        """Serve until every trainer is done, /shutdown, a signal, a stall, or a failure. Returns the exit code."""
        shelf = self.shelf
        await self.server.start()
        (Path(self.process.run_dir) / "dataflow.url").write_text(self.server.url + "\n", encoding="utf-8")
        await self.save()
        if self._dropped_at_start:
            await shelf.write(shelf.ledger.settle, self._dropped_at_start[0])
            for reason, leases in self._dropped_at_start[1].items():
                await shelf.write(shelf.ledger.abandon, leases, reason)
        for instance in list(shelf.pool.instances.values()):
            if instance.record.url.startswith(OLD_WIRE) and not self.process.allow_pickle:
                await self.fleet.out(instance.instance_id, "it speaks the old wire, and this start has no --allow-pickle")
            else:
                await self.fleet.open(instance)
        shelf.tasks.spawn("submit", self.acquisition.submit_loop())
        shelf.tasks.spawn("evals", self.evals.run())
        shelf.tasks.spawn("janitor", self._janitor())
        self.guard.clear()
        shelf.tasks.spawn("stall", self.guard.run(self._handlers.now, self._stalled))
        drained = self._signals()
        if shelf.barrier.all_done:  # the process before this one died while it ended
            self.finish("every trainer is done")
        await self._ended.wait()
        await self._end(tell_instances=not drained.is_set() and self._failure is None)
        if isinstance(self._failure, LedgerDamaged):
            log.error("%s", self._failure)
            return MISTAKE  # started again, it would meet the same file
        if self._failure is not None:
            return FAILED
        if shelf.stalled:
            log.error("%s", shelf.stalled)  # the last word in the log: whoever started this process tells it on
            return STALLED
        return 0

    def _signals(self) -> asyncio.Event:
        """SIGTERM and SIGINT end this process and leave the run resumable: instances are not told to end."""
        drained = asyncio.Event()

        def stop(name: str) -> None:
            drained.set()
            self.finish(name)

        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                asyncio.get_running_loop().add_signal_handler(number, stop, number.name)
        return drained

    async def _end(self, tell_instances: bool) -> None:
        shelf = self.shelf
        shelf.stopping, self.trainers.run_ended = True, tell_instances
        shelf.pulse.fire()
        await shelf.tasks.stop()
        if tell_instances:
            await self.fleet.shutdown_all("the run ends")
            await self.trainers.farewell()
        await self.server.stop()
        if self._failure is None:
            await self.save()
            if tell_instances:  # the run is over: a later start with this ledger is a resume: it expects its trainers anew
                await shelf.write(shelf.ledger.put, {"ended": b"1"})
            self._log_metrics()
        if not isinstance(self._failure, LedgerDamaged):
            counts = await shelf.write(shelf.ledger.check)
            log.info("ledger: %s", counts)
        await self.fleet.close()
        shelf.thread.close()
        shelf.ledger.close()
        shelf.metrics.close()

    async def _janitor(self) -> None:
        """Deadlines, held groups, metrics."""
        shelf, next_line = self.shelf, 0.0
        while True:
            await asyncio.sleep(JANITOR_S)
            for model_id in shelf.barrier.tick(shelf.clock()):
                limit = shelf.barrier.trainer_deadline_s
                shelf.event(f"trainer {model_id} was not heard of for {limit:g} s: it leaves the version minimum")
                shelf.pulse.fire()
            await self.intake.reconsider()
            if shelf.clock() >= next_line:
                next_line = shelf.clock() + self.process.dataflow.metrics_s
                self._log_metrics()

    def _log_metrics(self) -> None:
        """One line of the whole, and one per model: what was generated against what was trained on since the last such line."""
        shelf = self.shelf
        shelf.metrics.log(shelf.barrier.service_version, self._handlers.numbers() | shelf.group_means.take())
        for model_id, flow in shelf.flows.items():
            if values := flow.interval():
                shelf.metrics.log(shelf.barrier.models[model_id].version, values, model=model_id, over="interval")


def workflows(process: DataflowProcess, valid: Mapping[str, Sequence[Task]]) -> tuple[dict[str, WorkflowSpec], str, list[EvalSet]]:
    """(workflow id → spec, id of training, evaluation sets). An id is a hash of what it names."""
    specs: dict[str, WorkflowSpec] = {}

    def name(config: WorkflowConfig, overrides: dict[str, object]) -> str:
        spec = WorkflowSpec(
            workflow=config.workflow,
            reward=config.reward,
            options=config.options,
            generation={**config.generation, **overrides},
            policies=config.policies or process.models,
        )
        key = xxhash.xxh3_64_hexdigest(msgspec.json.encode(spec, order="deterministic"))
        specs[key] = spec
        return key

    train = name(process.workflow, {})
    sets = []
    for label, config in process.valid_datasets.items():
        chosen = process.eval_workflows[config.workflow] if config.workflow else process.workflow
        key = name(chosen, dict(config.generation))
        once = tuple({task.task_id: task for task in valid[label]}.values())
        sets.append(EvalSet(label, once, config.n_samples, key, config.max_length))
    return specs, train, sets


def run(process: DataflowProcess, outside: Surroundings = MACHINE) -> int:
    """Blocking main of the Dataflow process. Exit codes: 0 ended or drained, 1 failed, 2 a mistake of the user, 3 stalled."""
    setup_logging("dataflow", process.log_file or str(Path(process.run_dir) / "logs" / "dataflow.log"))
    started = time.monotonic()
    if process.trace:
        TRACE.open(process.run_dir, "dataflow")
    limit_arenas(2)
    try:
        for module in process.plugins:
            importlib.import_module(module)
        tasks = datasets.load(process.train_dataset, process.seed)
        valid = {name: datasets.load(config, process.seed, name) for name, config in process.valid_datasets.items()}
        log.info("%d tasks, %d valid sets, loaded in %.1f s", len(tasks), len(valid), time.monotonic() - started)
        return asyncio.run(_serve(process, tasks, valid, outside))
    except UserError as error:
        log.error("%s", error)
        return MISTAKE
    except ModuleNotFoundError as error:
        log.error("%s", ConfigError(f"plugins: {error}"))
        return MISTAKE


async def _serve(process: DataflowProcess, tasks: Sequence[Task], valid: Mapping[str, Sequence[Task]], outside: Surroundings) -> int:
    return await AstraFlowService(process, tasks, valid, outside).run()
