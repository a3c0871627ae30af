"""What `--chaos` asks for: which faults, where, and how often. Pure.

    kill=PROCESS:P        a process of this kind that serves is killed (SIGKILL) with probability P in every second
    stop=PROCESS:P:TIME   … is stopped (SIGSTOP) for TIME
    drop=WIRE:P           a reply is cut off with probability P, after it was made: whoever asked cannot know whether it was done
    delay=WIRE:TIME       every such call is sent TIME later
    for=TIME              nothing is hit later than this after the start
    seed=N                another sequence of draws
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from astraflow.config.check import nearest
from astraflow.config.sections import LaunchConfig
from astraflow.launch.plan import Role
from astraflow.protocol.errors import ConfigError
from astraflow.protocol.routes import DataflowAPI, RaaSAPI, SenderAPI

Kind = Literal["kill", "stop", "drop", "delay"]
PROCESSES = ("raas", "trainer", "dataflow", "sender")
"""What is killed and stopped. Senders are children of trainers, which start them again."""
STREAM = "weight stream"
"""No path: bytes of weights, which travel beside HTTP."""
EVERY = "*"
WIRES: dict[str, dict[Role, tuple[str, ...]]] = {
    "pull": {"dataflow": (RaaSAPI.pull.path, RaaSAPI.eval_pull.path)},
    "batch": {"trainer": (DataflowAPI.batch.path,)},
    "notify": {"trainer": (DataflowAPI.notify_version.path,), "dataflow": (RaaSAPI.notify_version.path,)},
    "raas": {"dataflow": (EVERY,)},
    "weights": {"raas": (SenderAPI.request_transfer.path, STREAM)},
}
"""Wire → who calls on it → the calls. Dataflow calls nobody but rollout services. Of `weights` the ticket is delayed and the stream is
cut in the middle."""
FORMS = {"kill": "{0}:PROBABILITY", "stop": "{0}:PROBABILITY:TIME", "drop": "{0}:PROBABILITY", "delay": "{0}:TIME"}
KINDS = [*FORMS, "for", "seed"]
UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
TIME = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(ms|s|m|h)")
LONGEST_S, LONGEST_RUN_S = 600.0, 1e7


@dataclass(frozen=True)
class Fault:
    """One part of the specification."""

    kind: Kind
    target: str
    chance: float = 1.0
    """Per second of a process, per reply of a wire; 1 = always."""
    time_s: float = 0.0


@dataclass(frozen=True)
class Drill:
    """All of it."""

    text: str
    faults: tuple[Fault, ...]
    seed: int = 0
    for_s: float = math.inf
    """Since the start of the run."""

    def of_processes(self, target: str) -> list[Fault]:
        """Kills and stops of a kind of process."""
        return [fault for fault in self.faults if fault.kind in ("kill", "stop") and fault.target == target]

    def of_wires(self, role: Role) -> list[Fault]:
        """Drops and delays that a process of this role suffers as a caller."""
        return [fault for fault in self.faults if fault.kind in ("drop", "delay") and role in WIRES[fault.target]]


def parse(text: str) -> Drill:
    """Raises ConfigError naming the part, its value and what is accepted."""
    faults: list[Fault] = []
    seed, for_s = 0, math.inf
    for part in filter(None, map(str.strip, text.split(","))):
        kind, equals, rest = part.partition("=")
        if not equals or kind not in KINDS:
            raise _refuse(part, f"{kind!r} is no kind of fault{nearest(kind, KINDS)}; accepted: {', '.join(KINDS)}")
        if kind == "seed":
            if not rest.isdecimal() or not rest.isascii():
                raise _refuse(part, f"seed {rest!r}; accepted: a whole number from 0 on")
            seed = int(rest)
            continue
        if kind == "for":
            for_s = _seconds(part, rest, LONGEST_RUN_S)
            continue
        fault = _fault(part, kind, rest)
        if any((fault.kind, fault.target) == (other.kind, other.target) for other in faults):
            raise _refuse(part, f"{kind}={fault.target} is given twice")
        faults.append(fault)
    if not faults:
        raise ConfigError(f"--chaos {text!r}: no fault; accepted: KIND=TARGET:AMOUNT,… such as kill=raas:0.02,drop=pull:0.05")
    return Drill(text, tuple(faults), seed, for_s)


def check(drill: Drill, launch: LaunchConfig) -> None:
    """Raise ConfigError for a fault that would hit nothing of this run."""
    missing = {"raas": "" if launch.raas else "launch.raas = 0", "trainer": "" if launch.trainers else "launch.trainers = false"}
    for fault in drill.faults:
        wired = WIRES[fault.target] if fault.kind in ("drop", "delay") else ["trainer" if fault.target == "sender" else fault.target]
        reasons = [missing.get(role, "") for role in wired]
        if all(reasons):
            raise ConfigError(f"--chaos: {fault.kind}={fault.target} would hit nothing of this run ({' and '.join(reasons)})")


def _fault(part: str, kind: str, rest: str) -> Fault:
    targets = PROCESSES if kind in ("kill", "stop") else tuple(WIRES)
    target, *amounts = rest.split(":")
    if target not in targets:
        raise _refuse(part, f"{target!r} is no target of {kind}{nearest(target, list(targets))}; accepted: {', '.join(targets)}")
    wanted = FORMS[kind].format(target).split(":")[1:]
    if len(amounts) != len(wanted):
        raise _refuse(part, f"{rest!r}; accepted: {kind}={FORMS[kind].format(target)}")
    fault = {"kind": kind, "target": target}
    values = {"PROBABILITY": 1.0, "TIME": 0.0}
    for name, amount in zip(wanted, amounts, strict=True):
        values[name] = _seconds(part, amount) if name == "TIME" else _chance(part, kind, amount)
    return Fault(**fault, chance=values["PROBABILITY"], time_s=values["TIME"])  # type: ignore[arg-type]


def _chance(part: str, kind: str, amount: str) -> float:
    try:
        value = float(amount)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1 or (kind in ("kill", "stop") and value == 1):
        upper = "below 1, in every second" if kind in ("kill", "stop") else "up to 1"
        raise _refuse(part, f"{amount!r} is no probability; accepted: a number above 0 and {upper}")
    return value


def _seconds(part: str, amount: str, most: float = LONGEST_S) -> float:
    found = TIME.fullmatch(amount)
    value = float(found[1]) * UNITS[found[2]] if found else 0.0
    if not 0 < value <= most:
        raise _refuse(part, f"{amount!r} is no time; accepted: a number with ms, s, m or h, above 0 and up to {most:g}s, e.g. 5s")
    return value


def _refuse(part: str, problem: str) -> ConfigError:
    return ConfigError(f"--chaos: {part!r}: {problem}")
