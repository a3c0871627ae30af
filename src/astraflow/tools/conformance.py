"""`astraflow conformance trainer|raas|dataflow URL`: a black-box test of somebody's service, in whatever language it is written.

Only the wire is spoken: the routes, their messages, and the streams of weights. The tool plays the other sides: rollout services and
trainers to a Dataflow, Dataflow and a sender to a rollout service, Dataflow and a receiver to a trainer. Each check has a name, a claim
of the contract, and a verdict with its reason; a check whose ground another one did not prepare is skipped. The service under test must
be there for the test alone: it is driven through its whole life, its end included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from astraflow.lib.aio import one_line
from astraflow.protocol.errors import AstraFlowError

Verdict = Literal["pass", "fail", "skip"]
T = TypeVar("T")
WAIT_S = 60.0
"""For what must come; how soon depends on the machine. A service that is stuck is found out after this time."""
POLL_S = 0.05


class Failed(Exception):
    """The service broke the claim; the text says how."""


class Skipped(Exception):
    """The claim cannot be looked at here; the text says why."""


class Result(msgspec.Struct, kw_only=True):
    """What one check found."""

    name: str
    """e.g. `batch.redelivery`."""
    claim: str
    """What the contract says."""
    verdict: Verdict
    """`skip` = it could not be looked at."""
    reason: str = ""
    """One line; empty when it passed."""
    seconds: float
    """How long it took."""


class Report(msgspec.Struct, kw_only=True):
    """What `--json` writes."""

    service: str
    """trainer, raas or dataflow."""
    url: str
    results: list[Result]

    @property
    def passed(self) -> bool:
        """Nothing failed."""
        return all(result.verdict != "fail" for result in self.results)


@dataclass(frozen=True)
class Claim:
    """What a method checks."""

    name: str
    text: str
    needs: tuple[str, ...]


def check(name: str, text: str, *needs: str) -> Callable[[T], T]:
    """Make a method of a Suite a check. `needs`: checks that must have passed, whose ground it stands on."""

    def mark(method: T) -> T:
        method.claim = Claim(name, text, needs)  # type: ignore[attr-defined]
        return method

    return mark


class Suite:
    """Checks in the order in which they are written, those of base classes first."""

    def results(self) -> Iterator[Result]:
        """Run them, one after the other."""
        verdicts: dict[str, Verdict] = {}
        for method in self._methods():
            claim: Claim = method.claim
            begin = time.monotonic()
            verdict, reason = self._judge(method, [name for name in claim.needs if verdicts.get(name) != "pass"])
            verdicts[claim.name] = verdict
            seconds = round(time.monotonic() - begin, 3)
            yield Result(name=claim.name, claim=claim.text, verdict=verdict, reason=reason, seconds=seconds)

    def _methods(self) -> Iterator[Any]:
        seen = set[str]()
        for kind in reversed(type(self).__mro__):
            for name, value in vars(kind).items():
                if hasattr(value, "claim") and name not in seen:
                    seen.add(name)
                    yield getattr(self, name)

    def _judge(self, method: Callable[[], None], missing: list[str]) -> tuple[Verdict, str]:
        if missing:
            return "skip", f"needs {', '.join(missing)}"
        try:
            method()
        except Skipped as why:
            return "skip", str(why)
        except Failed as why:
            return "fail", " ".join(str(why).split())
        except (AstraFlowError, OSError, ValueError, LookupError) as error:  # of a reply that is not what it should be
            return "fail", one_line(error)
        return "pass", ""

    def close(self) -> None:
        """End what the tool started."""


def expect(condition: object, reason: str) -> None:
    """Raise Failed with the reason unless the condition holds."""
    if not condition:
        raise Failed(reason)


def until(what: str, look: Callable[[], T | None], deadline_s: float = WAIT_S) -> T:
    """The first result that is neither None nor false. Raises Failed, naming what did not come."""
    end = time.monotonic() + deadline_s
    while True:
        if found := look():
            return found
        if time.monotonic() >= end:
            raise Failed(f"{what}: not within {deadline_s:g} s")
        time.sleep(POLL_S)


def run(suite: Suite, service: str, url: str, say: Callable[[str], None], json_file: Path | None) -> bool:
    """Run a suite, print a line per check, write the JSON; whether all passed."""
    found: list[Result] = []
    try:
        for result in suite.results():
            found.append(result)
            say(f"{result.verdict.upper():<4}  {result.name:<24} {result.claim}" + (f"\n      -> {result.reason}" if result.reason else ""))
    finally:
        suite.close()
    report = Report(service=service, url=url, results=found)
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    counts = [f"{sum(result.verdict == verdict for result in found)} {word}" for verdict, word in _WORDS]
    say(f"{service} at {url}: {', '.join(counts)}")
    return report.passed


_WORDS: tuple[tuple[Verdict, str], ...] = (("pass", "passed"), ("fail", "failed"), ("skip", "skipped"))
