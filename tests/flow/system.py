"""The system as a user meets it: `astraflow run` in a directory of its own, watched, hurt, and read afterwards.

Everything is looked at from outside: /status, the processes that the supervisor has as children, and the files that a run leaves.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from system_observer import DIRECTORY

from astraflow.dataflow.policies.base import GroupStats
from astraflow.lib.tls import PLAIN, Tls
from astraflow.lib.wire import new_identity
from astraflow.lib.wire_client import SyncClient
from astraflow.protocol.control import DataflowStatus, InstanceInfo
from astraflow.protocol.errors import AstraFlowError
from astraflow.protocol.routes import DataflowAPI

ROOT = Path(__file__).parents[2]
FLOW = Path(__file__).parent
POLL_S = 0.05
GONE_S = 60.0
"""Children die with their parent; the kernel needs a moment."""
STATES = {"leased", "rolled", "buffered", "served", "trained", "dropped"}


@dataclass(frozen=True)
class Share:
    """One (lease, policy) of the ledger, read without any of its code."""

    lease_id: str
    policy: str
    made: int
    live: int
    lost: int
    state: str
    reason: str
    timeline: int | None
    version: int | None
    stats: GroupStats | None
    instance: str
    attempt: int


@dataclass(frozen=True)
class TrainedBatch:
    policy: str
    timeline: int
    version: int
    state: str
    leases: list[str]


@dataclass(frozen=True)
class Books:
    """The tables of a ledger."""

    shares: list[Share]
    batches: list[TrainedBatch]
    digests: dict[str, dict[int, str]]
    """Policy → version → digest that its trainer published."""

    @property
    def made(self) -> int:
        return sum(share.made for share in self.shares)

    @property
    def trained(self) -> int:
        return sum(share.live for share in self.shares if share.state == "trained")

    @property
    def dropped(self) -> int:
        return sum(share.lost + (share.live if share.state == "dropped" else 0) for share in self.shares)

    @property
    def in_flight(self) -> int:
        return sum(share.live for share in self.shares if share.state not in ("trained", "dropped"))

    def staleness(self, policy: str) -> dict[int, int]:
        """Gap → trained rows."""
        found: Counter[int] = Counter()
        for share in self.shares:
            if share.policy == policy and share.state == "trained":
                assert share.version is not None
                assert share.stats is not None
                found[share.version - share.stats.min_version] += share.live
        return dict(found)

    def check(self, steps: dict[str, int], max_staleness: int) -> None:
        """No row is lost or counted twice, no version is trained twice, nothing is too old."""
        by_name = {(share.lease_id, share.policy): share for share in self.shares}
        assert len(by_name) == len(self.shares)
        for share in self.shares:
            assert share.state in STATES
            assert share.made == share.live + share.lost, share
        assert self.made == self.trained + self.dropped + self.in_flight
        for policy, reached in steps.items():
            mine = [batch for batch in self.batches if batch.policy == policy]
            trained = [batch for batch in mine if batch.state == "trained"]
            assert sorted(batch.version for batch in trained) == list(range(reached)), f"{policy}: versions trained once each"
            for timeline in {batch.timeline for batch in mine}:
                once = Counter(lease for batch in mine if batch.timeline == timeline for lease in batch.leases)
                assert max(once.values()) == 1, f"{policy}: a lease is twice in the batches of timeline {timeline}"
            leases = [(lease, batch) for batch in trained for lease in batch.leases]
            assert len({lease for lease, _ in leases}) == len(leases), f"{policy}: a lease was trained twice"
            for lease, batch in leases:
                share = by_name[lease, policy]
                assert (share.state, share.timeline, share.version) == ("trained", batch.timeline, batch.version), share
            assert len(leases) == sum(share.policy == policy and share.state == "trained" for share in self.shares)
            assert max(self.staleness(policy), default=0) <= max_staleness
            assert min(self.staleness(policy), default=0) >= 0


def read_books(run_dir: Path) -> Books:
    """The ledger of a run that has ended."""
    database = sqlite3.connect(f"file:{run_dir / 'ledger' / 'ledger.sqlite'}?mode=ro", uri=True)
    try:
        lost = Counter((lease, policy) for lease, policy in database.execute("SELECT lease_id, policy FROM lost"))
        shares = [
            Share(*row[:4], lost[row[0], row[1]], *row[4:8], msgspec.msgpack.decode(row[8], type=GroupStats) if row[8] else None, *row[9:])
            for row in database.execute(
                "SELECT s.lease_id, s.policy, s.n, s.live, s.state, s.reason, s.timeline, s.version, s.stats, l.instance, l.attempt"
                " FROM shares s JOIN leases l USING(lease_id) ORDER BY s.lease_id"
            )
        ]
        batches = [
            TrainedBatch(*row[:4], [lease for lease, _ in msgspec.msgpack.decode(row[4])])
            for row in database.execute("SELECT policy, timeline, version, state, fresh FROM batches")
        ]
        (models,) = database.execute("SELECT value FROM meta WHERE key='models'").fetchone()
    finally:
        database.close()
    states = msgspec.msgpack.decode(models, strict=False)
    return Books(shares, batches, {state["model_id"]: {int(k): v for k, v in state["digests"].items()} for state in states})


@dataclass
class Run:
    """One `astraflow run`."""

    run_dir: Path
    process: subprocess.Popen[bytes]
    output: Path
    served: set[tuple[str, int, int, str]] = field(default_factory=set)
    """(policy, timeline, version, digest) that any instance was seen to serve."""
    tls: Tls = PLAIN
    """What the observer trusts."""
    _client: tuple[str, SyncClient] | None = None

    # --- while it runs --------------------------------------------------------------------------------------------------

    def status(self) -> DataflowStatus | None:
        """None while Dataflow does not answer."""
        try:
            url = (self.run_dir / "dataflow.url").read_text().strip()
            if self._client is None or self._client[0] != url:
                self._client = url, SyncClient(url, new_identity("", tls=self.tls))
            found = self._client[1].call(DataflowAPI.status, timeout_s=20.0)
        except (FileNotFoundError, AstraFlowError):
            return None
        for instance in found.instances:
            for policy, held in instance.serving.items():
                self.served.add((policy, held.timeline, held.version, held.digest))
        return found

    def until(self, what: str, holds: Callable[[DataflowStatus], Any], deadline_s: float) -> DataflowStatus:
        """The first status for which the condition holds."""
        end = time.monotonic() + deadline_s
        status = None
        while time.monotonic() < end:
            assert self.process.poll() is None, f"the run ended before: {what}\n{self.text}"
            status = self.status()
            if status is not None and holds(status):
                return status
            time.sleep(POLL_S)
        waits = status.waits if status is not None else "Dataflow does not answer"
        raise AssertionError(f"not within {deadline_s:g} s: {what}\n{waits}\n{self.text}")

    def version(self, policy: str, at_least: int, deadline_s: float) -> DataflowStatus:
        """Wait for a version."""
        return self.until(f"version {at_least} of {policy}", lambda status: version(status, policy) >= at_least, deadline_s)

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def pids(self) -> dict[str, int]:
        """Name → pid of the supervisor's own children."""
        return {process_name(command_of(pid)): pid for pid in children_of(self.process.pid)}

    def kill(self, name: str) -> int:
        """kill -9 of one process, by its pid; `sender of trainer-x` is the trainer's child, `engine of raas-0` the service's, `rank 1 of
        trainer-x` one of several ranks."""
        kind, _, owner = name.rpartition(" of ")
        end = time.monotonic() + GONE_S
        while True:  # the kernel's list of children may miss one while others come and go
            pid = self.pids().get(owner)
            if kind and pid is not None:
                pid = next((child for child in children_of(pid) if kind in " ".join(command_of(child)) or kind == rank_of(child)), None)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                return pid
            assert time.monotonic() < end, f"there is no {name}\n{self.text}"
            time.sleep(POLL_S)

    def kill_pid(self, pid: int) -> bool:
        """kill -9 of a child of the supervisor; False when it had ended by itself."""
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def end(self, deadline_s: float, watch: bool = False) -> int:
        """Exit code. `watch` looks at /status until then."""
        end = time.monotonic() + deadline_s
        while self.process.poll() is None:
            assert time.monotonic() < end, f"the run did not end within {deadline_s:g} s\n{self.text}"
            if watch:
                self.status()
            time.sleep(POLL_S)
        return self.process.returncode

    # --- afterwards -----------------------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    @property
    def report(self) -> dict[str, Any]:
        found = json.loads((self.run_dir / "report.json").read_text())
        assert isinstance(found, dict)
        return found

    @property
    def outcome(self) -> dict[str, Any]:
        found = json.loads((self.run_dir / "outcome.json").read_text())
        assert isinstance(found, dict)
        return found

    @property
    def books(self) -> Books:
        return read_books(self.run_dir)

    def metrics(self, process: str) -> list[dict[str, Any]]:
        """Lines of one process, oldest first; a half-written last line of a killed process is left out."""
        lines = (self.run_dir / "metrics.jsonl").read_text().split("\n")
        rows = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [row for row in rows if row["process"] == process]

    def steps(self, policy: str) -> list[dict[str, Any]]:
        """Lines of a trainer's steps, oldest first; it writes others for evaluations and at its end."""
        return [row for row in self.metrics(f"trainer:{policy}") if "time/step_s" in row["values"]]

    def exit_codes(self) -> dict[str, list[int]]:
        """Name → exit code of every life."""
        return {name: process["exit_codes"] for name, process in self.outcome["processes"].items()}

    def adds_up(self, steps: dict[str, int], batch: int, max_staleness: int) -> Books:
        """Report and ledger say the same, and it is what it should be: every version of every policy trained on a whole batch."""
        report, books = self.report, self.books
        rows = report["rollouts"]
        assert report["adds_up"]
        assert report["steps"] == steps
        assert rows["made"] == rows["trained"] + rows["dropped"] + rows["in_flight"]
        assert (rows["made"], rows["trained"], rows["dropped"], rows["in_flight"]) == (
            books.made, books.trained, books.dropped, books.in_flight,
        )  # fmt: skip
        books.check(steps, max_staleness)
        assert books.trained == sum(steps.values()) * batch
        for policy in steps:
            assert {int(gap): count for gap, count in report["staleness"][policy].items()} == books.staleness(policy)
        return books

    def nothing_left(self) -> None:
        """No process of this run lives."""
        end = time.monotonic() + GONE_S
        while left := list(processes_of(self.run_dir)):
            assert time.monotonic() < end, f"left running: {left}"
            time.sleep(POLL_S)

    def close(self) -> None:
        """End what is left: the children die with their supervisor."""
        if self._client is not None:
            self._client[1].close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(GONE_S)


class Stage:
    """The runs of one test or module; `close` ends what they started."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = [FLOW, ROOT / "src"]
        """Where the commands find modules."""
        self._runs: list[Run] = []
        self.others: list[subprocess.Popen[bytes]] = []

    def run(self, recipe: str | Path, *overrides: str, name: str = "run", resume: bool = False) -> Run:
        """Start `astraflow run` in the background."""
        run_dir = self.directory / name
        arguments = [str(recipe), f"experiment.run_dir={run_dir}", *overrides, *(["--resume"] if resume else [])]
        output = self.directory / f"output-{len(self._runs)}.txt"
        self._runs.append(Run(run_dir, self._start(output, "run", *arguments, observed=self.observed(name)), output))
        return self._runs[-1]

    def observed(self, name: str) -> Path:
        """Where the observers of a run write (system_observer)."""
        return self.directory / f"observed-{name}"

    def astraflow(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Another command beside a run."""
        process = self._start(self.directory / f"beside-{len(self.others)}.txt", *arguments)
        self.others.append(process)
        return process

    def _start(self, output: Path, *arguments: str, observed: Path | None = None) -> subprocess.Popen[bytes]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("ASTRAFLOW_")}
        environment = clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, self.path))}
        if observed is not None:
            environment[DIRECTORY] = str(observed)
        with output.open("wb") as file:
            argv = [sys.executable, "-m", "astraflow", *arguments]
            return subprocess.Popen(argv, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)

    def close(self) -> None:
        for process in self.others:
            if process.poll() is None:
                process.kill()
            process.wait(GONE_S)
        for run in self._runs:
            run.close()
        for run in self._runs:  # several runs may share a directory
            run.nothing_left()


def version(status: DataflowStatus, policy: str) -> int:
    return next((trainer.version for trainer in status.trainers if trainer.model_id == policy), -1)


def instance(status: DataflowStatus, name: str) -> InstanceInfo | None:
    return next((found for found in status.instances if found.instance_id == name), None)


def children_of(pid: int) -> list[int]:
    """Living child processes, whichever thread started them."""
    found: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    except OSError:
        pass
    return found


def rank_of(pid: int) -> str:
    """`rank 1` of a trainer with several ranks."""
    try:
        pairs = (item.partition("=") for item in Path(f"/proc/{pid}/environ").read_text("utf-8", "replace").split("\0"))
        return next((f"rank {value}" for name, _, value in pairs if name == "RANK"), "")
    except OSError:
        return ""


def command_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return []


def cpu_s(pid: int) -> float:
    """CPU time of a process so far; 0 when it is gone."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def started_ago_s(pid: int) -> float:
    """Seconds since a process was started."""
    fields = _stat(pid)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat after the command's name, from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def process_name(command: list[str]) -> str:
    """`dataflow`, `raas-0`, `trainer-solver`: the supervisor's name of a child, from its command line."""
    for option, role in (("--index", "raas"), ("--policy", "trainer")):
        if role in command and option in command:
            return f"{role}-{command[command.index(option) + 1]}"
    return "dataflow" if "dataflow" in command else " ".join(command)


def processes_of(run_dir: Path) -> Iterator[str]:
    """Command lines of living processes that name the directory of a run."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            command = command_of(int(entry.name))
            if any(word == str(run_dir) or f"{run_dir}/" in word or word.endswith(f"={run_dir}") for word in command):
                yield " ".join(command)


TWO_POLICIES = "recipes/tiny-two-policies.yaml"
SCRIPTED = (
    "raas.engine.kind=scripted",
    "raas.engine.options={token_s: 0.002, load_s: 0.01}",
    "trainer.train_batch_size=32",
    "valid_datasets.heldout.options.n=8",
    "launch.restart.first_s=0.1",
)
"""Overrides of the two-policy recipe: no model computation in the rollouts."""
BATCH = 32

ONE_POLICY = """\
experiment: {name: one-policy, seed: 0}
models: {solver: {path: assets/tiny/solver}}
train_dataset: {loader: digits, options: {task: sort, min_len: 3, max_len: 6}}
workflow: {workflow: rlvr, reward: exact_match, n_samples: 8, generation: {max_new_tokens: 10, temperature: 1.0}}
raas: {engine: {kind: scripted, options: {token_s: 0.002, load_s: 0.01}}, slots: 64}
trainer: {train_batch_size: 16, max_steps: 8, eval_freq: 0, threads: 1, optimizer: {lr: 3e-4}}
launch: {raas: 1, restart: {first_s: 0.1}}
"""


def one_policy(directory: Path) -> Path:
    """The smallest run there is: one policy, no evaluation."""
    path = directory / "one-policy.yaml"
    path.write_text(ONE_POLICY)
    return path
