"""What a run shows while it runs: a live panel on a terminal, plain lines elsewhere; also the table of `astraflow status`.

Takes plain values, so that whoever watches a run (the supervisor, `status`) can show it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from astraflow.protocol.control import DataflowStatus, EvalResult, RaaSStatus

PLAIN_EVERY_S = 30.0
"""Without a terminal: a line at every step, and at least this often while there is none; then it says who waits for whom."""
PLAIN_WIDTH = 200
"""Columns of tables that no terminal shows."""
SHORT_WAIT_S = 1.0
"""Shorter waits are the normal course of things."""
REDRAW_S = 0.5
IDLE_SHOWN_S = 10.0
NEAR_S = 600.0
"""Deadlines that are further away are not shown."""


@dataclass(frozen=True)
class ProcessRow:
    """One process as its supervisor sees it."""

    name: str
    state: str
    restarts: int = 0
    exit_codes: Sequence[int] = ()


@dataclass(frozen=True)
class View:
    """All that is shown at one moment."""

    phase: str
    age_s: float
    processes: Sequence[ProcessRow]
    status: DataflowStatus | None = None
    status_age_s: float = 0.0
    """Since Dataflow's last answer."""
    instances: Mapping[str, RaaSStatus] = field(default_factory=dict)
    evals: Sequence[EvalResult] = ()
    events: Sequence[str] = ()
    """What the supervisor saw."""
    service_events: Sequence[str] = ()
    """What Dataflow saw."""


class SteadyConsole(Console):
    """A console whose reader may leave: Ctrl-C ends `astraflow run … | tee log` at its reader first, and the run has yet to drain."""

    def on_broken_pipe(self) -> None:
        """rich would end the process."""
        self.quiet = True
        fall_silent()


class Panel:
    """Shows views one after the other; `with Panel(…) as panel: panel.show(view)`."""

    def __init__(self, title: str, max_steps: Mapping[str, int], console: Console | None = None) -> None:
        self._title, self._max_steps = title, dict(max_steps)
        self._console = console or SteadyConsole()
        self._live: Live | None = None
        self._drawn_at = -1.0
        self._line_at = 0.0
        self._steps: dict[str, int] = {}
        self._first: dict[str, tuple[float, int]] = {}
        """Policy → (age, version) when its steps were first seen: the start-up is no measure of the pace."""
        self._said_events = 0
        self._said_service = 0
        self._said_evals = 0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            try:
                self._live.stop()
            except OSError:
                fall_silent()

    def show(self, view: View) -> None:
        """Draw the view if the last one is old enough; events and evaluations are always printed as lines.

        A terminal that was closed, or a pipe whose reader left, is no reason to lose a run: it goes on without a word.
        """
        try:
            self._show(view)
        except OSError:
            fall_silent()

    def _show(self, view: View) -> None:
        for trainer in view.status.trainers if view.status is not None and view.status.started else ():
            self._first.setdefault(trainer.model_id, (view.age_s, trainer.version))
        self._say_news(view)
        if self._live is None:
            self._plain(view)
        elif view.age_s - self._drawn_at >= REDRAW_S or view.phase == "over":
            self._drawn_at = view.age_s
            self._live.update(self.render(view), refresh=True)

    def render(self, view: View) -> RenderableType:
        """The panel of one view."""
        head = Text(f"{self._title}   {view.phase}   {clock(view.age_s)}", style="bold")
        if left := eta_s(view, self._max_steps, self._first):
            head.append(f"   about {clock(left)} left", style="dim")
        parts: list[RenderableType] = [head, process_table(view)]
        if view.status is not None:
            parts += [policy_table(view.status, self._max_steps), Text(flow_line(view.status))]
            parts += [Text(f"waiting: {line}", style="yellow") for line in wait_lines(view.status)[:4]]
        return Group(*parts)

    def _say_news(self, view: View) -> None:
        for event in view.events[self._said_events :]:
            self._print(f"{clock(view.age_s)}  {event}")
        self._said_events = max(self._said_events, len(view.events))
        for event in view.service_events[self._said_service :]:
            self._print(f"{clock(view.age_s)}  dataflow: {event}")
        self._said_service = max(self._said_service, len(view.service_events))
        for result in view.evals[self._said_evals :]:
            self._print(f"{clock(view.age_s)}  {eval_line(result)}")
        self._said_evals = max(self._said_evals, len(view.evals))

    def _plain(self, view: View) -> None:
        steps = {trainer.model_id: trainer.version for trainer in view.status.trainers} if view.status else {}
        if steps == self._steps and view.age_s - self._line_at < PLAIN_EVERY_S:
            return
        silent, self._steps, self._line_at = steps == self._steps, steps, view.age_s
        self._print(plain_line(view, self._max_steps, self._first, silent))

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def print_status(status: DataflowStatus, max_steps: Mapping[str, int]) -> None:
    """The answer of `astraflow status` on standard output; without a terminal in plain, wide lines."""
    page().print(status_view(status, max_steps))


def page() -> Console:
    """Standard output, for tables."""
    return SteadyConsole(width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def status_view(status: DataflowStatus, max_steps: Mapping[str, int]) -> RenderableType:
    """Everything about a running job on one page."""
    head = Text(f"{status.run_id}   {status.state}   up {clock(status.uptime_s)}   epoch {status.epoch}", style="bold")
    if left := steps_left_s(status, max_steps):
        head.append(f"   about {clock(left)} left", style="dim")
    parts: list[RenderableType] = [head]
    if status.message:
        parts.append(Text(status.message, style="yellow"))
    if status.idle_s >= IDLE_SHOWN_S:
        limit = f", stalled at {status.stall_s:.0f} s" if status.stall_s is not None else ""
        parts.append(Text(f"nothing moved for {status.idle_s:.0f} s{limit}", style="yellow"))
    parts += [policy_table(status, max_steps), pool_table(status), Text(flow_line(status))]
    if status.ledger.dropped:
        parts.append(Text("dropped: " + "  ".join(f"{reason} {count}" for reason, count in status.ledger.dropped.items())))
    parts += [Text(f"newest drop: {drop.lease_id} {drop.task_id} {drop.policy}: {drop.reason}") for drop in status.recent_drops[-3:]]
    parts += [Text(f"waiting: {line}", style="yellow") for line in wait_lines(status)]
    return Group(*parts, *[Text(event, style="dim") for event in status.events[-10:]])


def pool_table(status: DataflowStatus) -> RenderableType:
    """The rollout services as Dataflow knows them."""
    if not status.instances:
        return Text("no rollout service is registered", style="yellow")
    table = Table("rollout service", "state", "serves", "busy", "heard of", "url", "", box=None, pad_edge=False)
    for instance in status.instances:
        serves = "  ".join(f"{model} v{held.version}" for model, held in instance.serving.items())
        busy, heard = f"{instance.in_flight}/{instance.total_slots}", f"{instance.last_seen_s:.0f} s ago"
        table.add_row(instance.instance_id, instance.state, serves, busy, heard, instance.url, instance.reason)
    return table


def steps_left_s(status: DataflowStatus, max_steps: Mapping[str, int]) -> float:
    """Seconds that the slowest policy needs at the pace of its last step; 0 = not known."""
    left_s = 0.0
    for trainer in status.trainers:
        step_s = status.steps.get(trainer.model_id, {}).get("time/step_s", 0.0)
        left_s = max(left_s, (max_steps.get(trainer.model_id, 0) - trainer.version) * step_s)
    return left_s


def plain_line(view: View, max_steps: Mapping[str, int], first: Mapping[str, tuple[float, int]], silent: bool = False) -> str:
    """One line: age, versions, reward, queue, speed, and who waits for whom when nothing moves yet or for long (`silent`)."""
    parts = [clock(view.age_s), view.phase]
    status = view.status
    if status is None or not status.started:
        parts.append("  ".join(f"{row.name}:{row.state}" for row in view.processes))
        if status is not None:
            parts += wait_lines(status)[:2]
        return "  ".join(parts)
    for trainer in status.trainers:
        steps = status.steps.get(trainer.model_id, {})
        reward = f" reward {steps['reward/mean']:.3f}" if "reward/mean" in steps else ""
        parts.append(f"{trainer.model_id} v{trainer.version}/{max_steps.get(trainer.model_id, '?')}{reward}")
    parts.append(flow_line(status))
    if left := eta_s(view, max_steps, first):
        parts.append(f"about {clock(left)} left")
    if silent:
        parts += [f"{model} {queue.fresh_groups} groups queued" for model, queue in status.queues.items()]
        parts += [f"waiting: {line}" for line in wait_lines(status)[:2]]
    return "  ".join(parts)


def fall_silent() -> None:
    """Standard output and error of this process go nowhere from now on."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
    os.close(null)


def process_table(view: View) -> Table:
    """Stage of each process."""
    table = Table("process", "state", "serves / version", "busy", "restarts", box=None, pad_edge=False)
    for row in view.processes:
        serves, busy, state = "", "", row.state
        if row.name in view.instances and row.state == "running":
            instance = view.instances[row.name]
            state = instance.state
            serves = "  ".join(f"{model} v{held.version}" for model, held in instance.serving.items())
            busy = f"{instance.availability.in_flight}/{instance.availability.total_slots} slots"
        elif view.status is not None and row.name == "dataflow" and row.state == "running":
            state = view.status.state if view.status_age_s < 10 else f"silent for {view.status_age_s:.0f} s"
            serves = f"v{view.status.service_version}"
        elif view.status is not None and row.name.startswith("trainer-") and row.state == "running":
            for trainer in view.status.trainers:
                if f"trainer-{trainer.model_id}" == row.name:
                    state, serves = trainer.state, f"v{trainer.version}"
        table.add_row(row.name, state, serves, busy, str(row.restarts or ""))
    return table


def policy_table(status: DataflowStatus, max_steps: Mapping[str, int]) -> Table:
    """Progress of each policy."""
    table = Table("policy", "version", "of", "state", "reward", "loss", "queue", "held", "served", box=None, pad_edge=False)
    for trainer in status.trainers:
        queue, steps = status.queues.get(trainer.model_id), status.steps.get(trainer.model_id, {})
        table.add_row(
            trainer.model_id,
            str(trainer.version),
            str(max_steps.get(trainer.model_id, "?")),
            trainer.state,
            number(steps.get("reward/mean")),
            number(next((value for name, value in steps.items() if name in ("loss/total", "loss/policy", "loss")), None)),
            f"{queue.fresh_groups} groups" if queue else "",
            str(queue.held_groups) if queue else "",
            f"{queue.served} rows" if queue and queue.served else "",
        )
    return table


def flow_line(status: DataflowStatus) -> str:
    """Rows and rates."""
    ledger = status.ledger
    dropped, in_flight = sum(ledger.dropped.values()), sum(ledger.in_flight.values())
    text = f"made {ledger.made} = trained {ledger.trained} + dropped {dropped} + in flight {in_flight}"
    rates = status.rates
    if "tokens_per_s" in rates:
        text += f"   {rates['tokens_per_s']:.0f} tokens/s"
    if "trajectories_per_s" in rates:
        text += f"   {rates['trajectories_per_s']:.1f} trajectories/s"
    return text


def wait_lines(status: DataflowStatus) -> list[str]:
    """Who waits for whom, longest first."""
    edges = sorted(status.waits, key=lambda edge: -edge.since_s)
    return [
        f"{edge.who} for {edge.waits_for} ({edge.why}) since {edge.since_s:.0f} s"
        + (f", {edge.deadline_s:.0f} s left" if edge.deadline_s is not None and edge.deadline_s <= NEAR_S else "")
        for edge in edges
        if edge.since_s >= SHORT_WAIT_S
    ]


def eval_line(result: EvalResult) -> str:
    """`heldout at v15: avg@1 0.450 (20 tasks × 1)`."""
    several = len(result.versions) > 1
    versions = ", ".join(f"{model} v{held.version}" if several else f"v{held.version}" for model, held in result.versions.items())
    values = "  ".join(f"{name} {number(value)}" for name, value in sorted(result.metrics.items()) if value is not None)
    missing = f", {result.missing} missing" if result.missing else ""
    return f"{result.dataset} at {versions}: {values} ({result.n_tasks} tasks × {result.n_samples}{missing})"


def eta_s(view: View, max_steps: Mapping[str, int], first: Mapping[str, tuple[float, int]]) -> float:
    """Seconds that the slowest policy needs at its pace since `first` (age, version); 0 = not known yet."""
    left_s = 0.0
    for trainer in view.status.trainers if view.status is not None else ():
        age_s, version = first.get(trainer.model_id, (view.age_s, trainer.version))
        steps_left = max_steps.get(trainer.model_id, 0) - trainer.version
        if trainer.version - version >= 2 and steps_left > 0:
            left_s = max(left_s, (view.age_s - age_s) / (trainer.version - version) * steps_left)
    return left_s


def clock(seconds: float) -> str:
    """`3:07`."""
    whole = int(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def number(value: float | None) -> str:
    """Three places, or nothing."""
    return "" if value is None else f"{value:.3f}"
