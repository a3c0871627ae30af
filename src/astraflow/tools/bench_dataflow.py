"""`astraflow bench dataflow`: the real Dataflow service over HTTP, four scripted rollout services, and a trainer that makes every
trajectory again from its name and compares all of it.

One stage = one Dataflow process in a directory of its own with its peers. This process is the trainer.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from astraflow.dataflow.config import DataflowProcess
from astraflow.lib.proc import Child, describe_exit
from astraflow.lib.wire import new_identity
from astraflow.lib.wire_client import SyncClient
from astraflow.protocol import codec, control
from astraflow.protocol.batch import FINISH_CODES, Batch, BatchReply, BatchRequest
from astraflow.protocol.errors import AstraFlowError, Retryable
from astraflow.protocol.routes import DataflowAPI
from astraflow.tools.bench import Limit, Outcome, Say
from astraflow.tools.bench_peers import MODEL, PROMPT_SHARE, RUN_ID, Array, contents, keys, rewards

GROUP, BATCH, PEERS, SLOTS = 8, 256, 4, 512
CHECKPOINT_EVERY = 4
"""Steps between two checkpoints of the trainer: what they hold is final, and its payloads are deleted."""
DEADLINE_S = 60.0

LIMITS = {
    "trajectories_per_s_512": Limit(at_least=1000),
    "trajectories_per_s_4096": Limit(at_least=300),
    "cpu_s_per_1000_512": Limit(at_most=1.0),
    "batch_ms_p50_512": Limit(at_most=30),
    "batch_ms_p50_4096": Limit(at_most=150),
    "ledger_cost": Limit(at_most=0.25),
    "rss_growth": Limit(at_most=0.05),
}


@dataclass(frozen=True)
class Size:
    """Batches of each part."""

    warm_up: int
    short: int
    """Of 512 tokens per trajectory: throughput, CPU, memory."""
    long: int
    """Of 4,096 tokens."""
    ready: int
    """Single batches, timed while enough groups are queued."""
    compared: int
    """Of a run with or without ledger …"""
    rounds: int
    """… and so many pairs of runs."""


FULL = Size(warm_up=24, short=784, long=96, ready=21, compared=120, rounds=3)
QUICK = Size(warm_up=1, short=3, long=1, ready=1, compared=1, rounds=1)


class PayloadWrong(AstraFlowError):
    """A batch is not what its rollout services made."""


def run(quick: bool, say: Say) -> Outcome:
    """All results."""
    size, results, checked = QUICK if quick else FULL, dict[str, float](), dict[str, int]()

    def measure(tokens: int, batches: int, ready: int, ledger: bool = True) -> tuple[Window, list[float], list[int]]:
        with stage(tokens, ledger) as trainer:
            trainer.steps(size.warm_up)
            window = trainer.steps(batches)
            waits = [trainer.ready_batch_ms() for _ in range(ready)]
            trainer.finish()
        name = f"trajectories_{tokens}" if ledger else "trajectories_without_ledger"
        checked[name] = checked.get(name, 0) + trainer.trajectories
        say(f"{tokens} tokens, {'with' if ledger else 'without'} ledger: {window}")
        return window, waits, window.rss

    window, waits, rss = measure(512, size.short, size.ready)
    results["trajectories_per_s_512"] = window.per_s
    results["cpu_s_per_1000_512"] = window.cpu_s / window.trajectories * 1000
    results["batch_ms_p50_512"] = statistics.median(waits)
    results["rss_growth"] = growth(rss)
    window, waits, _ = measure(4096, size.long, size.ready)
    results["trajectories_per_s_4096"] = window.per_s
    results["batch_ms_p50_4096"] = statistics.median(waits)
    pairs = [(measure(512, size.compared, 0)[0].per_s, measure(512, size.compared, 0, ledger=False)[0].per_s) for _ in range(size.rounds)]
    results["ledger_cost"] = 1.0 - statistics.median(on for on, _ in pairs) / statistics.median(off for _, off in pairs)
    return Outcome({name: results[name] for name in LIMITS}, LIMITS, checked)


def growth(rss: list[int]) -> float:
    """Over the last half: medians of its first and last tenth, so that one sample decides nothing."""
    half = rss[len(rss) // 2 :]
    part = max(len(half) // 10, 1)
    return statistics.median(half[-part:]) / statistics.median(half[:part]) - 1.0


# --- trainer ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """What happened between the end of the warm-up and the last commit."""

    trajectories: int
    wall_s: float
    cpu_s: float
    """Of the Dataflow process, all threads."""
    rss: list[int]
    """Bytes of the Dataflow process after each batch."""

    @property
    def per_s(self) -> float:
        return self.trajectories / self.wall_s

    def __str__(self) -> str:
        per_1000 = self.cpu_s / self.trajectories * 1000
        return f"{self.trajectories:,} trajectories, {self.per_s:,.0f}/s, {per_1000:.3f} CPU-s per 1,000, {self.rss[-1] >> 20} MiB"


@dataclass
class Trainer:
    """Gets batches, verifies them, and says that it trained."""

    client: SyncClient
    dataflow: Child
    tokens: int
    seed: int
    max_staleness: int
    timeline: int = 0
    version: int = 0
    trajectories: int = 0
    leases: set[int] = field(default_factory=set)
    """Numbers of all leases in committed batches."""

    def attach(self) -> None:
        ready = control.Ready(model_id=MODEL, train_batch_size=BATCH, sender_endpoint="", digest=self._digest(0))
        reply = patiently(
            lambda: self.client.call(DataflowAPI.ready, ready, timeout_s=DEADLINE_S), "Dataflow's answer to /ready", self.dataflow
        )
        self.timeline, self.version = reply.timeline, reply.version

    def steps(self, count: int) -> Window:
        """So many batches."""
        before, start, cpu, rss = self.trajectories, time.perf_counter(), cpu_s(self.dataflow.pid), []
        for _ in range(count):
            self._train(self._batch())
            rss.append(rss_bytes(self.dataflow.pid))
        return Window(self.trajectories - before, time.perf_counter() - start, cpu_s(self.dataflow.pid) - cpu, rss)

    def ready_batch_ms(self) -> float:
        """From request to decoded columns, when a whole batch is queued and nothing else goes on."""

        def full() -> bool:
            status = self.client.call(DataflowAPI.status, timeout_s=DEADLINE_S)
            return status.queues[MODEL].fresh_groups >= BATCH // GROUP and not status.ledger.in_flight["leased"]

        patiently(full, "enough queued groups", self.dataflow)
        start = time.perf_counter()
        batch = self._batch()
        columns = [codec.array(column) for column in (*batch.tokens.values(), *batch.rows.values(), batch.offsets)]
        taken = time.perf_counter() - start
        assert columns
        self._train(batch)
        return taken * 1000

    def finish(self) -> None:
        """Compare the counts of both sides, and end the run."""
        counts = self.client.call(DataflowAPI.status, timeout_s=DEADLINE_S).ledger
        if counts.trained != self.trajectories or counts.made != counts.trained + sum(counts.dropped.values()) + sum(
            counts.in_flight.values()
        ):
            raise PayloadWrong(f"{self.trajectories} trajectories were trained on, the ledger says {counts}")
        self.client.call(DataflowAPI.shutdown, control.Shutdown(model_id=MODEL), timeout_s=DEADLINE_S)

    def _batch(self) -> Batch:
        request = BatchRequest(model_id=MODEL, timeline=self.timeline, version=self.version, wait_s=10.0)
        end = time.monotonic() + DEADLINE_S
        while True:
            reply: BatchReply = self.client.call(DataflowAPI.batch, request, timeout_s=DEADLINE_S)
            if reply.batch is not None:
                return reply.batch
            if reply.kind != "wait" or time.monotonic() > end:
                raise PayloadWrong(f"no batch of version {self.version}: {reply.kind}: {reply.reason}; {reply.waits}")

    def _train(self, batch: Batch) -> None:
        self._verify(batch)
        self.version += 1
        checkpoint = self.version // CHECKPOINT_EVERY * CHECKPOINT_EVERY
        notice = control.NotifyVersion(
            model_id=MODEL, timeline=self.timeline, version=self.version, digest=self._digest(self.version), checkpoint_version=checkpoint
        )
        reply = self.client.call(DataflowAPI.notify_version, notice, timeout_s=DEADLINE_S)
        if reply.trained != BATCH:
            raise PayloadWrong(f"version {self.version} made {reply.trained} trajectories trained, its batch held {BATCH}")
        self.trajectories += reply.trained

    def _digest(self, version: int) -> str:
        return f"{self.timeline}-{version}"

    def _verify(self, batch: Batch) -> None:
        """Make every trajectory again from its name and its version, and compare. Raises PayloadWrong."""
        where = f"batch of version {self.version}"
        expect((batch.model_id, batch.timeline, batch.version), (MODEL, self.timeline, self.version), f"{where}: name")
        names = [name.rpartition("/")[0::2] for name in batch.trajectory_ids]
        numbers = np.array([int(lease.rpartition("-")[2]) for lease, _ in names], np.int64)
        indices = np.array([int(index) for _, index in names], np.int64)
        groups = numbers[::GROUP].tolist()
        expect(np.repeat(groups, GROUP), numbers, f"{where}: whole groups")
        expect(indices, np.tile(np.arange(GROUP), BATCH // GROUP), f"{where}: members")
        twice = self.leases.intersection(groups)
        expect((len(set(groups)), twice), (BATCH // GROUP, set()), f"{where}: groups that were trained before")
        self.leases.update(groups)
        expect(codec.array(batch.offsets), np.arange(BATCH + 1) * self.tokens, f"{where}: offsets")
        rows = {name: codec.array(column) for name, column in batch.rows.items()}
        stamped = rows["min_version"]
        expect(bool((self.version - self.max_staleness <= stamped).all() and (stamped <= self.version).all()), True, f"{where}: staleness")
        key = keys(self.seed * 1_000_003 + numbers, indices, stamped)
        prompt = self.tokens // PROMPT_SHARE
        for name, wanted in row_values(rewards(key), stamped, prompt).items():
            (close if name.startswith("group_reward") else expect)(rows.pop(name), wanted, f"{where}: {name}")
        expect(rows, {}, f"{where}: other columns")
        ids, logprobs = contents(key, self.tokens)
        own, shape = np.arange(self.tokens) >= prompt, (BATCH, self.tokens)
        tokens = {name: codec.array(column).reshape(shape) for name, column in batch.tokens.items()}
        expect(tokens.pop("input_ids"), ids, f"{where}: input_ids")
        expect(tokens.pop("logprobs"), logprobs, f"{where}: logprobs")
        expect(tokens.pop("loss_mask"), np.broadcast_to(own, shape), f"{where}: loss_mask")
        expect(tokens.pop("versions"), np.where(own, stamped[:, None], -1), f"{where}: versions")
        expect(tokens, {}, f"{where}: other columns")


def row_values(values: Array, stamped: Array, prompt: int) -> dict[str, Array]:
    """What every row column must hold when these are the rewards and versions; statistics in float64."""
    members = values.reshape(-1, GROUP)
    equal = (members.max(1) - members.min(1)) <= 1e-6 * np.abs(members).max(1)
    numbers, one = np.arange(BATCH), np.ones(BATCH)
    return {
        "rewards": values.astype(np.float32),
        "reward_shaped": values,
        "credit": values,
        "temperature": one,
        "group_index": numbers // GROUP,
        "trajectory_index": numbers,
        "segment_index": one * 0,
        "group_reward_mean": np.repeat(members.mean(1), GROUP),
        "group_reward_std": np.repeat(np.where(equal, 0.0, members.std(1, ddof=1)), GROUP),
        "group_size": one * GROUP,
        "n_segments": one,
        "min_version": stamped,
        "max_version": stamped,
        "finish": one * FINISH_CODES.index("stop"),
        "scored": one,
        "replayed": one * 0,
        "prompt_length": one * prompt,
        "reward_all_equal": np.repeat(equal, GROUP),
    }


def expect(found: Any, wanted: Any, what: str) -> None:
    if not (np.array_equal(found, wanted) if isinstance(found, np.ndarray) else found == wanted):
        raise PayloadWrong(f"{what}: {found}, expected {wanted}")


def close(found: Any, wanted: Any, what: str) -> None:
    if not np.allclose(found, wanted, rtol=1e-12, atol=1e-12):
        raise PayloadWrong(f"{what}: {found}, expected {wanted}")


# --- processes ----------------------------------------------------------------------------------------------------------


@contextmanager
def stage(tokens: int, ledger: bool) -> Iterator[Trainer]:
    """One Dataflow, its rollout services, and the trainer attached to them; all of them are ended."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="astraflow-bench-")))
        process = DataflowProcess(run_id=RUN_ID, run_dir=str(directory / "run"), models=[MODEL], seed=7)
        process.workflow.n_samples = GROUP
        (directory / "process.json").write_bytes(msgspec.json.encode(process))
        dataflow = start(stack, directory, "dataflow", str(directory / "process.json"), *([] if ledger else ["--without-ledger"]))
        address = directory / "run" / "dataflow.url"
        patiently(lambda: address.exists() and bool(address.read_text().strip()), "Dataflow's address", dataflow)
        url = address.read_text().strip()
        for index in range(PEERS):
            start(
                stack, directory, "raas", "--dataflow", url, "--instance", f"raas{index}", "--slots", str(SLOTS), "--tokens", str(tokens)
            )  # fmt: skip
        client = stack.enter_context(SyncClient(url, new_identity(RUN_ID)))
        trainer = Trainer(client, dataflow, tokens, process.seed, process.dataflow.buffer.max_staleness or 0)
        trainer.attach()
        yield trainer
        code = dataflow.wait(DEADLINE_S)
        if code != 0:
            raise PayloadWrong(f"Dataflow {'did not end' if code is None else describe_exit(code)}: {log_tail(directory)}")


def start(stack: ExitStack, directory: Path, part: str, *arguments: str) -> Child:
    argv = [sys.executable, "-m", "astraflow.tools.bench_peers", part, *arguments]
    name = f"{part}-{len(list(directory.glob('*.log')))}"
    child = Child(argv, env=os.environ | {"OMP_NUM_THREADS": "1"}, log_path=directory / f"{name}.log", name=name)
    stack.callback(child.terminate, 1.0)
    return child


def patiently(condition: Callable[[], Any], what: str, dataflow: Child) -> Any:
    """Poll until the condition holds; a Dataflow that ended will never fulfil it."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end and dataflow.poll() is None:
        try:
            if found := condition():
                return found
        except Retryable:
            pass
        time.sleep(0.01)
    code = dataflow.poll()
    raise PayloadWrong(f"{what}: not within {DEADLINE_S:g} s" if code is None else f"{what}: Dataflow {describe_exit(code)}")


def log_tail(directory: Path) -> str:
    lines = [line for log in sorted(directory.glob("dataflow*.log")) for line in log.read_text(errors="replace").splitlines()]
    return " | ".join(lines[-3:])


def cpu_s(pid: int) -> float:
    """User and system time of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
