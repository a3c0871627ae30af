"""Seeded kill runs: which process dies at which moment of a run, by progress and never by the clock, and what must hold after it.

The plan of a seed is drawn before the run; `play` carries it out; `judge` compares three accounts that know nothing of each
other: what the rollout services were told to forget (system_observer), what the final weights were made of (system_backend), and
the tables of the ledger.
"""

from __future__ import annotations

import json
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from system import POLL_S, Books, Run, Stage, cpu_s, started_ago_s
from system_observer import GO

POLICY = "solver"
BATCH, N_SAMPLES, STEPS, MAX_STALENESS = 16, 4, 10, 2
GROUPS = STEPS * BATCH // N_SAMPLES
DEADLINE_S = 240.0
"""Only a run that hangs needs this long."""
SERVES_AGAIN_S = 5.0
"""A restarted Dataflow answers within this time of the start of its process."""
DOOR_REASONS = {"stale", "dead_timeline", "unconfirmed"}
"""For what an acknowledged group may be dropped in these runs; anything else would be a loss."""

RECIPE = f"""\
experiment: {{name: kills, seed: 0}}
models: {{{POLICY}: {{path: assets/tiny/solver}}}}
plugins: [system_observer]
train_dataset: {{loader: digits, options: {{task: sort, min_len: 3, max_len: 6}}}}
workflow: {{workflow: rlvr, reward: exact_match, n_samples: {N_SAMPLES}, generation: {{max_new_tokens: 10, temperature: 1.0}}}}
dataflow: {{buffer: {{max_staleness: {MAX_STALENESS}}}, pool: {{heartbeat_s: 1}}}}
raas: {{engine: {{kind: scripted, options: {{token_s: 0.005, load_s: 0.01}}}}, slots: 16}}
trainer:
  backend: system_backend:RememberingBackend
  train_batch_size: {BATCH}
  max_steps: {STEPS}
  eval_freq: 0
  threads: 1
  optimizer: {{lr: 3e-4}}
launch: {{restart: {{first_s: 0.1, limit: 10}}}}
"""


@dataclass(frozen=True)
class Kill:
    """One kill -9."""

    victim: str
    when: str
    """`leased`, `acknowledged`: groups by the ledger, by the observer; `begun`: steps of the trainer; `reborn`: CPU time of the
    process that replaced the victim before this one."""
    count: float


@dataclass(frozen=True)
class Plan:
    seed: int
    instances: int
    checkpoint_every: int
    kills: list[Kill]


def plan(seed: int) -> Plan:
    """1 to 3 kills at rising moments of the run's first two thirds, or right into the restart of what was killed before."""
    rng = random.Random(seed)
    instances = rng.choice([1, 2])
    victims = ["dataflow", *(f"raas-{index}" for index in range(instances)), f"trainer-{POLICY}"]
    count = rng.choice([1, 2, 2, 3])
    kills: list[Kill] = []
    for groups in sorted(rng.sample(range(1, GROUPS * 2 // 3), count)):
        when = rng.choice(["leased", "acknowledged", "begun", *(["reborn"] if kills else [])])
        amount = {"begun": groups * N_SAMPLES // BATCH + 1, "reborn": round(rng.uniform(0.0, 1.5), 2)}.get(when, groups)
        kills.append(Kill(rng.choice(victims), when, amount))
    return Plan(seed, instances, rng.choice([1, 2, 3]), kills)


@dataclass
class Ended:
    """A run that was played to its end."""

    plan: Plan
    run: Run
    observed: Path
    killed: list[str] = field(default_factory=list)
    """Victims that were still running when their moment came."""
    serves_again_s: list[float] = field(default_factory=list)
    """Per restart of Dataflow: from the start of its process to its first answer."""
    serves_again_cpu_s: list[float] = field(default_factory=list)
    """The same in CPU time of that process, which another load on the machine does not stretch."""
    exit_code: int = -1
    wall_s: float = 0.0


def play(stage: Stage, seed: int) -> Ended:
    """Carry out the plan of a seed and wait for the end of the run."""
    wanted, started = plan(seed), time.monotonic()
    recipe = stage.directory / f"kills-{seed}.yaml"
    recipe.write_text(RECIPE)
    overrides = (f"launch.raas={wanted.instances}", f"trainer.checkpoint.every={wanted.checkpoint_every}", f"experiment.seed={seed}")
    run = stage.run(recipe, *overrides, name=f"run-{seed}")
    ended = Ended(wanted, run, stage.observed(f"run-{seed}"))
    end, to_do, replaced, asleep = started + DEADLINE_S, list(wanted.kills), ("", 0), 0
    dead: set[int] = set()
    while run.process.poll() is None:
        assert time.monotonic() < end, f"seed {seed}: no end after {ended.killed}; then would come {to_do}\n{run.text}"
        if not to_do or any(step["version"] == STEPS - 1 for step in lines(ended.observed / f"steps-{POLICY}.jsonl")):
            to_do.clear()  # a moment that has not come by the last step does not come any more
            ended.observed.mkdir(exist_ok=True)
            (ended.observed / GO).touch()
        pids = {name: pid for name, pid in run.pids().items() if pid not in dead}  # the killed one is seen for a moment still
        if asleep and pids.get("dataflow", asleep) != asleep and (status := run.status()) is not None:
            ended.serves_again_cpu_s.append(cpu_s(pids["dataflow"]))
            ended.serves_again_s.append(max(started_ago_s(pids["dataflow"]), status.uptime_s))
            asleep = 0
        if to_do and _has_come(ended, to_do[0], pids, replaced) and (pid := pids.get(to_do[0].victim)):
            kill = to_do.pop(0)
            if run.kill_pid(pid):
                ended.killed.append(kill.victim)
                dead.add(pid)
                replaced = (kill.victim, pid)
                asleep = pid if kill.victim == "dataflow" else asleep
            continue
        time.sleep(POLL_S / 2)
    ended.exit_code, ended.wall_s = run.process.returncode, time.monotonic() - started
    return ended


class Players:
    """Plays several seeds at once, in threads: most of a run is the start of its processes."""

    def __init__(self, directory: Path, seeds: Sequence[int], at_once: int) -> None:
        self._pool = ThreadPoolExecutor(at_once, thread_name_prefix="seed")
        self._stages = {seed: Stage(directory / f"seed-{seed}") for seed in seeds}
        self._runs = {seed: self._pool.submit(self._play, seed) for seed in seeds}

    def _play(self, seed: int) -> Ended:
        self._stages[seed].directory.mkdir()
        return play(self._stages[seed], seed)

    def ended(self, seed: int) -> Ended:
        """Waits for its end."""
        return self._runs[seed].result()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for stage in self._stages.values():
            stage.close()


def chosen(request: pytest.FixtureRequest) -> list[int]:
    """Seeds of the tests of this module that are to be run."""
    mine = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    return [item.callspec.params["kill_seed"] for item in mine if "kill_seed" in item.fixturenames]


def _has_come(ended: Ended, kill: Kill, pids: dict[str, int], replaced: tuple[str, int]) -> bool:
    if kill.when == "reborn":
        pid = pids.get(replaced[0], 0)
        return pid not in (0, replaced[1]) and cpu_s(pid) >= kill.count
    if kill.when == "leased":
        return leased(ended.run.run_dir) >= kill.count
    name = "acknowledged" if kill.when == "acknowledged" else f"steps-{POLICY}"
    return len(lines(ended.observed / f"{name}.jsonl")) >= kill.count


def leased(run_dir: Path) -> int:
    """Leases in the ledger of a running Dataflow; 0 while there is none."""
    path = run_dir / "ledger" / "ledger.sqlite"
    try:
        database = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=0.05)
    except sqlite3.OperationalError:
        return 0
    try:
        (count,) = database.execute("SELECT COUNT(*) FROM leases").fetchone()
        return int(count)
    except sqlite3.OperationalError:
        return 0
    finally:
        database.close()


def lines(path: Path) -> list[dict[str, Any]]:
    """What an observer wrote; a last line that was not finished is left out."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.split("\n")[:-1]]


# --- the verdict ------------------------------------------------------------------------------------------------------------


def judge(ended: Ended) -> None:
    """The run ended with 0, every step was trained, nothing acknowledged was lost, nothing was trained twice on a timeline."""
    run, told = ended.run, f"seed {ended.plan.seed}: {ended.plan.kills}, killed {ended.killed}"
    assert ended.exit_code == 0, f"{told}\n{run.text}"
    run.nothing_left()
    deaths = Counter(ended.killed)
    names = ["dataflow", *(f"raas-{index}" for index in range(ended.plan.instances)), f"trainer-{POLICY}"]
    assert run.exit_codes() == {name: [-9] * deaths[name] + [0] for name in names}, f"{told}: {run.exit_codes()}\n{run.text}"
    conserved(run.run_dir)
    books = run.adds_up({POLICY: STEPS}, BATCH, MAX_STALENESS)
    trained = nothing_trained_twice(ended, books)
    nothing_acknowledged_lost(ended, books, trained)
    assert all(seconds < SERVES_AGAIN_S for seconds in ended.serves_again_cpu_s), f"{told}: {ended.serves_again_cpu_s}"


def conserved(run_dir: Path) -> None:
    """made = trained + dropped + in flight, per share and in all, by SQL over the tables."""
    database = sqlite3.connect(f"file:{run_dir / 'ledger' / 'ledger.sqlite'}?mode=ro", uri=True)
    try:
        (leases,) = database.execute("SELECT COALESCE(SUM(n_samples), 0) FROM leases").fetchone()
        (made, live) = database.execute("SELECT COALESCE(SUM(n), 0), COALESCE(SUM(live), 0) FROM shares").fetchone()
        (lost,) = database.execute("SELECT COUNT(*) FROM lost").fetchone()
        states = dict(database.execute("SELECT state, SUM(live) FROM shares GROUP BY state").fetchall())
        (odd,) = database.execute("SELECT COUNT(*) FROM shares WHERE state='dropped' AND reason=''").fetchone()
        open_leases = database.execute(
            "SELECT COUNT(*) FROM leases l JOIN shares s USING(lease_id) WHERE (l.state='open') != (s.state='leased')"
        ).fetchone()
    finally:
        database.close()
    assert leases == made == live + lost, (leases, made, live, lost)
    assert set(states) <= {"leased", "rolled", "buffered", "served", "trained", "dropped"}
    assert sum(states.values()) == live
    assert odd == 0, "dropped without a reason"
    assert open_leases == (0,), "a lease is open exactly as long as its rows are leased"


def nothing_trained_twice(ended: Ended, books: Books) -> dict[int, set[str]]:
    """Version → rows that the final weights were trained on, from the trainer's own memory."""
    (account,) = lines(ended.observed / f"lineage-{POLICY}.jsonl")[-1:]
    steps = account["steps"]
    assert [step["version"] for step in steps] == list(range(STEPS)), "every version once, in order"
    rows = [row for step in steps for row in step["rows"]]
    assert len(rows) == len(set(rows)) == STEPS * BATCH, "every trajectory once"
    assert {(step["timeline"], step["version"]) for step in steps} == {
        (batch.timeline, batch.version) for batch in books.batches if batch.state == "trained"
    }
    begun: dict[int, dict[int, set[str]]] = {}
    for step in lines(ended.observed / f"steps-{POLICY}.jsonl"):  # also those of trainers that were killed
        assert step["trajectories"] == len(step["rows"]) == BATCH
        batch = begun.setdefault(step["timeline"], {}).setdefault(step["version"], set(step["rows"]))
        assert batch == set(step["rows"]), f"batch {step['version']} of timeline {step['timeline']} is the same whenever it is asked for"
    for timeline, batches in begun.items():
        everything = [row for batch in batches.values() for row in batch]
        assert len(everything) == len(set(everything)), f"a row is in two batches of timeline {timeline}"
    return {step["version"]: set(step["rows"]) for step in steps}


def nothing_acknowledged_lost(ended: Ended, books: Books, trained: dict[int, set[str]]) -> None:
    """Every result that a rollout service was allowed to forget is where the ledger says it is."""
    shares = {share.lease_id: share for share in books.shares}
    everything = set().union(*trained.values())
    seen = lines(ended.observed / "acknowledged.jsonl")
    assert len({line["lease"] for line in seen}) >= GROUPS // 2, "the observer saw them"
    for line in seen:
        share, rows = shares[line["lease"]], set(line["rows"][POLICY])
        if share.attempt != line["attempt"]:  # a late result of an instance that was given up: its lease ran again elsewhere
            assert share.attempt > line["attempt"], (line["lease"], share)
            continue
        assert share.state != "leased", f"acknowledged, and lost: {share}"
        assert share.live == N_SAMPLES == len(rows)
        if share.state == "dropped":
            assert share.reason in DOOR_REASONS, share
        if share.state == "trained":
            assert share.version is not None
            assert rows <= trained[share.version], f"{share} is not in the batch that it was trained in"
        else:
            assert not rows & everything, f"{share} was trained, and the ledger does not know"
