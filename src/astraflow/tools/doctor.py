"""`astraflow doctor`: what would go wrong on this machine with this configuration, before anything is started.

Every line is OK, WARN (it will run, but …) or FAIL (it will not, or not rightly), with what was found and what to do. Models are
looked at in `doctor_models`; here are ports, places and the time that a weight sync will take.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from astraflow.config.experiment import Experiment, Resolved
from astraflow.lib.aio import one_line
from astraflow.lib.net import is_loopback, listen
from astraflow.lib.wire import new_identity
from astraflow.protocol.errors import AstraFlowError, ConfigError, UserError
from astraflow.raas.staging import COPIES, SHM, staging_path
from astraflow.weights.config import ModelConfig
from astraflow.weights.memory import available_bytes

Finding = Literal["OK", "WARN", "FAIL"]

WORD_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
TRAINING_BYTES = 12
"""Of a parameter in a checkpoint: float32 master and the two moments of AdamW."""
CHANGED = 0.03
"""Share of the words that one step changes, for the prediction: 0.3–5 % between lr 1e-6 and 1e-5 (docs/life-of-a-weight.md)."""
DELTA_BYTES = 2.5
"""Per changed word, coded (index and value)."""
PROBE_BYTES = 64 << 20
SLOW_SYNC_S = 60.0
ENDPOINT_S = 600.0
GB = 1e9


@dataclass(frozen=True)
class Line:
    """One finding."""

    finding: Finding
    check: str
    """What was looked at, e.g. `tokenizer solver`."""
    found: str
    todo: str = ""
    """What to do about it; empty when there is nothing to do."""

    def __str__(self) -> str:
        return f"{self.finding:<5} {self.check:<24} {self.found}" + (f" -> {self.todo}" if self.todo else "")


def examine(
    resolved: Resolved, models: Mapping[str, ModelConfig], preflight: Callable[[], None], sender: str = "", probe_bytes: int = PROBE_BYTES
) -> Iterator[Line]:
    """All lines, as they are found. `models`: those of the experiment with paths on this machine; `preflight` raises UserError;
    `sender`: address of a running sender agent to measure the way to."""
    experiment = resolved.experiment
    try:
        preflight()
    except UserError as error:
        yield Line("FAIL", "configuration", one_line(error), "nothing else was looked at; correct it first")
        return
    yield Line("OK", "configuration", "models can be read, workflows take their options, data sets load")
    from astraflow.tools.doctor_models import examine_model, parameters

    sizes: dict[str, int] = {}
    for policy, model in models.items():
        yield from examine_model(policy, model, experiment)
        sizes[policy] = parameters(Path(model.path))
    yield from ports(experiment)
    yield from places(resolved, models, sizes)
    yield from sync_time(experiment, sizes, sender, probe_bytes)


def exit_code(lines: Iterable[Line]) -> int:
    """1 when something failed."""
    return int(any(line.finding == "FAIL" for line in lines))


def as_json(lines: Iterable[Line]) -> list[dict[str, str]]:
    return [asdict(line) for line in lines]


# --- ports --------------------------------------------------------------------------------------------------------------


def ports(experiment: Experiment) -> Iterator[Line]:
    """Can everything that is to listen do so?"""
    launch, weights = experiment.launch, experiment.weights
    wanted = {"launch.dataflow_port": (launch.host, launch.dataflow_port)}
    for field in ("port", "stream_port"):
        wanted[f"weights.{field}"] = (weights.host, getattr(weights, field))
        if getattr(weights, field) and len(experiment.models) > 1:
            yield Line("FAIL", f"weights.{field}", f"one fixed port for {len(experiment.models)} senders", "set it to 0 (any free one)")
    for field, (host, port) in wanted.items():
        try:
            listen(host, port).close()
        except ConfigError as error:
            yield Line("FAIL", field, one_line(error))
            continue
        yield Line("OK", field, f"{host}:{port or 'any'} can be listened on")
    if not is_loopback(launch.host):
        yield Line("OK", "token", f"services listen on {launch.host}: every call needs the token of this run")


# --- memory and disk ----------------------------------------------------------------------------------------------------


def places(resolved: Resolved, models: Mapping[str, ModelConfig], sizes: Mapping[str, int]) -> Iterator[Line]:
    """Room for staged weights, for the senders' halves, and for checkpoints."""
    experiment, run_dir = resolved.experiment, resolved.run_dir
    words = sum(sizes.values()) * WORD_BYTES[experiment.weights.dtype]
    staged, halves = COPIES * words * experiment.launch.raas, 2 * words
    where = staging_path(str(run_dir), "raas-0", models=[model.path for model in models.values()]).parent
    in_memory = where == SHM
    text = f"{staged / GB:.2f} GB staged by {experiment.launch.raas} rollout services in {where}"
    if not in_memory:
        todo = "a larger shared memory (docker: --shm-size) makes loads quicker"
        yield Line("WARN", "shared memory", f"{text}, which is a disk", todo)
    else:
        yield enough("shared memory", text, staged, free_bytes(SHM), "give it more (docker: --shm-size), or start fewer rollout services")
    needed = halves + (staged if in_memory else 0)
    yield enough("memory", f"{needed / GB:.2f} GB for weights on their way", needed, available_bytes(), "spread the processes")
    files = {policy: trainer.checkpoint.keep + 1 for policy, trainer in experiment.trainer.items()}
    kept = sum(sizes[policy] * TRAINING_BYTES * count for policy, count in files.items())
    text = f"{kept / GB:.2f} GB of checkpoints in {run_dir}"
    yield enough("disk", text, kept, free_bytes(run_dir), "keep fewer (trainer.checkpoint.keep)")


def enough(check: str, what: str, needed: int, free: int, todo: str) -> Line:
    """FAIL when it does not fit, WARN when it takes more than 80 % of what is free."""
    finding: Finding = "FAIL" if needed > free else "WARN" if needed > 0.8 * free else "OK"
    return Line(finding, check, f"{what}; {free / GB:.2f} GB are free", "" if finding == "OK" else todo)


def free_bytes(path: Path) -> int:
    """On the file system of a directory that may not exist yet."""
    return shutil.disk_usage(next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())).free


# --- the time of a sync -------------------------------------------------------------------------------------------------


def sync_time(experiment: Experiment, sizes: Mapping[str, int], sender: str, probe_bytes: int) -> Iterator[Line]:
    """A real pull, from a sender of our own over loopback or from the one that was named, scaled to the models' size."""
    try:
        what, rate = (f"from {sender}", endpoint_rate(sender, experiment)) if sender else ("over loopback", loopback_rate(probe_bytes))
    except AstraFlowError as error:
        yield Line("FAIL", "bandwidth", one_line(error), "is the sender running, and its port open from here?")
        return
    yield Line("OK", "bandwidth", f"{rate / 1e6:.0f} MB/s {what}, verified and staged" + ("" if sender else "; other ways: --sender URL"))
    for policy, count in sizes.items():
        full = count * WORD_BYTES[experiment.weights.dtype]
        delta = min(full, count * CHANGED * DELTA_BYTES) if experiment.weights.delta else full
        text = f"full {full / 1e6:.1f} MB in {full / rate:.2f} s; delta of {CHANGED:.0%} {delta / 1e6:.1f} MB in {delta / rate:.2f} s"
        slow = full / rate > SLOW_SYNC_S
        todo = "deltas, more streams (weights.streams), or a rollout service nearer to the trainer" if slow else ""
        yield Line("WARN" if slow else "OK", f"sync {policy}", text, todo)


def loopback_rate(probe_bytes: int) -> float:
    """Bytes/s of a full pull between two processes of this machine."""
    from astraflow.tools.bench_transport import measure

    return probe_bytes / measure(probe_bytes, rounds=1)["full_pull_s"]


def endpoint_rate(sender: str, experiment: Experiment) -> float:
    """Bytes/s of a full pull of what this sender serves now. Raises AstraFlowError when there is none to be had."""
    from astraflow.config.processes import cluster_token
    from astraflow.lib.wire_client import SyncClient
    from astraflow.protocol.routes import SenderAPI
    from astraflow.weights.receiver import WeightReceiver

    identity = new_identity("", cluster_token(experiment), experiment.launch.tls)
    client = SyncClient(sender, identity)
    try:
        newest = client.call(SenderAPI.get_version, timeout_s=10.0)
    finally:
        client.close()
    with tempfile.TemporaryDirectory(prefix="astraflow-doctor-", dir=SHM if SHM.is_dir() else None) as place:
        receiver = WeightReceiver(newest.model_id, "doctor", Path(place), experiment.weights, identity)
        try:
            staged = receiver.pull(sender, newest.version, newest.digest, full=True, deadline_s=ENDPOINT_S)
        finally:
            receiver.close()
    return staged.size_bytes / staged.seconds
