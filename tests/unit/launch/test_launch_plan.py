"""The run book: every way in which processes end, against a clock that is an argument."""

from __future__ import annotations

import signal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.config.sections import LaunchConfig, RestartConfig
from astraflow.launch.plan import LEAVE_S, ProcessSpec, Restart, RunBook, Terminate, thread_env

LAUNCH = LaunchConfig(restart=RestartConfig(limit=2, first_s=1.0, max_s=3.0, window_s=100.0), drain_s=60.0, end_s=20.0, term_s=5.0)
NAMES = ("dataflow", "raas-0", "raas-1", "trainer-a")


def book() -> RunBook:
    return RunBook([ProcessSpec(name, name.split("-")[0], (), {}) for name in NAMES], LAUNCH)  # type: ignore[arg-type]


def test_a_run_ends_when_trainers_and_dataflow_and_then_the_rest_have_ended() -> None:
    run = book()
    assert run.exited("trainer-a", 0, 1.0) == []
    assert run.phase == "leaving"
    assert run.exited("dataflow", 0, 2.0) == []
    assert run.phase == "ending"
    run.exited("raas-0", 0, 3.0)
    run.exited("raas-1", 0, 3.0)
    assert (run.phase, run.exit_code(), run.failure) == ("over", 0, "")


def test_a_run_whose_trainers_are_started_elsewhere_ends_when_dataflow_does() -> None:
    specs = [ProcessSpec(name, name.split("-")[0], (), {}) for name in NAMES[:3]]  # type: ignore[arg-type]
    run = RunBook(specs, msgspec.structs.replace(LAUNCH, trainers=False))
    run.exited("raas-0", -9, 1.0)
    run.restarted("raas-0")
    assert (run.phase, run.tick(1000.0)) == ("up", [])
    for name in NAMES[:3]:
        run.exited(name, 0, 1001.0)
    assert (run.phase, run.exit_code(), run.failure) == ("over", 0, "")
    left = RunBook(specs, msgspec.structs.replace(LAUNCH, trainers=False))
    left.interrupted(1.0)
    (end,) = left.tick(1.0 + LEAVE_S)
    assert isinstance(end, Terminate)
    assert end.names == NAMES[:3], "there is no trainer here to wait for"


def test_a_dead_process_is_restarted_with_growing_pauses_and_named() -> None:
    run = book()
    assert run.exited("raas-0", -9, 10.0) == [Restart("raas-0", 11.0)]
    run.restarted("raas-0")
    assert run.exited("raas-0", 1, 20.0, "out of memory") == [Restart("raas-0", 22.0)]
    run.restarted("raas-0")
    assert run.processes["raas-0"].restarts == 2
    assert run.events == [
        "raas-0 was killed by SIGKILL",
        "raas-0 was restarted (restart 1)",
        "raas-0 ended with exit code 1: out of memory",
        "raas-0 was restarted (restart 2)",
    ]


def test_too_many_deaths_within_the_window_end_the_run() -> None:
    run = book()
    for now in (1.0, 2.0):
        assert isinstance(run.exited("dataflow", -11, now)[0], Restart)
        run.restarted("dataflow")
    (end,) = run.exited("dataflow", -11, 3.0)
    assert isinstance(end, Terminate)
    assert set(end.names) == {"raas-0", "raas-1", "trainer-a"}
    assert end.kill_at == 8.0
    assert "restarted 2 times already" in run.failure
    for name in end.names:
        run.exited(name, -15, 4.0)
    assert (run.phase, run.exit_code()) == ("over", 1)


def test_old_deaths_are_forgotten() -> None:
    run = book()
    for now in (0.0, 200.0, 400.0, 600.0):
        assert run.exited("dataflow", -11, now) == [Restart("dataflow", now + 1.0)]
        run.restarted("dataflow")


@pytest.mark.parametrize(("code", "exit_code"), [(2, 2), (3, 1)])
def test_a_mistake_of_the_user_or_a_starved_trainer_is_not_tried_again(code: int, exit_code: int) -> None:
    run = book()
    (end,) = run.exited("trainer-a", code, 1.0, "trainer.lr: …")
    assert isinstance(end, Terminate)
    assert run.failure == "trainer.lr: …"
    for name in end.names:
        run.exited(name, 0, 2.0)
    assert (run.phase, run.exit_code()) == ("over", exit_code)


STALL = "stalled: nothing moved for 3600 s; groups waits for raas:raas-0 since 3600 s: 6 leases run there"


def test_a_stalled_dataflow_is_not_tried_again_and_its_verdict_is_that_of_the_run() -> None:
    run = book()
    assert run.exited("dataflow", 3, 1.0, STALL) == []
    assert run.phase == "ending"
    run.exited("raas-0", 0, 2.0)
    run.exited("raas-1", 1, 2.0)
    assert run.tick(20.9) == [], "they were told by Dataflow, and end by themselves"
    (end,) = run.tick(21.0)
    assert isinstance(end, Terminate)
    assert end.names == ("trainer-a",)
    run.exited("trainer-a", -9, 22.0)
    assert (run.phase, run.exit_code(), run.failure) == ("over", 3, STALL)
    assert run.processes["raas-1"].restarts == 0
    assert run.processes["dataflow"].restarts == 0


def test_a_trainer_that_was_told_of_the_stall_leaves_dataflow_the_time_to_end_by_itself() -> None:
    run = book()
    assert run.exited("trainer-a", 3, 1.0, STALL) == []
    assert run.phase == "leaving"
    run.exited("raas-0", 0, 2.0)
    run.exited("raas-1", 0, 2.0)
    assert run.exited("dataflow", 3, 3.0, STALL) == []
    assert (run.phase, run.exit_code(), run.failure) == ("over", 3, STALL)


def test_a_stall_that_comes_to_light_while_the_run_stops_is_still_the_reason() -> None:
    run = book()
    run.exited("raas-0", 2, 1.0, "raas.slots: …")
    run.exited("dataflow", 3, 2.0, STALL)
    for name in ("raas-1", "trainer-a"):
        run.exited(name, -15, 2.0)
    assert (run.phase, run.exit_code(), run.failure) == ("over", 3, STALL)


def test_ctrl_c_drains_the_trainers_and_the_run_succeeds() -> None:
    run = book()
    assert run.interrupted(10.0) == [Terminate(("trainer-a",), 70.0, "drain")]
    assert run.phase == "draining"
    run.exited("trainer-a", 0, 20.0)
    assert run.phase == "leaving"
    run.exited("dataflow", 0, 21.0)
    assert run.phase == "ending"
    for name in ("raas-0", "raas-1"):
        run.exited(name, 0, 22.0)
    assert (run.phase, run.exit_code(), run.drained) == ("over", 0, True)


def test_ctrl_c_before_the_trainers_attached_ends_the_others_soon() -> None:
    run = book()
    run.interrupted(10.0)
    run.exited("trainer-a", -15, 10.5)
    assert (run.phase, run.tick(15.4)) == ("leaving", [])
    assert run.tick(15.5) == [Terminate(("dataflow", "raas-0", "raas-1"), 20.5, "the trainers are gone")]
    for name in ("dataflow", "raas-0", "raas-1"):
        run.exited(name, 0, 16.0)
    assert (run.phase, run.exit_code(), run.failure, run.drained) == ("over", 0, "", True)


def test_a_drain_that_takes_too_long_is_a_failure_that_names_its_deadline() -> None:
    run = book()
    run.interrupted(10.0)
    assert run.tick(69.9) == []
    (end,) = run.tick(70.0)
    assert isinstance(end, Terminate)
    assert "launch.drain_s = 60 s" in run.failure
    for name in NAMES:
        run.exited(name, -15, 71.0)
    assert (run.phase, run.exit_code(), run.drained) == ("over", 1, False)


def test_a_second_ctrl_c_stops_everything() -> None:
    run = book()
    run.interrupted(1.0)
    (end,) = run.interrupted(2.0)
    assert isinstance(end, Terminate)
    assert set(end.names) == set(NAMES)
    assert run.interrupted(3.0) == []


def test_while_draining_only_dataflow_is_brought_back() -> None:
    run = book()
    run.interrupted(1.0)
    assert run.exited("raas-0", -9, 2.0) == []
    assert run.processes["raas-0"].state == "ended"
    assert run.exited("dataflow", -9, 3.0) == [Restart("dataflow", 4.0)]


def test_a_rollout_service_that_outlives_the_run_is_terminated() -> None:
    run = book()
    run.exited("trainer-a", 0, 1.0)
    run.exited("dataflow", 0, 1.0)
    run.exited("raas-0", 0, 2.0)
    assert run.tick(5.9) == []
    assert run.tick(6.0) == [Terminate(("raas-1",), 11.0, "end of the run")], "5 s after an orderly end: it joined too late to be told"
    assert "raas-1 did not end without being asked" in run.events[-1]
    run.exited("raas-1", -9, 11.0)
    assert (run.phase, run.exit_code()) == ("over", 1)


def test_a_rollout_service_that_outlives_the_run_is_asked_soon_also_when_dataflow_ended_before_the_last_trainer() -> None:
    run = book()
    run.exited("dataflow", 0, 1.0)
    run.exited("raas-0", 0, 1.0)
    assert run.phase == "ending"
    run.exited("trainer-a", 0, 3.0)
    assert run.tick(7.9) == []
    assert run.tick(8.0) == [Terminate(("raas-1",), 13.0, "end of the run")], "5 s after the trainer, not end_s after Dataflow"


def test_a_dataflow_that_outlives_its_trainers_is_terminated_with_the_rest() -> None:
    run = book()
    run.exited("trainer-a", 0, 1.0)
    assert run.tick(20.9) == []
    assert run.tick(21.0) == [Terminate(("dataflow", "raas-0", "raas-1"), 26.0, "the trainers are gone")]


def test_ctrl_c_at_the_end_changes_nothing_until_it_comes_again() -> None:
    run = book()
    run.exited("trainer-a", 0, 1.0)
    assert run.interrupted(1.5) == []
    assert run.failure == ""
    assert isinstance(run.interrupted(1.6)[0], Terminate)
    assert run.failure == "interrupted twice"


def test_a_process_that_waits_for_its_restart_is_not_restarted_once_the_run_ends() -> None:
    run = book()
    run.exited("raas-0", -9, 1.0)
    run.exited("trainer-a", 0, 1.5)
    run.exited("dataflow", 0, 1.6)
    assert run.processes["raas-0"].state == "ended"
    run.exited("raas-1", 0, 1.7)
    assert run.phase == "over"


def test_trainers_do_not_wait_for_ever_for_a_dataflow_that_ended() -> None:
    run = book()
    run.exited("dataflow", 0, 1.0)
    assert run.phase == "ending"
    (end,) = run.tick(21.0)
    assert isinstance(end, Terminate)
    assert set(end.names) == {"raas-0", "raas-1", "trainer-a"}


@given(st.lists(st.tuples(st.sampled_from([*NAMES, "ctrl-c", "tick"]), st.sampled_from([0, 0, 1, 2, 3, -9, -15])), max_size=60))
def test_every_schedule_of_ends_reaches_the_end(schedule: list[tuple[str, int]]) -> None:
    """Whatever dies in whatever order: decisions are carried out, and the run is over once everything has ended."""
    run, now = book(), 0.0
    restarts: dict[str, float] = {}
    doomed: dict[str, float] = {}

    def carry_out(decisions: list[Restart | Terminate]) -> None:
        for decision in decisions:
            if isinstance(decision, Restart):
                restarts[decision.name] = decision.at
            else:
                assert all(run.processes[name].state == "running" for name in decision.names)
                doomed.update(dict.fromkeys(decision.names, decision.kill_at))

    def advance(to: float) -> None:
        nonlocal now
        now = to
        carry_out(run.tick(now))
        for name, at in list(restarts.items()):
            if now >= at:
                del restarts[name]
                if run.processes[name].alive:
                    run.restarted(name)
        for name, at in list(doomed.items()):
            if now >= at:
                del doomed[name]
                if run.processes[name].state == "running":
                    carry_out(run.exited(name, -9, now))

    for what, code in schedule:
        advance(now + 4.0)
        if what == "ctrl-c":
            carry_out(run.interrupted(now))
        elif what in run.processes and run.processes[what].state == "running":
            carry_out(run.exited(what, code, now))
    carry_out(run.interrupted(now))
    for _ in range(200):
        advance(now + 4.0)
    assert run.phase == "over"
    assert not any(process.alive for process in run.processes.values())
    if run.exit_code() == 0:
        last = {name: process.exit_codes[-1] for name, process in run.processes.items() if process.exit_codes}
        asked = -signal.SIGTERM if run.drained else 0  # a process that was told to end before it could listen
        assert all(code in (0, asked) or run.processes[name].called_off for name, code in last.items()), last


def test_threads_are_told_to_every_numeric_library() -> None:
    assert {thread_env(3)[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")} == {"3"}
