"""`GET /metrics` of every service of a run, beside the `/status` that it should say the same as."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from system import GONE_S, POLL_S, Run

from astraflow.lib.prometheus import CONTENT_TYPE, LEFT_OUT
from astraflow.lib.wire import new_identity
from astraflow.lib.wire_client import SyncClient
from astraflow.protocol.control import DataflowStatus, RaaSStatus, SaveCheckpoint, SetAcquisition
from astraflow.protocol.metrics import METRICS, find
from astraflow.protocol.routes import DataflowAPI, RaaSAPI

CLOCKS = ("time/uptime_s", "time/idle_s", "rollout/trajectories_per_s", "rollout/tokens_per_s")
"""They move while nothing happens."""
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass(frozen=True)
class Scraped:
    """One service at rest."""

    by: str
    labels: dict[str, str]
    """Of every series."""
    numbers: dict[str, float]
    """As /status has them."""
    families: list[Family]

    @property
    def samples(self) -> Samples:
        return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in self.families for s in family.samples}

    def says_what_status_says(self) -> None:
        """Every number of /status is there with its value, its type and its labels, and nothing else is."""
        wanted: Samples = {(LEFT_OUT, tuple(sorted(self.labels.items()))): 0.0}
        for name, value in self.numbers.items():
            metric = find(name, self.by)
            assert metric is not None, f"{self.by} logs {name!r}, which protocol/metrics.py does not declare"
            assert not metric.own, f"{self.by} logs {name!r} as if it were a user's own"
            match = metric.pattern.fullmatch(name)
            assert match is not None
            labels = {**self.labels, **{key: text or "" for key, text in match.groupdict().items()}}
            wanted[metric.prometheus, tuple(sorted(labels.items()))] = value
        found = {key: value for key, value in self.samples.items() if not key[0].startswith("astraflow_staleness_trained_")}
        assert found.keys() == wanted.keys()
        clocks = {metric.prometheus for metric in METRICS if metric.name in CLOCKS}
        assert {key: value for key, value in found.items() if value != wanted[key] and key[0] not in clocks} == {}
        for family in self.families:
            assert family.documentation
            assert family.type in ("counter", "gauge", "histogram")
            assert (family.type == "counter") == all(sample.name.endswith("_total") for sample in family.samples)


@contextmanager
def paused(run: Run, at_version: int, deadline_s: float) -> Iterator[SyncClient]:
    """A client of Dataflow while acquisition stands still, from some version on."""
    run.until("trainers move", lambda status: min(t.version for t in status.trainers) >= at_version, deadline_s)
    client = SyncClient((run.run_dir / "dataflow.url").read_text().strip(), new_identity(""))
    try:
        client.call(DataflowAPI.acquisition, SetAcquisition(paused=True), timeout_s=GONE_S)
        yield client
        client.call(DataflowAPI.acquisition, SetAcquisition(paused=False), timeout_s=GONE_S)
    finally:
        client.close()


def scrape(client: SyncClient) -> dict[str, Scraped]:
    """Process → what it shows, while acquisition is paused and nothing moves."""

    def dataflow() -> DataflowStatus:
        return client.call(DataflowAPI.status, timeout_s=GONE_S)

    status = dataflow()
    found = {"dataflow": _at_rest("dataflow", {"process": "dataflow"}, client.url, lambda: dataflow().metrics)}
    for info in status.instances:
        instance = SyncClient(info.url, new_identity(""))
        try:

            def numbers(instance: SyncClient = instance) -> dict[str, float]:
                answer: RaaSStatus = instance.call(RaaSAPI.status, timeout_s=GONE_S)
                return answer.metrics

            found[info.instance_id] = _at_rest("raas", {"process": info.instance_id}, info.url, numbers)
        finally:
            instance.close()
    for trainer in status.trainers:
        labels = {"process": f"trainer:{trainer.model_id}", "model": trainer.model_id}

        def step(model_id: str = trainer.model_id) -> dict[str, float]:
            return dataflow().steps[model_id]

        found[labels["process"]] = _at_rest("trainer", labels, trainer.sender_endpoint, step)
    return found


def checkpoint_now(run: Run, client: SyncClient, deadline_s: float) -> dict[str, int]:
    """Ask every trainer for a checkpoint while it waits for a batch; policy → version of the one that /status says is on disk, which it
    is."""
    asked: dict[str, int] = client.call(DataflowAPI.checkpoint, SaveCheckpoint(), timeout_s=GONE_S).versions

    def there(status: DataflowStatus) -> bool:
        return all(t.checkpoint_wanted == -1 and t.checkpoint_version >= asked.get(t.model_id, 0) for t in status.trainers)

    status = run.until("the checkpoints that an operator asked for", there, deadline_s)
    for trainer in status.trainers:
        assert (run.run_dir / "checkpoints" / trainer.model_id / f"step-{trainer.checkpoint_version:08d}" / "checkpoint.json").is_file()
    return asked


def _at_rest(by: str, labels: dict[str, str], url: str, numbers: Callable[[], dict[str, float]]) -> Scraped:
    """Look until the numbers before and after the scrape, and its own, are the same."""
    end = time.monotonic() + GONE_S
    while True:
        before = numbers()
        answer = httpx.get(f"{url}/metrics", timeout=GONE_S)
        after = numbers()
        assert answer.status_code == 200
        assert answer.headers["content-type"] == CONTENT_TYPE
        families = list(text_string_to_metric_families(answer.text))
        still = {name: value for name, value in before.items() if name not in CLOCKS}
        if still == {name: value for name, value in after.items() if name not in CLOCKS}:
            return Scraped(by, labels, after, families)
        assert time.monotonic() < end, f"{by} does not come to rest: {set(before.items()) ^ set(after.items())}"
        time.sleep(POLL_S)
