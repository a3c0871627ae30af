"""The trainer as a process against a Dataflow that serves a recorded stream of batches: a peer that speaks the routes."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from scheduled import scheduled_batches, serial_oracle

from astraflow.lib.wire import Server, new_identity
from astraflow.lib.wire_client import SyncClient
from astraflow.protocol import control
from astraflow.protocol.batch import Batch, BatchReply, BatchRequest
from astraflow.protocol.codec import array
from astraflow.protocol.errors import Conflict, DeadlinePassed, Replaced, Unavailable, UnknownName
from astraflow.protocol.rollout import Serving
from astraflow.protocol.routes import DataflowAPI, SenderAPI, table
from astraflow.trainer import main
from astraflow.trainer.config import (
    CheckpointConfig,
    DeadlineConfig,
    OptimizerConfig,
    PPOConfig,
    StopRule,
    TrainEngineConfig,
    TrainerProcess,
)
from astraflow.weights.config import ModelConfig, WeightsConfig

RUN = "run-trainer-flow"
WAIT_S = 100.0
"""For what must come; how soon depends on the machine."""
DRIVER = """
import sys
from pathlib import Path
import msgspec
from astraflow.trainer.config import TrainerProcess
from astraflow.trainer.main import run
sys.exit(run(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=TrainerProcess)))
"""


def unit_helpers() -> ModuleType:
    """The batch and model makers of the unit tests."""
    path = Path(__file__).parent.parent / "unit" / "trainer" / "conftest.py"
    spec = importlib.util.spec_from_file_location("trainer_test_helpers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


HELPERS = unit_helpers()


class RecordedDataflow:
    """Serves batch v = f(v) and keeps what it is told, as Dataflow's barrier does; runs in a thread of its own."""

    def __init__(self) -> None:
        self.n_batches = 100
        self.batch_of: Callable[[int], Batch] = lambda version: HELPERS.random_batch(version, version=version)
        self.at_end = "end_of_data"
        self.timeline, self.version, self.registered = 0, 0, False
        self.readies: list[control.Ready] = []
        self.notices: list[control.NotifyVersion] = []
        self.committed: list[tuple[int, int]] = []
        """(timeline, version) in the order in which versions became known."""
        self.shutdowns: list[control.Shutdown] = []
        self.results: list[control.EvalResult] = []
        self.lose_replies: set[int] = set()
        """Versions whose first notice is taken, but answered by an error."""
        self.hold = threading.Event()
        self.hold.set()
        self.hold_from = 1 << 30
        """Version from which batches are held back, so that the trainer cannot run ahead of what a test does to it."""
        self.bump_at = -1
        """Version at which the timeline is bumped behind the trainer's back."""
        self.replaced_at = -1
        """Version at which another process has taken the trainer's place."""
        self.others: list[str] = []
        """Models that are trained on when this one is done."""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.port = 0
        self.start()

    def start(self) -> None:
        """A new process at the same address."""
        handlers = {name: getattr(self, f"on_{name}", self.on_other) for name in table(DataflowAPI)}
        self.server = Server("dataflow", DataflowAPI, handlers, new_identity(RUN), port=self.port)
        asyncio.run_coroutine_threadsafe(self.server.start(), self._loop).result(WAIT_S)
        self.port = self.server.port

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.stop(0.1), self._loop).result(WAIT_S)

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def on_other(self, message: Any) -> Any:
        raise Conflict("not part of this recording")

    async def on_ready(self, message: control.Ready) -> control.ReadyReply:
        if self.registered and message.version < self.version:
            self.timeline += 1
        self.registered, self.version = True, message.version
        self.readies.append(message)
        return control.ReadyReply(timeline=self.timeline, version=message.version)

    async def on_batch(self, request: BatchRequest) -> BatchReply:
        if request.version == self.bump_at:
            self.bump_at, self.timeline = -1, self.timeline + 1
        if request.timeline != self.timeline:
            return BatchReply(kind="stale_timeline", reason="the timeline is dead")
        assert request.version == self.version
        if request.version == self.replaced_at:
            raise Replaced("model default: another process attached later and has taken its place: end one of the two")
        if not self.hold.is_set() or request.version >= self.hold_from:
            await asyncio.sleep(0.05)
            return BatchReply(kind="wait")
        if request.version >= self.n_batches:
            return BatchReply(kind=self.at_end, counts={"seen": 12, "dropped/zero_variance": 12})  # type: ignore[arg-type]
        batch = self.batch_of(request.version)
        batch.timeline = self.timeline
        return BatchReply(kind="batch", batch=batch, metrics={"buffer/fresh": 1.0})

    async def on_notify_version(self, message: control.NotifyVersion) -> control.NotifyVersionReply:
        if not self.registered or message.timeline != self.timeline:
            raise Conflict("call /ready")
        self.notices.append(message)
        new = message.version > self.version
        if new:
            self.version = message.version
            self.committed.append((self.timeline, message.version))
        if message.version in self.lose_replies:
            self.lose_replies.discard(message.version)
            raise Unavailable("the reply is lost")
        eval_id = ""
        if new and message.run_eval:
            eval_id = f"eval-{message.version}"
            served = {"default": Serving(timeline=self.timeline, version=message.version, digest=message.digest)}
            self.results.append(
                control.EvalResult(
                    eval_id=eval_id, dataset="d", versions=served, n_tasks=1, n_samples=1, missing=0, metrics={"avg@1": 0.5}, duration_s=0.1
                )
            )
        return control.NotifyVersionReply(service_version=self.version, trained=16 if new else 0, eval_id=eval_id)

    async def on_eval_results(self, request: control.EvalResultsRequest) -> control.EvalResults:
        return control.EvalResults(results=self.results[request.since :], next=len(self.results), running=[])

    async def on_shutdown(self, message: control.Shutdown) -> control.ShutdownReply:
        self.shutdowns.append(message)
        if self.others:
            await asyncio.sleep(min(message.wait_s, 0.05))
        return control.ShutdownReply(run_ended=not self.others, waits_for=self.others)


@pytest.fixture
def dataflow() -> Iterator[RecordedDataflow]:
    peer = RecordedDataflow()
    yield peer
    peer.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = HELPERS.write_tiny_model(tmp_path_factory.mktemp("model"))
    return path


@pytest.fixture
def process_of(dataflow: RecordedDataflow, model: Path, tmp_path: Path) -> Callable[..., TrainerProcess]:
    def make(name: str = "run", **options: Any) -> TrainerProcess:
        settings: dict[str, Any] = {
            "train_batch_size": 16,
            "max_steps": 6,
            "algorithm": PPOConfig(tis_c=2.0),
            "optimizer": OptimizerConfig(lr=1e-3, warmup_steps=2, schedule="cosine"),
            "checkpoint": CheckpointConfig(every=3),
            "deadlines": DeadlineConfig(dataflow_s=WAIT_S, batch_poll_s=0.2, drain_s=5, final_eval_s=WAIT_S),
        }
        return TrainerProcess(
            run_id=RUN,
            run_dir=str(tmp_path / name),
            dataflow_url=dataflow.server.url,
            max_new_tokens=5,
            model=ModelConfig(path=str(model)),
            trainer=TrainEngineConfig(**(settings | options)),
            weights=WeightsConfig(),
        )

    return make


Start = Callable[[TrainerProcess], "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    children: list[subprocess.Popen[bytes]] = []

    def begin(process: TrainerProcess) -> subprocess.Popen[bytes]:
        config = tmp_path / "process.json"
        config.write_bytes(msgspec.json.encode(process))
        with (tmp_path / "trainer.log").open("ab") as log:
            child = subprocess.Popen([sys.executable, "-c", DRIVER, str(config)], stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
        children.append(child)
        return child

    yield begin
    for child in children:
        if child.poll() is None:
            child.kill()
        child.wait()


def until(condition: Callable[[], Any], deadline_s: float, what: str) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def masters(process: TrainerProcess, version: int) -> dict[str, np.ndarray]:
    return load_file(Path(process.run_dir) / "checkpoints" / "default" / f"step-{version:08d}" / "state-1-of-1.safetensors")


def test_a_trainer_runs_to_its_last_step_evaluates_exports_and_leaves(
    dataflow: RecordedDataflow, process_of: Callable[..., TrainerProcess], start: Start, tmp_path: Path
) -> None:
    dataflow.lose_replies = {2}
    process = process_of(eval_freq=4)
    assert start(process).wait(WAIT_S) == 0, (tmp_path / "trainer.log").read_text()
    assert dataflow.committed == [(0, v) for v in range(1, 7)]
    versions = [n.version for n in dataflow.notices]
    assert versions[:7] == [1, 2, 2, 3, 4, 5, 6], "the lost reply is asked for again"
    assert versions[7:] in ([], [6]), "the last one renews, unless the checkpoint was durable before it"
    assert [n.version for n in dataflow.notices if n.run_eval] == [4, 6]
    assert all(len(n.digest) == 32 for n in dataflow.notices)
    assert len({n.digest for n in dataflow.notices}) == 5, "the cosine ends at a rate of 0"
    assert dataflow.notices[-1].checkpoint_version == 6
    assert [s.model_id for s in dataflow.shutdowns] == ["default"]
    first = dataflow.readies[0]
    assert (first.version, first.recovered_version, first.checkpoint_version) == (0, None, -1)
    assert first.sender_endpoint.startswith("http://")
    for name in (
        "reward/mean",
        "loss/policy",
        "policy/grad_norm",
        "policy/lr",
        "mismatch/ess",
        "staleness/max",
        "time/wait_s",
        "perf/wait_share",
    ):
        assert name in dataflow.notices[0].metrics, name
    lines = [msgspec.json.decode(line) for line in (Path(process.run_dir) / "metrics.jsonl").read_bytes().splitlines()]
    assert [line["step"] for line in lines if "policy/lr" in line["values"]] == [1, 2, 3, 4, 5, 6]
    assert any(line["values"].get("eval/d/avg@1") == 0.5 for line in lines)
    assert {path.name for path in (Path(process.run_dir) / "export" / "default").iterdir()} >= {"model.safetensors", "config.json"}


def test_ten_steps_are_five_a_kill_and_five_bit_for_bit(
    dataflow: RecordedDataflow, process_of: Callable[..., TrainerProcess], start: Start, tmp_path: Path
) -> None:
    """Masters, moments, schedule, random generators, the stop rule's window, and where the numbers are written."""
    options = {"max_steps": 10, "checkpoint": CheckpointConfig(every=5), "stop": StopRule(at_least=2.0, window=8)}
    straight = process_of("straight", **options)
    assert start(straight).wait(WAIT_S) == 0
    dataflow.__dict__.update(version=0, registered=False, notices=[], committed=[], readies=[], hold_from=7)
    killed = process_of("killed", **options)
    child = start(killed)
    until(lambda: any(n.checkpoint_version == 5 for n in dataflow.notices), WAIT_S, "no durable checkpoint was announced")
    until(lambda: dataflow.version > 5, WAIT_S, "no version beyond the checkpoint was announced")
    child.send_signal(signal.SIGKILL)
    child.wait()
    dataflow.hold_from = 1 << 30
    assert start(killed).wait(WAIT_S) == 0, (tmp_path / "trainer.log").read_text()
    again = dataflow.readies[-1]
    assert (again.version, again.recovered_version, again.checkpoint_version) == (5, 5, 5)
    assert dataflow.timeline == 1, "versions beyond the checkpoint were known"
    expected, found = masters(straight, 10), masters(killed, 10)
    assert expected.keys() == found.keys()
    assert "rng.torch" in found
    for name in expected:
        assert expected[name].tobytes() == found[name].tobytes(), name
    assert plain(straight, 10) == plain(killed, 10)
    rates = {name: [line["values"]["policy/lr"] for line in steps_of(process)] for name, process in (("a", straight), ("b", killed))}
    assert rates["b"][-5:] == rates["a"][-5:], "the schedule goes on where it was"
    assert {line["process"] for line in steps_of(killed)} == {"trainer:default"}, "one series of numbers, whoever wrote them"


def plain(process: TrainerProcess, version: int) -> Any:
    """checkpoint.json without what a hash of the tensors says already."""
    path = Path(process.run_dir) / "checkpoints" / "default" / f"step-{version:08d}" / "checkpoint.json"
    return {name: value for name, value in msgspec.json.decode(path.read_bytes()).items() if name != "files"}


def steps_of(process: TrainerProcess) -> list[dict[str, Any]]:
    lines = [msgspec.json.decode(line) for line in (Path(process.run_dir) / "metrics.jsonl").read_bytes().splitlines()]
    return [line for line in lines if "policy/lr" in line["values"]]


def test_a_scheduled_replay_with_a_kill_gives_the_weights_of_a_serial_oracle_bit_for_bit(
    dataflow: RecordedDataflow, process_of: Callable[..., TrainerProcess], start: Start, model: Path, tmp_path: Path
) -> None:
    batches = scheduled_batches(6)
    assert max(int(np.max(array(b.rows["min_version"]).max() - array(b.rows["min_version"]).min())) for b in batches) > 0, "mixed versions"
    dataflow.batch_of, dataflow.hold_from = (lambda version: msgspec.structs.replace(batches[version])), 5
    process = process_of()
    child = start(process)
    until(lambda: any(n.checkpoint_version == 3 for n in dataflow.notices), WAIT_S, "no durable checkpoint was announced")
    child.send_signal(signal.SIGKILL)
    child.wait()
    dataflow.hold_from = 1 << 30
    assert start(process).wait(WAIT_S) == 0, (tmp_path / "trainer.log").read_text()
    torch.set_num_threads(1)
    expected, found = serial_oracle(model, batches, lr=1e-3, warmup=2, total=6), masters(process, 6)
    for name, values in expected.items():
        assert found[f"master.{name}"].tobytes() == values.tobytes(), name


def test_a_dataflow_that_dies_and_returns_is_attached_to_again_without_losing_a_step(
    dataflow: RecordedDataflow, process_of: Callable[..., TrainerProcess], start: Start, tmp_path: Path
) -> None:
    dataflow.hold_from = 4
    child = start(process_of())
    until(lambda: dataflow.version >= 2, WAIT_S, "no steps")
    dataflow.stop()
    dataflow.hold_from = 1 << 30
    dataflow.registered = False  # and it has forgotten the trainer: notices are refused until /ready
    dataflow.start()
    assert child.wait(WAIT_S) == 0, (tmp_path / "trainer.log").read_text()
    assert dataflow.timeline == 0, "attaching again at the present version moves no timeline"
    versions = [v for _, v in dataflow.committed]
    assert versions[-1] == 6
    assert versions == sorted(set(versions)), "no version twice"
    assert len(dataflow.readies) >= 2
    assert dataflow.readies[-1].recovered_version is not None


def test_sigterm_while_it_waits_saves_and_leaves_with_zero(
    dataflow: RecordedDataflow, process_of: Callable[..., TrainerProcess], start: Start, tmp_path: Path
) -> None:
    process = process_of(max_steps=1000, checkpoint=CheckpointConfig(every=0))
    child = start(process)
    until(lambda: dataflow.version >= 2, WAIT_S, "no steps")
    dataflow.hold.clear()
    child.send_signal(signal.SIGTERM)
    assert child.wait(WAIT_S) == 0, (tmp_path / "trainer.log").read_text()
    assert dataflow.shutdowns[-1].reason.startswith("drained")
    assert dataflow.notices[-1].checkpoint_version == dataflow.version
    assert masters(process, dataflow.version)


def test_sigterm_while_dataflow_is_gone_saves_and_leaves_with_zero(
    dataflow: RecordedDataflow, process_of: Callable[..., TrainerProcess], tmp_path: Path
) -> None:
    deadlines = DeadlineConfig(dataflow_s=WAIT_S, batch_poll_s=0.1, drain_s=0.5)
    process = process_of(max_steps=1000, checkpoint=CheckpointConfig(every=0), deadlines=deadlines)
    stop, codes = threading.Event(), []
    worker = threading.Thread(target=lambda: codes.append(main.run_until(process, stop)))
    worker.start()
    until(lambda: dataflow.version >= 2, WAIT_S, "no steps")
    dataflow.stop()
    stop.set()
    worker.join(WAIT_S)
    dataflow.start()
    assert codes == [0]
    found = [path.name for path in (Path(process.run_dir) / "checkpoints" / "default").iterdir()]
    assert found in ([f"step-{dataflow.version:08d}"], [f"step-{dataflow.version + 1:08d}"]), "the step that was under way is kept"


def run_here(process: TrainerProcess) -> int:
    """The same in this process: without its own start-up."""
    return main.run_until(process, threading.Event())


@pytest.mark.parametrize(
    ("n_batches", "kind", "code"), [(0, "end_of_data", 1), (2, "end_of_data", 0), (1, "starved", 3)], ids=["nothing", "some", "starved"]
)
def test_the_end_of_the_data_and_starvation_are_answers(
    n_batches: int,
    kind: str,
    code: int,
    dataflow: RecordedDataflow,
    process_of: Callable[..., TrainerProcess],
    caplog: pytest.LogCaptureFixture,
) -> None:
    dataflow.n_batches, dataflow.at_end = n_batches, kind
    assert run_here(process_of()) == code
    assert dataflow.version == n_batches
    assert dataflow.shutdowns[-1].reason.startswith(kind)
    assert code == 0 or ("nothing was trained" if code == 1 else "dropped/zero_variance 12") in caplog.text


def test_a_trainer_that_is_told_of_a_stall_saves_and_ends_with_3_without_a_goodbye(
    dataflow: RecordedDataflow, process_of: Callable[..., TrainerProcess], caplog: pytest.LogCaptureFixture
) -> None:
    dataflow.n_batches, dataflow.at_end = 1, "stalled"
    process = process_of(checkpoint=CheckpointConfig(every=0))
    assert run_here(process) == 3
    assert dataflow.shutdowns == [], "Dataflow ends by itself"
    assert (Path(process.run_dir) / "checkpoints" / "default" / "step-00000001").is_dir()
    assert "dropped/zero_variance 12" in caplog.text


def test_the_stop_rule_ends_the_run_early(dataflow: RecordedDataflow, process_of: Callable[..., TrainerProcess]) -> None:
    rule = StopRule(metric="reward/mean", window=2, at_least=0.0, not_before=3)
    assert run_here(process_of(stop=rule)) == 0
    assert dataflow.version == 3


def test_a_stop_rule_on_an_unknown_metric_names_the_known_ones(
    dataflow: RecordedDataflow, process_of: Callable[..., TrainerProcess]
) -> None:
    with pytest.raises(UnknownName, match="reward/mean"):
        run_here(process_of(stop=StopRule(metric="reward/meen", at_least=1.0)))


def test_a_dead_timeline_is_left_by_attaching_again(dataflow: RecordedDataflow, process_of: Callable[..., TrainerProcess]) -> None:
    dataflow.bump_at = 2
    assert run_here(process_of()) == 0
    assert dataflow.committed == [(0, 1), (0, 2), (1, 3), (1, 4), (1, 5), (1, 6)]


def test_a_trainer_that_was_replaced_ends_with_one_line_and_does_not_take_its_place_back(
    dataflow: RecordedDataflow, process_of: Callable[..., TrainerProcess], start: Start, tmp_path: Path
) -> None:
    dataflow.replaced_at = 2
    assert start(process_of()).wait(60) == 2, "an exit code that no supervisor starts again"
    errors = [line for line in (tmp_path / "trainer.log").read_text().splitlines() if " ERROR " in line]
    assert len(errors) == 1, errors
    assert "another process attached later and has taken its place" in errors[0]
    assert (len(dataflow.readies), dataflow.version, dataflow.shutdowns) == (1, 2, [])


def test_a_trainer_that_is_done_serves_its_weights_until_the_others_are_done_too(
    dataflow: RecordedDataflow, process_of: Callable[..., TrainerProcess], start: Start, tmp_path: Path
) -> None:
    dataflow.others = ["other"]
    child = start(process_of(max_steps=2))
    until(lambda: len(dataflow.shutdowns) >= 3, 60, "it does not stay")
    sender = SyncClient(dataflow.readies[0].sender_endpoint, new_identity(RUN))
    served = sender.call(SenderAPI.get_version, timeout_s=60.0)
    assert (served.version, served.digest) == (2, dataflow.notices[-1].digest)
    dataflow.stop()
    dataflow.start()  # a restart of Dataflow is no reason to leave
    before = len(dataflow.shutdowns)
    until(lambda: len(dataflow.shutdowns) > before, 60, "it left")
    dataflow.others = []
    assert child.wait(60) == 0, (tmp_path / "trainer.log").read_text()
    with pytest.raises(Unavailable):
        sender.call(SenderAPI.get_version, timeout_s=10.0)
    sender.close()


def test_a_trainer_that_stays_ends_when_it_is_told_to_or_by_its_deadline(
    dataflow: RecordedDataflow, process_of: Callable[..., TrainerProcess]
) -> None:
    dataflow.others = ["other"]
    stop, codes = threading.Event(), []
    worker = threading.Thread(target=lambda: codes.append(main.run_until(process_of(max_steps=1), stop)))
    worker.start()
    until(lambda: len(dataflow.shutdowns) >= 2, 60, "it does not stay")
    stop.set()
    worker.join(60)
    assert codes == [0]
    dataflow.__dict__.update(version=0, registered=False, shutdowns=[])
    deadlines = DeadlineConfig(batch_poll_s=0.1, stay_s=0.2)
    assert run_here(process_of("second", max_steps=1, deadlines=deadlines)) == 0
    assert len(dataflow.shutdowns) >= 2


def test_a_wait_for_a_batch_ends_by_its_deadline_and_names_it(
    dataflow: RecordedDataflow, process_of: Callable[..., TrainerProcess]
) -> None:
    dataflow.hold.clear()
    with pytest.raises(DeadlinePassed, match=r"batch of version 0: none within 0\.5 s"):
        run_here(process_of(deadlines=DeadlineConfig(batch_poll_s=0.1, batch_s=0.5)))


def test_mistakes_of_the_user_end_with_two_and_one_line(
    dataflow: RecordedDataflow, process_of: Callable[..., TrainerProcess], start: Start, tmp_path: Path
) -> None:
    assert start(process_of(backend="locl")).wait(WAIT_S) == 2
    lines = (tmp_path / "trainer.log").read_text().splitlines()
    assert len(lines) == 1
    assert "did you mean 'local'" in lines[0]
