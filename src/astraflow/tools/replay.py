"""`astraflow replay RUN_DIR`: what other data policies would have kept, on the log of a run.

The ledger is the log: rows are never deleted, and every group's statistics hold what a shaper, a filter and a curator look at. Groups
are taken in the order of their arrival; a curator decides on a group's prompt before it sees the group, does not see what it refused,
and versions move between the arrivals between which they moved. What a log cannot say: which prompts would have come
instead of those that were refused, and what a policy would have learned from another batch.

Reads only, without an engine, also while the run goes on.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import yaml
from rich.console import Console
from rich.table import Table

from astraflow.dataflow.admission import statistics
from astraflow.dataflow.logbook import Logbook, LoggedShare
from astraflow.dataflow.policies import CURATORS, FILTERS, SHAPERS
from astraflow.dataflow.policies.base import Filter, GroupStats, Shaper, build
from astraflow.dataflow.policies.curation import Curation
from astraflow.dataflow.source import FORCED_AFTER
from astraflow.protocol.errors import ConfigError

AS_LOGGED, TRAINED = "as logged", "trained"
WIDTH = 200
"""Columns where nobody says how many there are: a file, a pipe."""
NOT_SUBMITTED = "not_submitted"
AT_THE_DOOR = ("malformed", "unscored", "too_few_scored")
"""What no filter decides on: these groups were no use whatever the policies."""
Choice = str | dict[str, Any] | list[str | dict[str, Any]]


@dataclass(frozen=True)
class Share:
    """One model's share of a delivered group, its parts together."""

    policy: str
    stats: GroupStats | None
    """None when no member was scored, or the group was refused at the door."""
    fate: str
    """`trained`, a reason, or empty while it is on its way."""


@dataclass(frozen=True)
class LoggedGroup:
    """One delivered lease, or, with `moved`, a version that moved at this place among them."""

    task_id: str = ""
    epoch: int = 0
    n_samples: int = 0
    shares: list[Share] = field(default_factory=list)
    moved: tuple[str, int] | None = None
    """(model, version)."""


class Amount(msgspec.Struct):
    """How much of a log."""

    groups: int = 0
    varied: int = 0
    """Groups whose shaped rewards differ: the others teach nothing to a group-relative estimator."""
    trajectories: int = 0
    tokens: int = 0
    """Own sampled tokens of scored members."""
    length: float | None = None
    """Mean own sampled tokens per scored trajectory."""
    reward: float | None = None
    """Mean raw reward per scored trajectory."""


class Outcome(msgspec.Struct, kw_only=True):
    """One set of policies, seen by one model."""

    policy: str
    curator: str
    filter: str
    shaper: str
    seen: Amount
    kept: Amount
    dropped: Amount
    reasons: dict[str, int]
    """Reason → groups; `not_submitted` = the curator did not want the prompt."""
    under_way: int = 0
    """Groups whose end the log does not know yet."""
    rollouts_per_kept_group: float | None = None
    """Trajectories generated (those of prompts that were not submitted cost nothing) per group that was kept."""
    forced: int = 0
    """Prompts submitted because 256 in a row were refused."""


class Replay(msgspec.Struct, kw_only=True):
    """The whole answer; `--json` writes it."""

    run: str
    groups: int
    outcomes: list[Outcome]


def run(run_dir: Path, curators: Sequence[str], filters: Sequence[str], shapers: Sequence[str], out: Path | None) -> Replay:
    """The verb. Raises ConfigError in one line for a wrong directory, name or option."""
    answer = replay(run_dir, curators, filters, shapers)
    if out is not None:
        try:
            out.write_bytes(msgspec.json.format(msgspec.json.encode(answer), indent=1) + b"\n")
        except OSError as error:
            raise ConfigError(f"--json: cannot write {str(out)!r}: {error.strerror}") from None
    console = Console()
    (console if console.is_terminal else Console(width=WIDTH)).print(table(answer))
    return answer


def replay(run_dir: Path, curators: Sequence[str] = (), filters: Sequence[str] = (), shapers: Sequence[str] = ()) -> Replay:
    """What really happened, then every combination of the given choices (YAML; none = accept_all, keep_all, none)."""
    chosen = [
        [parse(option, text) for text in texts or (default,)]
        for option, texts, default in (
            ("--curator", curators, "accept_all"),
            ("--filter", filters, "keep_all"),
            ("--shaper", shapers, "none"),
        )
    ]
    log = read_log(run_dir)
    outcomes = as_logged(log)
    for curator, rule, shaper in itertools.product(*chosen):
        outcomes += alternative(log, curator, rule, shaper)
    return Replay(run=run_dir.name or str(run_dir), groups=sum(group.moved is None for group in log), outcomes=outcomes)


def parse(option: str, text: str) -> Choice:
    """A name, or a mapping with `name` and options, or a list of these, in YAML. Raises ConfigError naming the option."""
    try:
        found: Choice = msgspec.convert(yaml.safe_load(text), Choice)
    except (yaml.YAMLError, msgspec.ValidationError):
        raise ConfigError(f"{option}: {text!r}: expected a name, or YAML like '{{name: greso, p_easy: 0.4}}', or a list of these") from None
    return found


def read_log(run_dir: Path) -> list[LoggedGroup]:
    """Delivered groups in the order of their arrival, and versions where they moved. Raises ConfigError for what is no run."""
    with Logbook(run_dir) as book:
        came = list(book.shares("WHERE s.arrival IS NOT NULL"))[::-1]
        moves = deque(book.moves())
    log: list[LoggedGroup] = []
    for _, found in itertools.groupby(came, key=lambda share: share.lease_id):
        parts = list(found)
        while moves and moves[0][0] < (parts[0].arrival or 0):
            log.append(LoggedGroup(moved=moves.popleft()[1:]))
        by_policy: dict[str, list[LoggedShare]] = {}
        for part in parts:
            by_policy.setdefault(part.policy, []).append(part)
        shares = [Share(policy, mine[0].stats, _fate(mine)) for policy, mine in by_policy.items()]
        made = sum(part.made for part in by_policy[parts[0].policy])
        log.append(LoggedGroup(parts[0].task_id, parts[0].epoch, made, shares))
    return log + [LoggedGroup(moved=move[1:]) for move in moves]


def _fate(parts: Sequence[LoggedShare]) -> str:
    """Of a group whose parts may be in several batches: trained as soon as one of them is."""
    states = {part.state for part in parts}
    return TRAINED if TRAINED in states else parts[0].reason if states == {"dropped"} else ""


# --- outcomes ---------------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """Sums over groups of one model."""

    groups: int = 0
    varied: int = 0
    trajectories: int = 0
    scored: int = 0
    tokens: int = 0
    reward: float = 0.0

    def add(self, n_samples: int, stats: GroupStats | None) -> None:
        self.groups += 1
        self.trajectories += n_samples
        if stats is not None:
            self.varied += not stats.all_equal
            self.scored += stats.size
            self.tokens += stats.loss_tokens
            self.reward += sum(stats.values.values())

    def amount(self) -> Amount:
        length, reward = (self.tokens / self.scored, self.reward / self.scored) if self.scored else (None, None)
        return Amount(self.groups, self.varied, self.trajectories, self.tokens, length, reward)


@dataclass
class Books:
    """What one set of policies did with one model's groups."""

    seen: Tally = field(default_factory=Tally)
    kept: Tally = field(default_factory=Tally)
    dropped: Tally = field(default_factory=Tally)
    reasons: Counter[str] = field(default_factory=Counter)
    under_way: int = 0
    spent: int = 0
    """Trajectories generated for groups that ended."""

    def note(self, n_samples: int, stats: GroupStats | None, reason: str, *, submitted: bool = True) -> None:
        """`reason` empty = kept."""
        self.seen.add(n_samples, stats)
        self.spent += n_samples if submitted else 0
        (self.dropped if reason else self.kept).add(n_samples, stats)
        if reason:
            self.reasons[reason] += 1

    def outcome(self, policy: str, curator: str, rule: str, shaper: str, forced: int = 0) -> Outcome:
        return Outcome(
            policy=policy,
            curator=curator,
            filter=rule,
            shaper=shaper,
            seen=self.seen.amount(),
            kept=self.kept.amount(),
            dropped=self.dropped.amount(),
            reasons=dict(sorted(self.reasons.items())),
            under_way=self.under_way,
            rollouts_per_kept_group=self.spent / self.kept.groups if self.kept.groups else None,
            forced=forced,
        )


def policies(log: Sequence[LoggedGroup]) -> list[str]:
    """Models of the log."""
    return sorted({share.policy for group in log for share in group.shares})


def as_logged(log: Sequence[LoggedGroup]) -> list[Outcome]:
    """What really became of the groups, by whatever stood in their way."""
    books = {policy: Books() for policy in policies(log)}
    for group in log:
        for share in group.shares:
            if share.fate:
                books[share.policy].note(group.n_samples, share.stats, "" if share.fate == TRAINED else share.fate)
            else:
                books[share.policy].seen.add(group.n_samples, share.stats)
                books[share.policy].under_way += 1
    return [book.outcome(policy, AS_LOGGED, AS_LOGGED, AS_LOGGED) for policy, book in books.items()]


def alternative(log: Sequence[LoggedGroup], curator: Choice, rule: Choice, shaper: Choice) -> list[Outcome]:
    """What these policies would have kept. Staleness and other deadlines are left out: they belong to how the run went."""
    models = policies(log)
    curation = Curation(build(CURATORS, "--curator", curator))
    filters = list(build(FILTERS, "--filter", rule).values())
    shapers = list(build(SHAPERS, "--shaper", shaper).values())
    books, epoch, looked, forced, refused_in_row = {policy: Books() for policy in models}, 0, 0, 0, 0
    for group in log:
        if group.moved is not None:
            curation.moved(*group.moved, epoch)
            continue
        epoch = max(epoch, group.epoch)
        wanted = curation.wants(models, group.task_id, looked)
        looked += 1
        if not wanted and refused_in_row >= FORCED_AFTER:
            wanted, forced = True, forced + 1
        refused_in_row = 0 if wanted else refused_in_row + 1
        for share in group.shares:
            if not wanted:
                books[share.policy].note(group.n_samples, share.stats, NOT_SUBMITTED, submitted=False)
                continue
            stats = reshaped(share.stats, shapers)
            if stats is not None:
                curation.observe(share.policy, stats)
            books[share.policy].note(group.n_samples, stats, rejected(share, stats, filters))
    names = [label(curator), label(rule), label(shaper)]
    return [books[policy].outcome(policy, names[0], names[1], names[2], forced) for policy in models]


def reshaped(stats: GroupStats | None, shapers: Sequence[Shaper]) -> GroupStats | None:
    """The statistics that these shapers would have made of the raw values."""
    if stats is None:
        return None
    shaped = {
        index: value + sum(shaper.bonus(stats.lengths[index], stats.finishes.get(index, "stop")) for shaper in shapers)
        for index, value in stats.values.items()
    }
    mean, std, equal = statistics(list(shaped.values()))
    return msgspec.structs.replace(stats, shaped=shaped, mean=mean, std=std, all_equal=equal)


def rejected(share: Share, stats: GroupStats | None, filters: Sequence[Filter]) -> str:
    """Why the door would have dropped the share; empty = kept."""
    if stats is None or share.fate in AT_THE_DOOR:
        return share.fate or "unscored"
    return next((reason for rule in filters if (reason := rule.reject(share.policy, stats))), "")


def label(choice: Choice) -> str:
    """A choice as one writes it on the command line."""
    if isinstance(choice, str):
        return choice
    return yaml.safe_dump(choice, default_flow_style=True, sort_keys=False, width=1000).strip()


# --- the table --------------------------------------------------------------------------------------------------------------


def table(answer: Replay) -> Table:
    """One row per model and set of policies."""
    shown = Table(title=f"{answer.run}: {answer.groups} groups in the log")
    many_shapers = any(outcome.shaper not in (AS_LOGGED, "none") for outcome in answer.outcomes)
    for column in ("policy", "curator", "filter", *(["shaper"] if many_shapers else [])):
        shown.add_column(column, overflow="fold")
    for column in ("seen", "kept", "with variance", "rollouts per kept", "tokens kept", "length kept / dropped", "reward kept / dropped"):
        shown.add_column(column, justify="right")
    shown.add_column("dropped because", overflow="fold")
    for outcome in sorted(answer.outcomes, key=lambda outcome: outcome.policy):
        kept, dropped = outcome.kept, outcome.dropped
        why = ", ".join(f"{reason} {count}" for reason, count in outcome.reasons.items())
        why += (", " if why and outcome.under_way else "") + (f"(under way {outcome.under_way})" if outcome.under_way else "")
        why += f" (forced {outcome.forced})" if outcome.forced else ""
        shown.add_row(
            outcome.policy,
            outcome.curator,
            outcome.filter,
            *([outcome.shaper] if many_shapers else []),
            str(outcome.seen.groups),
            str(kept.groups),
            str(kept.varied),
            number(outcome.rollouts_per_kept_group, 1),
            str(kept.tokens),
            f"{number(kept.length, 1)} / {number(dropped.length, 1)}",
            f"{number(kept.reward, 2)} / {number(dropped.reward, 2)}",
            why,
        )
    return shown


def number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
