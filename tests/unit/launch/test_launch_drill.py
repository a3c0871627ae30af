"""Who is hit when, and what ends a hit: real child processes, and answers and a clock that are written by hand."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from astraflow.config.sections import LaunchConfig, RestartConfig
from astraflow.launch.drill import PROCESSES, Drilled, Driller, Victim, _Plan
from astraflow.launch.drill_spec import parse
from astraflow.launch.plan import ProcessSpec, RunBook
from astraflow.launch.watch import Observed
from astraflow.lib.proc import Child, RestartBook, RestartPolicy
from astraflow.protocol.control import DataflowStatus, InstanceInfo, LedgerCounts, TrainerInfo
from astraflow.protocol.rollout import Serving

WAIT_S = 30.0


class Luck:
    """Draws that are due after so many seconds of service each."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s

    def expovariate(self, rate: float) -> float:
        assert rate > 0
        return self._every_s


class Stand:
    """A driller of one process, and all that it looks at."""

    def __init__(self, directory: Path, name: str, text: str, every_s: float = 2.0) -> None:
        role = name.partition("-")[0]
        self.now = 100.0
        self.book = RunBook(
            [ProcessSpec(name if role != "sender" else f"trainer-{name[7:]}", "raas", (), {})],
            LaunchConfig(restart=RestartConfig(limit=2, window_s=1000.0)),
        )
        self.drill = parse(text)
        plans = [_Plan(fault, Luck(every_s)) for fault in self.drill.of_processes(role)]  # type: ignore[arg-type]
        deaths = RestartBook(RestartPolicy(limit=1, window_s=1000.0)) if role == "sender" else None
        self.victim = Victim(name, role, plans, deaths=deaths)
        self.driller = Driller(self.drill, directory, [self.victim], clock=lambda: self.now, began=100.0)
        self.child = Child([sys.executable, "-c", "import time; time.sleep(600)"])
        self.status = DataflowStatus(
            state="ready", uptime_s=1.0, service_version=0, started=True, trainers=[], instances=[], queues={},
            ledger=LedgerCounts(made=0, trained=0, dropped={}, in_flight={}), waits=[], incarnation="d1",
        )  # fmt: skip

    def step(self, passed_s: float = 1.0, age_s: float = 0.0, error: str = "") -> None:
        self.now += passed_s
        seen = Observed(status=self.status, status_age_s=age_s, error=error)
        self.driller.step(self.now, {self.victim.owner: self.child}, self.book, seen)

    def instance(self, incarnation: str, state: str = "live", in_flight: int = 8, last_seen_s: float = 0.0) -> None:
        self.status.instances = [
            InstanceInfo(
                instance_id="raas-0", url="http://x", incarnation=incarnation, state=state, total_slots=8, free_slots=0,  # type: ignore[arg-type]
                in_flight=in_flight, failures=0, last_seen_s=last_seen_s, models=["a"], serving={},
            )
        ]  # fmt: skip

    def trainer(self, version: int, timeline: int = 0, served: int | None = None) -> None:
        self.status.trainers = [
            TrainerInfo(
                model_id="a", timeline=timeline, version=version, digest="", checkpoint_version=-1, state="live", last_seen_s=0.0,
                sender_endpoint="http://x",
            )
        ]  # fmt: skip
        if served is not None:
            self.instance("r1")
            self.status.instances[0].serving = {"a": Serving(timeline=timeline, version=served, digest="")}

    def becomes(self, stopped: bool) -> bool:
        """Wait until the kernel has done it."""
        end = time.monotonic() + WAIT_S
        while (Path(f"/proc/{self.child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T") != stopped:
            assert time.monotonic() < end
            time.sleep(0.01)
        return True


@pytest.fixture
def stands() -> Iterator[list[Stand]]:
    made: list[Stand] = []
    yield made
    for stand in made:
        stand.child.kill()


def test_a_service_is_killed_when_its_time_has_come_and_is_back_when_another_process_holds_a_lease(
    tmp_path: Path, stands: list[Stand]
) -> None:
    stand = Stand(tmp_path, "raas-0", "kill=raas:0.3")
    stands.append(stand)
    for _ in range(5):
        stand.step()  # nobody has heard of it yet
    stand.instance("r1", state="suspect")
    stand.step(5.0)
    stand.instance("r1")
    stand.step(1.5)
    stand.step(1.0, error="Dataflow does not answer")  # time of which nothing is known is no service
    assert stand.driller.hits == []
    stand.step(1.0)
    (hit,) = stand.driller.hits
    assert stand.child.wait(WAIT_S) == -signal.SIGKILL
    assert (hit.process, hit.pid, hit.rows_there, hit.recovered_s) == ("raas-0", stand.child.pid, 8, None)
    stand.step()
    stand.instance("r2", state="catching_up")
    stand.step()
    stand.instance("r2", in_flight=0)
    stand.step()
    assert hit.recovered_s is None
    stand.instance("r2")
    stand.step(age_s=10.0)  # an answer from before the hit says nothing
    assert hit.recovered_s is None
    stand.step()
    assert (hit.recovered_s, hit.sign) == (5.0, "is live and holds 8 trajectories")
    assert stand.book.events[-1] == "drill: raas-0 recovered after 5.0 s: it is live and holds 8 trajectories"


def test_a_process_that_nobody_would_start_again_is_spared(tmp_path: Path, stands: list[Stand]) -> None:
    stand = Stand(tmp_path, "raas-0", "kill=raas:0.3")
    stands.append(stand)
    for code in (-9, -9):
        stand.book.exited("raas-0", code, stand.now)
        stand.book.restarted("raas-0")
    stand.instance("r1")
    for _ in range(5):
        stand.step()
    assert stand.driller.hits == []
    stand.driller.close()
    told = msgspec.json.decode((tmp_path / PROCESSES).read_bytes(), type=Drilled)
    assert (told.hits, told.spared) == ([], {"raas-0": 2})
    assert stand.child.poll() is None


def test_a_stopped_service_goes_on_after_its_time_and_at_the_latest_with_the_end(tmp_path: Path, stands: list[Stand]) -> None:
    stand = Stand(tmp_path, "raas-0", "stop=raas:0.3:10s,for=15s")
    stands.append(stand)
    stand.instance("r1")
    for _ in range(3):
        stand.step()
    (hit,) = stand.driller.hits
    stand.step(9.0)
    assert stand.becomes(stopped=True)
    stand.step(1.5)
    assert stand.becomes(stopped=False)
    stand.instance("r1", last_seen_s=5.0)
    stand.step()
    assert hit.recovered_s is None, "it has not answered since"
    stand.instance("r1", last_seen_s=0.1)
    stand.step()
    assert hit.recovered_s == pytest.approx(12.5)
    for _ in range(20):
        stand.step()
    assert len(stand.driller.hits) == 1, "nothing is hit any more after 15 s"


def test_a_trainer_is_back_when_it_has_published_more_than_it_came_back_with(tmp_path: Path, stands: list[Stand]) -> None:
    stand = Stand(tmp_path, "trainer-a", "kill=trainer:0.3")
    stands.append(stand)
    stand.trainer(7)
    for _ in range(3):
        stand.step()
    (hit,) = stand.driller.hits
    stand.trainer(8)
    stand.step()  # its last word
    assert hit.recovered_s is None
    stand.book.processes["trainer-a"].restarts = 1
    stand.step()
    stand.trainer(5, timeline=1)
    stand.step()
    assert hit.recovered_s is None
    stand.trainer(6, timeline=1)
    stand.step()
    assert (hit.sign, hit.versions_again) == ("published version 6", 2)


def test_a_sender_is_back_when_a_version_of_after_the_hit_is_served(tmp_path: Path, stands: list[Stand]) -> None:
    stand = Stand(tmp_path, "sender-a", "stop=sender:0.3:1s")
    stands.append(stand)
    stand.trainer(3, served=3)
    for _ in range(3):
        stand.step()
    assert stand.driller.hits == [], "a trainer without a sender has none to stop"
    stand.child.kill()
    below = "[sys.executable, '-c', 'import time; time.sleep(600)', 'astraflow.weights.sender'], start_new_session=True"
    stand.child = Child([sys.executable, "-c", f"import subprocess, sys; subprocess.run({below})"])
    end = time.monotonic() + WAIT_S
    while not stand.driller.hits:
        assert time.monotonic() < end
        stand.step()
        time.sleep(0.01)
    (hit,) = stand.driller.hits
    assert hit.pid != stand.child.pid
    stand.trainer(4, served=3)
    stand.step(2.0)
    stand.step()
    assert hit.recovered_s is None
    stand.trainer(5, served=5)
    stand.step()
    assert hit.sign == "raas-0 serves version 5"
    os.kill(hit.pid, signal.SIGKILL)
