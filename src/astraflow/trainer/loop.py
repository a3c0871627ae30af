"""The training loop.

    get_batch ──> train_step ──> offload ──> save_checkpoint ──> notify ──> …

who            waits for                                     until
get_batch      Dataflow: groups, other policies              deadlines.batch_s
train_step     the checkpoint writer, before its update      the file is durable
offload        readers of the half that is overwritten       weights.reader_wait_s
notify         the sender's digest; Dataflow                 deadlines.publish_s; dataflow_s

get_batch is the only wait for others in a healthy run. The writer thread of a checkpoint and the sender's digest and delta run
beside the next step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from astraflow.lib.metrics import Metrics
from astraflow.lib.registry import closest
from astraflow.lib.trace import TRACE
from astraflow.protocol.batch import BatchReply
from astraflow.protocol.control import EvalResult, NotifyVersion, Ready
from astraflow.protocol.errors import DeadlinePassed, Retryable, UnknownName
from astraflow.trainer.batch import TRUNCATED, RaggedBatch, ragged
from astraflow.trainer.config import TrainerProcess
from astraflow.trainer.link import DataflowLink
from astraflow.trainer.team import Team

logger = logging.getLogger(__name__)

EXIT_TRAINED, EXIT_NOTHING, EXIT_USER_ERROR, EXIT_STALLED = 0, 1, 2, 3


class Ended(Exception):
    """Dataflow has no more batches, or the trainer was told to end while it waited."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


@dataclass
class Progress:
    """What the loop itself carries from step to step; part of every checkpoint."""

    version: int = 0
    digest: str = ""
    window: deque[float] = field(default_factory=deque)
    """Last values of the stop rule's metric."""
    resumed_from: int | None = None
    stepped: int = 0
    """Steps of this process."""

    def values(self) -> dict[str, Any]:
        """Plain values for the checkpoint."""
        return {"window": list(self.window)}


class AstraFlowPPOTrainer:
    """One policy's trainer: the five verbs and their order. Runs in the process's main thread."""

    def __init__(
        self,
        process: TrainerProcess,
        team: Team,
        link: DataflowLink,
        metrics: Metrics,
        stop: threading.Event,
        hashes: tuple[str, str] = ("", ""),
    ):
        """`stop`: set by a signal; `hashes`: of tokenizer and chat template."""
        self.process, self.config = process, process.trainer
        self.team, self.weights, self.checkpoints = team, team.weights, team.checkpoints
        self.link, self.metrics, self.stop, self.hashes = link, metrics, stop, hashes
        self.progress = Progress()
        self._announced_checkpoint = self._saved = -1
        self._evaluation = (-1, "")
        """Version and id of the newest evaluation that this trainer began; the id is empty when its reply was lost."""

    def run(self) -> int:
        """Train until done. Returns the exit code: 0 only after training or a drain."""
        self.resume()
        self.attach()
        end: Ended | None = None
        while end is None:
            end = self.reason_to_end()
            if end is None:
                try:
                    self.step()
                except Ended as noticed:
                    end = noticed
                except Retryable as error:
                    if not self.stop.is_set():
                        raise
                    end = Ended("drained", f"told to end while {error}")
        return self.finish(end)

    def step(self) -> None:
        """One version: the whole loop body."""
        begin = time.monotonic()
        reply, batch = self.get_batch()
        got = time.monotonic()
        values = self.train_step(reply, batch)
        trained = time.monotonic()
        self.offload(self.progress.version + 1)
        offloaded = time.monotonic()
        self.observe(values)
        self.save_checkpoint()
        values |= {
            "time/wait_s": got - begin,
            "time/train_s": trained - got,
            "time/offload_s": offloaded - trained,
            "time/step_s": offloaded - begin,
            "perf/wait_share": (got - begin) / max(offloaded - begin, 1e-9),
            "perf/tokens_per_s": float(batch.offsets[-1]) / max(offloaded - begin, 1e-9),
            "perf/train_tokens_per_s": float(batch.offsets[-1]) / max(trained - got, 1e-9),
        }
        values |= {name: value for name, value in reply.metrics.items() if name not in values}
        if TRACE.on:
            where = {"model": self.process.model_id, "version": self.progress.version}
            TRACE.add("step", begin, offloaded, **where)
            for name, since, until in (("wait", begin, got), ("train", got, trained), ("offload", trained, offloaded)):
                TRACE.add(name, since, until, **where)
        self.notify(values)

    # --- the verbs ------------------------------------------------------------------------------------------------------

    def get_batch(self) -> tuple[BatchReply, RaggedBatch]:
        """The batch of this version. Raises Ended when there is none, DeadlinePassed when it does not come."""
        version = self.progress.version
        end = time.monotonic() + self.config.deadlines.batch_s
        while True:
            reply = self.link.batch(self.process.model_id, version)
            if reply.save_checkpoint and version not in (self._saved, self.checkpoints.durable):
                logger.info("version %d: an operator wants a checkpoint", version)
                self.save(version)
            if reply.kind == "batch" and reply.batch is not None:
                return reply, ragged(reply.batch)
            if reply.kind in ("end_of_data", "starved", "stalled"):
                counts = ", ".join(f"{name} {count}" for name, count in sorted(reply.counts.items()))
                raise Ended(reply.kind, f"{reply.reason or reply.kind}" + (f" ({counts})" if counts else ""))
            if reply.save_checkpoint:  # nothing to train on, so that no notice of a next step would tell
                self.team.durable()
                self.announce(run_eval=False, metrics={})
            if self.stop.is_set():
                raise Ended("drained", "told to end while it waited for a batch")
            self.team.check()
            if time.monotonic() >= end:
                waits = "; ".join(f"{wait.who} waits for {wait.waits_for}: {wait.why}" for wait in reply.waits) or reply.reason
                raise DeadlinePassed(f"batch of version {version}: none within {self.config.deadlines.batch_s:g} s ({waits})")

    def train_step(self, reply: BatchReply, batch: RaggedBatch) -> dict[str, float]:
        """Forward, backward, update. The version moves even when every advantage is zero and the weights stay."""
        assert reply.batch is not None
        values = self.team.train_step(reply.batch, batch)
        return batch_metrics(batch, self.progress.version) | values

    def offload(self, version: int) -> None:
        """Publish the weights under `version`; blocks for the copy only, the digest is computed by the sender."""
        self.team.publish(version)
        self.progress.version = version
        self.progress.stepped += 1

    def save_checkpoint(self) -> None:
        """Begin a checkpoint when one is due; the last one is made by `finish`."""
        every = self.config.checkpoint.every
        if every > 0 and self.progress.version % every == 0:
            self.save(self.progress.version)

    def save(self, version: int) -> None:
        """Begin a checkpoint; the next update waits for it."""
        self.team.save(version, self.progress.values())
        self._saved = version

    def notify(self, values: dict[str, float]) -> None:
        """Tell Dataflow that the version is published; commits the batch. Wanted evaluations are begun by it."""
        version = self.progress.version
        with TRACE.span("publish", model=self.process.model_id, version=version):
            self.progress.digest = self.weights.published(version, self.config.deadlines.publish_s)
        values |= self.weights.stats()
        values["time/checkpoint_s"] = self.checkpoints.seconds
        freq, end = self.config.eval_freq, self.reason_to_end()
        final = self.config.final_eval and end is not None and end.kind == "done"
        self.announce(run_eval=freq > 0 and (final or version % freq == 0), metrics=values)
        self.metrics.log(version, values, model=self.process.model_id, timeline=self.link.timeline)
        self.weights.show(values)
        logger.info(
            "version %d: reward %.3f, loss %.4f, grad norm %.3g, step %.2f s of which %.2f s waiting",
            version,
            values.get("reward/mean", float("nan")),
            values.get("loss/policy", float("nan")),
            values.get("policy/grad_norm", float("nan")),
            values.get("time/step_s", 0.0),
            values.get("time/wait_s", 0.0),
        )

    def announce(self, run_eval: bool, metrics: dict[str, float]) -> None:
        """One notice of the present version; the same version again is a duplicate that renews checkpoint_version."""
        version, endpoint = self.progress.version, self.weights.endpoint
        self.link.held(version, self.progress.digest, self.checkpoints.durable, endpoint)
        notice = NotifyVersion(
            model_id=self.process.model_id,
            timeline=self.link.timeline,
            version=version,
            digest=self.progress.digest,
            checkpoint_version=self.checkpoints.durable,
            run_eval=run_eval,
            sender_endpoint=endpoint,
            metrics=metrics,
        )
        with TRACE.span("notify", model=self.process.model_id, version=version):
            reply = self.link.notify(notice)
        self._announced_checkpoint = self.checkpoints.durable
        if run_eval:
            self._evaluation = (version, reply.eval_id)

    # --- begin and end --------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Load the newest complete checkpoint of this run directory, if there is one."""
        saved = self.team.resume()
        if saved is None:
            return
        self.progress.version = self.progress.resumed_from = saved.version
        self.progress.window = deque(saved.loop["window"])
        logger.info("resumed from the checkpoint of version %d", saved.version)

    def attach(self) -> None:
        """Publish the present version, then /ready: Dataflow never names weights that cannot be pulled."""
        version = self.progress.version
        self.team.publish(version)
        self.progress.digest = self.weights.published(version, self.config.deadlines.publish_s)
        self.link.attach(
            Ready(
                model_id=self.process.model_id,
                train_batch_size=self.config.train_batch_size,
                sender_endpoint=self.weights.endpoint,
                version=version,
                digest=self.progress.digest,
                recovered_version=self.progress.resumed_from,
                checkpoint_version=self.checkpoints.durable,
                tokenizer_hash=self.hashes[0],
                template_hash=self.hashes[1],
                more_senders=self.team.senders[1:],
                region=self.process.region,
            )
        )

    def observe(self, values: dict[str, float]) -> None:
        """Feed the stop rule."""
        rule = self.config.stop
        if rule is None:
            return
        if rule.metric not in values:
            raise UnknownName(
                f"trainer.stop.metric: {rule.metric!r} is no metric of a step{closest(rule.metric, list(values))}; "
                f"known: {', '.join(sorted(values))}"
            )
        self.progress.window.append(values[rule.metric])
        while len(self.progress.window) > rule.window:
            self.progress.window.popleft()

    def reason_to_end(self) -> Ended | None:
        """Whether the present version is the last one, and why."""
        if self.stop.is_set():
            return Ended("drained", "told to end")
        version, rule, window = self.progress.version, self.config.stop, self.progress.window
        if version >= self.config.max_steps:
            return Ended("done", f"max_steps {self.config.max_steps} reached")
        if rule is not None and version >= rule.not_before and len(window) >= rule.window:
            mean = sum(window) / len(window)
            if mean >= rule.at_least:
                return Ended("done", f"mean {rule.metric} of {rule.window} steps is {mean:.3f}, at least {rule.at_least:g}")
        return None

    def finish(self, end: Ended) -> int:
        """Final checkpoint, evaluation and export; then leave. The exit code is 0 only after training or a drain."""
        logger.info("ending at version %d: %s", self.progress.version, end)
        trained = self.progress.version > 0
        if self.team.durable() != self.progress.version and trained and self.config.checkpoint.at_end:
            self.save(self.progress.version)
            self.team.durable()
        if trained and end.kind in ("done", "end_of_data") and self.config.final_eval and self.config.eval_freq > 0:
            self.final_eval()
        if end.kind == "stalled":  # Dataflow ends by itself, nobody is there to say goodbye to
            logger.error("%s", end)
            return EXIT_STALLED
        if trained and end.kind != "drained" and self.config.checkpoint.export:
            self.team.export(Path(self.process.run_dir) / "export" / self.process.model_id)
        self.leave(end)
        if end.kind == "starved":
            logger.error("starved at version %d: %s", self.progress.version, end)
            return EXIT_STALLED
        if not trained and end.kind != "drained":
            logger.error("nothing was trained: %s", end)
            return EXIT_NOTHING
        return EXIT_TRAINED

    def leave(self, end: Ended) -> None:
        """Announce the last checkpoint and say /shutdown. A drained trainer leaves also when Dataflow is gone: all is saved."""
        try:
            if self.checkpoints.durable != self._announced_checkpoint:
                self.announce(run_eval=False, metrics={})
            self.link.shutdown(self.process.model_id, f"{end.kind}: {end}")
        except Retryable as error:
            if end.kind != "drained":
                raise
            logger.warning("leaving without a word to Dataflow: %s", error)

    def final_eval(self) -> None:
        """Evaluate the last version and wait for the results; a missed deadline is reported, not fatal."""
        version = self.progress.version
        if self._evaluation[0] != version:
            self.announce(run_eval=True, metrics={})
        try:
            results = self.link.wait_for_eval(self.process.model_id, version, self._evaluation[1], self.config.deadlines.final_eval_s)
        except DeadlinePassed as error:
            logger.error("final %s", error)
            return
        if not results:
            logger.warning("no evaluation of the last version was made")
            return
        self.metrics.log(version, eval_metrics(results), model=self.process.model_id, timeline=self.link.timeline)


def eval_metrics(results: list[EvalResult]) -> dict[str, float]:
    """`eval/<dataset>/<metric>`; null metrics are left out."""
    return {
        f"eval/{result.dataset}/{name}": value for result in results for name, value in result.metrics.items() if value is not None
    }


def batch_metrics(batch: RaggedBatch, version: int) -> dict[str, float]:
    """`reward/`, `staleness/` and `rollout/` of a batch. Means of gaps are over own loss tokens, of rewards over trajectories.

    `reward/mean` is this policy's own reward (the mean of its segments' credits, numerics 8), which with one policy is the
    trajectory's; the latter is `reward/trajectory_mean`.
    """
    rows, mask = batch.rows, batch.loss_mask()
    _, first, trajectory = np.unique(rows["trajectory_index"], return_index=True, return_inverse=True)
    own = np.bincount(trajectory, weights=rows["credit"]) / np.maximum(np.bincount(trajectory), 1)
    scored = own[np.isfinite(own)]
    seen = rows["rewards"][first].astype(np.float64)
    _, group = np.unique(rows["group_index"], return_index=True)
    equal = rows["reward_all_equal"][group].astype(bool)
    gaps = (version - batch.tokens["versions"][mask]).astype(np.float64)
    values = {
        "rollout/trajectories": float(len(first)),
        "rollout/rows": float(batch.n_rows),
        "rollout/groups": float(len(group)),
        "rollout/loss_tokens": float(mask.sum()),
        "rollout/truncated": float((rows["finish"][first] == TRUNCATED).mean()) if len(first) else 0.0,
        "reward/zero_variance_groups": float(equal.mean()) if equal.size else 0.0,
    }
    if scored.size:
        values |= {"reward/mean": float(scored.mean()), "reward/std": float(scored.std()), "reward/max": float(scored.max())}
        values["reward/shaped_mean"] = float(np.nanmean(rows["reward_shaped"]))
    if np.isfinite(seen).any():
        values["reward/trajectory_mean"] = float(np.nanmean(seen))
    if gaps.size:
        values |= {"staleness/mean": float(gaps.mean()), "staleness/max": float(gaps.max())}
    return values
